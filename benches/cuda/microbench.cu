// Measures what a CUDA program feels: launches, waits, small copies, allocation, bandwidth, start-up, and requests beside
// a program that keeps the GPU busy.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 microbench.cu -o microbench
//
// Every result is one line, name=value. See `usage` for the modes. Clients that are to begin together are started with
// --wait: each prints ready=1 and then waits for a line with the wall-clock second at which to begin.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>
#include <sys/resource.h>

namespace {

const char usage[] =
    "usage: microbench MODE [options]\n"
    "  start      nothing but the first runtime call and the first kernel\n"
    "  latency    launches, launch and wait, 4-byte copies, malloc and free\n"
    "  bandwidth  copies of --bytes, pinned and pageable, both ways\n"
    "  small      kernels of --us microseconds and --blocks blocks, --batch of them and then a wait, for --seconds\n"
    "  empty      the same with empty kernels\n"
    "  request    --batch kernels of --us and --blocks and a wait, think about --think-us, and again, for --seconds\n"
    "  flood      kernels of --us, four blocks for each multiprocessor, --depth of them submitted ahead, until the\n"
    "             input ends\n"
    "  hold       an idle client: prints used_mib for every line read, ends with the end of the input\n"
    "options:\n"
    "  --seconds S (2)   --us N (50)   --blocks N (8)   --batch N (1)   --bytes N (268435456)\n"
    "  --think-us N (3000)   --depth N (8)\n"
    "  --wait            print ready=1, then read the wall-clock second at which to begin\n";

void check(cudaError_t status, const char *call, int line) {
    if (status == cudaSuccess) {
        return;
    }
    std::fprintf(stderr, "microbench: line %d: %s: %s\n", line, call, cudaGetErrorName(status));
    std::exit(1);
}
#define CHECK(call) check((call), #call, __LINE__)

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double wall_clock_now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Seconds that `work` takes, once for each of `rounds`, in ascending order.
template <typename Work> std::vector<double> sample(int rounds, Work work) {
    std::vector<double> times(rounds);
    for (double &time : times) {
        const double begin = seconds_now();
        work();
        time = seconds_now() - begin;
    }
    std::sort(times.begin(), times.end());
    return times;
}

double percentile(const std::vector<double> &sorted, int percent) { return sorted[sorted.size() * percent / 100]; }

// Seconds of CPU that this process has used.
double cpu_seconds() {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    return double(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           double(use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-6;
}

void report(const char *name, double value) {
    std::printf("%s=%.3f\n", name, value);
    std::fflush(stdout);
}

__global__ void nothing(int *) {}

// Keeps its blocks busy for a number of SM clock cycles.
__global__ void busy(int64_t cycles, int *out) {
    const int64_t begin = clock64();
    while (clock64() - begin < cycles) {
    }
    if (out != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
        *out = 1;
    }
}

// A microsecond of `busy` is 1,700 cycles whatever the clock, so that runs compare. At an H200's 1.98 GHz a kernel of
// 50 takes 43 microseconds, and 50 with launch and wait.
constexpr int64_t cycles_per_us = 1700;

struct Options {
    std::string mode;
    double seconds = 2;
    int us = 50;
    int blocks = 8;
    int batch = 1;
    size_t bytes = size_t(256) << 20;
    int think_us = 3000;
    int depth = 8;
    bool wait = false;
};

[[noreturn]] void refuse(const std::string &what) {
    std::fprintf(stderr, "microbench: %s\n%s", what.c_str(), usage);
    std::exit(2);
}

double positive(const std::string &option, const char *text) {
    char *end = nullptr;
    const double value = text == nullptr ? 0 : std::strtod(text, &end);
    if (text == nullptr || *end != '\0' || !(value > 0)) {
        refuse(option + " needs a positive number");
    }
    return value;
}

Options parse(int count, char **arguments) {
    Options options;
    if (count < 2) {
        refuse("no mode given");
    }
    options.mode = arguments[1];
    for (int i = 2; i < count; i++) {
        const std::string option = arguments[i];
        if (option == "--wait") {
            options.wait = true;
            continue;
        }
        const char *value = i + 1 < count ? arguments[++i] : nullptr;
        if (option == "--seconds") {
            options.seconds = positive(option, value);
        } else if (option == "--us") {
            options.us = int(positive(option, value));
        } else if (option == "--blocks") {
            options.blocks = int(positive(option, value));
        } else if (option == "--batch") {
            options.batch = int(positive(option, value));
        } else if (option == "--bytes") {
            options.bytes = size_t(positive(option, value));
        } else if (option == "--think-us") {
            options.think_us = int(positive(option, value));
        } else if (option == "--depth") {
            options.depth = int(positive(option, value));
        } else {
            refuse("unknown option " + option);
        }
    }
    return options;
}

// With --wait: waits to be told when to begin, and then for that moment.
void wait_for_start(const Options &options) {
    if (!options.wait) {
        return;
    }
    report("ready", 1);
    double begin = 0;
    if (std::scanf("%lf", &begin) != 1) {
        std::exit(0); // Whoever started this has gone.
    }
    report("late_ms", std::max(0.0, wall_clock_now() - begin) * 1e3);
    while (wall_clock_now() < begin) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

void latency(int *device) {
    constexpr int burst = 256; // Fits in the driver's queue, so that a launch never waits for the GPU.
    auto launch_burst = [&] {
        for (int i = 0; i < burst; i++) {
            nothing<<<1, 32>>>(device);
        }
    };
    std::vector<double> bursts;
    for (int round = 0; round < 200; round++) {
        CHECK(cudaDeviceSynchronize());
        bursts.push_back(sample(1, launch_burst)[0] / burst);
    }
    std::sort(bursts.begin(), bursts.end());
    CHECK(cudaDeviceSynchronize());
    report("launch_burst_ns", bursts.front() * 1e9);
    report("launch_burst_p50_ns", percentile(bursts, 50) * 1e9);

    constexpr int many = 100000;
    const double steady = sample(1, [&] {
        for (int i = 0; i < many; i++) {
            nothing<<<1, 32>>>(device);
        }
        CHECK(cudaDeviceSynchronize());
    })[0];
    report("launch_steady_ns", steady / many * 1e9);

    const auto waits = sample(5000, [&] {
        nothing<<<1, 32>>>(device);
        CHECK(cudaDeviceSynchronize());
    });
    report("launch_sync_p50_us", percentile(waits, 50) * 1e6);
    report("launch_sync_p99_us", percentile(waits, 99) * 1e6);

    int word = 1;
    const auto to_device = sample(5000, [&] { CHECK(cudaMemcpy(device, &word, 4, cudaMemcpyHostToDevice)); });
    const auto from_device = sample(5000, [&] { CHECK(cudaMemcpy(&word, device, 4, cudaMemcpyDeviceToHost)); });
    report("h2d_4_bytes_p50_us", percentile(to_device, 50) * 1e6);
    report("d2h_4_bytes_p50_us", percentile(from_device, 50) * 1e6);

    const auto allocations = sample(2000, [&] {
        void *memory = nullptr;
        CHECK(cudaMalloc(&memory, 1 << 20));
        CHECK(cudaFree(memory));
    });
    report("malloc_free_p50_us", percentile(allocations, 50) * 1e6);
}

void bandwidth(size_t bytes) {
    void *device = nullptr, *pinned = nullptr;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    std::vector<char> pageable(bytes, 1);
    std::memset(pinned, 1, bytes);
    const int rounds = int(std::clamp<size_t>((size_t(512) << 20) / bytes, 4, 500));
    auto measure = [&](const char *name, void *to, const void *from, cudaMemcpyKind kind) {
        CHECK(cudaMemcpy(to, from, bytes, kind));
        const double took = sample(1, [&] {
            for (int i = 0; i < rounds; i++) {
                CHECK(cudaMemcpyAsync(to, from, bytes, kind));
            }
            CHECK(cudaDeviceSynchronize());
        })[0];
        report(name, double(bytes) * rounds / took / 1e9);
    };
    measure("h2d_pinned_gb_s", device, pinned, cudaMemcpyHostToDevice);
    measure("d2h_pinned_gb_s", pinned, device, cudaMemcpyDeviceToHost);
    measure("h2d_pageable_gb_s", device, pageable.data(), cudaMemcpyHostToDevice);
    measure("d2h_pageable_gb_s", pageable.data(), device, cudaMemcpyDeviceToHost);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(device));
}

// Batches of one launch each and a wait, until the time is over.
template <typename Launch> void throughput(const Options &options, Launch launch) {
    launch();
    CHECK(cudaDeviceSynchronize());
    wait_for_start(options);
    long kernels = 0;
    const double cpu = cpu_seconds();
    const double begin = seconds_now();
    while (seconds_now() - begin < options.seconds) {
        for (int i = 0; i < options.batch; i++) {
            launch();
        }
        CHECK(cudaDeviceSynchronize());
        kernels += options.batch;
    }
    const double took = seconds_now() - begin;
    report("kernels_per_s", double(kernels) / took);
    report("cpus", (cpu_seconds() - cpu) / took);
}

// Requests with pauses between them, as a client of a service makes them. A pause is half to one and a half times
// --think-us, so that requests do not fall into step with whatever else runs.
template <typename Launch> void requests(const Options &options, Launch launch) {
    uint32_t state = 1;
    auto request = [&] {
        for (int i = 0; i < options.batch; i++) {
            launch();
        }
        CHECK(cudaDeviceSynchronize());
    };
    for (int i = 0; i < 10; i++) {
        request();
    }
    wait_for_start(options);
    std::vector<double> times;
    const double cpu = cpu_seconds();
    const double begin = seconds_now();
    while (times.empty() || seconds_now() - begin < options.seconds) {
        state = state * 1664525 + 1013904223; // A linear congruential sequence; the upper bits are good enough.
        const int pause = options.think_us / 2 + int(uint64_t(state >> 8) * uint64_t(options.think_us) >> 24);
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
        times.push_back(sample(1, request)[0]);
    }
    const double took = seconds_now() - begin;
    const double used = cpu_seconds() - cpu;
    std::sort(times.begin(), times.end());
    report("requests", double(times.size()));
    report("request_p50_us", percentile(times, 50) * 1e6);
    report("request_p99_us", percentile(times, 99) * 1e6);
    report("cpus", used / took);
}

// Keeps the GPU supplied with kernels until the input ends; then what it got done.
void flood(const Options &options, int *device) {
    int multiprocessors = 0;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    std::vector<cudaEvent_t> done(options.depth);
    for (cudaEvent_t &event : done) {
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    std::atomic<bool> ended{false};
    std::thread input([&] {
        while (std::getchar() != EOF) {
        }
        ended = true;
    });
    long kernels = 0;
    const double begin = seconds_now();
    while (!ended) {
        cudaEvent_t event = done[kernels % options.depth];
        CHECK(cudaEventSynchronize(event)); // Returns at once for one that was never recorded.
        busy<<<4 * multiprocessors, 128>>>(options.us * cycles_per_us, device);
        CHECK(cudaEventRecord(event));
        if (++kernels == options.depth) {
            report("ready", 1);
        }
    }
    CHECK(cudaDeviceSynchronize());
    report("kernels_per_s", double(kernels) / (seconds_now() - begin));
    input.join();
    for (cudaEvent_t event : done) {
        CHECK(cudaEventDestroy(event));
    }
}

void hold() {
    report("ready", 1);
    char line[64];
    while (std::fgets(line, sizeof line, stdin) != nullptr) {
        size_t free = 0, total = 0;
        CHECK(cudaMemGetInfo(&free, &total));
        report("used_mib", double(total - free) / (1 << 20));
    }
}

} // namespace

int main(int count, char **arguments) {
    const Options options = parse(count, arguments);
    if (options.mode == "help" || options.mode == "--help" || options.mode == "-h") {
        std::fputs(usage, stdout);
        return 0;
    }
    const char *modes[] = {"start", "latency", "bandwidth", "small", "empty", "request", "flood", "hold"};
    if (std::find(std::begin(modes), std::end(modes), options.mode) == std::end(modes)) {
        refuse("unknown mode " + options.mode);
    }

    const double begin = seconds_now();
    CHECK(cudaFree(nullptr));
    report("runtime_start_ms", (seconds_now() - begin) * 1e3);
    int *device = nullptr;
    CHECK(cudaMalloc(&device, 1 << 20));
    nothing<<<1, 32>>>(device);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    report("first_kernel_ms", (seconds_now() - begin) * 1e3);

    if (options.mode == "latency") {
        latency(device);
    } else if (options.mode == "bandwidth") {
        bandwidth(options.bytes);
    } else if (options.mode == "small") {
        throughput(options, [&] { busy<<<options.blocks, 128>>>(options.us * cycles_per_us, device); });
    } else if (options.mode == "empty") {
        throughput(options, [&] { nothing<<<1, 32>>>(device); });
    } else if (options.mode == "request") {
        requests(options, [&] { busy<<<options.blocks, 128>>>(options.us * cycles_per_us, device); });
    } else if (options.mode == "flood") {
        flood(options, device);
    } else if (options.mode == "hold") {
        hold();
    }
    CHECK(cudaFree(device));
    return 0;
}
