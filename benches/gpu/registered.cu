// Times of registered host memory: registration, copies, fork beside it; and of launches, allocations and events, which must
// not become slower by it.
//
//     nvcc -O2 -arch=sm_90 benches/gpu/registered.cu -o registered -lcuda
//     ./registered [GIB]        GIB: memory beside which the program forks (none)
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                          \
    do {                                                                                     \
        cudaError_t status = (call);                                                         \
        if (status != cudaSuccess) {                                                         \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));                  \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static const size_t GIB = size_t(1) << 30;

static __global__ void add(unsigned *word) { atomicAdd(word, 1u); }

// Microseconds of the monotonic clock.
static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static double median(std::vector<double> &times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

template <class Call> static double median_of(int rounds, Call call) {
    std::vector<double> times;
    for (int round = 0; round < rounds; round++) {
        double began = now();
        call();
        times.push_back(now() - began);
    }
    return median(times);
}

static char *memory(size_t bytes) {
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memset(at, 1, bytes);
    return static_cast<char *>(at);
}

static void registrations() {
    const size_t sizes[] = {4096, 65536, size_t(1) << 20, size_t(64) << 20, GIB};
    for (size_t bytes : sizes) {
        char *block = memory(bytes);
        int rounds = bytes >= GIB ? 3 : bytes > (size_t(1) << 20) ? 9 : 101;
        std::vector<double> begins, ends;
        for (int round = 0; round < rounds; round++) {
            double began = now();
            CHECK(cudaHostRegister(block, bytes, cudaHostRegisterDefault));
            double registered = now();
            CHECK(cudaHostUnregister(block));
            begins.push_back(registered - began);
            ends.push_back(now() - registered);
        }
        printf("%10zu B: register %.1f us, unregister %.1f us\n", bytes, median(begins), median(ends));
        munmap(block, bytes);
    }
}

static void copies() {
    const size_t bytes = size_t(256) << 20;
    char *block = memory(bytes), *device;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaHostRegister(block, bytes, cudaHostRegisterDefault));
    double to = median_of(7, [&] { CHECK(cudaMemcpy(device, block, bytes, cudaMemcpyHostToDevice)); });
    double from = median_of(7, [&] { CHECK(cudaMemcpy(block, device, bytes, cudaMemcpyDeviceToHost)); });
    printf("256 MiB: to the device %.1f GB/s, from it %.1f GB/s\n", bytes / to / 1e3, bytes / from / 1e3);
    to = median_of(2001, [&] { CHECK(cudaMemcpyAsync(device, block, 4, cudaMemcpyHostToDevice, 0)); });
    from = median_of(2001, [&] { CHECK(cudaMemcpy(block, device, 4, cudaMemcpyDeviceToHost)); });
    printf("4 B: to the device, asynchronous %.2f us, from it %.2f us\n", to, from);
    CHECK(cudaHostUnregister(block));
    CHECK(cudaFree(device));
    munmap(block, bytes);
}

static void calls() {
    unsigned *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    double launch = median_of(20001, [&] { add<<<1, 1>>>(word); });
    CHECK(cudaDeviceSynchronize());
    double both = median_of(5001, [&] {
        add<<<1, 1>>>(word);
        cudaDeviceSynchronize();
    });
    double allocate = median_of(5001, [&] {
        void *block;
        CHECK(cudaMalloc(&block, size_t(1) << 20));
        CHECK(cudaFree(block));
    });
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    double record = median_of(20001, [&] { cudaEventRecord(event, 0); });
    CHECK(cudaDeviceSynchronize());
    printf("launch %.3f us, launch and synchronize %.2f us, allocate and free 1 MiB %.2f us, record an event %.3f us\n",
           launch, both, allocate, record);
}

// Milliseconds until fork has returned in the parent.
static double forked() {
    double began = now();
    pid_t child = fork();
    if (child == 0) {
        _exit(0);
    }
    double returned = now();
    waitpid(child, nullptr, 0);
    return (returned - began) / 1e3;
}

static void forks(size_t gib) {
    size_t bytes = gib * GIB;
    char *block = memory(bytes);
    printf("%zu GiB: fork beside it %.0f ms", gib, forked());
    double began = now();
    CHECK(cudaHostRegister(block, bytes, cudaHostRegisterDefault));
    printf(", register %.0f ms", (now() - began) / 1e3);
    printf(", fork %.0f ms", forked());
    began = now();
    CHECK(cudaHostUnregister(block));
    printf(", unregister %.0f ms\n", (now() - began) / 1e3);
    munmap(block, bytes);
}

int main(int count, char **arguments) {
    CHECK(cudaFree(nullptr));
    registrations();
    copies();
    calls();
    if (count > 1) {
        forks(strtoul(arguments[1], nullptr, 10));
    }
}
