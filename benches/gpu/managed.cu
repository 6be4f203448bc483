// Managed memory, and programs without it beside it. benches/gpu/managed.py runs the modes; each prints lines
// NAME=VALUE, of which `wrong` is the number of words with a wrong value.
//
//     nvcc -O2 -std=c++17 -arch=native benches/gpu/managed.cu -o managed
//     ./managed kernels [KERNELS]             kernels over 8 MB; the host looks at the end
//     ./managed initialise [MIB]              the host writes, one kernel, the host sums
//     ./managed turns [MIB] [TURNS]           host and device change all of it in turns
//     ./managed heat FILE RANK RANKS STEPS    a one-dimensional heat equation; FILE, empty, is what the ranks share
//     ./managed flood managed|plain           the kernels of `kernels` until the input ends
//     ./managed neighbour SECONDS             kernels of about 0.5 ms and copies of 4 MiB, without managed memory
//     ./managed passes MIB PASSES             kernels that change all of it, one pass after another
//     ./managed calls [ROUNDS]                launch and wait, malloc and free, without managed memory
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                          \
    do {                                                                                     \
        cudaError_t status = (call);                                                         \
        if (status != cudaSuccess) {                                                         \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorName(status));                    \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static const size_t MIB = size_t(1) << 20;
static const unsigned BLOCKS = 3199, THREADS = 256;
static const size_t WORDS = 8000000 / sizeof(unsigned);

static __global__ void add(unsigned *words, size_t count, unsigned value) {
    size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
        words[at] += value;
    }
}

// Cells 1 to `count`; those before and behind are the neighbours'.
static __global__ void step(unsigned *to, const unsigned *from, unsigned count) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x + 1;
    if (at <= count) {
        to[at] = (from[at - 1] + 2 * from[at] + from[at + 1]) / 4;
    }
}

static __global__ void compute(float *out, int rounds) {
    float value = threadIdx.x;
    for (int round = 0; round < rounds; round++) {
        value = value * 0.999f + 1.0f;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// Seconds of the monotonic clock.
static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void say(const char *name, double value) {
    printf("%s=%.9g\n", name, value);
    fflush(stdout);
}

static unsigned *managed(size_t words) {
    unsigned *at;
    CHECK(cudaMallocManaged(&at, words * sizeof *at));
    return at;
}

static size_t count_wrong(const unsigned *words, size_t count, unsigned first) {
    size_t wrong = 0;
    for (size_t at = 0; at < count; at++) {
        wrong += words[at] != unsigned(at) + first;
    }
    return wrong;
}

static void number(unsigned *words, size_t count) {
    for (size_t at = 0; at < count; at++) {
        words[at] = unsigned(at);
    }
}

static void kernels(int count) {
    unsigned *words = managed(WORDS);
    number(words, WORDS);
    add<<<BLOCKS, THREADS>>>(words, WORDS, 1);
    CHECK(cudaDeviceSynchronize());
    double began = now();
    for (int kernel = 0; kernel < count; kernel++) {
        add<<<BLOCKS, THREADS>>>(words, WORDS, 1);
    }
    CHECK(cudaDeviceSynchronize());
    say("seconds", now() - began);
    say("wrong", double(count_wrong(words, WORDS, unsigned(count) + 1)));
}

static void initialise(size_t mib) {
    size_t count = mib * MIB / sizeof(unsigned);
    unsigned *words = managed(count);
    double began = now();
    number(words, count);
    double written = now();
    add<<<BLOCKS, THREADS>>>(words, count, 1);
    CHECK(cudaDeviceSynchronize());
    double computed = now();
    uint64_t sum = 0;
    for (size_t at = 0; at < count; at++) {
        sum += words[at];
    }
    say("write_s", written - began);
    say("kernel_s", computed - written);
    say("sum_s", now() - computed);
    uint64_t expected = uint64_t(count) * (uint64_t(count) + 1) / 2;
    say("wrong", sum != expected);
    CHECK(cudaFree(words));
}

static void turns(size_t mib, unsigned rounds) {
    size_t count = mib * MIB / sizeof(unsigned);
    unsigned *words = managed(count);
    number(words, count);
    double began = now();
    for (unsigned round = 0; round < rounds; round++) {
        add<<<BLOCKS, THREADS>>>(words, count, 1);
        CHECK(cudaDeviceSynchronize());
        for (size_t at = 0; at < count; at++) {
            words[at] += 2;
        }
    }
    say("seconds", now() - began);
    say("wrong", double(count_wrong(words, count, 3 * rounds)));
}

// --------------------------------------------------------------------------------------------------------------------
// Heat equation

static const unsigned CELLS = 1 << 20, CHECKED = 32, MOST_RANKS = 64;

// What a rank shows to the others: its outermost cells after each step, those of even and odd steps apart.
struct alignas(256) Edges {
    std::atomic<uint64_t> steps;
    unsigned left[2], right[2];
};

static unsigned initial(int64_t cell, int64_t cells) {
    return cell < 0 || cell >= cells ? 0 : unsigned(cell * 2654435761u) >> 4;
}

// Waits until a rank has made so many steps; a rank that has failed must not keep the others.
static void await(const Edges &edges, uint64_t steps) {
    double began = now();
    while (edges.steps.load(std::memory_order_acquire) < steps) {
        sched_yield();
        if (now() - began > 60) {
            fprintf(stderr, "a rank makes no step\n");
            exit(1);
        }
    }
}

static size_t heat_wrong(const unsigned *cells, unsigned rank, unsigned ranks, unsigned steps) {
    // The cells that can have had an effect on this rank's.
    int64_t all = int64_t(CELLS) * ranks, first = int64_t(CELLS) * rank - steps - 1;
    std::vector<unsigned> from(CELLS + 2 * steps + 2), to(from.size());
    for (size_t at = 0; at < from.size(); at++) {
        from[at] = initial(first + int64_t(at), all);
    }
    for (unsigned round = 0; round < steps; round++) {
        for (size_t at = 1; at + 1 < from.size(); at++) {
            int64_t cell = first + int64_t(at);
            bool is_one = cell >= 0 && cell < all;
            to[at] = is_one ? (from[at - 1] + 2 * from[at] + from[at + 1]) / 4 : 0;
        }
        std::swap(from, to);
    }
    size_t wrong = 0;
    for (unsigned at = 1; at <= CELLS; at++) {
        wrong += cells[at] != from[at + steps];
    }
    return wrong;
}

static void heat(const char *path, unsigned rank, unsigned ranks, unsigned steps) {
    if (ranks > MOST_RANKS || rank >= ranks || steps < CHECKED) {
        fprintf(stderr, "at most %u ranks, at least %u steps\n", MOST_RANKS, CHECKED);
        exit(1);
    }
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Edges) * MOST_RANKS) != 0) {
        perror(path);
        exit(1);
    }
    void *shared = mmap(nullptr, sizeof(Edges) * MOST_RANKS, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    Edges *edges = static_cast<Edges *>(shared);
    unsigned *from = managed(CELLS + 2), *to = managed(CELLS + 2);
    int64_t first = int64_t(CELLS) * rank - 1, all = int64_t(CELLS) * ranks;
    for (unsigned at = 0; at < CELLS + 2; at++) {
        from[at] = to[at] = initial(first + at, all);
    }
    size_t wrong = 0;
    double began = now(), checking = 0;
    for (uint64_t done = 1; done <= steps; done++) {
        step<<<(CELLS + THREADS - 1) / THREADS, THREADS>>>(to, from, CELLS);
        CHECK(cudaDeviceSynchronize());
        std::swap(from, to);
        Edges &own = edges[rank];
        own.left[done % 2] = from[1];
        own.right[done % 2] = from[CELLS];
        own.steps.store(done, std::memory_order_release);
        if (rank > 0) {
            await(edges[rank - 1], done);
            from[0] = edges[rank - 1].right[done % 2];
        }
        if (rank + 1 < ranks) {
            await(edges[rank + 1], done);
            from[CELLS + 1] = edges[rank + 1].left[done % 2];
        }
        if (done == 1) {
            // Programs do not start at the same time.
            began = now();
        }
        if (done == CHECKED) {
            double since = now();
            wrong = heat_wrong(from, rank, ranks, CHECKED);
            checking = now() - since;
        }
    }
    say("steps_per_s", (steps - 1) / (now() - began - checking));
    say("wrong", double(wrong));
}

// --------------------------------------------------------------------------------------------------------------------
// Neighbours

static void flood(bool is_managed) {
    unsigned *words;
    if (is_managed) {
        words = managed(WORDS);
        number(words, WORDS);
    } else {
        std::vector<unsigned> numbers(WORDS);
        number(numbers.data(), WORDS);
        CHECK(cudaMalloc(&words, WORDS * sizeof *words));
        CHECK(cudaMemcpy(words, numbers.data(), WORDS * sizeof *words, cudaMemcpyHostToDevice));
    }
    std::atomic<bool> ended(false);
    std::thread reader([&] {
        while (getchar() != EOF) {
        }
        ended = true;
    });
    unsigned count = 0;
    double began = now();
    while (!ended) {
        for (int kernel = 0; kernel < 100; kernel++) {
            add<<<BLOCKS, THREADS>>>(words, WORDS, 1);
        }
        CHECK(cudaDeviceSynchronize());
        if (count == 0) {
            say("ready", 1);
            began = now();
        }
        count += 100;
    }
    say("kernels_per_s", (count - 100) / (now() - began));
    reader.join();
    std::vector<unsigned> numbers(WORDS);
    CHECK(cudaMemcpy(numbers.data(), words, WORDS * sizeof *words, cudaMemcpyDefault));
    say("wrong", double(count_wrong(numbers.data(), WORDS, count)));
}

static void neighbour(double seconds) {
    const size_t bytes = 4 * MIB;
    // Dependent operations of 4 cycles each at about 1.7 GHz.
    const int rounds = 210000;
    float *out;
    char *device, *host;
    CHECK(cudaMalloc(&out, 16 * 256 * sizeof *out));
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&host, bytes));
    memset(host, 1, bytes);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    double began = 0;
    int count = 0;
    std::vector<double> times;
    for (;; count++) {
        if (count == 20) {
            began = now();
        }
        double start = now();
        CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
        compute<<<16, 256, 0, stream>>>(out, rounds);
        CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (count >= 20) {
            times.push_back(now() - start);
            if (now() - began > seconds) {
                break;
            }
        }
    }
    say("rounds_per_s", times.size() / (now() - began));
    std::sort(times.begin(), times.end());
    say("p99_ms", times[times.size() * 99 / 100] * 1e3);
    size_t wrong = 0;
    for (size_t at = 0; at < bytes; at++) {
        wrong += host[at] != 1;
    }
    say("wrong", double(wrong));
}

static void passes(size_t mib, unsigned count) {
    size_t words = mib * MIB / sizeof(unsigned);
    unsigned *all = managed(words);
    double began = now();
    number(all, words);
    say("write_s", now() - began);
    began = now();
    const size_t part = 256 * MIB / sizeof(unsigned);
    for (unsigned pass = 0; pass < count; pass++) {
        for (size_t at = 0; at < words; at += part) {
            add<<<BLOCKS, THREADS>>>(all + at, std::min(part, words - at), 1);
        }
        CHECK(cudaDeviceSynchronize());
    }
    say("gb_per_s", double(mib) * MIB * count / (now() - began) / 1e9);
    say("wrong", double(count_wrong(all, words, count)));
}

static double median(std::vector<double> &times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e6;
}

static void calls(int rounds) {
    unsigned *word;
    CHECK(cudaMalloc(&word, sizeof *word));
    CHECK(cudaMemset(word, 0, sizeof *word));
    std::vector<double> launches, allocations;
    for (int round = 0; round < rounds; round++) {
        double began = now();
        add<<<1, 1>>>(word, 1, 1);
        CHECK(cudaDeviceSynchronize());
        launches.push_back(now() - began);
        void *block;
        began = now();
        CHECK(cudaMalloc(&block, MIB));
        CHECK(cudaFree(block));
        allocations.push_back(now() - began);
    }
    unsigned sum;
    CHECK(cudaMemcpy(&sum, word, sizeof sum, cudaMemcpyDeviceToHost));
    say("launch_wait_us", median(launches));
    say("malloc_free_us", median(allocations));
    say("wrong", sum != unsigned(rounds));
}

int main(int count, char **arguments) {
    auto text = [&](int at) { return at < count ? arguments[at] : ""; };
    auto number = [&](int at, double usual) { return at < count ? atof(arguments[at]) : usual; };
    const char *mode = text(1);
    if (!strcmp(mode, "kernels")) {
        kernels(int(number(2, 10000)));
    } else if (!strcmp(mode, "initialise")) {
        initialise(size_t(number(2, 1024)));
    } else if (!strcmp(mode, "turns")) {
        turns(size_t(number(2, 64)), unsigned(number(3, 200)));
    } else if (!strcmp(mode, "heat")) {
        heat(text(2), unsigned(number(3, 0)), unsigned(number(4, 1)), unsigned(number(5, 2000)));
    } else if (!strcmp(mode, "flood")) {
        flood(!strcmp(text(2), "managed"));
    } else if (!strcmp(mode, "neighbour")) {
        neighbour(number(2, 5));
    } else if (!strcmp(mode, "passes")) {
        passes(size_t(number(2, 12288)), unsigned(number(3, 3)));
    } else if (!strcmp(mode, "calls")) {
        calls(int(number(2, 5000)));
    } else {
        fprintf(stderr, "managed kernels|initialise|turns|heat|flood|neighbour|passes|calls; see the source\n");
        return 2;
    }
    return 0;
}
