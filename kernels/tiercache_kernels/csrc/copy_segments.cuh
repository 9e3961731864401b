// What one thread does of copying a table of segments: see tiercache_kernels/table.py for the table.
//
// Source and destination may each be device memory or pinned, mapped host memory: one body gathers, scatters and forks. It reads and writes
// nothing but the segments. It knows of the launch only what it is told, so that a host compiler can run all threads of a grid in a loop.
// It includes nothing, for NVRTC has no headers.
#pragma once

namespace tiercache {

using Size = unsigned long long;  // addresses, and offsets in segments that may exceed 4 GiB

constexpr unsigned CHUNK_BYTES = 32768;
constexpr unsigned THREADS = 512;
// Vectors that a thread loads before it stores the first: a load from host memory takes 1 to 2 us, so what counts is how much is under way
// meanwhile. 4 vectors of 16 bytes x 512 threads are one chunk.
constexpr unsigned UNROLL = 4;

struct Row {
    Size source;
    Size destination;
    Size length;
    Size first;  // chunk
};

// The segment in [low, high) that has this chunk. The caller guarantees that there is one.
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

// Copies `count` vectors, as thread `thread` of a block: neighbours take neighbouring vectors. Both addresses are aligned to the vector.
template <typename Vector>
__device__ inline void copy_vectors(Size source, Size destination, unsigned count, unsigned thread) {
    const Vector* from = reinterpret_cast<const Vector*>(source);
    Vector* to = reinterpret_cast<Vector*>(destination);
#pragma unroll 1
    for (unsigned start = thread; start < count; start += UNROLL * THREADS) {
        // The zeros are never stored, and cost nothing: without them the old contents of `held` count as alive, and a thread needs 62
        // registers instead of 32, taken from the kernels that compute meanwhile.
        Vector held[UNROLL] = {};
        // All loads, then all stores: the compiler keeps this order, for a store might change what a later load reads. Each byte is used
        // once, so both are marked as the first to leave the caches (`cs`), where the model's own data shall stay.
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

// Copies `length` bytes whose addresses differ by a multiple of the vector's size: as vectors, but for the edges before and after them.
template <typename Vector>
__device__ inline void copy_aligned(Size source, Size destination, unsigned length, unsigned thread) {
    constexpr unsigned width = sizeof(Vector);
    const unsigned to_boundary = static_cast<unsigned>(-destination % width);
    const unsigned head = min(to_boundary, length);
    const unsigned count = (length - head) / width;
    const unsigned tail = (length - head) % width;
    copy_vectors<Vector>(source + head, destination + head, count, thread);
    // Less than 2 * width bytes in both edges together: one for each of the first threads, so that neither edge waits for the other.
    if (thread < head + tail) {
        const unsigned at = thread < head ? thread : thread + count * width;
        __stcs(reinterpret_cast<unsigned char*>(destination + at), __ldcs(reinterpret_cast<const unsigned char*>(source + at)));
    }
}

// Copies `length` bytes, at most a chunk, in the widest vectors that both addresses can be aligned to at once.
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
__device__ inline void copy_segments(const Row* __restrict__ table, Size rows, unsigned block, unsigned blocks, unsigned thread) {
    const Size origin = table[0].first;  // not 0 if this is the middle of a longer table
    const Size end = table[rows].first;
    Size segment = 0;
    for (Size chunk = origin + block; chunk < end; chunk += blocks) {
        // Every segment has a chunk, so `blocks` chunks further on is at most `blocks` segments further on: no need to search them all.
        segment = find_segment(table, segment, min(segment + blocks + 1, rows), chunk);
        const Row row = table[segment];
        const Size offset = (chunk - row.first) * CHUNK_BYTES;
        const unsigned length = static_cast<unsigned>(min(row.length - offset, Size{CHUNK_BYTES}));
        copy_chunk(row.source + offset, row.destination + offset, length, thread);
    }
}

}  // namespace tiercache
