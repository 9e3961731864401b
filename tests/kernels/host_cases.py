"""The copy kernel's body on the host, against its twin, in a process that may crash: LIBRARY CASE."""

from __future__ import annotations

import ctypes
import mmap
import sys
from itertools import product

import numpy as np
from tiercache_kernels.kernel import CHUNK_BYTES, COLUMNS, ROW_BYTES, THREADS, fill_table
from tiercache_kernels.reference import copy_table

PAGE = mmap.PAGESIZE
MAP_NORESERVE = 0x4000
PROT_NONE = 0
EDGES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33]


class Grid:
    """The library's functions."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name in ("chunk_bytes", "bytes_loaded", "bytes_stored", "stores_made"):
            getattr(self._library, name).restype = ctypes.c_ulonglong
        self._library.run_grid.argtypes = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint)
        self._library.run_block.argtypes = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_uint, ctypes.c_uint)
        assert self._library.chunk_bytes() == CHUNK_BYTES
        assert self._library.threads() == THREADS

    def run(self, table: np.ndarray, blocks: int) -> int:
        """Copy all of a table; how many stores that took."""
        self._library.run_grid(table.ctypes.data, len(table) - 1, blocks)
        nbytes = int(table[:-1, 2].sum())
        assert self._library.bytes_loaded() == self._library.bytes_stored() == nbytes, "each byte once"
        return int(self._library.stores_made())

    def run_block(self, table: np.ndarray, block: int, blocks: int) -> None:
        self._library.run_block(table.ctypes.data, len(table) - 1, block, blocks)


class Guarded:
    """Memory between two pages that nobody may touch."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.nbytes + 2 * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE
        self.view = np.frombuffer(self._map, np.uint8, self.nbytes, PAGE)
        libc = ctypes.CDLL(None, use_errno=True)
        for guard in (self.address - PAGE, self.address + self.nbytes):
            assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), PROT_NONE) == 0


def table_of(sources: np.ndarray, destinations: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    table = np.empty((len(lengths) + 1, COLUMNS), np.uint64)
    fill_table(table, sources.astype(np.uint64), destinations.astype(np.uint64), lengths.astype(np.int64))
    return table


def scattered(grid: Grid) -> None:
    """Any alignments, lengths, orders, grids and cuts of the table."""
    for seed in range(120):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 12))
        lengths = np.where(
            rng.random(n) < 0.5,
            rng.integers(1, 80, n),
            rng.integers(1, 4, n) * CHUNK_BYTES + rng.integers(-40, 40, n),
        ).astype(np.int64)
        # What the two addresses have in common decides the width of the vectors, so all widths are drawn
        # equally often.
        width = 1 << rng.integers(0, 5, n)
        skew = rng.integers(0, 16, n) * width
        order = rng.permutation(n)
        slot = 4 * CHUNK_BYTES
        offset = rng.integers(0, 64, n)
        source = np.frombuffer(rng.bytes(n * slot), np.uint8)
        expected = np.frombuffer(bytearray(rng.bytes(n * slot)), np.uint8)
        got = expected.copy()
        starts = np.arange(n) * slot + offset
        ends = order * slot + (offset + skew) % 256
        copy_table(table_of(source.ctypes.data + starts, expected.ctypes.data + ends, lengths))
        table = table_of(source.ctypes.data + starts, got.ctypes.data + ends, lengths)
        cut = int(rng.integers(0, n + 1))
        for part in (table[: cut + 1], table[cut:]):
            grid.run(part, int(rng.integers(1, 41)))
        assert (got == expected).all(), f"seed {seed}"


def guarded(grid: Grid) -> None:
    """Segments that begin or end where the memory does, at either end of the copy."""
    longest = 3 * CHUNK_BYTES + 33
    source, target = Guarded(longest), Guarded(longest)
    source.view[:] = np.random.default_rng(0).integers(0, 256, source.nbytes, np.uint8)
    lengths = [
        *range(1, 68),
        *(chunks * CHUNK_BYTES + sign * edge for chunks, sign, edge in product((1, 3), (-1, 1), EDGES)),
    ]
    for length, from_end, to_end in product(
        [*lengths, CHUNK_BYTES, 3 * CHUNK_BYTES], (False, True), (False, True)
    ):
        start = source.nbytes - length if from_end else 0
        place = target.nbytes - length if to_end else 0
        target.view[:] = 0xA5
        grid.run(
            table_of(
                np.array([source.address + start]), np.array([target.address + place]), np.array([length])
            ),
            3,
        )
        assert (target.view[place : place + length] == source.view[start : start + length]).all(), length
        assert (target.view[:place] == 0xA5).all(), length
        assert (target.view[place + length :] == 0xA5).all(), length


def widest(grid: Grid) -> None:
    """No copy is made in smaller pieces than the two addresses allow."""
    source, target = Guarded(2 * CHUNK_BYTES), Guarded(2 * CHUNK_BYTES)
    for at, apart in product(range(16), range(32)):
        table = table_of(
            np.array([source.address + at + apart]), np.array([target.address + at]), np.array([4096])
        )
        width = next(w for w in (16, 8, 4, 2, 1) if apart % w == 0)
        head = -at % width
        count, tail = divmod(4096 - head, width)
        assert grid.run(table, 1) == head + count + tail, (at, apart)


def far_apart(grid: Grid) -> None:
    """Addresses and offsets beyond 32 bits, in memory of which only the touched pages exist."""
    size = 6 << 30
    memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    view = np.frombuffer(memory, np.uint8)
    data = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)

    places = np.array([5, (4 << 30) - 100, (5 << 30) + 1])
    for place in places:
        view[place : place + 1000] = data[:1000]
    table = table_of(base + places, base + size + places[::-1], np.full(3, 1000))
    table[:, 3] += np.uint64(1 << 33)  # as in the middle of a long table
    grid.run(table, 2)
    for place in places:
        assert (view[size + place : size + place + 1000] == data[:1000]).all(), place

    length = (4 << 30) + 3 * CHUNK_BYTES - 5
    last = length // CHUNK_BYTES
    start = last * CHUNK_BYTES
    view[start : start + CHUNK_BYTES] = data
    table = table_of(np.array([base]), np.array([base + size]), np.array([length]))
    grid.run_block(table, last, last + 1)
    assert (view[size + start : size + length] == data[: length - start]).all()
    assert not view[size + length : size + start + CHUNK_BYTES].any()


def long_table(grid: Grid) -> None:
    """Thousands of segments and grids of all sizes: each block finds its chunks."""
    rng = np.random.default_rng(0)
    n = 3000
    lengths = np.where(rng.random(n) < 0.9, rng.integers(1, 50, n), rng.integers(1, 3 * CHUNK_BYTES, n))
    lengths[1000:2000] = 1
    starts = np.cumsum(lengths) - lengths
    source = rng.integers(0, 256, int(lengths.sum()), np.uint8)
    for blocks in (1, 2, 7, 40, 1000, 100_000):
        got = np.zeros_like(source)
        grid.run(table_of(source.ctypes.data + starts, got.ctypes.data + starts, lengths), blocks)
        assert (got == source).all(), blocks


def nothing(grid: Grid) -> None:
    """A table without segments."""
    assert grid.run(np.zeros((1, ROW_BYTES // 8), np.uint64), 4) == 0


CASES = {case.__name__: case for case in (scattered, guarded, widest, far_apart, long_table, nothing)}

if __name__ == "__main__":
    CASES[sys.argv[2]](Grid(sys.argv[1]))
