// What is in memory that a program has just allocated.
//
//     remains write|read|both [wait]
//
// `write` fills memory of each kind with a pattern and frees it, `read` allocates such memory and counts the words that hold
// the pattern, `both` does one after the other. A line for each kind: its name, a colon, the number of words. With `wait` the
// program says "ready" then, and stays until its standard input ends.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#define CHECK(call)                                                              \
    do {                                                                         \
        int status = (call);                                                     \
        if (status) {                                                            \
            fprintf(stderr, "%s: %d in line %d\n", #call, status, __LINE__);     \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

constexpr unsigned PATTERN = 0xA5C3F00D;
constexpr int BLOCKS = 264, THREADS = 256, SHARED = 40000;

__device__ unsigned variable[1 << 20];
extern __shared__ unsigned of_block[];

__global__ void fill(unsigned *words, size_t count) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += step) words[i] = PATTERN;
}

__global__ void count(const unsigned *words, size_t count, unsigned long long *found) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += step) mine += words[i] == PATTERN;
    if (mine) atomicAdd(found, mine);
}

__global__ void use_heap(bool writes, unsigned long long *found) {
    constexpr int WORDS = 256;
    for (int i = 0; i < 64; i++) {
        unsigned *words = (unsigned *)malloc(WORDS * 4);
        for (int at = 16; words && at < WORDS; at++) {
            if (writes) words[at] = PATTERN;
            else if (words[at] == PATTERN) atomicAdd(found, 1ull);
        }
        free(words);
    }
}

__global__ void use_shared(bool writes, unsigned long long *found) {
    for (int i = threadIdx.x; i < SHARED / 4; i += blockDim.x) {
        if (writes) of_block[i] = PATTERN;
        else if (of_block[i] == PATTERN) atomicAdd(found, 1ull);
    }
}

std::string mode;
unsigned long long *found;

// Has `use` write, look, or both.
void kind(const char *name, const std::function<void(bool)> &use) {
    if (mode != "read") {
        use(true);
        CHECK(cudaDeviceSynchronize());
    }
    if (mode == "write") return;
    unsigned long long words = 0;
    CHECK(cudaMemset(found, 0, sizeof *found));
    CHECK(cudaDeviceSynchronize());
    use(false);
    CHECK(cudaMemcpy(&words, found, sizeof words, cudaMemcpyDeviceToHost));
    printf("%s: %llu\n", name, words);
    fflush(stdout);
}

void touch(bool writes, unsigned *words, size_t bytes, cudaStream_t stream = nullptr) {
    if (writes) fill<<<BLOCKS, THREADS, 0, stream>>>(words, bytes / 4);
    else count<<<BLOCKS, THREADS, 0, stream>>>(words, bytes / 4, found);
}

using Allocate = std::function<unsigned *(size_t)>;
using Free = std::function<void(unsigned *)>;

void blocks(const char *name, size_t bytes, int number, const Allocate &allocate, const Free &free) {
    kind(name, [&](bool writes) {
        std::vector<unsigned *> all(number);
        for (auto &one : all) one = allocate(bytes);
        for (auto one : all) touch(writes, one, bytes);
        CHECK(cudaDeviceSynchronize());
        for (auto one : all) free(one);
    });
}

void arrays(const char *name, size_t width, size_t height, int number) {
    kind(name, [&](bool writes) {
        cudaChannelFormatDesc words = cudaCreateChannelDesc<unsigned>();
        std::vector<cudaArray_t> all(number);
        for (auto &one : all) CHECK(cudaMallocArray(&one, &words, width, height));
        unsigned *flat;
        size_t row = width * 4;
        CHECK(cudaMalloc(&flat, row * height));
        for (auto one : all) {
            if (writes) {
                touch(true, flat, row * height);
                CHECK(cudaMemcpy2DToArray(one, 0, 0, flat, row, row, height, cudaMemcpyDeviceToDevice));
            } else {
                CHECK(cudaMemcpy2DFromArray(flat, row, one, 0, 0, row, height, cudaMemcpyDeviceToDevice));
                touch(false, flat, row * height);
            }
        }
        CHECK(cudaDeviceSynchronize());
        for (auto one : all) CHECK(cudaFreeArray(one));
        // Nothing of the pattern stays here.
        CHECK(cudaMemset(flat, 0, row * height));
        CHECK(cudaFree(flat));
    });
}

void graphs(const char *name, size_t bytes) {
    kind(name, [&](bool writes) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t instance;
        unsigned *words;
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaMallocAsync(&words, bytes, stream));
        touch(writes, words, bytes, stream);
        CHECK(cudaFreeAsync(words, stream));
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&instance, graph, 0));
        CHECK(cudaGraphLaunch(instance, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(instance));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamDestroy(stream));
    });
}

void mapped(const char *name, size_t bytes) {
    kind(name, [&](bool writes) {
        CUmemAllocationProp properties = {};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle handle;
        CUdeviceptr address;
        CHECK(cuMemCreate(&handle, bytes, &properties, 0));
        CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
        CHECK(cuMemMap(address, bytes, 0, handle, 0));
        CHECK(cuMemSetAccess(address, bytes, &access, 1));
        touch(writes, (unsigned *)address, bytes);
        CHECK(cudaDeviceSynchronize());
        CHECK(cuMemUnmap(address, bytes));
        CHECK(cuMemRelease(handle));
        CHECK(cuMemAddressFree(address, bytes));
    });
}

int main(int argc, char **argv) {
    mode = argc > 1 ? argv[1] : "";
    if (mode != "write" && mode != "read" && mode != "both") {
        fprintf(stderr, "usage: remains write|read|both [wait]\n");
        return 2;
    }
    CHECK(cudaMalloc(&found, sizeof *found));
    Allocate plain = [](size_t bytes) { unsigned *words; CHECK(cudaMalloc(&words, bytes)); return words; };
    Free give_back = [](unsigned *words) { CHECK(cudaFree(words)); };
    Allocate pooled = [](size_t bytes) { unsigned *words; CHECK(cudaMallocAsync(&words, bytes, nullptr)); return words; };
    Free to_pool = [](unsigned *words) { CHECK(cudaFreeAsync(words, nullptr)); };
    Allocate pinned = [](size_t bytes) { unsigned *words; CHECK(cudaMallocHost(&words, bytes)); return words; };
    Free unpin = [](unsigned *words) { CHECK(cudaFreeHost(words)); };
    Allocate managed = [](size_t bytes) { unsigned *words; CHECK(cudaMallocManaged(&words, bytes)); return words; };
    blocks("cudaMalloc, 2000 of 512 B", 512, 2000, plain, give_back);
    blocks("cudaMalloc, 500 of 64 KiB", 64 << 10, 500, plain, give_back);
    blocks("cudaMalloc, 100 of 3 MiB", 3 << 20, 100, plain, give_back);
    blocks("cudaMalloc, 4 GiB", 4ull << 30, 1, plain, give_back);
    blocks("cudaMallocAsync, 1000 of 4 KiB", 4 << 10, 1000, pooled, to_pool);
    blocks("cudaMallocAsync, 256 MiB", 256 << 20, 1, pooled, to_pool);
    blocks("cudaMallocHost, 100 of 4 KiB", 4 << 10, 100, pinned, unpin);
    blocks("cudaMallocHost, 64 MiB", 64 << 20, 1, pinned, unpin);
    blocks("cudaMallocManaged, 64 MiB", 64 << 20, 1, managed, give_back);
    arrays("arrays, 1000 of 256 B", 16, 4, 1000);
    arrays("array, 64 MiB", 4096, 4096, 1);
    graphs("graph node, 4 KiB", 4 << 10);
    graphs("graph node, 32 MiB", 32 << 20);
    mapped("cuMemCreate, 64 MiB", 64 << 20);
    kind("variable, 4 MiB", [](bool writes) {
        unsigned *words;
        CHECK(cudaGetSymbolAddress((void **)&words, variable));
        touch(writes, words, sizeof variable);
    });
    kind("heap of the device", [](bool writes) { use_heap<<<8, 32>>>(writes, found); });
    kind("shared memory", [](bool writes) { use_shared<<<132, THREADS, SHARED>>>(writes, found); });
    if (argc > 2) {
        printf("ready\n");
        fflush(stdout);
        while (getchar() != EOF) {}
    }
}
