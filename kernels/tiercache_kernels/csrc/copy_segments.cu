// The copy kernel: gather (device to host), scatter (host to device) and fork (device to device) of a table of segments.
#include "copy_segments.cuh"

// Any grid is correct: blocks take chunks in turn. The table is best in device memory, as it is searched again for every chunk.
extern "C" __global__ void __launch_bounds__(tiercache::THREADS)
    tiercache_copy_segments(const tiercache::Row* __restrict__ table, unsigned long long rows) {
    tiercache::copy_segments(table, rows, blockIdx.x, gridDim.x, threadIdx.x);
}
