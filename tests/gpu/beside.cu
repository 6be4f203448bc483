// The programs of tests/gpu/beside.py: work of many shapes, whose results are checked.
//
//   nvcc -O2 -std=c++20 -arch=native -o beside tests/gpu/beside.cu -lcuda
//   nvcc -O2 -std=c++20 -arch=native -DHEAP -o heap tests/gpu/beside.cu -lcuda
//
// beside ROLE [NUMBER]. Prints ready=1 when its first round is over, then works until its standard input ends, and prints
// rounds=N. A wrong result or an error is one line on standard error and exit status 1.

#include <atomic>
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime.h>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

const char usage[] =
    "usage: beside ROLE [NUMBER]\n"
    "  flood           three queued kernels of 4 full waves of blocks of 1 ms\n"
    "  blocks MS       one full wave of blocks of this time (100)\n"
    "  small           a kernel and a wait\n"
    "  graph NODES     a graph of this many kernel nodes in a row (1000)\n"
    "  capture         a new capture, instance and launch each time\n"
    "  cooperative     a cooperative launch that fills its device, with four barriers\n"
    "  green           kernels in a green context of half of the multiprocessors\n"
    "  heap            kernels that allocate and free memory: in the second program\n"
    "  fill MIB        takes all of the device's memory but this much (300)\n";

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "beside: %s\n", what.c_str());
    std::_Exit(1); // No destructors: they would wait for the device.
}

void check(cudaError_t status, const char *call, int line) {
    if (status != cudaSuccess) {
        fail("line " + std::to_string(line) + ": " + call + ": " + cudaGetErrorName(status));
    }
}

void check(CUresult status, const char *call, int line) {
    if (status != CUDA_SUCCESS) {
        fail("line " + std::to_string(line) + ": " + call + ": " + std::to_string(status));
    }
}
#define CHECK(call) check((call), #call, __LINE__)

__device__ void spin(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}

__global__ void occupy(long long ns, int *counter) {
    spin(ns);
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1);
    }
}

__global__ void add(int *words, int count, int by) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        words[at] += by;
    }
}

// Each block adds its part of the sum of the step before it; right only if all blocks meet at the barrier.
__global__ void together(int *sums) {
    auto grid = cooperative_groups::this_grid();
    for (int step = 1; step <= 4; step++) {
        if (threadIdx.x == 0) {
            atomicAdd(&sums[step], sums[step - 1] / static_cast<int>(gridDim.x) + 1);
        }
        grid.sync();
    }
}

// Programs with such a kernel get a context of their own.
#ifdef HEAP
__global__ void allocate(int *failed) {
    auto *words = static_cast<int *>(malloc(1024));
    if (!words) {
        atomicAdd(failed, 1);
        return;
    }
    words[0] = threadIdx.x;
    words[255] = blockIdx.x;
    if (words[0] != static_cast<int>(threadIdx.x) || words[255] != static_cast<int>(blockIdx.x)) {
        atomicAdd(failed, 1);
    }
    free(words);
}
#endif

constexpr int count = 1 << 16;

struct Program {
    int number;
    cudaStream_t stream;
    int *words;
    int multiprocessors;
    std::vector<int> host = std::vector<int>(count);
    int expected = 0;

    explicit Program(int given) : number(given) {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&words, count * sizeof(int)));
        CHECK(cudaMemsetAsync(words, 0, count * sizeof(int), stream));
        CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    }

    void launch_add(int by) {
        add<<<count / 256, 256, 0, stream>>>(words, count, by);
        CHECK(cudaGetLastError());
        expected += by;
    }

    void look() {
        CHECK(cudaMemcpyAsync(host.data(), words, count * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int word : host) {
            if (word != expected) {
                fail("a word is " + std::to_string(word) + " instead of " + std::to_string(expected));
            }
        }
    }

    std::function<void()> waves(int waves, int ms, int queued) {
        int blocks = 2 * multiprocessors * waves;
        return [=, this, number_of = 0]() mutable {
            for (int one = 0; one < queued; one++) {
                occupy<<<blocks, 1024, 0, stream>>>(1'000'000LL * ms, words);
                CHECK(cudaGetLastError());
            }
            number_of += queued * blocks;
            CHECK(cudaMemcpyAsync(host.data(), words, sizeof(int), cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            if (host[0] != number_of) {
                fail(std::to_string(host[0]) + " blocks ran instead of " + std::to_string(number_of));
            }
        };
    }

    std::function<void()> small() {
        return [this] {
            launch_add(1);
            look();
        };
    }

    cudaGraphExec_t capture(int nodes) {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int node = 0; node < nodes; node++) {
            add<<<count / 256, 256, 0, stream>>>(words, count, 1);
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        return exec;
    }

    std::function<void()> graph() {
        int nodes = number ? number : 1000;
        return [this, nodes, exec = capture(nodes)] {
            CHECK(cudaGraphLaunch(exec, stream));
            expected += nodes;
            look();
        };
    }

    std::function<void()> captures() {
        return [this] {
            auto exec = capture(20);
            CHECK(cudaGraphLaunch(exec, stream));
            expected += 20;
            look();
            CHECK(cudaGraphExecDestroy(exec));
        };
    }

    std::function<void()> cooperative() {
        int blocks_each;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, together, 256, 0));
        int blocks = blocks_each * multiprocessors;
        return [this, blocks] {
            CHECK(cudaMemsetAsync(words, 0, 5 * sizeof(int), stream));
            void *parameters[] = {&words};
            CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void *>(together), dim3(blocks), dim3(256), parameters, 0,
                                              stream));
            CHECK(cudaMemcpyAsync(host.data(), words, 5 * sizeof(int), cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            for (int step = 1; step <= 4; step++) {
                if (host[step] != step * blocks) {
                    fail("the sum of step " + std::to_string(step) + " is " + std::to_string(host[step]));
                }
            }
        };
    }

    std::function<void()> green() {
        CUdevResource all, part;
        CUdevResourceDesc description;
        CUgreenCtx context;
        CUdevice device;
        CHECK(cuDeviceGet(&device, 0));
        CHECK(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
        unsigned groups = 1;
        CHECK(cuDevSmResourceSplitByCount(&part, &groups, &all, nullptr, 0, all.sm.smCount / 2));
        CHECK(cuDevResourceGenerateDesc(&description, &part, 1));
        CHECK(cuGreenCtxCreate(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0));
        return small();
    }

#ifdef HEAP
    std::function<void()> heap() {
        return [this] {
            allocate<<<multiprocessors, 128, 0, stream>>>(words);
            CHECK(cudaGetLastError());
            look();
        };
    }
#endif

    std::function<void()> fill() {
        size_t spare = static_cast<size_t>(number ? number : 300) << 20;
        for (size_t piece = size_t(1) << 30; piece >= (size_t(1) << 20);) {
            size_t free, total;
            void *memory;
            CHECK(cudaMemGetInfo(&free, &total));
            if (free < spare + piece || cudaMalloc(&memory, piece) != cudaSuccess) {
                cudaGetLastError();
                piece /= 2;
            }
        }
        return small();
    }
};

} // namespace

int main(int count_of, char **arguments) {
    std::string role = count_of > 1 ? arguments[1] : "";
    int number = count_of > 2 ? std::atoi(arguments[2]) : 0;
    const std::map<std::string, std::function<std::function<void()>(Program &)>> roles = {
        {"flood", [](Program &one) { return one.waves(4, 1, 3); }},
        {"blocks", [](Program &one) { return one.waves(1, one.number ? one.number : 100, 1); }},
        {"small", &Program::small},
        {"graph", &Program::graph},
        {"capture", &Program::captures},
        {"cooperative", &Program::cooperative},
        {"green", &Program::green},
#ifdef HEAP
        {"heap", &Program::heap},
#endif
        {"fill", &Program::fill},
    };
    auto found = roles.find(role);
    if (found == roles.end()) {
        std::fputs(usage, stderr);
        return 2;
    }
    Program program(number);
    auto round = found->second(program);
    round();
    std::puts("ready=1");
    std::fflush(stdout);
    std::atomic<bool> ends = false;
    std::thread reader([&] {
        char byte;
        while (read(STDIN_FILENO, &byte, 1) > 0) {
        }
        ends = true;
    });
    long rounds = 0;
    while (!ends) {
        round();
        rounds++;
    }
    reader.join();
    std::printf("rounds=%ld\n", rounds);
    return 0;
}
