/* What the files of the pretended runtime share. Streams and events are the structs of device.h behind CUDA's own types. */
#ifndef CUDA_STUB_CUDART_H
#define CUDA_STUB_CUDART_H
#define _GNU_SOURCE
#include "device.h"
#include <cuda_runtime_api.h>

extern __thread int stub_current;
extern __thread cudaError_t stub_last;

cudaError_t fail(cudaError_t error); /* notes it for cudaGetLastError */
cudaError_t ended(int failed);
struct stream *own(cudaStream_t stream);
cudaError_t unsafe_call(void);
cudaError_t give(struct stream *stream, struct task task);
#define UNSAFE do { if (unsafe_call()) return stub_last; } while (0)
#endif
