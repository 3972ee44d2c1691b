/* The CUDA runtime, as far as torch calls it: what streams are given. Kernels do nothing; where cuda_stub_compute(1) was said, launching one
is an error, with its name: what it should compute is given by cuda_stub_launch. */
#include "cudart.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static atomic_int computes;

void cuda_stub_compute(int on) { computes = on; }

/* Memory */

cudaError_t cudaMalloc(void **start, size_t bytes)
{
    COUNTED;
    UNSAFE;
    own(NULL);
    *start = bytes ? stub_allocate(bytes, stub_current) : NULL;
    return bytes && !*start ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFree(void *start)
{
    COUNTED;
    own(NULL);
    if (!start) return cudaSuccess;
    UNSAFE;
    struct block block;
    if (!stub_block(start, &block)) return fail(cudaErrorInvalidValue);
    /* torch's allocator has waited for what uses it; to wait here, while it holds its lock, would wait for kernels that need Python. */
    return stub_free(start) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = stub_total_bytes();
    *free_bytes = stub_free_bytes(stub_current);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned int flags)
{
    COUNTED;
    UNSAFE;
    *start = stub_allocate(bytes, -1);
    return *start ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *start)
{
    UNSAFE;
    return stub_free(start) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *start)
{
    struct block block;
    *found = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (stub_block(start, &block)) {
        found->type = block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        found->device = block.device < 0 ? 0 : block.device;
        found->devicePointer = (void *)start;
        if (block.device < 0) found->hostPointer = (void *)start;
    }
    return cudaSuccess;
}

static int pageable(const void *start)
{
    struct block block;
    return !stub_block(start, &block);
}

/* Pageable memory of the host is read before the call returns, and written before it returns. */
static cudaError_t copy(void *to, const void *from, size_t bytes, struct stream *stream)
{
    struct task task = {.kind = COPY, .to = to, .from = from, .bytes = bytes, .takes_ns = stub_copy_ns(bytes)};
    if (!stream->capture && pageable(from) && stub_later(stream)) {
        void *kept = malloc(bytes);
        memcpy(kept, from, bytes);
        task.from = kept;
        task.owned = 1;
    }
    cudaError_t error = give(stream, task);
    return error || stream->capture || !pageable(to) ? error : ended(stub_await_stream(stream));
}

/* Where kernels compute nothing, there is nothing to copy: the devices' work takes the host no time then. */
static cudaError_t copy_on_devices(void *to, const void *from, size_t bytes, struct stream *stream)
{
    return give(stream, (struct task){.kind = COPY, .to = to, .from = from, .bytes = computes ? bytes : 0, .takes_ns = stub_copy_ns(bytes)});
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    COUNTED;
    return kind == cudaMemcpyDeviceToDevice ? copy_on_devices(to, from, bytes, own(stream)) : copy(to, from, bytes, own(stream));
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream)
{
    COUNTED;
    return copy_on_devices(to, from, bytes, own(stream));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    COUNTED;
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, own(stream));
    return error;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    COUNTED;
    UNSAFE;
    cudaError_t error = copy(to, from, bytes, own(NULL));
    return error ? error : ended(stub_await_stream(own(NULL)));
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    COUNTED;
    return give(own(stream), (struct task){.kind = FILL, .to = to, .value = value, .bytes = bytes, .takes_ns = stub_kernel_ns()});
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    COUNTED;
    return cudaMemsetAsync(to, value, bytes, NULL);
}

/* Streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    COUNTED;
    own(NULL);
    *stream = (cudaStream_t)stub_new_stream(stub_current);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }

static cudaError_t capturing(struct stream *stream)
{
    if (!stream->capture) return cudaSuccess;
    stream->capture->invalid = 1;
    return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    COUNTED;
    struct stream *s = own(stream);
    if (capturing(s)) return stub_last;
    UNSAFE;
    return ended(stub_await_stream(s));
}

static cudaError_t answered(int reached)
{
    if (!reached) stub_ask();
    return fail(reached ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    COUNTED;
    struct stream *s = own(stream);
    if (capturing(s)) return stub_last;
    UNSAFE;
    struct mark end = {.stream = s, .at_ns = s->ends_ns, .done = !s->waiting.first && !s->busy};
    return answered(stub_reached(&end));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    COUNTED;
    struct event *made = calloc(1, sizeof *made);
    made->device = stub_current;
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event); /* its marks stay: streams may wait for them yet */
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    COUNTED;
    struct event *e = (struct event *)event;
    struct stream *s = own(stream);
    if (e->device != s->device) return fail(cudaErrorInvalidResourceHandle);
    struct mark *mark = calloc(1, sizeof *mark);
    mark->stream = s;
    e->mark = mark;
    if (!s->capture || flags & cudaEventRecordExternal) return give(s, (struct task){.kind = REACH, .mark = mark});
    mark->capture = s->capture;
    mark->version = s->version;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    COUNTED;
    struct mark *mark = ((struct event *)event)->mark;
    struct stream *s = own(stream);
    if (!mark) return cudaSuccess;
    if (mark->capture) {
        if (!s->capture) {
            s->capture = mark->capture;
            s->joined = 1; /* it has no work of its own yet */
        } else if (s->capture != mark->capture) {
            s->capture->invalid = 1;
            return fail(cudaErrorStreamCaptureMerge);
        }
        if (mark->stream != s && mark->version == mark->stream->version) mark->stream->joined = 1;
        return cudaSuccess;
    }
    if (s->capture && !(flags & cudaEventWaitExternal)) {
        s->capture->invalid = 1;
        return fail(cudaErrorStreamCaptureIsolation);
    }
    return give(s, (struct task){.kind = AWAIT, .mark = mark});
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    COUNTED;
    struct mark *mark = ((struct event *)event)->mark;
    if (mark && mark->capture) return fail(cudaErrorCapturedEvent);
    UNSAFE;
    return answered(!mark || stub_reached(mark));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    COUNTED;
    struct mark *mark = ((struct event *)event)->mark;
    if (mark && mark->capture) return fail(cudaErrorCapturedEvent);
    UNSAFE;
    return mark ? ended(stub_await_mark(mark)) : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    struct mark *from = ((struct event *)start)->mark, *to = ((struct event *)end)->mark;
    if (!from || !to || from->capture || to->capture) return fail(cudaErrorInvalidResourceHandle);
    if (!stub_reached(from) || !stub_reached(to)) return fail(cudaErrorNotReady);
    *ms = (float)((double)(to->at_ns - from->at_ns) / 1e6);
    return cudaSuccess;
}

/* Kernels: their names by the host's functions, as they are registered */

static struct { const void *function; const char *name; } *kernels;
static size_t kernels_known;
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit, void *thread_id,
                            void *block_id, void *block_size, void *grid_size, int *warp_size)
{
    pthread_mutex_lock(&kernels_lock);
    if (!(kernels_known & (kernels_known - 1))) kernels = realloc(kernels, (kernels_known ? 2 * kernels_known : 1) * sizeof *kernels);
    kernels[kernels_known].function = function;
    kernels[kernels_known++].name = name;
    pthread_mutex_unlock(&kernels_lock);
}

static const char *name_of(const void *function)
{
    for (size_t i = 0; i < kernels_known; i++)
        if (kernels[i].function == function) return kernels[i].name;
    return "a kernel";
}

static cudaError_t launched(const char *name, cudaStream_t stream)
{
    struct stream *s = own(stream);
    if (s->device != stub_current) return fail(cudaErrorInvalidResourceHandle);
    if (computes && !strstr(name, "spin_kernel")) { /* which computes nothing: torch.cuda._sleep */
        fprintf(stderr, "cuda stub: nobody computes %s\n", name);
        return fail(cudaErrorInvalidDeviceFunction);
    }
    return give(s, (struct task){.kind = CALL, .takes_ns = stub_kernel_ns()});
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    COUNTED;
    return launched(computes ? name_of(function) : "", stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument)
{
    COUNTED;
    return give(own(stream), (struct task){.kind = TELL, .call = (int (*)(void *))function, .argument = argument});
}

/* A kernel that computes: `call`, in the stream's turn; it returns 0, or the error is that of who waits. */
int cuda_stub_launch(void *stream, int device, int (*call)(void *), void *argument)
{
    COUNTED;
    struct stream *s = stub_stream(stream, device);
    if (s->device != device) return fail(cudaErrorInvalidResourceHandle);
    return give(s, (struct task){.kind = CALL, .call = call, .argument = argument, .takes_ns = stub_kernel_ns()});
}

/* See nccl.c. */
int cuda_stub_transfer(void *stream, int (*ready)(void *), int (*call)(void *), void *argument)
{
    COUNTED;
    struct stream *s = own(stream);
    if (s->capture) return fail(cudaErrorStreamCaptureUnsupported);
    return give(s, (struct task){.kind = CALL, .ready = ready, .call = call, .argument = argument, .from = argument, .owned = 1});
}

/* A kernel of a library. */
int cuda_stub_library_launch(const char *name, void *stream) { return launched(name, stream) != cudaSuccess; }

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

cudaError_t __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream)
{
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return cudaSuccess;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function)
{
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                   unsigned int flags)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

cudaError_t cudaGetSymbolAddress(void **start, const void *symbol)
{
    static char variables[1 << 20];
    *start = variables;
    return cudaSuccess;
}

/* The driver's functions are those of the pretended driver, where it has them. */
static int unsupported(void) { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, name) : NULL;
    if (!*function) *function = (void *)unsupported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
