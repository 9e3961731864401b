// The copy kernel's body for a host compiler: CUDA's words, and a loop over the blocks and threads instead of a grid.
#include <algorithm>

#define __device__

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static unsigned long long loaded, stored, stores;

template <typename T>
T __ldcs(const T* from) {
    loaded += sizeof(T);
    return *from;
}

template <typename T>
void __stcs(T* to, T value) {
    stored += sizeof(T);
    ++stores;
    *to = value;
}

using std::min;

#include "copy_segments.cuh"

extern "C" {

unsigned threads() { return tiercache::THREADS; }
unsigned long long chunk_bytes() { return tiercache::CHUNK_BYTES; }
unsigned long long bytes_loaded() { return loaded; }
unsigned long long bytes_stored() { return stored; }
unsigned long long stores_made() { return stores; }

void run_block(const tiercache::Row* table, unsigned long long rows, unsigned block, unsigned blocks) {
    for (unsigned thread = 0; thread < tiercache::THREADS; ++thread) {
        tiercache::copy_segments(table, rows, block, blocks, thread);
    }
}

// Backwards, so that a block which relies on those before it is found out.
void run_grid(const tiercache::Row* table, unsigned long long rows, unsigned blocks) {
    loaded = stored = stores = 0;
    for (unsigned block = blocks; block-- > 0;) run_block(table, rows, block, blocks);
}
}
