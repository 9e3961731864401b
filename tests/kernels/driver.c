/* A CUDA driver for tests: what tiercache_kernels calls of it itself, with memcpy in its place.
 *
 * The header's internal switch declares cuMemcpyBatchAsync with the ABI of CUDA 12.8, under which the driver exports the plain name. So the
 * compiler checks the prototype below against NVIDIA's, and the fields that it reads are those of NVIDIA's struct. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdint.h>
#include <string.h>

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

int stand_in_calls(void) { return called; }
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
    last_stream = hStream;
    complaint = wrong(attrs, attrsIdxs, numAttrs, count);
    *failIdx = SIZE_MAX;
    if (*complaint) return CUDA_ERROR_INVALID_VALUE;
    if (fail_with != CUDA_SUCCESS && fail_at == SIZE_MAX) return fail_with;
    for (size_t i = 0; i < count; ++i) {
        if (i == fail_at) {
            *failIdx = i;
            return fail_with;
        }
        memcpy((void *)dsts[i], (const void *)srcs[i], sizes[i]);
    }
    return CUDA_SUCCESS;
}
#endif

static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

int stand_in_relaxed(void) { return capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED; }

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    const CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
