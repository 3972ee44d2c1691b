/* The CUDA runtime, as far as torch calls it, on the pretended devices of device.c: the devices themselves, capture and graphs. Capture follows the rules of the programming guide ("Stream capture"): what may not be called
meanwhile is an error and ends the capture. */
#include "cudart.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct graph { struct tasks tasks; };

__thread int stub_current;
__thread cudaError_t stub_last;
static __thread int mode = cudaStreamCaptureModeGlobal;
static struct capture *captures;
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int opened[MOST_DEVICES];

cudaError_t fail(cudaError_t error)
{
    if (error) stub_last = error;
    return error;
}

cudaError_t ended(int failed)
{
    return fail(failed ? cudaErrorLaunchFailure : cudaSuccess);
}

struct stream *own(cudaStream_t stream)
{
    opened[stub_current] = 1;
    return stub_stream(stream, stub_current);
}

/* Capture */

static uint64_t this_thread(void)
{
    return (uint64_t)pthread_self();
}

/* Calls that could wait for the device, or change it: not while this thread captures, nor another one in the global mode. */
cudaError_t unsafe_call(void)
{
    if (mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&capture_lock);
    for (struct capture *c = captures; c; c = c->next) {
        int mine = c->thread == this_thread() && c->mode != cudaStreamCaptureModeRelaxed;
        int others = c->mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
        if (mine || others) {
            c->invalid = 1;
            error = cudaErrorStreamCaptureUnsupported;
        }
    }
    pthread_mutex_unlock(&capture_lock);
    return fail(error);
}

/* Work for a stream: done, or noted where it captures. */
cudaError_t give(struct stream *stream, struct task task)
{
    struct capture *capture = stream->capture;
    if (!capture) stub_submit(stream, task);
    else if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
    else stub_append(&capture->tasks, task);
    stream->version++;
    stream->joined = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode wanted)
{
    COUNTED;
    static unsigned long long ids;
    struct stream *s = own(stream);
    if (s == stub_stream(NULL, s->device)) return fail(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return fail(cudaErrorIllegalState);
    struct capture *capture = calloc(1, sizeof *capture);
    pthread_mutex_lock(&capture_lock);
    *capture = (struct capture){.id = ++ids, .mode = (int)wanted, .thread = this_thread(), .origin = s, .next = captures};
    captures = capture;
    s->capture = capture;
    pthread_mutex_unlock(&capture_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    COUNTED;
    struct stream *origin = own(stream);
    struct capture *capture = origin->capture;
    *graph = NULL;
    if (!capture) return fail(cudaErrorIllegalState);
    if (capture->origin != origin) return fail(cudaErrorStreamCaptureUnmatched);
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread()) return fail(cudaErrorStreamCaptureWrongThread);
    cudaError_t error = capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    pthread_mutex_lock(&capture_lock);
    for (struct stream *s = stub_each_stream(NULL); s; s = stub_each_stream(s)) {
        if (s->capture != capture) continue;
        if (s != origin && !s->joined && !error) error = cudaErrorStreamCaptureUnjoined;
        s->capture = NULL;
    }
    struct capture **at = &captures;
    while (*at != capture) at = &(*at)->next;
    *at = capture->next;
    pthread_mutex_unlock(&capture_lock);
    if (error) {
        stub_drop(&capture->tasks);
    } else {
        struct graph *made = malloc(sizeof *made);
        made->tasks = capture->tasks;
        *graph = (cudaGraph_t)made;
    }
    return fail(error); /* the capture itself is kept: events may point to it */
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    struct capture *c = own(stream)->capture;
    *status = !c ? cudaStreamCaptureStatusNone : c->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count)
{
    struct capture *c = own(stream)->capture;
    if (id) *id = c ? c->id : 0;
    if (graph) *graph = (cudaGraph_t)c;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *wanted)
{
    int before = mode;
    mode = (int)*wanted;
    *wanted = (enum cudaStreamCaptureMode)before;
    return cudaSuccess;
}

/* Graphs */

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags)
{
    COUNTED;
    struct graph *copy = calloc(1, sizeof *copy);
    for (struct task *t = ((struct graph *)graph)->tasks.first; t; t = t->next) stub_append(&copy->tasks, *t);
    *made = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream)
{
    COUNTED;
    cudaError_t error = cudaSuccess;
    for (struct task *t = ((struct graph *)graph)->tasks.first; t && !error; t = t->next) error = give(own(stream), *t);
    return error;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    long found = ((struct graph *)graph)->tasks.count;
    if (nodes) memset(nodes, 0, *count * sizeof *nodes);
    *count = (size_t)found;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free(graph); /* its tasks stay, for the graphs made of it */
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph)
{
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *o, void *p, cudaHostFn_t f, unsigned int n, unsigned int flags)
{
    *o = (cudaUserObject_t)calloc(1, 8);
    return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t o, unsigned int n) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, unsigned int n, unsigned int flags) { return cudaSuccess; }

/* Devices */

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = stub_devices();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = stub_current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    COUNTED;
    if (device < 0 || device >= stub_devices()) return fail(cudaErrorInvalidDevice);
    stub_current = device;
    opened[device] = 1;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = stub_last;
    stub_last = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return stub_last; }

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorInvalidDeviceFunction: return "invalid device function (the stub's kernels do not compute)";
    case cudaErrorNotSupported: return "operation not supported (by the stub)";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "error of the stub";
    }
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheStub";
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    if (device < 0 || device >= stub_devices()) return fail(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .name = "CUDA stub", .totalGlobalMem = stub_total_bytes(), .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448,
        .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .warpSize = 32,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}, .major = 9, .minor = 0,
        .multiProcessorCount = 132, .l2CacheSize = 50 << 20, .textureAlignment = 512, .pciBusID = device + 1, .unifiedAddressing = 1,
        .concurrentKernels = 1, .streamPrioritiesSupported = 1,
    };
    p->uuid.bytes[15] = (char)device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    default: *value = 0; /* what the device cannot do */
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, (size_t)size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize(void)
{
    COUNTED;
    UNSAFE;
    return ended(stub_await_device(stub_current));
}

/* 1: the process has opened the device, as its first use does. */
int cuda_stub_opened(int device) { return opened[device]; }
