// Graphs with conditional nodes in several streams of one context, on the plain driver: whether the context is lost, and after
// how many launches (docs/design/0025-conditional-nodes.md).
//
//   nvcc -O2 -std=c++20 -o conditional tests/gpu/conditional.cu -lcuda
//   ./conditional tests/fixtures/conditional.ptx LLL 4
//
// conditional PTX THREADS [SECONDS] [ORDER]. Each letter is a thread with a stream of its own, which launches and waits, again
// and again:
//   L  a graph with a loop (three rounds)            N  with a loop in a loop
//   B  a graph with a branch                         C  a loop; its kernel's parameters are set before each launch
//   I  a new graph and instance with a loop each time
//   M  a memset of 40 MiB                            S  twenty memsets of 4 KiB
//   A  an allocation and a free of 4 MiB             P  a graph of two memsets
// ORDER: `one` lets one graph with conditional nodes run at a time, by a lock; `events` orders them by events; `alone` lets
// nothing else run meanwhile; `upload` lets them run beside each other, and uploads each before its launch. Prints a line; exit
// status 1 if a call failed.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// A call's status, thrown.
struct Failed {
    const char *call;
    CUresult status;
};

void check(CUresult status, const char *call) {
    if (status != CUDA_SUCCESS) {
        throw Failed{call, status};
    }
}
#define CHECK(call) check((call), #call)

constexpr size_t large = 40 << 20;
constexpr unsigned rounds = 3;

CUcontext context;
CUfunction count_down, set_condition;
std::atomic<bool> over{false};
std::mutex turn;
CUevent last;
std::string order;

// A graph with conditional nodes, and its instance. Its kernels point into it, so it stays where it is.
class Conditional {
  public:
    // `words`: device memory of eight words.
    Conditional(char kind, CUdeviceptr words) : left(words), passes(words + 4), inner_left(words + 8), inner_passes(words + 12) {
        CHECK(cuGraphCreate(&graph, 0));
        outer = handle(1);
        CUgraphNode node;
        CUgraph body = conditional(graph, nullptr, outer, kind == 'B' ? CU_GRAPH_COND_TYPE_IF : CU_GRAPH_COND_TYPE_WHILE, &node);
        CUgraphNode behind = nullptr;
        if (kind == 'N') {
            inner = handle(0);
            void *enabling[] = {&inner, &one};
            CUgraphNode enabled = kernel(body, nullptr, set_condition, enabling);
            CUDA_MEMSET_NODE_PARAMS set = {};
            set.dst = inner_left, set.value = rounds, set.elementSize = 4, set.width = 1, set.height = 1;
            CUgraphNode reset;
            CHECK(cuGraphAddMemsetNode(&reset, body, &enabled, 1, &set, context));
            CUgraph inside = conditional(body, reset, inner, CU_GRAPH_COND_TYPE_WHILE, &behind);
            void *counting[] = {&inner, &inner_left, &inner_passes};
            kernel(inside, nullptr, count_down, counting);
        }
        void *counting[] = {&outer, &left, &passes};
        counter = kernel(body, behind, count_down, counting);
        CHECK(cuGraphInstantiate(&instance, graph, 0));
    }

    ~Conditional() {
        // The context may be lost.
        cuGraphExecDestroy(instance);
        cuGraphDestroy(graph);
    }

    Conditional(const Conditional &) = delete;
    Conditional &operator=(const Conditional &) = delete;

    void set_parameters() {
        void *counting[] = {&outer, &left, &passes};
        CUDA_KERNEL_NODE_PARAMS params = parameters(count_down, counting);
        CHECK(cuGraphExecKernelNodeSetParams(instance, counter, &params));
    }

    void launch(CUstream stream) {
        CHECK(cuMemsetD32Async(left, rounds, 1, stream));
        if (order == "upload") {
            CHECK(cuGraphUpload(instance, stream));
        }
        CHECK(cuGraphLaunch(instance, stream));
    }

  private:
    CUgraphConditionalHandle handle(unsigned value) {
        CUgraphConditionalHandle made;
        CHECK(cuGraphConditionalHandleCreate(&made, graph, context, value, CU_GRAPH_COND_ASSIGN_DEFAULT));
        return made;
    }

    static CUgraph conditional(CUgraph in, CUgraphNode behind, CUgraphConditionalHandle handle, CUgraphConditionalNodeType type,
                               CUgraphNode *node) {
        CUgraphNodeParams params = {};
        params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
        params.conditional.handle = handle;
        params.conditional.type = type;
        params.conditional.size = 1;
        params.conditional.ctx = context;
        CHECK(cuGraphAddNode(node, in, behind ? &behind : nullptr, nullptr, behind ? 1 : 0, &params));
        return params.conditional.phGraph_out[0];
    }

    static CUDA_KERNEL_NODE_PARAMS parameters(CUfunction function, void **values) {
        CUDA_KERNEL_NODE_PARAMS params = {};
        params.func = function;
        params.gridDimX = params.gridDimY = params.gridDimZ = 1;
        params.blockDimX = params.blockDimY = params.blockDimZ = 1;
        params.kernelParams = values;
        return params;
    }

    static CUgraphNode kernel(CUgraph in, CUgraphNode behind, CUfunction function, void **values) {
        CUDA_KERNEL_NODE_PARAMS params = parameters(function, values);
        CUgraphNode node;
        CHECK(cuGraphAddKernelNode(&node, in, behind ? &behind : nullptr, behind ? 1 : 0, &params));
        return node;
    }

    CUgraph graph = nullptr;
    CUgraphExec instance = nullptr;
    CUgraphNode counter = nullptr;
    CUgraphConditionalHandle outer = 0, inner = 0;
    CUdeviceptr left, passes, inner_left, inner_passes;
    unsigned one = 1;
};

// An instance of a graph of two memsets.
CUgraphExec plain(CUdeviceptr words) {
    CUgraph graph;
    CHECK(cuGraphCreate(&graph, 0));
    CUDA_MEMSET_NODE_PARAMS set = {};
    set.dst = words, set.value = 1, set.elementSize = 4, set.width = 8, set.height = 1;
    CUgraphNode first, second;
    CHECK(cuGraphAddMemsetNode(&first, graph, nullptr, 0, &set, context));
    CHECK(cuGraphAddMemsetNode(&second, graph, &first, 1, &set, context));
    CUgraphExec instance;
    CHECK(cuGraphInstantiate(&instance, graph, 0));
    CHECK(cuGraphDestroy(graph));
    return instance;
}

// Launches a graph with conditional nodes in the order that was asked for, and waits.
void in_order(Conditional &graph, CUstream stream) {
    if (order == "events") {
        std::unique_lock<std::mutex> lock(turn);
        CHECK(cuStreamWaitEvent(stream, last, 0));
        graph.launch(stream);
        CHECK(cuEventRecord(last, stream));
        lock.unlock();
        CHECK(cuStreamSynchronize(stream));
        return;
    }
    std::unique_lock<std::mutex> lock(turn, std::defer_lock);
    if (!order.empty() && order != "upload") {
        lock.lock();
    }
    graph.launch(stream);
    CHECK(cuStreamSynchronize(stream));
}

void work(char kind, std::atomic<long> &count) {
    CHECK(cuCtxSetCurrent(context));
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr words, memory;
    CHECK(cuMemAlloc(&words, 64));
    CHECK(cuMemAlloc(&memory, large));
    const bool is_conditional = std::strchr("LNBCI", kind);
    std::vector<Conditional *> kept;
    if (is_conditional && kind != 'I') {
        kept.push_back(new Conditional(kind, words));
    }
    CUgraphExec instance = kind == 'P' ? plain(words) : nullptr;
    for (; !over; count++) {
        if (kind == 'I') {
            Conditional made(kind, words);
            in_order(made, stream);
            continue;
        }
        if (is_conditional) {
            if (kind == 'C') {
                kept[0]->set_parameters();
            }
            in_order(*kept[0], stream);
            continue;
        }
        std::unique_lock<std::mutex> lock(turn, std::defer_lock);
        if (order == "alone") {
            lock.lock();
        }
        switch (kind) {
        case 'M':
            CHECK(cuMemsetD32Async(memory, 0, large / 4, stream));
            break;
        case 'S':
            for (int at = 0; at < 20; at++) {
                CHECK(cuMemsetD32Async(memory, 0, 1024, stream));
            }
            break;
        case 'A': {
            CUdeviceptr block;
            CHECK(cuMemAlloc(&block, 4 << 20));
            CHECK(cuMemFree(block));
            break;
        }
        default:
            CHECK(cuGraphLaunch(instance, stream));
        }
        CHECK(cuStreamSynchronize(stream));
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string threads = argc > 2 ? argv[2] : "";
    order = argc > 4 ? argv[4] : "";
    const bool known = threads.find_first_not_of("LNBCIMSAP") == std::string::npos &&
                       (order.empty() || order == "one" || order == "events" || order == "alone" || order == "upload");
    const double seconds = argc > 3 ? std::atof(argv[3]) : 4;
    if (threads.empty() || !known || seconds <= 0 || argc > 5) {
        std::fprintf(stderr, "usage: conditional PTX THREADS [SECONDS] [one|events|alone|upload]; THREADS: letters of LNBCIMSAP\n");
        return 2;
    }
    std::ifstream file(argv[1]);
    if (!file) {
        std::fprintf(stderr, "conditional: %s: %s\n", argv[1], std::strerror(errno));
        return 2;
    }
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::vector<std::atomic<long>> counts(threads.size());
    std::mutex of_failure;
    std::string failure;
    const auto began = Clock::now();
    const auto note = [&](const Failed &failed) {
        std::lock_guard<std::mutex> lock(of_failure);
        if (failure.empty()) {
            const std::chrono::duration<double> after = Clock::now() - began;
            failure = std::string(failed.call) + ": " + std::to_string(failed.status) + " after " + std::to_string(after.count()) + " s";
        }
        over = true;
    };
    std::vector<std::thread> all;
    try {
        CHECK(cuInit(0));
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        CHECK(cuCtxSetCurrent(context));
        CUmodule module;
        CHECK(cuModuleLoadData(&module, text.c_str()));
        CHECK(cuModuleGetFunction(&count_down, module, "count_down"));
        CHECK(cuModuleGetFunction(&set_condition, module, "set_condition"));
        CHECK(cuEventCreate(&last, CU_EVENT_DISABLE_TIMING));
        for (size_t at = 0; at < threads.size(); at++) {
            all.emplace_back([&, at] {
                try {
                    work(threads[at], counts[at]);
                } catch (const Failed &failed) {
                    note(failed);
                }
            });
        }
    } catch (const Failed &failed) {
        note(failed);
    }
    const auto end = began + std::chrono::duration<double>(seconds);
    while (!over && Clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    over = true;
    for (std::thread &thread : all) {
        thread.join();
    }
    std::printf("%s %s: %s; launches", threads.c_str(), order.c_str(), failure.empty() ? "no failure" : failure.c_str());
    for (const std::atomic<long> &count : counts) {
        std::printf(" %ld", count.load());
    }
    std::printf("\n");
    std::fflush(stdout);
    // No destructors of the driver's: the context may be lost.
    std::_Exit(failure.empty() ? 0 : 1);
}
