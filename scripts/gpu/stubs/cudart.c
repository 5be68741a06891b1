/* The part of the CUDA runtime 13 that ONNX Runtime's provider calls, without a device.
 *
 * Device memory is address space that nobody may read or write: host code that touches it ends the process. Copies
 * to the device are dropped, copies from it give zeros, kernels do nothing but are noted by name. So results mean
 * nothing; what is placed, launched, copied and waited for is the provider's own.
 *
 * Forms of structs and numbers of attributes: driver_types.h of CUDA 13.0.
 */
#define _GNU_SOURCE
#include "events.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, VERSION = 13000, PAGE = 4096 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905 };
enum { DEVICE_BYTES_LOG2 = 37 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };
/* An H200's: what kernels are chosen by. */
enum { MAJOR = 9, MINOR = 0, PROCESSORS = 132, WARP = 32, THREADS = 1024, REGISTERS = 65536 };
enum { SHARED_BYTES = 49152, SHARED_BYTES_OPT_IN = 232448, SHARED_BYTES_OF_PROCESSOR = 233472 };

/* ------------------------------------------------------------------ what a capture forbids */

static int is_capturing, is_invalid;

/* A call that CUDA refuses while this thread records a stream; it ends what was recorded. */
static int refused_in_capture(const char *call, int error)
{
    if (!is_capturing)
        return SUCCESS;
    is_invalid = 1;
    stub_note("refused_in_capture %s", call);
    return error;
}

#define NOT_IN_CAPTURE                                                                                                 \
    do {                                                                                                               \
        int refusal = refused_in_capture(__func__, CAPTURE_UNSUPPORTED);                                               \
        if (refusal)                                                                                                   \
            return refusal;                                                                                            \
    } while (0)

/* ------------------------------------------------------------------ device memory */

typedef struct Piece {
    char *begin;
    size_t size;
    struct Piece *next;
} Piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Piece *pieces;

static int reserve(void **out, size_t size)
{
    size = (size + PAGE) / PAGE * PAGE;
    Piece *piece = malloc(sizeof *piece);
    char *begin = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!piece || begin == MAP_FAILED)
        return OUT_OF_MEMORY;
    *piece = (Piece){begin, size, pieces};
    pthread_mutex_lock(&lock);
    piece->next = pieces;
    pieces = piece;
    pthread_mutex_unlock(&lock);
    *out = begin;
    return SUCCESS;
}

static int is_on_device(const void *pointer)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (Piece *piece = pieces; piece && !found; piece = piece->next)
        found = (const char *)pointer >= piece->begin && (const char *)pointer < piece->begin + piece->size;
    pthread_mutex_unlock(&lock);
    return found;
}

int cudaMalloc(void **out, size_t size)
{
    NOT_IN_CAPTURE;
    stub_note("allocate %zu", size);
    return reserve(out, size);
}

/* Legal in a capture, but the memory then belongs to the graph. */
int cudaMallocFromPoolAsync(void **out, size_t size, void *pool, void *stream)
{
    stub_note("allocate %zu", size);
    return reserve(out, size);
}

static int release(void *pointer)
{
    pthread_mutex_lock(&lock);
    for (Piece **link = &pieces; *link; link = &(*link)->next)
        if ((*link)->begin == pointer) {
            Piece *piece = *link;
            *link = piece->next;
            munmap(piece->begin, piece->size);
            free(piece);
            break;
        }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cudaFree(void *pointer) { NOT_IN_CAPTURE; return release(pointer); }
int cudaFreeAsync(void *pointer, void *stream) { return release(pointer); }

static int on_host(void **out, size_t size)
{
    return posix_memalign(out, 256, size ? size : 1) ? OUT_OF_MEMORY : SUCCESS;
}

int cudaMallocHost(void **out, size_t size) { NOT_IN_CAPTURE; return on_host(out, size); }
int cudaHostAlloc(void **out, size_t size, unsigned flags) { NOT_IN_CAPTURE; return on_host(out, size); }
int cudaFreeHost(void *pointer) { free(pointer); return SUCCESS; }

int cudaMemGetInfo(size_t *unused, size_t *total)
{
    *unused = *total = (size_t)1 << DEVICE_BYTES_LOG2;
    return SUCCESS;
}

/* Kinds of memory: 1 the host's, 2 the device's. */
int cudaPointerGetAttributes(int *attributes, const void *pointer)
{
    memset(attributes, 0, 24);
    attributes[0] = is_on_device(pointer) ? 2 : 1;
    return SUCCESS;
}

/* ------------------------------------------------------------------ copies */

static int copy(void *to, const void *from, size_t size, int kind, const char *manner)
{
    static const char *const names[] = {"host_to_host", "host_to_device", "device_to_host", "device_to_device"};
    if (kind == BY_ADDRESS)
        kind = 2 * is_on_device(from) + is_on_device(to);
    stub_note("%s %s %zu", manner, names[kind], size);
    if (is_on_device(to))
        return SUCCESS;
    if (is_on_device(from))
        memset(to, 0, size);
    else
        memmove(to, from, size);
    return SUCCESS;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
    NOT_IN_CAPTURE;
    return copy(to, from, size, kind, "wait_for_copy");
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    return copy(to, from, size, kind, "copy");
}

int cudaMemsetAsync(void *to, int value, size_t size, void *stream)
{
    stub_note("set %zu", size);
    if (!is_on_device(to))
        memset(to, value, size);
    return SUCCESS;
}

int cudaMemset(void *to, int value, size_t size) { NOT_IN_CAPTURE; return cudaMemsetAsync(to, value, size, NULL); }

/* ------------------------------------------------------------------ kernels */

/* A fat binary: code of some kernels for every architecture. */
typedef struct Binary {
    const char *code;
    int is_used;
} Binary;

typedef struct Kernel {
    const void *host_function;
    const char *name;
    Binary *binary;
} Kernel;

static Binary **binaries;
static size_t num_binaries;

static Kernel *kernels;
static size_t num_kernels, kernel_space;
static int is_sorted;

/* What is registered: two numbers of four bytes, then the address of the code. */
void **__cudaRegisterFatBinary(const void *wrapper)
{
    Binary *binary = calloc(1, sizeof *binary);
    binaries = realloc(binaries, (num_binaries + 1) * sizeof *binaries);
    if (!binary || !binaries)
        abort();
    binary->code = ((const char *const *)wrapper)[1];
    binaries[num_binaries++] = binary;
    return (void **)binary;
}

/* Ranks by address of fat binaries of which a kernel was launched; returns how many there are, ``all`` of how many. */
size_t stub_used_code(size_t *ranks, size_t room, size_t *all)
{
    size_t count = 0;
    *all = num_binaries;
    for (size_t i = 0; i < num_binaries; i++) {
        if (!binaries[i]->is_used || count++ >= room)
            continue;
        ranks[count - 1] = 0;
        for (size_t j = 0; j < num_binaries; j++)
            ranks[count - 1] += binaries[j]->code < binaries[i]->code;
    }
    return count;
}

int __cudaRegisterFunction(void **handle, const void *host_function, char *device_function, const char *name)
{
    if (num_kernels == kernel_space) {
        kernel_space = kernel_space ? 2 * kernel_space : 4096;
        kernels = realloc(kernels, kernel_space * sizeof *kernels);
        if (!kernels)
            abort();
    }
    kernels[num_kernels++] = (Kernel){host_function, name, (Binary *)handle};
    is_sorted = 0;
    return SUCCESS;
}

static int by_address(const void *left, const void *right)
{
    const char *one = ((const Kernel *)left)->host_function, *other = ((const Kernel *)right)->host_function;
    return (one > other) - (one < other);
}

static int launch(const void *host_function)
{
    pthread_mutex_lock(&lock);
    if (!is_sorted)
        qsort(kernels, num_kernels, sizeof *kernels, by_address);
    is_sorted = 1;
    Kernel wanted = {host_function, NULL, NULL};
    Kernel *found = bsearch(&wanted, kernels, num_kernels, sizeof *kernels, by_address);
    if (found)
        found->binary->is_used = 1;
    pthread_mutex_unlock(&lock);
    stub_note("launch %.900s", found ? found->name : "?");
    return SUCCESS;
}

/* A kernel's handle is the host function that stands for it. */
int __cudaGetKernel(const void **kernel, const void *host_function) { *kernel = host_function; return SUCCESS; }
int __cudaLaunchKernel(const void *kernel) { return launch(kernel); }
int cudaLaunchKernel(const void *kernel) { return launch(kernel); }
int cudaLaunchKernelExC(const void *config, const void *kernel) { return launch(kernel); }
int cudaLaunchCooperativeKernel(const void *kernel) { return launch(kernel); }

unsigned __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void **stream) { return SUCCESS; }

/* cudaFuncAttributes: shared, constant and local bytes, most threads, registers, versions of code. */
int cudaFuncGetAttributes(void *attributes, const void *kernel)
{
    size_t sizes[3] = {0, 0, 0};
    int numbers[4] = {THREADS, WARP, 10 * MAJOR + MINOR, 10 * MAJOR + MINOR};
    memset(attributes, 0, 128);
    memcpy(attributes, sizes, sizeof sizes);
    memcpy((char *)attributes + sizeof sizes, numbers, sizeof numbers);
    return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 1; return SUCCESS; }

/* ------------------------------------------------------------------ the device */

/* OUTRIDER_STUB_DEVICES=0 in the environment: as on a machine with a driver and no device. */
int cudaGetDeviceCount(int *count)
{
    const char *wanted = getenv("OUTRIDER_STUB_DEVICES");
    *count = !wanted || strcmp(wanted, "0");
    return *count ? SUCCESS : NO_DEVICE;
}

int cudaGetDevice(int *index) { *index = 0; return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *cudaGetErrorName(int error) { return "stub"; }
const char *cudaGetErrorString(int error) { return "the stub libraries know no errors"; }

int cudaDeviceGetAttribute(int *value, int attribute, int index)
{
    static const struct { int attribute, value; } known[] = {
        {1, THREADS}, {8, SHARED_BYTES}, {10, WARP}, {12, REGISTERS}, {16, PROCESSORS}, {39, 2048},
        {75, MAJOR}, {76, MINOR}, {81, SHARED_BYTES_OF_PROCESSOR}, {97, SHARED_BYTES_OPT_IN},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return SUCCESS;
}

/* cudaDeviceProp as far as its members are named; those behind stay zero. */
typedef struct Properties {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t bytes, shared_bytes;
    int registers, warp;
    size_t pitch;
    int threads, block[3], grid[3];
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment, pitch_alignment;
    int processors;
} Properties;

enum { SIZE_OF_PROPERTIES = 1008 };

int cudaGetDeviceProperties(void *out, int index)
{
    Properties of_device = {
        .name = "stub of an H200", .bytes = (size_t)1 << DEVICE_BYTES_LOG2, .shared_bytes = SHARED_BYTES,
        .registers = REGISTERS, .warp = WARP, .pitch = INT32_MAX, .threads = THREADS,
        .block = {THREADS, THREADS, 64}, .grid = {INT32_MAX, 65535, 65535}, .constant_bytes = 65536,
        .major = MAJOR, .minor = MINOR, .texture_alignment = 512, .pitch_alignment = 32, .processors = PROCESSORS,
    };
    memset(out, 0, SIZE_OF_PROPERTIES);
    memcpy(out, &of_device, sizeof of_device);
    return SUCCESS;
}

/* ------------------------------------------------------------------ streams, events, graphs, pools */

enum { NUM_HANDLES = 4096 };

/* Handles are only compared; each is a place in this array, which says of an event whether it was recorded in a
 * capture. */
static char places[NUM_HANDLES];

static int make_handle(void **out)
{
    static size_t num_made;
    *out = places + __sync_fetch_and_add(&num_made, 1) % NUM_HANDLES;
    *(char *)*out = 0;
    return SUCCESS;
}

int cudaStreamCreate(void **out) { return make_handle(out); }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { return make_handle(out); }
int cudaEventCreate(void **out) { return make_handle(out); }
int cudaEventCreateWithFlags(void **out, unsigned flags) { return make_handle(out); }
int cudaMemPoolCreate(void **out, const void *properties) { return make_handle(out); }
int cudaGraphInstantiate(void **out) { return make_handle(out); }
int cudaGraphLaunch(void *graph, void *stream) { stub_note("replay"); return SUCCESS; }
int cudaStreamSynchronize(void *stream) { NOT_IN_CAPTURE; stub_note("wait_for_stream"); return SUCCESS; }
int cudaEventSynchronize(void *event) { NOT_IN_CAPTURE; stub_note("wait_for_event"); return SUCCESS; }
int cudaDeviceSynchronize(void) { NOT_IN_CAPTURE; stub_note("wait_for_device"); return SUCCESS; }
int cudaStreamQuery(void *stream) { NOT_IN_CAPTURE; return SUCCESS; }
int cudaEventQuery(void *event) { NOT_IN_CAPTURE; return SUCCESS; }
int cudaLaunchHostFunc(void) { NOT_IN_CAPTURE; return SUCCESS; }
int cudaStreamAddCallback(void) { NOT_IN_CAPTURE; return SUCCESS; }

int cudaEventRecord(void *event, void *stream)
{
    *(char *)event = is_capturing;
    return SUCCESS;
}

/* A recorded stream waits for recorded work only. */
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    return *(char *)event ? SUCCESS : refused_in_capture(__func__, CAPTURE_ISOLATION);
}

int cudaStreamBeginCapture(void *stream, int mode)
{
    NOT_IN_CAPTURE;
    is_capturing = 1;
    stub_note("begin_capture");
    return SUCCESS;
}

int cudaStreamEndCapture(void *stream, void **graph)
{
    int was_invalid = is_invalid;
    is_capturing = is_invalid = 0;
    stub_note("end_capture");
    return was_invalid ? CAPTURE_INVALIDATED : make_handle(graph);
}

int cudaStreamIsCapturing(void *stream, int *status) { *status = is_capturing; return SUCCESS; }
