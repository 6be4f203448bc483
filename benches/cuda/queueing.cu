// The programs of benches/gpu/queueing.py, which measures short work beside long work.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 queueing.cu -o queueing
//
// See `usage` for the roles. Each prints one line of name=value pairs at the end. Kernels spin on the device's global
// timer, so that a block has a fixed duration from the moment it began: the timer goes on while another process has the
// device, so with time slicing between processes a block's time includes that of the others.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

namespace {

const char usage[] =
    "usage: queueing ROLE START SECONDS ...\n"
    "  flood START SECONDS WAVES BLOCK_US           kernels of WAVES full waves, three of them queued\n"
    "  steady START SECONDS WAVES BLOCK_US DEPTH    the same, DEPTH of them queued\n"
    "  ask START SECONDS BLOCKS BLOCK_US PAUSE_US   one kernel and a wait for the stream, and again after a pause\n"
    "  ask START SECONDS BLOCKS BLOCK_US every PERIOD_US\n"
    "                                               the same, at fixed times; those during a wait are missed\n"
    "                                               BLOCKS: 150x16 is a request of 150 kernels of 16 blocks each\n"
    "  words START SECONDS PAUSE_US                 a copy of 4 bytes to pinned memory and a wait for the stream\n"
    "  copies START SECONDS MIB h2d|d2h|both        pinned copies of MIB MiB, three queued for each direction\n"
    "START is the wall-clock second at which to begin, 0 for at once; - prints ready=1 when the first kernel has run,\n"
    "then reads lines `START [SECONDS]` and prints a line for each, until the end of the input.\n"
    "WAVES: a full wave is two blocks of 1024 threads for each multiprocessor; 528b means 528 blocks.\n"
    "flood, steady and copies queue their first work 0.2 s before START and count from START on.\n";

// How long before START the long work begins.
constexpr double lead_s = 0.2;
// How long after the end of a stretch its last progress is waited for.
constexpr double limit_s = 2;

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "queueing: %s\n", what.c_str());
    std::_Exit(1); // No destructors: they would wait for the device.
}

void check(cudaError_t status, const char *call, int line) {
    if (status != cudaSuccess) {
        fail("line " + std::to_string(line) + ": " + call + ": " + cudaGetErrorName(status));
    }
}
#define CHECK(call) check((call), #call, __LINE__)

[[noreturn]] void refuse(const std::string &what) {
    std::fprintf(stderr, "queueing: %s\n%s", what.c_str(), usage);
    std::exit(2);
}

double wall_clock_now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_for(double seconds) {
    if (seconds > 0) {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    }
}

// Sleeps until shortly before and then spins: a sleep may end late.
void sleep_until(double time) {
    constexpr double spun_s = 100e-6;
    sleep_for(time - seconds_now() - spun_s);
    while (seconds_now() < time) {
    }
}

double number(const std::string &what, const std::string &text, double least) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= least) || value > 1e12) {
        refuse(what + " needs a number of at least " + std::to_string(least) + ", not '" + text + "'");
    }
    return value;
}

int whole_number(const std::string &what, const std::string &text) {
    const double value = number(what, text, 1);
    if (value > std::numeric_limits<int>::max() || value != double(int(value))) {
        refuse(what + " needs a whole number, not '" + text + "'");
    }
    return int(value);
}

// A line of results.
class Line {
  public:
    void add(const std::string &name, double value, int digits = 3) {
        char number[64];
        std::snprintf(number, sizeof number, "%.*f", digits, value);
        text += (text.empty() ? "" : " ") + name + "=" + number;
    }

    void print() const {
        std::printf("%s\n", text.c_str());
        std::fflush(stdout);
    }

  private:
    std::string text;
};

// When a stretch of work begins and ends, by the steady clock.
struct Stretch {
    double begin;
    double seconds;

    double end() const { return begin + seconds; }
};

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

__device__ uint64_t global_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Every so many blocks the host is told how many have ended.
constexpr unsigned told_blocks = 8;

// Keeps each block busy for so long. `ended` counts the blocks in device memory, `told` is host memory.
__global__ void __launch_bounds__(1024) spin(uint64_t ns, unsigned *ended, volatile unsigned *told) {
    const uint64_t begin = global_ns();
    while (global_ns() - begin < ns) {
    }
    if (threadIdx.x == 0 && ended != nullptr) {
        const unsigned count = atomicAdd(ended, 1) + 1;
        if (count % told_blocks == 0) {
            *told = count;
        }
    }
}

int full_wave() {
    int multiprocessors = 0;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    return 2 * multiprocessors;
}

cudaStream_t new_stream() {
    cudaStream_t stream = nullptr;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

// ---------------------------------------------------------------------------------------------------------------------
// Long work

// Keeps `depth` pieces of work queued in a stream of its own, from a thread of its own.
class Queue {
  public:
    Queue(int depth, std::function<void(cudaStream_t)> submit) : submit(std::move(submit)), events(depth) {
        for (cudaEvent_t &event : events) {
            CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
        }
        // Everything that a first time takes.
        this->submit(stream);
        CHECK(cudaStreamSynchronize(stream));
    }

    void start() {
        stopping = false;
        thread = std::thread([this] { run(); });
    }

    // Submits no more; `finish` waits for the end of what is queued.
    void stop() { stopping = true; }
    void finish() { thread.join(); }

    // Pieces of work whose end was seen.
    uint64_t done() const { return ended; }

  private:
    void run() {
        auto submit_one = [this](cudaEvent_t event) {
            submit(stream);
            CHECK(cudaEventRecord(event, stream));
        };
        for (cudaEvent_t event : events) {
            submit_one(event);
        }
        size_t queued = events.size();
        for (size_t next = 0; queued > 0; next = (next + 1) % events.size()) {
            CHECK(cudaEventSynchronize(events[next]));
            ended++;
            if (stopping) {
                queued--;
            } else {
                submit_one(events[next]);
            }
        }
    }

    std::function<void(cudaStream_t)> submit;
    std::vector<cudaEvent_t> events;
    cudaStream_t stream = new_stream();
    std::thread thread;
    std::atomic<bool> stopping{false};
    std::atomic<uint64_t> ended{0};
};

// A count that grows in steps, at any time by linear interpolation between the steps before and after it: the blocks of
// a full wave end together, and a stretch that is counted in whole waves would be wrong by up to one.
class Progress {
  public:
    explicit Progress(std::function<uint64_t()> count) : count(std::move(count)) { begin(); }

    void begin() { before = {seconds_now(), count()}; }

    // Follows the count until this time.
    void follow(double time) {
        while (seconds_now() < time) {
            look();
            sleep_for(std::min(step_s, time - seconds_now()));
        }
        reached = time;
    }

    // The count at the time that `follow` came to. Waits for the step after it.
    double value() {
        const Point known = before;
        while (before.count == known.count && seconds_now() < reached + limit_s) {
            look();
            sleep_for(step_s);
        }
        if (before.count == known.count || before.time <= known.time) {
            return double(known.count);
        }
        const double part = std::max(0.0, reached - known.time) / (before.time - known.time);
        return double(known.count) + double(before.count - known.count) * std::min(1.0, part);
    }

  private:
    static constexpr double step_s = 100e-6;

    struct Point {
        double time;
        uint64_t count;
    };

    void look() {
        const uint64_t now = count();
        // The words of blocks that end together may arrive in another order.
        if (now > before.count) {
            before = {seconds_now(), now};
        }
    }

    std::function<uint64_t()> count;
    Point before{};
    double reached = 0;
};

// What was done between the beginning and the end of a stretch, by each count in turn.
struct Counted {
    double progress = 0;
    std::vector<uint64_t> whole;
};

// Runs the queues beyond both ends of a stretch.
Counted run_queues(std::vector<std::unique_ptr<Queue>> &queues, const std::function<uint64_t()> &count,
                   const Stretch &stretch) {
    sleep_until(stretch.begin - lead_s);
    Progress progress(count);
    for (auto &queue : queues) {
        queue->start();
    }
    Counted counted;
    progress.follow(stretch.begin);
    for (auto &queue : queues) {
        counted.whole.push_back(queue->done());
    }
    counted.progress = -progress.value();
    progress.follow(stretch.end());
    for (size_t i = 0; i < queues.size(); i++) {
        counted.whole[i] = queues[i]->done() - counted.whole[i];
        queues[i]->stop();
    }
    counted.progress += progress.value();
    for (auto &queue : queues) {
        queue->finish();
    }
    return counted;
}

// ---------------------------------------------------------------------------------------------------------------------
// Short work

// The times of requests, in seconds.
void add_latencies(Line &line, std::vector<double> times, double seconds) {
    std::sort(times.begin(), times.end());
    double sum = 0;
    for (double time : times) {
        sum += time;
    }
    auto percentile = [&](int percent) { return times.empty() ? 0 : times[times.size() * percent / 100] * 1e3; };
    line.add("count", double(times.size()), 0);
    line.add("per_s", seconds > 0 ? double(times.size()) / seconds : 0);
    line.add("mean_ms", times.empty() ? 0 : sum / double(times.size()) * 1e3, 4);
    line.add("p50_ms", percentile(50), 4);
    line.add("p90_ms", percentile(90), 4);
    line.add("p99_ms", percentile(99), 4);
    line.add("max_ms", times.empty() ? 0 : times.back() * 1e3, 4);
}

// Makes requests until the stretch ends: after a pause, or at fixed times if there is a period.
void make_requests(Line &line, const Stretch &stretch, double pause_s, double period_s,
                   const std::function<void()> &request) {
    std::vector<double> times;
    uint64_t missed = 0;
    sleep_until(stretch.begin);
    const double first = seconds_now();
    double due = stretch.begin, last = first;
    while (last < stretch.end() && due < stretch.end()) {
        const double began = seconds_now();
        request();
        last = seconds_now();
        times.push_back(last - began);
        if (period_s > 0) {
            for (due += period_s; due < last; due += period_s) {
                missed += due < stretch.end();
            }
            if (due < stretch.end()) {
                sleep_until(due);
            }
        } else if (pause_s > 0) {
            sleep_until(last + pause_s);
            due = last + pause_s;
        }
    }
    add_latencies(line, times, last - first);
    if (period_s > 0) {
        line.add("missed", double(missed), 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Roles

using Work = std::function<void(const Stretch &, Line &)>;

Work kernels(const std::string &waves, double block_us, int depth) {
    const int wave = full_wave();
    const bool absolute = waves.size() > 1 && waves.back() == 'b';
    const int blocks = absolute ? whole_number("the number of blocks", waves.substr(0, waves.size() - 1))
                                : whole_number("WAVES", waves) * wave;
    unsigned *ended = nullptr, *told = nullptr;
    void *host = nullptr;
    CHECK(cudaMalloc(&ended, sizeof *ended));
    CHECK(cudaMemset(ended, 0, sizeof *ended));
    CHECK(cudaHostAlloc(&host, sizeof(unsigned), cudaHostAllocMapped));
    auto *seen = static_cast<volatile unsigned *>(host);
    *seen = 0;
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void **>(&told), host, 0));
    CHECK(cudaDeviceSynchronize());
    const auto ns = uint64_t(block_us * 1e3);
    auto queues = std::make_shared<std::vector<std::unique_ptr<Queue>>>();
    queues->push_back(std::make_unique<Queue>(depth, [=](cudaStream_t stream) {
        spin<<<blocks, 1024, 0, stream>>>(ns, ended, told);
        CHECK(cudaGetLastError());
    }));
    return [=](const Stretch &stretch, Line &line) {
        const Counted counted = run_queues(*queues, [=] { return uint64_t(*seen); }, stretch);
        line.add("kernels", double(counted.whole[0]), 0);
        line.add("kernels_per_s", double(counted.whole[0]) / stretch.seconds);
        // With the parts of kernels at both ends of the stretch.
        line.add("rate", counted.progress / blocks / stretch.seconds, 4);
        line.add("blocks", blocks, 0);
        line.add("wave_blocks", wave, 0);
    };
}

Work ask(int kernels, int blocks, double block_us, double pause_us, double period_us) {
    const cudaStream_t stream = new_stream();
    auto request = [=] {
        for (int i = 0; i < kernels; i++) {
            spin<<<blocks, 256, 0, stream>>>(uint64_t(block_us * 1e3), nullptr, nullptr);
            CHECK(cudaGetLastError());
        }
        CHECK(cudaStreamSynchronize(stream));
    };
    request();
    return [=](const Stretch &stretch, Line &line) {
        make_requests(line, stretch, pause_us * 1e-6, period_us * 1e-6, request);
    };
}

Work words(double pause_us) {
    const cudaStream_t stream = new_stream();
    unsigned *device = nullptr, *host = nullptr;
    CHECK(cudaMalloc(&device, sizeof *device));
    CHECK(cudaMemset(device, 0, sizeof *device));
    CHECK(cudaMallocHost(&host, sizeof *host));
    CHECK(cudaDeviceSynchronize());
    auto request = [=] {
        CHECK(cudaMemcpyAsync(host, device, sizeof *host, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
    };
    request();
    return [=](const Stretch &stretch, Line &line) { make_requests(line, stretch, pause_us * 1e-6, 0, request); };
}

Work copies(double mib, const std::string &direction) {
    constexpr int depth = 3;
    if (direction != "h2d" && direction != "d2h" && direction != "both") {
        refuse("copies go h2d, d2h or both ways, not '" + direction + "'");
    }
    const auto bytes = size_t(mib * (1 << 20));
    auto queues = std::make_shared<std::vector<std::unique_ptr<Queue>>>();
    std::vector<std::string> names;
    for (const std::string name : {"h2d", "d2h"}) {
        if (direction != name && direction != "both") {
            continue;
        }
        void *device = nullptr, *host = nullptr;
        CHECK(cudaMalloc(&device, bytes));
        CHECK(cudaMallocHost(&host, bytes));
        const bool down = name == "h2d";
        queues->push_back(std::make_unique<Queue>(depth, [=](cudaStream_t stream) {
            CHECK(cudaMemcpyAsync(down ? device : host, down ? host : device, bytes,
                                  down ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
        }));
        names.push_back(name);
    }
    auto ended = [queues] {
        uint64_t sum = 0;
        for (const auto &queue : *queues) {
            sum += queue->done();
        }
        return sum;
    };
    return [=](const Stretch &stretch, Line &line) {
        const Counted counted = run_queues(*queues, ended, stretch);
        const double scale = double(bytes) / 1e9 / stretch.seconds;
        line.add("gb_per_s", counted.progress * scale);
        for (size_t i = 0; i < names.size(); i++) {
            line.add(names[i] + "_gb_per_s", double(counted.whole[i]) * scale);
        }
    };
}

// Does the stretch and prints its line. START is a wall-clock second, or 0 for as soon as possible.
void work_at(const Work &work, double start, double seconds) {
    const double late = start > 0 ? wall_clock_now() - start : -lead_s;
    Line line;
    const Stretch stretch{seconds_now() - late, seconds};
    work(stretch, line);
    line.add("late_ms", std::max(0.0, late) * 1e3, 1);
    line.print();
}

} // namespace

int main(int count, char **values) {
    const std::vector<std::string> given(values + 1, values + count);
    if (given.size() < 3) {
        refuse("a role, START and SECONDS are needed");
    }
    const std::string &role = given[0], &start = given[1];
    const bool told = start == "-";
    const double start_at = told ? 0 : number("START", start, 0);
    const double seconds = number("SECONDS", given[2], 0.001);
    const std::vector<std::string> rest(given.begin() + 3, given.end());
    auto takes = [&](size_t least, size_t most) {
        if (rest.size() < least || rest.size() > most) {
            refuse("wrong number of arguments of " + role);
        }
    };
    Work work;
    if (role == "flood" || role == "steady") {
        takes(role == "flood" ? 2 : 3, role == "flood" ? 2 : 3);
        work = kernels(rest[0], number("BLOCK_US", rest[1], 1), role == "flood" ? 3 : whole_number("DEPTH", rest[2]));
    } else if (role == "ask") {
        takes(3, 4);
        const bool periodic = rest[2] == "every";
        takes(periodic ? 4 : 3, periodic ? 4 : 3);
        const size_t times = rest[0].find('x');
        const bool several = times != std::string::npos;
        const int kernels = several ? whole_number("BLOCKS", rest[0].substr(0, times)) : 1;
        const int blocks = whole_number("BLOCKS", several ? rest[0].substr(times + 1) : rest[0]);
        work = ask(kernels, blocks, number("BLOCK_US", rest[1], 1),
                   periodic ? 0 : number("PAUSE_US", rest[2], 0), periodic ? number("PERIOD_US", rest[3], 1) : 0);
    } else if (role == "words") {
        takes(1, 1);
        work = words(number("PAUSE_US", rest[0], 0));
    } else if (role == "copies") {
        takes(2, 2);
        work = copies(number("MIB", rest[0], 0.001), rest[1]);
    } else {
        refuse("no role " + role);
    }
    if (!told) {
        work_at(work, start_at, seconds);
        return 0;
    }
    std::printf("ready=1\n");
    std::fflush(stdout);
    for (std::string text; std::getline(std::cin, text);) {
        std::istringstream words_of(text);
        std::string at, length;
        words_of >> at >> length;
        work_at(work, number("START", at, 0), length.empty() ? seconds : number("SECONDS", length, 0.001));
    }
    return 0;
}
