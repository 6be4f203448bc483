/* The heat equation in two dimensions over MPI and the CUDA driver API: each rank steps a slab of rows on its device
 * and exchanges edge rows with its neighbours after every step. `heat --help` lists the options.
 *
 * A cell's new value depends on the same five old ones however the rows are divided, so that any number of ranks gives
 * the same bits; --verify has rank 0 do the whole grid alone and compares. The driver is loaded at run time: to build
 * this takes an MPI, and neither CUDA's headers nor its libraries. */

#include <dlfcn.h>
#include <getopt.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The driver: what is used of cuda.h ---- */

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;
typedef struct {
    char bytes[64];
} CUipcMemHandle;
enum { MULTIPROCESSOR_COUNT = 16, IPC_LAZY_PEER_ACCESS = 1 };

/* return type, name without cu, symbol, arguments */
#define DRIVER(X)                                                                                                       \
    X(Init, "cuInit", (unsigned flags))                                                                                 \
    X(GetErrorName, "cuGetErrorName", (int error, const char **name))                                                   \
    X(DeviceGetCount, "cuDeviceGetCount", (int *count))                                                                 \
    X(DeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                                       \
    X(DeviceGetName, "cuDeviceGetName", (char *name, int length, CUdevice device))                                      \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                         \
    X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, CUdevice device))                                         \
    X(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                             \
    X(PrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                                             \
    X(CtxSetCurrent, "cuCtxSetCurrent", (CUcontext context))                                                            \
    X(ModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))                                       \
    X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char *name))             \
    X(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr * address, size_t bytes))                                                 \
    X(MemFree, "cuMemFree_v2", (CUdeviceptr address))                                                                   \
    X(MemAllocHost, "cuMemAllocHost_v2", (void **address, size_t bytes))                                                \
    X(MemFreeHost, "cuMemFreeHost", (void *address))                                                                    \
    X(MemcpyHtoD, "cuMemcpyHtoDAsync_v2", (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))            \
    X(MemcpyDtoH, "cuMemcpyDtoHAsync_v2", (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                  \
    X(MemcpyDtoD, "cuMemcpyDtoDAsync_v2", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))            \
    X(MemsetD8, "cuMemsetD8Async", (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                \
    X(StreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))                                              \
    X(StreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                                      \
    X(StreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                                           \
    X(LaunchKernel, "cuLaunchKernel",                                                                                   \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,      \
       unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra))

/* looked up only where they are used */
#define SHARING(X)                                                                                                      \
    X(IpcGetMemHandle, "cuIpcGetMemHandle", (CUipcMemHandle * handle, CUdeviceptr address))                             \
    X(IpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (CUdeviceptr * address, CUipcMemHandle handle, unsigned flags))        \
    X(IpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr address))

#define DECLARE(name, symbol, arguments) static int(*cu##name) arguments;
DRIVER(DECLARE)
SHARING(DECLARE)

static int rank, ranks;

/* Ends all ranks with a message. */
static void fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "heat: rank %d: %s\n", rank, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void check(int status, const char *call) {
    const char *name = NULL;
    if (status == 0)
        return;
    if (cuGetErrorName)
        cuGetErrorName(status, &name);
    fail("%s failed: %s (%d)", call, name ? name : "unknown error", status);
}
#define CU(call) check(cu##call, "cu" #call)

static void load_driver(int sharing) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        fail("no CUDA driver: %s", dlerror());
#define LOOK_UP(name, symbol, arguments)                                                                                \
    if (!(*(void **)&cu##name = dlsym(driver, symbol)))                                                                 \
        fail("the CUDA driver has no %s", symbol);
    DRIVER(LOOK_UP)
    if (sharing) {
        SHARING(LOOK_UP)
    }
    CU(Init(0));
}

/* ---- The kernel ---- */

/* to[y][x] = from[y][x] + c * (left + right + above + below - 4 * from[y][x]) for the rows 1 to `rows` of a slab, whose
 * row 0 and last row are the neighbours'. The first and the last column keep what they have. */
static const char KERNEL[] = ".version 6.0\n"
                             ".target sm_50\n"
                             ".address_size 64\n"
                             ".visible .entry heat_step(.param .u64 from, .param .u64 to, .param .u32 width,\n"
                             "                          .param .u32 rows, .param .f32 c)\n"
                             "{\n"
                             "  .reg .pred %p<3>;\n"
                             "  .reg .b32 %r<12>;\n"
                             "  .reg .f32 %f<12>;\n"
                             "  .reg .b64 %rd<12>;\n"
                             "  ld.param.u64 %rd1, [from];\n"
                             "  ld.param.u64 %rd2, [to];\n"
                             "  ld.param.u32 %r1, [width];\n"
                             "  ld.param.u32 %r2, [rows];\n"
                             "  ld.param.f32 %f1, [c];\n"
                             "  cvta.to.global.u64 %rd1, %rd1;\n"
                             "  cvta.to.global.u64 %rd2, %rd2;\n"
                             "  mov.u32 %r3, %ctaid.x;\n"
                             "  mov.u32 %r4, %ntid.x;\n"
                             "  mov.u32 %r5, %tid.x;\n"
                             "  mad.lo.s32 %r3, %r3, %r4, %r5;\n" /* x */
                             "  mov.u32 %r6, %ctaid.y;\n"
                             "  mov.u32 %r7, %ntid.y;\n"
                             "  mov.u32 %r8, %tid.y;\n"
                             "  mad.lo.s32 %r6, %r6, %r7, %r8;\n" /* y - 1 */
                             "  setp.ge.u32 %p1, %r3, %r1;\n"
                             "  @%p1 bra END;\n"
                             "  setp.ge.u32 %p1, %r6, %r2;\n"
                             "  @%p1 bra END;\n"
                             "  mul.wide.u32 %rd3, %r1, 4;\n" /* bytes of a row */
                             "  add.s32 %r9, %r6, 1;\n"
                             "  cvt.u64.u32 %rd4, %r9;\n"
                             "  mul.lo.s64 %rd4, %rd4, %rd3;\n"
                             "  mul.wide.u32 %rd5, %r3, 4;\n"
                             "  add.s64 %rd4, %rd4, %rd5;\n" /* offset of the cell */
                             "  add.s64 %rd1, %rd1, %rd4;\n"
                             "  add.s64 %rd2, %rd2, %rd4;\n"
                             "  ld.global.f32 %f2, [%rd1];\n"
                             "  mov.f32 %f3, %f2;\n"
                             "  setp.eq.u32 %p1, %r3, 0;\n"
                             "  @%p1 bra STORE;\n"
                             "  add.s32 %r10, %r3, 1;\n"
                             "  setp.eq.u32 %p1, %r10, %r1;\n"
                             "  @%p1 bra STORE;\n"
                             "  sub.s64 %rd6, %rd1, %rd3;\n"
                             "  add.s64 %rd7, %rd1, %rd3;\n"
                             "  ld.global.f32 %f4, [%rd1+-4];\n"
                             "  ld.global.f32 %f5, [%rd1+4];\n"
                             "  ld.global.f32 %f6, [%rd6];\n"
                             "  ld.global.f32 %f7, [%rd7];\n"
                             "  add.rn.f32 %f8, %f4, %f5;\n"
                             "  add.rn.f32 %f9, %f6, %f7;\n"
                             "  add.rn.f32 %f8, %f8, %f9;\n"
                             "  mov.f32 %f10, 0fC0800000;\n" /* -4 */
                             "  fma.rn.f32 %f8, %f2, %f10, %f8;\n"
                             "  fma.rn.f32 %f3, %f1, %f8, %f2;\n"
                             "STORE:\n"
                             "  st.global.f32 [%rd2], %f3;\n"
                             "END:\n"
                             "  ret;\n"
                             "}\n";

/* ---- A slab of the grid on the device ---- */

enum { NONE = MPI_PROC_NULL };

typedef struct {
    unsigned width, rows;
    size_t row_bytes, bytes; /* of one row; of one state: the rows and one above and below */
    int above, below;        /* the neighbours' ranks, or NONE */
    CUdeviceptr states;      /* two states, one after the other */
    CUdeviceptr theirs[2];   /* the states of the rank above and of the one below, or 0 */
    float *halo;             /* pinned: edge rows to send up and down, and received from above and below */
    CUstream stream;
    int now; /* which state is the present one */
} Slab;

static CUfunction heat_step;

static CUdeviceptr row(const Slab *slab, int state, unsigned index) {
    return slab->states + state * slab->bytes + index * slab->row_bytes;
}

/* Rows of the whole grid before those of a rank, of so many. */
static unsigned first_row(unsigned size, int of_rank, int of_ranks) {
    return (unsigned)((uint64_t)size * of_rank / of_ranks);
}

static unsigned rows_of(unsigned size, int of_rank, int of_ranks) {
    return first_row(size, of_rank + 1, of_ranks) - first_row(size, of_rank, of_ranks);
}

/* All is cold but for a hot middle of the row above the grid. */
static void open_slab(Slab *slab, unsigned size, int which, int of) {
    memset(slab, 0, sizeof *slab);
    slab->width = size;
    slab->rows = rows_of(size, which, of);
    slab->row_bytes = sizeof(float) * size;
    slab->bytes = (slab->rows + 2) * slab->row_bytes;
    slab->above = which > 0 ? which - 1 : NONE;
    slab->below = which + 1 < of ? which + 1 : NONE;
    CU(StreamCreate(&slab->stream, 1 /* does not wait for the legacy default stream */));
    CU(MemAlloc(&slab->states, 2 * slab->bytes));
    CU(MemAllocHost((void **)&slab->halo, 4 * slab->row_bytes));
    CU(MemsetD8(slab->states, 0, 2 * slab->bytes, slab->stream));
    if (slab->above == NONE) {
        for (unsigned x = 0; x < size; x++)
            slab->halo[x] = x >= size / 4 && x < size - size / 4 ? 100.0f : 0.0f;
        for (int state = 0; state < 2; state++)
            CU(MemcpyHtoD(row(slab, state, 0), slab->halo, slab->row_bytes, slab->stream));
    }
    CU(StreamSynchronize(slab->stream));
}

/* Makes the neighbours' memory readable for this rank. */
static void open_neighbours(Slab *slab) {
    CUipcMemHandle mine, theirs;
    const int neighbours[2] = {slab->above, slab->below};
    CU(IpcGetMemHandle(&mine, slab->states));
    for (int side = 0; side < 2; side++) {
        MPI_Sendrecv(&mine, sizeof mine, MPI_BYTE, neighbours[!side], 0, &theirs, sizeof theirs, MPI_BYTE,
                     neighbours[side], 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (neighbours[side] != NONE)
            CU(IpcOpenMemHandle(&slab->theirs[side], theirs, IPC_LAZY_PEER_ACCESS));
    }
}

static void close_neighbours(Slab *slab) {
    for (int side = 0; side < 2; side++)
        if (slab->theirs[side])
            CU(IpcCloseMemHandle(slab->theirs[side]));
    /* Nobody frees what another one has open. */
    MPI_Barrier(MPI_COMM_WORLD);
}

static void close_slab(Slab *slab) {
    CU(MemFreeHost(slab->halo));
    CU(MemFree(slab->states));
    CU(StreamDestroy(slab->stream));
}

static void step(Slab *slab, float c) {
    CUdeviceptr from = row(slab, slab->now, 0), to = row(slab, !slab->now, 0);
    void *parameters[] = {&from, &to, &slab->width, &slab->rows, &c};
    CU(LaunchKernel(heat_step, (slab->width + 31) / 32, (slab->rows + 7) / 8, 1, 32, 8, 1, 0, slab->stream, parameters,
                    NULL));
    slab->now = !slab->now;
}

/* Edge rows go through pinned host memory and MPI. */
static void exchange_by_host(Slab *slab) {
    const int count = (int)slab->width;
    float *up = slab->halo, *down = up + count, *from_above = down + count, *from_below = from_above + count;
    CU(MemcpyDtoH(up, row(slab, slab->now, 1), slab->row_bytes, slab->stream));
    CU(MemcpyDtoH(down, row(slab, slab->now, slab->rows), slab->row_bytes, slab->stream));
    CU(StreamSynchronize(slab->stream));
    MPI_Sendrecv(up, count, MPI_FLOAT, slab->above, 1, from_below, count, MPI_FLOAT, slab->below, 1, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(down, count, MPI_FLOAT, slab->below, 2, from_above, count, MPI_FLOAT, slab->above, 2, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    if (slab->above != NONE)
        CU(MemcpyHtoD(row(slab, slab->now, 0), from_above, slab->row_bytes, slab->stream));
    if (slab->below != NONE)
        CU(MemcpyHtoD(row(slab, slab->now, slab->rows + 1), from_below, slab->row_bytes, slab->stream));
}

/* Edge rows are copied out of the neighbours' device memory; MPI only says that they are there. A neighbour writes the
 * state that is read here two steps later, thus after the next of these calls, which waits for the copies. */
static void exchange_by_device(Slab *slab) {
    char token = 0, got;
    CU(StreamSynchronize(slab->stream));
    MPI_Sendrecv(&token, 1, MPI_CHAR, slab->above, 1, &got, 1, MPI_CHAR, slab->below, 1, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(&token, 1, MPI_CHAR, slab->below, 2, &got, 1, MPI_CHAR, slab->above, 2, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    if (slab->above != NONE) {
        const unsigned rows = rows_of(slab->width, slab->above, ranks);
        const CUdeviceptr state = slab->theirs[0] + slab->now * (rows + 2) * slab->row_bytes;
        CU(MemcpyDtoD(row(slab, slab->now, 0), state + rows * slab->row_bytes, slab->row_bytes, slab->stream));
    }
    if (slab->below != NONE) {
        const unsigned rows = rows_of(slab->width, slab->below, ranks);
        const CUdeviceptr state = slab->theirs[1] + slab->now * (rows + 2) * slab->row_bytes;
        CU(MemcpyDtoD(row(slab, slab->now, slab->rows + 1), state + slab->row_bytes, slab->row_bytes, slab->stream));
    }
}

/* The slab's own rows, to be freed. */
static float *fetch(Slab *slab) {
    float *cells = malloc(slab->rows * slab->row_bytes);
    if (!cells)
        fail("out of memory");
    CU(MemcpyDtoH(cells, row(slab, slab->now, 1), slab->rows * slab->row_bytes, slab->stream));
    CU(StreamSynchronize(slab->stream));
    return cells;
}

/* The whole grid on rank 0, to be freed; NULL on the others. */
static float *gather(Slab *slab, unsigned size) {
    float *mine = fetch(slab), *all = NULL;
    int *counts = calloc(2 * (size_t)ranks, sizeof *counts), *places = counts + ranks;
    if (rank == 0)
        all = malloc(size * slab->row_bytes);
    if (!counts || (rank == 0 && !all))
        fail("out of memory");
    for (int other = 0; other < ranks; other++) {
        places[other] = (int)(first_row(size, other, ranks) * size);
        counts[other] = (int)(first_row(size, other + 1, ranks) * size) - places[other];
    }
    MPI_Gatherv(mine, counts[rank], MPI_FLOAT, all, counts, places, MPI_FLOAT, 0, MPI_COMM_WORLD);
    free(mine);
    free(counts);
    return all;
}

/* FNV-1a. */
static uint64_t checksum(const float *cells, size_t count) {
    const unsigned char *bytes = (const unsigned char *)cells;
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count * sizeof *cells; i++)
        sum = (sum ^ bytes[i]) * 0x100000001b3u;
    return sum;
}

/* ---- The program ---- */

typedef struct {
    unsigned size, steps;
    int by_device, verify;
} Options;

static const char USAGE[] = "Usage: mpirun -np RANKS heat [OPTIONS]\n"
                            "The heat equation on SIZE x SIZE cells, a slab of rows for each rank.\n\n"
                            "  --size SIZE       rows and columns (512), at most 32768\n"
                            "  --steps STEPS     time steps (200)\n"
                            "  --halo host       edge rows go through host memory and MPI (this is the default)\n"
                            "  --halo device     edge rows are copied between the ranks' device memory; for ranks of\n"
                            "                    one node that see the same devices\n"
                            "  --verify          rank 0 does the whole grid alone and compares; exit status 1 if it\n"
                            "                    differs\n"
                            "  --help            this text\n";

/* Wrong options end the program on all ranks; rank 0 says why. */
static void wrong(const char *why, const char *what) {
    if (rank == 0)
        fprintf(stderr, "heat: %s%s%s; --help lists the options\n", why, what ? " " : "", what ? what : "");
    MPI_Finalize();
    exit(2);
}

static unsigned number(const char *text, const char *option, unsigned long most) {
    char *end;
    const unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || value < 1 || value > most)
        wrong(option, text);
    return (unsigned)value;
}

static Options parse(int count, char **arguments) {
    static const struct option LONG[] = {{"size", required_argument, NULL, 's'}, {"steps", required_argument, NULL, 't'},
                                         {"halo", required_argument, NULL, 'h'}, {"verify", no_argument, NULL, 'v'},
                                         {"help", no_argument, NULL, '?'},       {NULL, 0, NULL, 0}};
    Options options = {.size = 512, .steps = 200};
    int option;
    opterr = 0;
    while ((option = getopt_long(count, arguments, ":", LONG, NULL)) != -1) {
        switch (option) {
        case 's':
            options.size = number(optarg, "--size must be 1 to 32768, not", 32768);
            break;
        case 't':
            options.steps = number(optarg, "--steps must be 1 to 1000000000, not", 1000000000);
            break;
        case 'h':
            options.by_device = strcmp(optarg, "device") == 0;
            if (!options.by_device && strcmp(optarg, "host") != 0)
                wrong("--halo must be host or device, not", optarg);
            break;
        case 'v':
            options.verify = 1;
            break;
        case ':':
            wrong("a value is missing after", arguments[optind - 1]);
            break;
        default:
            if (strcmp(arguments[optind - 1], "--help") != 0)
                wrong("there is no option", arguments[optind - 1]);
            if (rank == 0)
                fputs(USAGE, stdout);
            MPI_Finalize();
            exit(0);
        }
    }
    if (optind < count)
        wrong("no argument was expected:", arguments[optind]);
    if ((unsigned)ranks > options.size)
        wrong("there are more ranks than rows", NULL);
    return options;
}

/* Ranks of one node take its devices in turn. Returns the device. */
static CUdevice choose_device(const Options *options) {
    MPI_Comm node;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    int here, of_node, devices;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &here);
    MPI_Comm_size(node, &of_node);
    MPI_Comm_free(&node);
    if (options->by_device && of_node != ranks)
        wrong("--halo device is for ranks of one node; use --halo host", NULL);
    CU(DeviceGetCount(&devices));
    if (devices == 0)
        fail("there is no device");
    CU(DeviceGet(&device, here % devices));
    CU(PrimaryCtxRetain(&context, device));
    CU(CtxSetCurrent(context));
    CU(ModuleLoadData(&module, KERNEL));
    CU(ModuleGetFunction(&heat_step, module, "heat_step"));
    return device;
}

/* What the ranks may use: limits are seen here. */
static void describe(CUdevice device) {
    char name[256];
    int multiprocessors;
    size_t memory;
    CU(DeviceGetName(name, sizeof name, device));
    CU(DeviceGetAttribute(&multiprocessors, MULTIPROCESSOR_COUNT, device));
    CU(DeviceTotalMem(&memory, device));
    const long long mine[2] = {multiprocessors, (long long)(memory >> 20)};
    long long least[2];
    MPI_Reduce(mine, least, 2, MPI_LONG_LONG, MPI_MIN, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%d ranks on %s, each with at least %lld multiprocessors and %lld MiB\n", ranks, name, least[0],
               least[1]);
}

int main(int count, char **arguments) {
    const float c = 0.2f; /* up to 0.25 it is stable */
    int status = 0;
    Slab slab;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const Options options = parse(count, arguments);
    load_driver(options.by_device);
    const CUdevice device = choose_device(&options);
    describe(device);
    open_slab(&slab, options.size, rank, ranks);
    if (options.by_device)
        open_neighbours(&slab);

    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    for (unsigned i = 0; i < options.steps; i++) {
        step(&slab, c);
        if (options.by_device)
            exchange_by_device(&slab);
        else
            exchange_by_host(&slab);
    }
    CU(StreamSynchronize(slab.stream));
    MPI_Barrier(MPI_COMM_WORLD);
    const double seconds = MPI_Wtime() - begin;

    float *all = gather(&slab, options.size);
    if (options.by_device)
        close_neighbours(&slab);
    close_slab(&slab);
    if (rank == 0) {
        const size_t cells = (size_t)options.size * options.size;
        double sum = 0;
        for (size_t i = 0; i < cells; i++)
            sum += all[i];
        printf("checksum %016llx, mean temperature %.6f\n", (unsigned long long)checksum(all, cells), sum / cells);
        printf("%.1f steps/s of %u x %u cells, edge rows by %s copies\n", options.steps / seconds, options.size,
               options.size, options.by_device ? "device" : "host");
        if (options.verify) {
            open_slab(&slab, options.size, 0, 1);
            for (unsigned i = 0; i < options.steps; i++)
                step(&slab, c);
            float *alone = fetch(&slab);
            status = memcmp(all, alone, cells * sizeof *all) != 0;
            puts(status ? "WRONG: one rank alone gives something else" : "verified: one rank alone gives the same");
            free(alone);
            close_slab(&slab);
        }
    }
    free(all);
    MPI_Bcast(&status, 1, MPI_INT, 0, MPI_COMM_WORLD);
    CU(PrimaryCtxRelease(device));
    MPI_Finalize();
    return status;
}
