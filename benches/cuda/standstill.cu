// The programs of benches/gpu/standstill.py, which measures whether clients stand still beside long kernels.
//
//   nvcc -O2 -std=c++17 -arch=sm_90 --no-compress standstill.cu standstill_variable.cu -o standstill
//
// Images are not compressed, so that a newcomer can make its own differ from all that were ever loaded (--nonce).
// Every result is one line, name=value. See `usage` for the modes. Kernels measure their time with the device's global
// timer: it goes on while another client has the device.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

cudaError_t scale_by_variable(unsigned *data, unsigned count, const unsigned values[4]);

namespace {

const char usage[] =
    "usage: standstill MODE [options]\n"
    "  long       kernels of --ms and --blocks back to back, --ahead of them queued behind the one that runs, for\n"
    "             --seconds\n"
    "  short      kernels of --us and --blocks, each with a copy of its result word and a wait, which it checks, for\n"
    "             --seconds\n"
    "  newcomer   starts, works with --functions kernels and some others, then --kernels of --ms and --blocks, checks\n"
    "             every result, ends\n"
    "  endless    a kernel of --blocks that runs until the input ends, --seconds at most\n"
    "  await      shares memory and has a kernel wait for a word in it, 20 s at most; prints handle=HEX\n"
    "  write      opens the memory of --handle; its first kernel writes that word\n"
    "options:\n"
    "  --seconds S (10)   --ms M (2000)   --us N (50)   --blocks N (4; 0: fills every multiprocessor)   --ahead N (1)\n"
    "  --functions N (8, 32 at most)   --kernels N (0)   --handle HEX\n"
    "  --windows         long, short: every line of the input ends a stretch and prints what was done in it; the end\n"
    "                    of the input ends the program, and --seconds is not looked at\n"
    "  --ready-file F    is made when ready=1 is printed\n"
    "  --began NS        CLOCK_MONOTONIC when the program was started: newcomer's and write's times count from there\n"
    "  --nonce HEX       16 digits; the images differ from those of another nonce\n";

constexpr double await_limit_s = 20;

void check(cudaError_t status, const char *call, int line) {
    if (status == cudaSuccess) {
        return;
    }
    std::fprintf(stderr, "standstill: line %d: %s: %s\n", line, call, cudaGetErrorName(status));
    std::_Exit(1); // No destructors: they would wait for the device.
}
#define CHECK(call) check((call), #call, __LINE__)

[[noreturn]] void fail(const std::string &what) {
    std::fprintf(stderr, "standstill: %s\n", what.c_str());
    std::_Exit(1);
}

[[noreturn]] void refuse(const std::string &what) {
    std::fprintf(stderr, "standstill: %s\n%s", what.c_str(), usage);
    std::exit(2);
}

// The clock that Python's time.monotonic() reads.
int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

double seconds_now() { return double(monotonic_ns()) * 1e-9; }

void report(const char *name, double value) {
    std::printf("%s=%.3f\n", name, value);
    std::fflush(stdout);
}

struct Options {
    std::string mode;
    double seconds = 10;
    double ms = 2000;
    double us = 50;
    int blocks = 4;
    int ahead = 1;
    int functions = 8;
    int kernels = 0;
    bool windows = false;
    std::string handle;
    std::string ready_file;
    std::string nonce = "0000000000000000";
    int64_t began = monotonic_ns();

    double ms_since_began() const { return double(monotonic_ns() - began) * 1e-6; }
};

double number(const std::string &option, const char *text, double least) {
    char *end = nullptr;
    const double value = text == nullptr ? 0 : std::strtod(text, &end);
    if (text == nullptr || end == text || *end != '\0' || !(value >= least)) {
        refuse(option + " needs a number of at least " + std::to_string(least));
    }
    return value;
}

std::string digits(const std::string &option, const char *text, size_t count) {
    const std::string value = text == nullptr ? "" : text;
    if (value.size() != count || value.find_first_not_of("0123456789abcdef") != std::string::npos) {
        refuse(option + " needs " + std::to_string(count) + " lower-case hexadecimal digits");
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
        if (option == "--windows") {
            options.windows = true;
            continue;
        }
        const char *value = i + 1 < count ? arguments[++i] : nullptr;
        if (option == "--seconds") {
            options.seconds = number(option, value, 0.001);
        } else if (option == "--ms") {
            options.ms = number(option, value, 0.001);
        } else if (option == "--us") {
            options.us = number(option, value, 1);
        } else if (option == "--blocks") {
            options.blocks = int(number(option, value, 0));
        } else if (option == "--ahead") {
            options.ahead = int(number(option, value, 0));
        } else if (option == "--functions") {
            options.functions = int(number(option, value, 1));
        } else if (option == "--kernels") {
            options.kernels = int(number(option, value, 0));
        } else if (option == "--began") {
            // An integer: as a floating-point number it would lose its last digits.
            options.began = value == nullptr ? 0 : std::strtoll(value, nullptr, 10);
        } else if (option == "--nonce") {
            options.nonce = digits(option, value, 16);
        } else if (option == "--handle") {
            options.handle = digits(option, value, 2 * sizeof(cudaIpcMemHandle_t));
        } else if (option == "--ready-file" && value != nullptr) {
            options.ready_file = value;
        } else {
            refuse("unknown option " + option);
        }
    }
    return options;
}

// ---------------------------------------------------------------------------------------------------------------------
// Images that nobody has seen

int program_base(dl_phdr_info *info, size_t, void *base) {
    *static_cast<uintptr_t *>(base) = info->dlpi_addr;
    return 1; // The first object is the program.
}

// Writes the nonce into the program's images, before the runtime has read them.
void renew_images(const std::string &nonce) {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::string elf{std::istreambuf_iterator<char>(file), {}};
    Elf64_Ehdr header{};
    if (elf.size() < sizeof header) {
        fail("cannot read the program's own file");
    }
    std::memcpy(&header, elf.data(), sizeof header);
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    std::memcpy(sections.data(), elf.data() + header.e_shoff, sections.size() * sizeof(Elf64_Shdr));
    const char *names = elf.data() + sections[header.e_shstrndx].sh_offset;
    uintptr_t base = 0;
    dl_iterate_phdr(program_base, &base);
    const std::string mark = "standstill nonce 0000000000000000";
    int found = 0;
    for (const Elf64_Shdr &section : sections) {
        if (std::strcmp(names + section.sh_name, ".nv_fatbin") != 0) {
            continue;
        }
        char *begin = reinterpret_cast<char *>(base + section.sh_addr), *end = begin + section.sh_size;
        const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
        char *first = reinterpret_cast<char *>(uintptr_t(begin) & ~(page - 1));
        if (mprotect(first, size_t(end - first), PROT_READ | PROT_WRITE) != 0) {
            fail("cannot make the images writable");
        }
        for (char *at = begin; (at = std::search(at, end, mark.begin(), mark.end())) != end; at += mark.size()) {
            std::memcpy(at + mark.size() - nonce.size(), nonce.data(), nonce.size());
            found++;
        }
    }
    if (found < 2) { // One in each source file's image.
        fail("no nonce in the images: build with --no-compress");
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

__device__ uint64_t global_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Keeps its blocks busy for so long, then each block adds 1 to `done`.
__global__ void spin(uint64_t ns, unsigned *done) {
    const uint64_t begin = global_ns();
    while (global_ns() - begin < ns) {
    }
    if (threadIdx.x == 0) {
        atomicAdd(done, 1);
    }
}

// A word that follows from the round, after so long.
__global__ void answer(uint64_t ns, unsigned round, unsigned *out) {
    const uint64_t begin = global_ns();
    while (global_ns() - begin < ns) {
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *out = round * 2654435761u + 1;
    }
}

// Writes 1 to `runs`, then runs until another writes `wanted` to `word`, or the time is over: `outcome` is 1 or 2.
__global__ void await_word(const volatile unsigned *word, unsigned wanted, uint64_t limit_ns, volatile unsigned *runs,
                           volatile unsigned *outcome) {
    const uint64_t begin = global_ns();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *runs = 1;
        __threadfence_system();
    }
    bool seen = false;
    do {
        seen = *word == wanted;
    } while (!seen && global_ns() - begin < limit_ns);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *outcome = seen ? 1 : 2;
        __threadfence_system();
    }
}

__global__ void write_word(volatile unsigned *word, unsigned value) {
    *word = value;
    __threadfence_system();
}

// The digits of the nonce that is in the image.
__global__ void read_nonce(char *out) { out[threadIdx.x] = "standstill nonce 0000000000000000"[17 + threadIdx.x]; }

template <unsigned N> __host__ __device__ unsigned stepped(unsigned value) {
    return (value ^ (value >> (N % 13 + 1))) * (2 * N + 3) + N;
}

template <unsigned N> __global__ void step(unsigned *data, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        data[i] = stepped<N>(data[i]);
    }
}

constexpr unsigned local_words = 1024;

// Adds what it reads back from 4 KiB of local memory for each thread.
__global__ void through_local_memory(unsigned *data, unsigned count, unsigned stride) {
    unsigned words[local_words];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned k = 0; k < local_words; k++) {
        words[(k * stride) % local_words] = k + i;
    }
    if (i < count) {
        data[i] += words[(i * stride) % local_words];
    }
}

// Reverses each block's part by way of dynamic shared memory.
__global__ void through_shared_memory(unsigned *data) {
    extern __shared__ unsigned words[];
    const unsigned begin = blockIdx.x * blockDim.x;
    words[threadIdx.x] = data[begin + threadIdx.x];
    __syncthreads();
    data[begin + threadIdx.x] = words[blockDim.x - 1 - threadIdx.x];
}

struct Function {
    void (*kernel)(unsigned *, unsigned);
    unsigned (*host)(unsigned);
};

template <unsigned... N> std::vector<Function> all_functions(std::integer_sequence<unsigned, N...>) {
    return {Function{step<N>, stepped<N>}...};
}

constexpr int most_functions = 32;

// ---------------------------------------------------------------------------------------------------------------------
// Stretches of work

// Tells a working thread when a stretch ends and when all does: by lines of the input, or after --seconds.
class Stretches {
  public:
    explicit Stretches(const Options &options) : windows(options.windows), until(seconds_now() + options.seconds) {
        if (windows) {
            // Not by getchar, whose lock would keep the program from ending while this waits.
            std::thread([] {
                for (char c; read(STDIN_FILENO, &c, 1) == 1;) {
                    asked += c == '\n';
                }
                ended = true;
            }).detach();
        }
    }

    bool over() const { return windows ? ended.load() : seconds_now() >= until; }

    // Whether a stretch is to be reported now.
    bool asked_for_report() {
        if (asked == reported) {
            return false;
        }
        reported++;
        return true;
    }

    // The last line of a stretch's report.
    void report_end() const { report("window", reported); }

  private:
    const bool windows;
    const double until;
    // The reading thread may outlive the object.
    static inline std::atomic<int> asked{0};
    static inline std::atomic<bool> ended{false};
    int reported = 0;
};

void ready(const Options &options) {
    report("ready", 1);
    if (!options.ready_file.empty()) {
        std::ofstream(options.ready_file) << "1\n";
    }
}

int multiprocessors() {
    int count = 0;
    CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

void launch_spin(const Options &options, unsigned *done) {
    // Eight blocks of 256 threads take all threads of a multiprocessor.
    const int blocks = options.blocks == 0 ? 8 * multiprocessors() : options.blocks;
    spin<<<blocks, 256>>>(uint64_t(options.ms * 1e6), done);
    CHECK(cudaGetLastError());
}

// A word in host memory that kernels see too.
volatile unsigned *mapped_word(unsigned **device) {
    void *host = nullptr;
    CHECK(cudaHostAlloc(&host, sizeof(unsigned), cudaHostAllocMapped));
    *static_cast<volatile unsigned *>(host) = 0;
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void **>(device), host, 0));
    return static_cast<volatile unsigned *>(host);
}

// ---------------------------------------------------------------------------------------------------------------------
// Modes

void run_long(const Options &options) {
    unsigned *done = nullptr;
    CHECK(cudaMalloc(&done, sizeof *done));
    const int depth = options.ahead + 1;
    std::vector<cudaEvent_t> ends(depth);
    for (cudaEvent_t &end : ends) {
        CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    Stretches stretches(options);
    // A stretch goes from the end of one kernel to the end of another.
    double begin = seconds_now(), last = begin;
    std::vector<double> walls;
    auto report_stretch = [&] {
        std::sort(walls.begin(), walls.end());
        report("kernels", double(walls.size()));
        report("seconds", last - begin);
        report("kernel_p50_ms", walls.empty() ? 0 : walls[walls.size() / 2] * 1e3);
        report("kernel_longest_ms", walls.empty() ? 0 : walls.back() * 1e3);
        begin = last;
        walls.clear();
    };
    long launched = 0, ended = 0;
    while (ended < launched || !stretches.over()) {
        while (launched - ended < depth && !stretches.over()) {
            launch_spin(options, done);
            CHECK(cudaEventRecord(ends[launched % depth]));
            if (++launched == 1) {
                ready(options);
            }
        }
        if (ended == launched) {
            break;
        }
        CHECK(cudaEventSynchronize(ends[ended++ % depth]));
        const double now = seconds_now();
        walls.push_back(now - last);
        last = now;
        while (stretches.asked_for_report()) {
            report_stretch();
            stretches.report_end();
        }
    }
    if (!options.windows) {
        report_stretch();
    }
}

void run_short(const Options &options) {
    unsigned *word = nullptr, *host = nullptr;
    cudaStream_t stream = nullptr;
    CHECK(cudaMalloc(&word, sizeof *word));
    CHECK(cudaMallocHost(&host, sizeof *host));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned round = 0;
    auto work = [&] {
        round++;
        *host = 0;
        answer<<<std::max(options.blocks, 1), 128, 0, stream>>>(uint64_t(options.us * 1e3), round, word);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(host, word, sizeof *word, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        return *host == round * 2654435761u + 1;
    };
    for (int i = 0; i < 10; i++) {
        work();
    }
    Stretches stretches(options);
    ready(options);
    std::vector<float> times; // milliseconds
    double begin = seconds_now(), longest = 0, longest_at = begin;
    long wrong = 0;
    auto report_stretch = [&] {
        const double now = seconds_now();
        std::sort(times.begin(), times.end());
        auto part = [&](double p) { return times.empty() ? 0 : double(times[size_t(double(times.size() - 1) * p)]); };
        report("rounds", double(times.size()));
        report("rounds_per_s", double(times.size()) / (now - begin));
        report("p50_ms", part(0.5));
        report("p999_ms", part(0.999));
        report("longest_ms", longest * 1e3);
        report("longest_at_s", longest_at); // CLOCK_MONOTONIC, when it began.
        report("wrong", double(wrong));
        times.clear();
        begin = seconds_now();
        longest = 0, longest_at = begin, wrong = 0;
    };
    while (!stretches.over()) {
        const double from = seconds_now();
        wrong += !work();
        const double took = seconds_now() - from;
        times.push_back(float(took * 1e3));
        if (took > longest) {
            longest = took;
            longest_at = from;
        }
        while (stretches.asked_for_report()) {
            report_stretch();
            stretches.report_end();
        }
    }
    if (!options.windows) {
        report_stretch();
    }
}

// A number of results that are not what the host computes.
long differences(const std::vector<unsigned> &expected, const unsigned *device) {
    std::vector<unsigned> found(expected.size());
    CHECK(cudaMemcpy(found.data(), device, found.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
    long count = 0;
    for (size_t i = 0; i < found.size(); i++) {
        count += found[i] != expected[i];
    }
    return count;
}

void run_newcomer(const Options &options) {
    report("main_ms", options.ms_since_began());
    constexpr unsigned count = 1 << 16, block = 256;
    std::vector<unsigned> expected(count);
    for (unsigned i = 0; i < count; i++) {
        expected[i] = i * 7 + 1;
    }
    const auto functions = all_functions(std::make_integer_sequence<unsigned, most_functions>{});
    long wrong = 0;
    auto launch = [&](const Function &function, unsigned *data) {
        function.kernel<<<count / block, block>>>(data, count);
        CHECK(cudaGetLastError());
        std::transform(expected.begin(), expected.end(), expected.begin(), function.host);
    };

    CHECK(cudaFree(nullptr));
    report("context_ms", options.ms_since_began());
    unsigned *data = nullptr;
    CHECK(cudaMalloc(&data, count * sizeof *data));
    CHECK(cudaMemcpy(data, expected.data(), count * sizeof *data, cudaMemcpyHostToDevice));
    launch(functions[0], data);
    wrong += differences(expected, data);
    report("first_ms", options.ms_since_began());

    char *device_nonce = nullptr, nonce[16];
    CHECK(cudaMalloc(&device_nonce, sizeof nonce));
    read_nonce<<<1, sizeof nonce>>>(device_nonce);
    CHECK(cudaMemcpy(nonce, device_nonce, sizeof nonce, cudaMemcpyDeviceToHost));
    wrong += options.nonce.compare(0, sizeof nonce, nonce, sizeof nonce) != 0;
    CHECK(cudaFree(device_nonce));

    for (int i = 1; i < std::min(options.functions, most_functions); i++) {
        launch(functions[i], data);
    }
    constexpr unsigned stride = 5; // Odd, so that every word of the local memory is written once.
    through_local_memory<<<count / block, block>>>(data, count, stride);
    CHECK(cudaGetLastError());
    for (unsigned i = 0; i < count; i++) {
        expected[i] += i % local_words + i; // The word at i * stride was written in round i, modulo their number.
    }
    constexpr int shared_bytes = 64 << 10; // More than a kernel may have unasked.
    CHECK(cudaFuncSetAttribute(through_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    through_shared_memory<<<count / block, block, shared_bytes>>>(data);
    CHECK(cudaGetLastError());
    for (unsigned i = 0; i < count; i += block) {
        std::reverse(expected.begin() + i, expected.begin() + i + block);
    }
    const unsigned factors[4] = {3, 5, 7, 11};
    CHECK(scale_by_variable(data, count, factors));
    for (unsigned i = 0; i < count; i++) {
        expected[i] = expected[i] * factors[i % 4] + unsigned("standstill nonce "[i % 17]);
    }
    wrong += differences(expected, data);
    report("functions_ms", options.ms_since_began());

    if (options.kernels > 0) {
        unsigned *done = nullptr, blocks = 0;
        CHECK(cudaMalloc(&done, sizeof *done));
        CHECK(cudaMemset(done, 0, sizeof *done));
        for (int i = 0; i < options.kernels; i++) {
            launch_spin(options, done);
        }
        CHECK(cudaMemcpy(&blocks, done, sizeof blocks, cudaMemcpyDeviceToHost));
        const int each = options.blocks == 0 ? 8 * multiprocessors() : options.blocks;
        wrong += blocks != unsigned(options.kernels) * unsigned(each);
        CHECK(cudaFree(done));
    }
    CHECK(cudaFree(data));
    report("wrong", double(wrong));
    report("end_ms", options.ms_since_began());
}

// Waits until a kernel has written to the word.
void wait_for(volatile unsigned *word, const char *what) {
    const double until = seconds_now() + 10;
    while (*word == 0) {
        if (seconds_now() > until) {
            fail(std::string(what) + " did not begin within 10 s");
        }
        usleep(200);
    }
}

void run_endless(const Options &options) {
    unsigned *stop = nullptr, *runs = nullptr, *outcome = nullptr;
    volatile unsigned *host_stop = mapped_word(&stop), *host_runs = mapped_word(&runs);
    volatile unsigned *host_outcome = mapped_word(&outcome);
    Options until_end_of_input = options;
    until_end_of_input.windows = true;
    Stretches stretches(until_end_of_input);
    // If this process is killed, nobody writes the word: then the kernel ends by itself.
    await_word<<<std::max(options.blocks, 1), 32>>>(stop, 1, uint64_t((options.seconds + 5) * 1e9), runs, outcome);
    CHECK(cudaGetLastError());
    wait_for(host_runs, "the kernel");
    ready(options);
    const double begin = seconds_now();
    while (!stretches.over() && seconds_now() - begin < options.seconds) {
        usleep(1000);
    }
    *host_stop = 1;
    CHECK(cudaDeviceSynchronize());
    report("seconds", seconds_now() - begin);
    report("told", *host_outcome == 1);
}

constexpr unsigned handshake_word = 0x600dbeef;

void run_await(const Options &options) {
    unsigned *word = nullptr, *runs = nullptr, *outcome = nullptr;
    volatile unsigned *host_runs = mapped_word(&runs), *host_outcome = mapped_word(&outcome);
    CHECK(cudaMalloc(&word, 2 << 20));
    CHECK(cudaMemset(word, 0, 2 << 20));
    CHECK(cudaDeviceSynchronize());
    cudaIpcMemHandle_t handle;
    CHECK(cudaIpcGetMemHandle(&handle, word));
    await_word<<<1, 32>>>(word, handshake_word, uint64_t(await_limit_s * 1e9), runs, outcome);
    CHECK(cudaGetLastError());
    wait_for(host_runs, "the kernel that waits");
    std::printf("handle=");
    for (size_t i = 0; i < sizeof handle; i++) {
        std::printf("%02x", reinterpret_cast<const unsigned char *>(&handle)[i]);
    }
    std::printf("\n");
    ready(options);
    CHECK(cudaDeviceSynchronize());
    report("ended_at_ms", double(monotonic_ns()) * 1e-6); // CLOCK_MONOTONIC
    report("seen", *host_outcome == 1);
    // The other still has the memory open.
    while (std::getchar() != EOF) {
    }
}

void run_write(const Options &options) {
    if (options.handle.empty()) {
        refuse("write needs --handle");
    }
    cudaIpcMemHandle_t handle;
    for (size_t i = 0; i < sizeof handle; i++) {
        reinterpret_cast<unsigned char *>(&handle)[i] =
            static_cast<unsigned char>(std::stoul(options.handle.substr(2 * i, 2), nullptr, 16));
    }
    void *word = nullptr;
    CHECK(cudaIpcOpenMemHandle(&word, handle, cudaIpcMemLazyEnablePeerAccess));
    report("opened_ms", options.ms_since_began());
    write_word<<<1, 1>>>(static_cast<unsigned *>(word), handshake_word);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    report("written_ms", options.ms_since_began());
    CHECK(cudaIpcCloseMemHandle(word));
}

} // namespace

int main(int count, char **arguments) {
    const Options options = parse(count, arguments);
    if (options.mode == "help" || options.mode == "--help" || options.mode == "-h") {
        std::fputs(usage, stdout);
        return 0;
    }
    const std::pair<const char *, void (*)(const Options &)> modes[] = {
        {"long", run_long},       {"short", run_short}, {"newcomer", run_newcomer},
        {"endless", run_endless}, {"await", run_await}, {"write", run_write}};
    for (const auto &[name, run] : modes) {
        if (options.mode == name) {
            if (options.nonce != Options{}.nonce) {
                renew_images(options.nonce);
            }
            run(options);
            return 0;
        }
    }
    refuse("unknown mode " + options.mode);
}
