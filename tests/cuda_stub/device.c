/* Pretended CUDA devices in the memory of the host.

Tasks of a stream (copies, fills, calls, events) are done in their order. By default each is done as soon as it is given. With
CUDA_STUB_ORDER=SEED nothing is done before somebody waits for something (asking, as cudaEventQuery does, is not waiting), and then the
streams take turns by chance: what the host forgot to order happens in another order for another seed. Memory is full of NaN then.

A transfer to another process waits for its other end, and so does all that comes after it in its stream; the host does not. Where a process
has such transfers, asking has a thread go on with what can be done.

The clock is apart from that: a task takes CUDA_STUB_KERNEL_US (0), or a copy CUDA_STUB_COPY_GBPS (0: no time), from when it is given or its
stream is free; who waits, waits until then. */
#define _GNU_SOURCE
#include "device.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static double setting(const char *name, double otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtod(text, NULL) : otherwise;
}

/* Counts */

static struct count *counts;

void cuda_stub_note(struct count *count)
{
    if (!atomic_exchange(&count->listed, 1)) {
        pthread_mutex_lock(&lock);
        count->next = counts;
        counts = count;
        pthread_mutex_unlock(&lock);
    }
    atomic_fetch_add_explicit(&count->calls, 1, memory_order_relaxed);
}

/* Tells `tell` the calls of every function that was called. */
void cuda_stub_counts(void (*tell)(const char *, long))
{
    for (struct count *c = counts; c; c = c->next) tell(c->name, atomic_load(&c->calls));
}

/* Memory */

static struct block *blocks;
static size_t used_bytes[MOST_DEVICES];
static int communicates;

int stub_devices(void)
{
    static int count;
    if (!count) count = (int)setting("CUDA_STUB_DEVICES", 4);
    return count < MOST_DEVICES ? count : MOST_DEVICES;
}

size_t stub_total_bytes(void)
{
    static size_t bytes;
    if (!bytes) bytes = (size_t)setting("CUDA_STUB_BYTES", 80.0 * (1 << 30));
    return bytes;
}

size_t stub_free_bytes(int device)
{
    return stub_total_bytes() - used_bytes[device];
}

void *stub_allocate(size_t bytes, int device)
{
    const size_t granule = device < 0 ? 4096 : 2 << 20;
    bytes = (bytes + granule - 1) / granule * granule;
    struct block *block = NULL;
    pthread_mutex_lock(&lock);
    if (device < 0 || used_bytes[device] + bytes <= stub_total_bytes()) {
        void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start != MAP_FAILED) {
            block = malloc(sizeof *block);
            *block = (struct block){start, bytes, device, blocks};
            blocks = block;
            if (device >= 0) used_bytes[device] += bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    if (block && stub_deferred()) memset(block->start, 0xff, bytes);
    return block ? block->start : NULL;
}

int stub_free(void *start)
{
    pthread_mutex_lock(&lock);
    struct block **at = &blocks;
    while (*at && (*at)->start != start) at = &(*at)->next;
    struct block *found = *at;
    if (found) {
        *at = found->next;
        if (found->device >= 0) used_bytes[found->device] -= found->bytes;
        if (!stub_deferred() && !communicates) munmap(found->start, found->bytes); /* else what was given earlier may use it yet */
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

int stub_block(const void *start, struct block *into)
{
    const char *address = start;
    pthread_mutex_lock(&lock);
    struct block *b = blocks;
    while (b && !(address >= b->start && address < b->start + b->bytes)) b = b->next;
    if (b) *into = *b;
    pthread_mutex_unlock(&lock);
    return b != NULL;
}

/* Streams */

static struct stream defaults[MOST_DEVICES];
static struct stream *streams;
static int failed, deferred = -1;
static uint64_t chance;

int stub_deferred(void)
{
    if (deferred < 0) {
        const char *seed = getenv("CUDA_STUB_ORDER");
        cuda_stub_order(seed ? strtol(seed, NULL, 10) : -1);
    }
    return deferred;
}

/* The order from now on: as CUDA_STUB_ORDER says; -1: each task as soon as it is given. Nothing may be waiting. */
void cuda_stub_order(long seed)
{
    chance = (uint64_t)seed * 2862933555777941757u + 3037000493u;
    deferred = seed >= 0;
}

static struct stream *listed(struct stream *stream, int device)
{
    pthread_mutex_lock(&lock);
    if (!stream->listed) {
        stream->device = device;
        stream->next = streams;
        streams = stream;
        stream->listed = 1;
    }
    pthread_mutex_unlock(&lock);
    return stream;
}

struct stream *stub_stream(void *handle, int device)
{
    return (uintptr_t)handle > 2 ? handle : listed(&defaults[device], device);
}

struct stream *stub_new_stream(int device)
{
    return listed(calloc(1, sizeof(struct stream)), device);
}

struct stream *stub_each_stream(struct stream *previous)
{
    return previous ? previous->next : streams;
}

int64_t stub_kernel_ns(void)
{
    static int64_t ns = -1;
    if (ns < 0) ns = (int64_t)(1000 * setting("CUDA_STUB_KERNEL_US", 0));
    return ns;
}

int64_t stub_copy_ns(size_t bytes)
{
    static double per_ns = -1;
    if (per_ns < 0) per_ns = setting("CUDA_STUB_COPY_GBPS", 0);
    return stub_kernel_ns() + (per_ns > 0 ? (int64_t)((double)bytes / per_ns) : 0);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void wait_until(int64_t ns)
{
    for (int64_t left; (left = ns - now_ns()) > 0;) {
        struct timespec t = {left / 1000000000, left % 1000000000};
        if (left > 100000) nanosleep(&t, NULL);
    }
}

static int done(struct task *task)
{
    int error = 0;
    if (task->kind == COPY) memmove(task->to, task->from, task->bytes);
    else if (task->kind == FILL) memset(task->to, task->value, task->bytes);
    else if (task->kind == CALL && task->call) error = task->call(task->argument);
    else if (task->kind == TELL) ((void (*)(void *))task->call)(task->argument);
    if (task->owned) free((void *)task->from);
    return error;
}

static int idle(struct stream *s)
{
    return !s->waiting.first && !s->busy;
}

void stub_append(struct tasks *tasks, struct task task)
{
    struct task *kept = malloc(sizeof *kept);
    *kept = task;
    kept->next = NULL;
    if (tasks->last) tasks->last->next = kept;
    else tasks->first = kept;
    tasks->last = kept;
    tasks->count++;
}

void stub_drop(struct tasks *tasks)
{
    for (struct task *t = tasks->first, *next; t; t = next) {
        next = t->next;
        if (t->owned) free((void *)t->from);
        free(t);
    }
    *tasks = (struct tasks){0};
}

/* The lock is held. */
static int possible(struct task *t)
{
    return t->kind == AWAIT ? t->mark->done : !t->ready || t->ready(t->argument);
}

int stub_later(struct stream *stream)
{
    pthread_mutex_lock(&lock);
    int later = stub_deferred() || !idle(stream);
    pthread_mutex_unlock(&lock);
    return later;
}

void stub_submit(struct stream *stream, struct task task)
{
    int64_t now = now_ns();
    pthread_mutex_lock(&lock);
    int64_t start = stream->ends_ns > now ? stream->ends_ns : now;
    if (task.kind == REACH) task.mark->at_ns = start;
    if (task.kind == AWAIT && task.mark->at_ns > start) start = task.mark->at_ns;
    if (task.takes_ns || task.kind == AWAIT) stream->ends_ns = start + task.takes_ns;
    int later = stub_deferred() || !idle(stream) || !possible(&task);
    if (later) stub_append(&stream->waiting, task);
    else if (task.kind == REACH) task.mark->done = 1;
    pthread_mutex_unlock(&lock);
    if (!later && done(&task)) failed = 1;
}

static int runnable(struct stream *s)
{
    struct task *t = s->waiting.first;
    return t && !s->busy && possible(t);
}

/* Does one task of a stream drawn by chance; the lock is held, but not while a task runs. 0: none can be done now. */
static int step(void)
{
    int choices = 0;
    for (struct stream *s = streams; s; s = s->next) choices += runnable(s);
    if (!choices) return 0;
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    int chosen = (int)((chance >> 33) % (uint64_t)choices);
    struct stream *s = streams;
    while (!runnable(s) || chosen--) s = s->next;
    struct task *t = s->waiting.first;
    s->waiting.first = t->next;
    if (!t->next) s->waiting.last = NULL;
    s->busy = 1;
    pthread_mutex_unlock(&lock);
    int error = done(t);
    pthread_mutex_lock(&lock);
    if (error) failed = 1;
    if (t->kind == REACH) {
        if (communicates && now_ns() > t->mark->at_ns) t->mark->at_ns = now_ns();
        t->mark->done = 1;
    }
    s->busy = 0;
    free(t);
    pthread_cond_broadcast(&changed);
    return 1;
}

static int any_busy(void)
{
    for (struct stream *s = streams; s; s = s->next)
        if (s->busy) return 1;
    return 0;
}

static int any_transfer(void)
{
    for (struct stream *s = streams; s; s = s->next)
        if (s->waiting.first && s->waiting.first->ready) return 1;
    return 0;
}

static void pause_unlocked(void)
{
    struct timespec t = {0, 20000};
    pthread_mutex_unlock(&lock);
    nanosleep(&t, NULL);
    pthread_mutex_lock(&lock);
}

static int all_idle(int device)
{
    for (struct stream *s = streams; s; s = s->next)
        if (s->device == device && !idle(s)) return 0;
    return 1;
}

/* Runs tasks until the mark is reached, the stream is empty, or all of the device's are: the one that is given. */
static void drain(struct mark *mark, struct stream *stream, int device)
{
    pthread_mutex_lock(&lock);
    while (mark ? !mark->done : stream ? !idle(stream) : !all_idle(device)) {
        if (step()) continue;
        if (any_transfer()) {
            pause_unlocked();
            continue;
        }
        if (!any_busy()) {
            fprintf(stderr, "cuda stub: streams wait for each other for ever\n");
            abort();
        }
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
}

static int error_so_far(void)
{
    int error = failed;
    failed = 0;
    return error;
}

int stub_reached(struct mark *mark)
{
    return mark->done && now_ns() >= mark->at_ns;
}

int stub_await_mark(struct mark *mark)
{
    drain(mark, NULL, 0);
    wait_until(mark->at_ns);
    return error_so_far();
}

int stub_await_stream(struct stream *stream)
{
    drain(NULL, stream, 0);
    wait_until(stream->ends_ns);
    return error_so_far();
}

int stub_await_device(int device)
{
    drain(NULL, NULL, device);
    for (struct stream *s = streams; s; s = s->next)
        if (s->device == device) wait_until(s->ends_ns);
    return error_so_far();
}

/* Transfers */

static pthread_cond_t asked = PTHREAD_COND_INITIALIZER;

static void *go_on(void *nothing)
{
    pthread_mutex_lock(&lock);
    for (;;)
        if (!step()) pthread_cond_wait(&asked, &lock);
}

/* From now on there are transfers. */
void stub_communicate(void)
{
    pthread_t thread;
    pthread_mutex_lock(&lock);
    int first = !communicates;
    communicates = 1;
    pthread_mutex_unlock(&lock);
    if (first) pthread_create(&thread, NULL, go_on, NULL);
}

/* Somebody has seen that something is not done yet. */
void stub_ask(void)
{
    if (communicates) pthread_cond_signal(&asked);
}
