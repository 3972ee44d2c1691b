/* The CUDA driver, as far as torch and cuda-bindings call it. */
#include "device.h"
#include <cuda.h>

int cuda_stub_opened(int device);

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = stub_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { static int some; *context = (CUcontext)&some; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    *flags = 0;
    *active = cuda_stub_opened(device);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "error of the stub"; return CUDA_SUCCESS; }
