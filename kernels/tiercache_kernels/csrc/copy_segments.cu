// The copy kernel. It copies the segments of a table: from device to host (gather), or from host to device (scatter).
#include "copy_segments.cuh"

// Any grid size is correct: block b of n copies the chunks b, b + n, b + 2n, ...
// The table should be in device memory, because it is searched again for every chunk.
extern "C" __global__ void __launch_bounds__(tiercache::THREADS)
    tiercache_copy_segments(const tiercache::Row* __restrict__ table, unsigned long long rows) {
    tiercache::copy_segments(table, rows, blockIdx.x, gridDim.x, threadIdx.x);
}
