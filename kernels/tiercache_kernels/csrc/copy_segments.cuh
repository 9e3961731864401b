// What one thread does to copy a table of segments. tiercache_kernels/kernel.py describes the table.
//
// Source and destination may each be device memory, or pinned and mapped host memory. Only the destinations are
// written. The numbers of threads and blocks are arguments, not CUDA's built-in variables, so that the code also
// compiles for the host, where a loop runs all threads of a grid. Nothing is included, because NVRTC has no headers.
#pragma once

namespace tiercache {

using Size = unsigned long long;  // addresses, and offsets in segments that may exceed 4 GiB

constexpr unsigned CHUNK_BYTES = 32768;
constexpr unsigned THREADS = 512;
// Number of vectors that a thread loads before it stores the first. A load from host memory takes 1 to 2 us, so many
// loads must be in flight at a time. 4 vectors of 16 bytes x 512 threads are one chunk.
constexpr unsigned UNROLL = 4;

struct Row {
    Size source;
    Size destination;
    Size length;
    Size first;  // number of the segment's first chunk
};

// Returns the segment in [low, high) that has chunk number `chunk`. The caller guarantees that the range has it.
__device__ inline Size find_segment(const Row* __restrict__ table, Size low, Size high, Size chunk) {
    while (high - low > 1) {
        const Size middle = low + (high - low) / 2;
        if (table[middle].first <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Copies the share of thread `thread` of `count` vectors; neighbouring threads copy neighbouring vectors.
// Both addresses are aligned to the size of a vector.
template <typename Vector>
__device__ inline void copy_vectors(Size source, Size destination, unsigned count, unsigned thread) {
    const Vector* from = reinterpret_cast<const Vector*>(source);
    Vector* to = reinterpret_cast<Vector*>(destination);
#pragma unroll 1
    for (unsigned start = thread; start < count; start += UNROLL * THREADS) {
        // The zeros are never stored, and cost nothing. Without them, the compiler keeps the former contents of `held`,
        // and a thread needs 62 registers instead of 32. Kernels that compute at the same time would lack these.
        Vector held[UNROLL] = {};
        // All loads, then all stores: the compiler keeps this order, because a store might change the source of a
        // later load. Each byte is used once, so loads and stores are marked `cs`: their lines are the first to be
        // evicted from the caches, and the model's own data stays.
#pragma unroll
        for (unsigned i = 0; i < UNROLL; ++i) {
            const unsigned at = start + i * THREADS;
            if (at < count) held[i] = __ldcs(from + at);
        }
#pragma unroll
        for (unsigned i = 0; i < UNROLL; ++i) {
            const unsigned at = start + i * THREADS;
            if (at < count) __stcs(to + at, held[i]);
        }
    }
}

// Copies `length` bytes, where source and destination differ by a multiple of a vector's size:
//   destination    | head |  vector  |  vector  | ... | tail |      vectors are aligned; the edges are copied by byte
template <typename Vector>
__device__ inline void copy_aligned(Size source, Size destination, unsigned length, unsigned thread) {
    constexpr unsigned width = sizeof(Vector);
    const unsigned to_boundary = static_cast<unsigned>(-destination % width);
    const unsigned head = min(to_boundary, length);
    const unsigned count = (length - head) / width;
    const unsigned tail = (length - head) % width;
    copy_vectors<Vector>(source + head, destination + head, count, thread);
    // Both edges together have less than 2 * width bytes. Each of the first threads copies one, all at the same time.
    if (thread < head + tail) {
        const unsigned at = thread < head ? thread : thread + count * width;
        __stcs(reinterpret_cast<unsigned char*>(destination + at),
               __ldcs(reinterpret_cast<const unsigned char*>(source + at)));
    }
}

// Copies `length` bytes, at most a chunk, in the widest vectors to which both addresses can be aligned at once.
__device__ inline void copy_chunk(Size source, Size destination, unsigned length, unsigned thread) {
    const Size apart = source - destination;  // may wrap around; its low bits are right
    if (apart % 16 == 0) {
        copy_aligned<uint4>(source, destination, length, thread);
    } else if (apart % 8 == 0) {
        copy_aligned<uint2>(source, destination, length, thread);
    } else if (apart % 4 == 0) {
        copy_aligned<unsigned int>(source, destination, length, thread);
    } else if (apart % 2 == 0) {
        copy_aligned<unsigned short>(source, destination, length, thread);
    } else {
        copy_aligned<unsigned char>(source, destination, length, thread);
    }
}

// Copies the chunks `block`, `block + blocks`, ... of the table of `rows` segments, as thread `thread` of THREADS.
__device__ inline void copy_segments(
    const Row* __restrict__ table, Size rows, unsigned block, unsigned blocks, unsigned thread) {
    const Size origin = table[0].first;  // not 0 if this is the middle of a longer table
    const Size end = table[rows].first;
    Size segment = 0;
    for (Size chunk = origin + block; chunk < end; chunk += blocks) {
        // Every segment has at least one chunk, so the next chunk of this block is at most `blocks` segments further:
        // the search need not cover the whole table.
        segment = find_segment(table, segment, min(segment + blocks + 1, rows), chunk);
        const Row row = table[segment];
        const Size offset = (chunk - row.first) * CHUNK_BYTES;
        const unsigned length = static_cast<unsigned>(min(row.length - offset, Size{CHUNK_BYTES}));
        copy_chunk(row.source + offset, row.destination + offset, length, thread);
    }
}

}  // namespace tiercache
