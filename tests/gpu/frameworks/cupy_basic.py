"""CuPy: element-wise and raw kernels (NVRTC), reductions, FFT, linear algebra, streams, pools, graphs, textures."""
import cupy as cp
import numpy as np

cp.random.seed(0)
a = cp.arange(1 << 16, dtype=cp.float32).reshape(256, 256) / 1000
print(f"sum: {float(a.sum()):.2f}")
print(f"matmul: {float((a @ a).mean()):.2f}")
print(f"fft: {float(cp.abs(cp.fft.fft2(a)).mean()):.3f}")
print(f"solve: {float(cp.linalg.solve(a + 300 * cp.eye(256, dtype=cp.float32), a).sum()):.3f}")
print(f"sort: {float(cp.sort(-a.ravel())[10]):.4f}")
square = cp.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "square")
print(f"elementwise: {float(square(a).sum()):.0f}")
raw = cp.RawKernel(r"""
extern "C" __global__ void axpy(const float* x, float* y, float f, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += f * x[i];
}""", "axpy")
y = cp.zeros_like(a)
raw((256,), (256,), (a, y, cp.float32(2), cp.int32(a.size)))
print(f"raw_kernel: {float(y.sum()):.0f}")
grid = cp.RawKernel(r"""
#include <cooperative_groups.h>
extern "C" __global__ void both(float* x, float* out) {
    auto grid = cooperative_groups::this_grid();
    x[grid.thread_rank()] += 1;
    grid.sync();
    if (grid.thread_rank() == 0) { float s = 0; for (int i = 0; i < grid.size(); i++) s += x[i]; *out = s; }
}""", "both", enable_cooperative_groups=True)
x, out = cp.zeros(1024, cp.float32), cp.zeros(1, cp.float32)
grid((8,), (128,), (x, out))
print(f"cooperative: {float(out[0]):.0f}")
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    b = cp.ones(1000).cumsum()
    event = stream.record()
event.synchronize()
print(f"stream: {float(b[-1]):.0f}")
print(f"pinned: {int(cp.cuda.alloc_pinned_memory(4096).size() > 0)}")
with cp.cuda.using_allocator(cp.cuda.MemoryAsyncPool().malloc):
    print(f"async_pool: {float(cp.ones(1 << 20, cp.float32).sum()):.0f}")
with cp.cuda.using_allocator(cp.cuda.malloc_managed):
    managed = cp.arange(1000, dtype=cp.float32)
    print(f"managed: {float(managed.sum()):.0f}")
with stream:
    c = cp.ones(1000, cp.float32)
    stream.begin_capture()
    c *= 2
    graph = stream.end_capture()
    graph.launch(stream)
    graph.launch(stream)
stream.synchronize()
print(f"graph: {float(c.sum()):.0f}")
called = []
stream.launch_host_func(lambda _: called.append(1), None)
stream.synchronize()
print(f"host_func: {len(called)}")
print(f"asnumpy: {float(np.asarray(cp.asnumpy(a)).sum()):.0f}")
