// Whether a priority that is set on a live stream holds for later launches and graphs, beside three streams that flood the GPU.
//   nvcc -O2 -std=c++17 -arch=sm_90 -o priority tests/gpu/priority.cu && ./priority
// docs/results/priority-2026-11-25.md has the numbers.
#include <cuda_runtime.h>
#include <cstdio>
#include <vector>
#include <algorithm>
#include <chrono>
#define CK(x) do{cudaError_t err_=(x); if(err_){printf("%s: %s\n",#x,cudaGetErrorString(err_));}}while(0)
__global__ void spin(long long ns){ long long t0; asm volatile("mov.u64 %0, %%globaltimer;":"=l"(t0)); long long t; do{ asm volatile("mov.u64 %0, %%globaltimer;":"=l"(t)); }while(t-t0<ns); }
static double now(){ return std::chrono::duration<double,std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int main(){
  int lo,hi; CK(cudaDeviceGetStreamPriorityRange(&lo,&hi)); printf("range %d %d\n",lo,hi);
  cudaDeviceProp p; CK(cudaGetDeviceProperties(&p,0)); int blocks=p.multiProcessorCount*2*4; // 4 waves of 1024-thread blocks
  std::vector<cudaStream_t> f(3); for(auto&s:f) CK(cudaStreamCreateWithPriority(&s,cudaStreamNonBlocking,0));
  auto flood=[&](int n){ for(int i=0;i<n;i++) for(auto s:f) spin<<<blocks,1024,0,s>>>(250000); };
  auto measure=[&](const char*name, auto go, cudaStream_t s){ std::vector<double> v; for(int r=0;r<7;r++){ flood(30); double t=now(); go(); CK(cudaStreamSynchronize(s)); v.push_back(now()-t); CK(cudaDeviceSynchronize()); } std::sort(v.begin(),v.end()); printf("%-60s median %8.2f ms  [%.2f %.2f]\n",name,v[3],v[0],v[6]); };
  cudaStream_t b0,b5; CK(cudaStreamCreateWithPriority(&b0,cudaStreamNonBlocking,0)); CK(cudaStreamCreateWithPriority(&b5,cudaStreamNonBlocking,hi));
  auto one=[&](cudaStream_t s){ spin<<<p.multiProcessorCount,1024,0,s>>>(1000000); };
  auto attr=[&](cudaStream_t s,int pr){ cudaLaunchConfig_t c={}; c.gridDim=p.multiProcessorCount; c.blockDim=1024; c.stream=s; cudaLaunchAttribute a; a.id=cudaLaunchAttributePriority; a.val.priority=pr; c.attrs=&a; c.numAttrs=1; CK(cudaLaunchKernelEx(&c,spin,(long long)1000000)); };
  auto set=[&](cudaStream_t s,int pr){ cudaStreamAttrValue v={}; v.priority=pr; CK(cudaStreamSetAttribute(s,cudaStreamAttributePriority,&v)); };
  cudaGraph_t g; cudaGraphExec_t e; CK(cudaStreamBeginCapture(b0,cudaStreamCaptureModeRelaxed)); one(b0); CK(cudaStreamEndCapture(b0,&g)); CK(cudaGraphInstantiate(&e,g,0));
  measure("launch, stream made with 0",[&]{one(b0);},b0);
  measure("launch, stream made with -5",[&]{one(b5);},b5);
  measure("launch with attribute -5, stream of 0",[&]{attr(b0,hi);},b0);
  measure("graph in stream of 0",[&]{CK(cudaGraphLaunch(e,b0));},b0);
  measure("graph in stream of -5",[&]{CK(cudaGraphLaunch(e,b5));},b5);
  set(b0,hi); int got=99; cudaStreamAttrValue v; CK(cudaStreamGetAttribute(b0,cudaStreamAttributePriority,&v)); CK(cudaStreamGetPriority(b0,&got)); printf("set on a live stream: attribute %d, GetPriority %d\n",v.priority,got);
  measure("launch, stream of 0 set to -5",[&]{one(b0);},b0);
  measure("graph, stream of 0 set to -5",[&]{CK(cudaGraphLaunch(e,b0));},b0);
  set(b0,0);
  measure("launch, set back to 0",[&]{one(b0);},b0);
  measure("graph, set back to 0",[&]{CK(cudaGraphLaunch(e,b0));},b0);
  set(b5,0);
  measure("launch, stream of -5 set to 0",[&]{one(b5);},b5);
  // change while work is queued in the same stream: does the queued work change?
  for(int r=0;r<3;r++){ flood(30); double t=now(); for(int i=0;i<5;i++) one(b0); set(b0,hi); one(b0); CK(cudaStreamSynchronize(b0)); printf("five at 0, then set -5, then one: %.2f ms\n",now()-t); CK(cudaDeviceSynchronize()); set(b0,0);}
  double t=now(); for(int i=0;i<1000;i++){ set(b0,i&1?0:hi);} printf("set attribute: %.3f us\n",(now()-t));
}
