/* A CUDA driver for tests: what tiercache_kernels calls of it itself, with memcpy in its place, and two devices whose contexts it counts.
 *
 * The header's internal switch declares cuMemcpyBatchAsync with the ABI of CUDA 12.8, under which the driver exports the plain name. So the
 * compiler checks the prototype below against NVIDIA's, and the fields that it reads are those of NVIDIA's struct. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdint.h>
#include <string.h>

#define POISON 0x7fffffff /* bytes of a copy that is refused */

#ifndef VERSION
#define VERSION 13000
#endif

static size_t fail_at = SIZE_MAX; /* no copy */
static CUresult fail_with = CUDA_SUCCESS;
static int called;
static CUstream last_stream;
static const char *complaint = "";

void stand_in_fail(CUresult code, size_t index) {
    fail_with = code;
    fail_at = index;
}

static size_t largest;

int stand_in_calls(void) { return called; }
int stand_in_poison(void) { return POISON; }
size_t stand_in_largest(void) { return largest; }
void *stand_in_stream(void) { return (void *)last_stream; }
const char *stand_in_complaint(void) { return complaint; }

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    *version = VERSION;
    return VERSION ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
        case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return CUDA_SUCCESS;
        case CUDA_ERROR_ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return CUDA_SUCCESS;
        case CUDA_ERROR_SYSTEM_NOT_READY: *name = "CUDA_ERROR_SYSTEM_NOT_READY"; return CUDA_SUCCESS;
        default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

#ifndef WITHOUT_BATCH
static const char *wrong(const CUmemcpyAttributes *attributes, const size_t *first, size_t number, size_t count) {
    if (number != 1 || number > count) return "number of attributes";
    if (first[0] != 0) return "first copy of the attributes";
    if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) return "srcAccessOrder";
    if (attributes->srcLocHint.type != CU_MEM_LOCATION_TYPE_INVALID || attributes->srcLocHint.id != 0) return "srcLocHint";
    if (attributes->dstLocHint.type != CU_MEM_LOCATION_TYPE_INVALID || attributes->dstLocHint.id != 0) return "dstLocHint";
    if (attributes->flags != CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) return "flags";
    return "";
}

CUresult CUDAAPI cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                                    size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream) {
    ++called;
    if (count > largest) largest = count;
    last_stream = hStream;
    complaint = wrong(attrs, attrsIdxs, numAttrs, count);
    *failIdx = SIZE_MAX;
    if (*complaint) return CUDA_ERROR_INVALID_VALUE;
    if (fail_with != CUDA_SUCCESS && fail_at == SIZE_MAX) return fail_with;
    for (size_t i = 0; i < count; ++i) {
        if (i == fail_at || sizes[i] == POISON) {
            *failIdx = i;
            return i == fail_at ? fail_with : CUDA_ERROR_INVALID_VALUE;
        }
        memcpy((void *)dsts[i], (const void *)srcs[i], sizes[i]);
    }
    return CUDA_SUCCESS;
}
#endif

#define DEVICES 2
#define DEEPEST 16
#ifndef SAME_ADDRESS
#define SAME_ADDRESS 1 /* does a device know registered memory by the host's address? */
#endif

static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static _Thread_local int stack[DEEPEST]; /* devices whose contexts the thread has made current */
static _Thread_local int depth;
static _Thread_local int chosen; /* the device of a thread that has no context, by the runtime */
static _Atomic int contexts[DEVICES];
static _Atomic int strict_calls; /* of threads that would spoil another one's capture */

static void heard(void) {
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) ++strict_calls;
}

int stand_in_relaxed(void) { return capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED; }
int stand_in_strict_calls(void) { return strict_calls; }
int stand_in_contexts(int device) { return contexts[device]; }
int stand_in_depth(void) { return depth; }

/* As any call of CUDA's runtime does first: the device whose context the thread has; where it has none, it is made. */
int stand_in_runtime_call(void) {
    heard();
    if (depth) return stack[depth - 1];
    ++contexts[chosen];
    stack[depth++] = chosen;
    return chosen;
}

int stand_in_get_device(void) { return depth ? stack[depth - 1] : chosen; }

/* As cudaSetDevice since CUDA 12. */
void stand_in_set_device(int device) {
    heard();
    chosen = device;
    ++contexts[device];
    if (depth)
        stack[depth - 1] = device;
    else
        stack[depth++] = device;
}

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    if (attribute != CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) return CUDA_ERROR_INVALID_VALUE;
    *value = SAME_ADDRESS;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    heard();
    ++contexts[device];
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context) {
    heard();
    if (depth == DEEPEST || !context) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = (int)(uintptr_t)context - 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *context) {
    heard();
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *context = (CUcontext)(uintptr_t)(stack[--depth] + 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    const CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
