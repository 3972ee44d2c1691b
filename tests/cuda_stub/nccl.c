/* NCCL between processes of one machine, as far as sends and receives go. Each waits in its stream's turn until the other end has come to its
own: a rendezvous, the most that NCCL asks of a program. Numbers go through memory that the processes share, and that has no name. */
#define _GNU_SOURCE
#include "device.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_RANKS 16
#define MOST_BYTES ((size_t)256 << 20) /* of one transfer */

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
struct id { char path[128]; };
struct pair { atomic_long posted, filled; atomic_size_t bytes; }; /* transfers that the receiver has come to, and that the sender has done */
struct shared { atomic_int joined; struct pair pairs[MOST_RANKS][MOST_RANKS]; };
struct comm { int rank, size; atomic_int aborted; struct shared *shared; long begun[2][MOST_RANKS]; };
struct transfer { struct comm *comm; struct pair *pair; char *place; void *memory; size_t bytes; long number; int sends; };

static const size_t HEAD_BYTES = (sizeof(struct shared) + 4095) / 4096 * 4096;

int ncclGetUniqueId(struct id *id)
{
    int file = memfd_create("cuda stub", 0);
    if (file < 0) return SYSTEM_ERROR;
    snprintf(id->path, sizeof id->path, "/proc/%d/fd/%d", (int)getpid(), file);
    return SUCCESS;
}

int ncclCommInitRankConfig(struct comm **made, int size, struct id id, int rank, void *config)
{
    size_t bytes = HEAD_BYTES + (size_t)size * size * MOST_BYTES;
    if (size > MOST_RANKS) return INVALID_ARGUMENT;
    int file = open(id.path, O_RDWR);
    if (file < 0 || ftruncate(file, bytes)) return SYSTEM_ERROR;
    struct shared *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (shared == MAP_FAILED) return SYSTEM_ERROR;
    *made = calloc(1, sizeof **made);
    **made = (struct comm){.rank = rank, .size = size, .shared = shared};
    for (shared->joined++; shared->joined < size;) usleep(1000);
    stub_communicate();
    return SUCCESS;
}

int ncclCommInitRank(struct comm **made, int size, struct id id, int rank) { return ncclCommInitRankConfig(made, size, id, rank, NULL); }
int ncclCommCount(struct comm *comm, int *size) { *size = comm->size; return SUCCESS; }
int ncclCommUserRank(struct comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommGetAsyncError(struct comm *comm, int *error) { *error = SUCCESS; return SUCCESS; }
int ncclCommFinalize(struct comm *comm) { return SUCCESS; }
int ncclCommAbort(struct comm *comm) { comm->aborted = 1; return SUCCESS; }

static int met(void *argument)
{
    struct transfer *t = argument;
    if (t->comm->aborted) return 1;
    if (t->sends) return t->pair->posted > t->number;
    t->pair->posted = t->number + 1;
    return t->pair->filled > t->number;
}

static int carried(void *argument)
{
    struct transfer *t = argument;
    if (t->comm->aborted) return 0;
    if (t->sends) {
        memcpy(t->place, t->memory, t->bytes);
        t->pair->bytes = t->bytes;
        t->pair->filled = t->number + 1;
    } else if (t->pair->bytes == t->bytes) {
        memcpy(t->memory, t->place, t->bytes);
    } else {
        fprintf(stderr, "cuda stub: %zu bytes were sent, and %zu are to be received\n", (size_t)t->pair->bytes, t->bytes);
        return 1;
    }
    return 0;
}

static int begin(struct comm *comm, int sends, int peer, void *memory, size_t count, int type, void *stream)
{
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclDataType_t's */
    size_t bytes = count * widths[type];
    int from = sends ? comm->rank : peer, to = sends ? peer : comm->rank;
    if (bytes > MOST_BYTES || peer >= comm->size) return INVALID_ARGUMENT;
    struct transfer *t = malloc(sizeof *t);
    *t = (struct transfer){.comm = comm, .pair = &comm->shared->pairs[from][to], .memory = memory, .bytes = bytes, .sends = sends,
                           .place = (char *)comm->shared + HEAD_BYTES + MOST_BYTES * (from * comm->size + to),
                           .number = comm->begun[sends][peer]++};
    return cuda_stub_transfer(stream, met, carried, t) ? INVALID_ARGUMENT : SUCCESS;
}

int ncclSend(const void *memory, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    COUNTED;
    return begin(comm, 1, peer, (void *)memory, count, type, stream);
}

int ncclRecv(void *memory, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    COUNTED;
    return begin(comm, 0, peer, memory, count, type, stream);
}
