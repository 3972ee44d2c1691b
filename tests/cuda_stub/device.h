/* The devices that are pretended: memory, streams of tasks, events, and a clock of their own. See device.c. */
#ifndef CUDA_STUB_DEVICE_H
#define CUDA_STUB_DEVICE_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 16

struct count { const char *name; atomic_long calls; atomic_int listed; struct count *next; };
void cuda_stub_note(struct count *count);
/* Counts the calls of the function that it stands in. */
#define COUNTED static struct count counted = {__func__, 0, 0, 0}; cuda_stub_note(&counted)

/* A point of a stream that an event stands for. `version`: the work its stream had been given when it was recorded in a capture. */
struct mark { struct stream *stream; long version; int64_t at_ns; int done; struct capture *capture; };

/* CALL: a kernel's work, which may fail, or a transfer, whose turn comes once it is `ready`; TELL: a function of the host */
enum kind { COPY, FILL, CALL, TELL, REACH, AWAIT };
struct task {
    enum kind kind;
    void *to; const void *from; size_t bytes; int value; int owned; /* owned: `from` is a copy, freed once used */
    int (*call)(void *); void *argument; int (*ready)(void *);
    struct mark *mark;
    int64_t takes_ns;
    struct task *next;
};
struct tasks { struct task *first, *last; long count; };

struct stream { int device, listed, busy; struct tasks waiting; int64_t ends_ns; struct capture *capture; long version; int joined; struct stream *next; };
struct event { int device; struct mark *mark; };
struct capture { unsigned long long id; int mode, invalid; uint64_t thread; struct stream *origin; struct tasks tasks; struct capture *next; };

struct block { char *start; size_t bytes; int device; struct block *next; }; /* device -1: page-locked memory of the host */

int stub_devices(void);
size_t stub_total_bytes(void);
size_t stub_free_bytes(int device);
void *stub_allocate(size_t bytes, int device); /* NULL: there is no more */
int stub_free(void *start); /* 0: it was not allocated */
int stub_block(const void *start, struct block *found); /* 0: ordinary memory of the host */

struct stream *stub_stream(void *handle, int device); /* NULL, and what stands for default streams: the device's default stream */
struct stream *stub_new_stream(int device);
int64_t stub_kernel_ns(void);
int64_t stub_copy_ns(size_t bytes);
int stub_deferred(void);
void cuda_stub_order(long seed);
void stub_submit(struct stream *stream, struct task task);
int stub_later(struct stream *stream); /* 1: what it is given now is done later */
void stub_communicate(void);
void stub_ask(void);
int stub_reached(struct mark *mark);
int stub_await_mark(struct mark *mark); /* these return the error of a task that failed since, else 0 */
int stub_await_stream(struct stream *stream);
int stub_await_device(int device);
void stub_append(struct tasks *tasks, struct task task);
void stub_drop(struct tasks *tasks);
struct stream *stub_each_stream(struct stream *previous);

int cuda_stub_launch(void *stream, int device, int (*call)(void *), void *argument); /* 0, or an error of the runtime */
int cuda_stub_library_launch(const char *name, void *stream);
int cuda_stub_transfer(void *stream, int (*ready)(void *), int (*call)(void *), void *argument); /* frees the argument once done */
#endif
