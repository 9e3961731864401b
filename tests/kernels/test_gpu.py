"""The copy kernel and batched copies on a real device, against the CPU twin.

Needs CuPy and a device: `pytest -m gpu tests/kernels`.

CuPy is used for memory, streams and plain copies only: its own element-wise kernels need headers that may not
be installed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest
from tiercache_kernels.batch import BatchCopy
from tiercache_kernels.driver import Unavailable
from tiercache_kernels.kernel import CHUNK_BYTES, COLUMNS, ROW_BYTES, CopyKernel, fill_table
from tiercache_kernels.reference import copy_segments

# What CuPy and its dependencies deprecate is not ours to fail on.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

MIB = 1 << 20
GIB = 1 << 30
FILLER = 0xA5
DEFAULT_KIND = 4  # cudaMemcpyDefault: the addresses tell the direction
MAPPED_FOR_ALL = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


@pytest.fixture(scope="module")
def cupy() -> Any:
    module = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
    try:
        module.cuda.Device(0).use()
        module.cuda.runtime.free(0)  # makes the device's context current, as the driver's calls need it
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    return module


class Memory(Protocol):
    """`nbytes` bytes at `address`, which host and device both know by that address."""

    address: int
    nbytes: int

    def put(self, data: np.ndarray, at: int = 0) -> None: ...

    def get(self, at: int = 0, nbytes: int | None = None) -> np.ndarray: ...


class Device:
    """Device memory."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._runtime = cupy.cuda.runtime
        self._held = cupy.cuda.alloc(nbytes)
        self.address = int(self._held.ptr)

    def put(self, data: np.ndarray, at: int = 0) -> None:
        self._runtime.memcpy(self.address + at, data.ctypes.data, data.nbytes, DEFAULT_KIND)

    def get(self, at: int = 0, nbytes: int | None = None) -> np.ndarray:
        data = np.empty(self.nbytes - at if nbytes is None else nbytes, np.uint8)
        self._runtime.memcpy(data.ctypes.data, self.address + at, data.nbytes, DEFAULT_KIND)
        return data


class Host:
    """Pinned memory that CUDA allocated."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._held = cupy.cuda.alloc_pinned_memory(nbytes)
        self._view = np.frombuffer(self._held, np.uint8, nbytes)
        self.address = self._view.ctypes.data

    def put(self, data: np.ndarray, at: int = 0) -> None:
        self._view[at : at + len(data)] = data

    def get(self, at: int = 0, nbytes: int | None = None) -> np.ndarray:
        return self._view[at : None if nbytes is None else at + nbytes].copy()


class Registered(Host):
    """Shared memory that was mapped first and pinned later, as the arena is."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._runtime = cupy.cuda.runtime
        self._view = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.address = self._view.ctypes.data
        self._runtime.hostRegister(self.address, nbytes, MAPPED_FOR_ALL)

    def __del__(self) -> None:
        self._runtime.hostUnregister(self.address)


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Offsets in the source, offsets in the target, lengths."""
Copy = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]
"""Sources, destinations, lengths, stream; what it queues may need what it holds until the stream has been
synchronised.
"""


class ByKernel:
    """`CopyKernel` with tables in device memory, kept for as long as this lives."""

    def __init__(self, cupy: Any, blocks: int = 16) -> None:
        self._cupy, self._blocks, self._kernel = cupy, blocks, CopyKernel()
        self._tables: list[Device] = []

    def table(
        self, sources: np.ndarray, destinations: np.ndarray, lengths: np.ndarray
    ) -> tuple[int, np.ndarray]:
        """The table's address on the device, and its first chunks."""
        table = np.empty((len(lengths) + 1, COLUMNS), np.uint64)
        fill_table(table, sources, destinations, lengths)
        self._tables.append(Device(self._cupy, table.nbytes))
        self._tables[-1].put(table)
        # the call may return before its bytes are there, and other streams do not wait
        self._cupy.cuda.runtime.deviceSynchronize()
        return self._tables[-1].address, table[:, 3].astype(np.int64)

    def __call__(
        self, sources: np.ndarray, destinations: np.ndarray, lengths: np.ndarray, stream: int
    ) -> None:
        address, first = self.table(sources, destinations, lengths)
        self._kernel.launch(address, len(lengths), int(first[-1]), self._blocks, stream)

    def by_layers(self, columns: Columns, cuts: list[int], streams: list[int]) -> None:
        """Rows between the cuts as launches of their own over one table, in turn in the streams."""
        address, first = self.table(*columns)
        for i, (start, stop) in enumerate(pairwise(cuts)):
            chunks = int(first[stop] - first[start])
            self._kernel.launch(
                address + start * ROW_BYTES, stop - start, chunks, self._blocks, streams[i % len(streams)]
            )


@pytest.fixture(params=["kernel", "batch"])
def copy(request: pytest.FixtureRequest, cupy: Any) -> Copy:
    if request.param == "kernel":
        return ByKernel(cupy)
    try:
        return BatchCopy.load()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def stream(cupy: Any) -> Iterator[Any]:
    made = cupy.cuda.Stream(non_blocking=True)
    yield made
    made.synchronize()


def drawn(seed: int, n: int, longest: int, slot: int) -> Columns:
    """`n` segments in slots of both memories, in different orders, with any alignment at both ends."""
    rng = np.random.default_rng(seed)
    short = rng.random(n) < 0.4
    chunky = np.clip(rng.integers(1, 4, n) * CHUNK_BYTES + rng.integers(-40, 40, n), 1, longest)
    lengths = np.where(
        short, rng.integers(1, 80, n), np.where(rng.random(n) < 0.5, chunky, rng.integers(1, longest, n))
    ).astype(np.int64)
    offset = rng.integers(0, 64, n)
    skew = rng.integers(0, 16, n) * (1 << rng.integers(0, 5, n))
    assert longest + 512 <= slot
    return np.arange(n) * slot + offset, rng.permutation(n) * slot + offset + skew, lengths


def check(cupy: Any, copy: Copy, source: Memory, target: Memory, columns: Columns, stream: Any) -> None:
    """Copy, and compare the whole target with what the twin makes of it."""
    starts, places, lengths = columns
    data = np.random.default_rng(1).integers(0, 256, source.nbytes, np.uint8)
    expected = np.full(target.nbytes, FILLER, np.uint8)
    source.put(data)
    target.put(expected)
    copy_segments(
        (starts + data.ctypes.data).astype(np.uint64),
        (places + expected.ctypes.data).astype(np.uint64),
        lengths,
    )
    cupy.cuda.runtime.deviceSynchronize()  # `put` went through another stream
    copy(
        (starts + source.address).astype(np.uint64),
        (places + target.address).astype(np.uint64),
        lengths,
        stream.ptr,
    )
    stream.synchronize()
    assert np.array_equal(target.get(), expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Device, Host), (Device, Registered), (Host, Device), (Registered, Device), (Device, Device)],
    ids=["gather", "gather_registered", "scatter", "scatter_registered", "fork"],
)
@pytest.mark.parametrize("seed", range(3))
def test_any_alignment(cupy: Any, copy: Copy, stream: Any, source: type, target: type, seed: int) -> None:
    slot = 256 << 10
    columns = drawn(seed, 200, slot - 512, slot)
    check(cupy, copy, source(cupy, 200 * slot), target(cupy, 200 * slot), columns, stream)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Device, Host), (Host, Device), (Device, Device)],
    ids=["gather", "scatter", "fork"],
)
def test_states(cupy: Any, copy: Copy, stream: Any, source: type, target: type) -> None:
    """From convolution states of 48 KiB to recurrent states of 80 MiB, aligned and not."""
    lengths = np.array([48 << 10, 2 * MIB, 80 * MIB, 80 * MIB - 3, 5 * MIB + 1], np.int64)
    starts = np.cumsum(lengths + 64) - lengths
    starts += -starts % 16 + np.array([0, 0, 0, 1, 2])
    places = starts + np.array([0, 0, 0, 2, 5])
    nbytes = int(lengths.sum()) + MIB
    check(cupy, copy, source(cupy, nbytes), target(cupy, nbytes), (starts, places, lengths), stream)


def test_many_small_segments(cupy: Any, copy: Copy, stream: Any) -> None:
    """More segments than any grid has blocks, most much shorter than a chunk."""
    columns = drawn(0, 20_000, 1024, 2048)
    memory = Device(cupy, 20_000 * 2048), Host(cupy, 20_000 * 2048)
    check(cupy, copy, *memory, columns, stream)


@pytest.mark.parametrize("blocks", [1, 2, 7, 132, 100_000])
def test_any_grid(cupy: Any, stream: Any, blocks: int) -> None:
    slot = 128 << 10
    columns = drawn(blocks, 100, slot - 512, slot)
    memory = Device(cupy, 100 * slot), Host(cupy, 100 * slot)
    check(cupy, ByKernel(cupy, blocks), *memory, columns, stream)


def test_layers_of_one_table_in_two_streams(cupy: Any, stream: Any) -> None:
    kernel, other, slot = ByKernel(cupy), cupy.cuda.Stream(non_blocking=True), 128 << 10
    cuts = [0, 1, 40, 41, 90, 100]

    def copy(sources: np.ndarray, destinations: np.ndarray, lengths: np.ndarray, first_stream: int) -> None:
        kernel.by_layers((sources, destinations, lengths), cuts, [first_stream, other.ptr])
        other.synchronize()

    columns = drawn(5, 100, slot - 512, slot)
    check(cupy, copy, Host(cupy, 100 * slot), Device(cupy, 100 * slot), columns, stream)


def test_from_another_thread(cupy: Any, copy: Copy, stream: Any) -> None:
    """Threads that never called CUDA need its context first, and nothing else."""

    def elsewhere(sources: np.ndarray, destinations: np.ndarray, lengths: np.ndarray, raw: int) -> None:
        def work() -> None:
            cupy.cuda.Device(0).use()
            cupy.cuda.runtime.free(0)
            copy(sources, destinations, lengths, raw)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()

    slot = 128 << 10
    columns = drawn(6, 50, slot - 512, slot)
    check(cupy, elsewhere, Device(cupy, 50 * slot), Host(cupy, 50 * slot), columns, stream)


def test_the_stream_s_order_is_kept(cupy: Any, copy: Copy, stream: Any) -> None:
    """A copy sees what was queued before it, and what is queued after it does not disturb it."""
    nbytes = 64 * MIB
    device, host = Device(cupy, nbytes), Host(cupy, nbytes)
    rows = np.arange(0, nbytes, MIB)
    columns = (
        (rows + device.address).astype(np.uint64),
        (rows + host.address).astype(np.uint64),
        np.full(len(rows), MIB),
    )
    for value in (1, 2, 3):
        cupy.cuda.runtime.memsetAsync(device.address, 0, nbytes, stream.ptr)
        cupy.cuda.runtime.memsetAsync(device.address, value, nbytes, stream.ptr)
        copy(*columns, stream.ptr)
        cupy.cuda.runtime.memsetAsync(device.address, 9, nbytes, stream.ptr)
        stream.synchronize()
        assert (host.get() == value).all()


@pytest.mark.parametrize(("to_host", "apart"), [(True, 0), (True, 3), (False, 0), (False, 3)])
def test_pools_above_4_gib(cupy: Any, copy: Copy, stream: Any, to_host: bool, apart: int) -> None:
    size, piece = 5 * GIB, 100_001
    need_free(cupy, size + GIB)
    pool, host = Device(cupy, size), Host(cupy, 4 * 2 * piece)
    places = np.array([0, 4 * GIB - 50_000, 4 * GIB + piece + 16, size - piece - 8])
    slots = 2 * piece * np.arange(4)
    # Whole multiples of 16 apart, but for `apart`.
    slots += (places - slots) % 16 + apart
    data = np.random.default_rng(0).integers(0, 256, (4, piece), np.uint8)
    source, target, starts, ends = (pool, host, places, slots) if to_host else (host, pool, slots, places)
    for row, start in zip(data, starts.tolist(), strict=True):
        source.put(row, start)
    cupy.cuda.runtime.deviceSynchronize()
    copy(
        (starts + source.address).astype(np.uint64),
        (ends + target.address).astype(np.uint64),
        np.full(4, piece),
        stream.ptr,
    )
    stream.synchronize()
    for row, end in zip(data, ends.tolist(), strict=True):
        assert np.array_equal(target.get(end, piece), row), end


def test_one_segment_above_4_gib(cupy: Any, copy: Copy, stream: Any) -> None:
    size = 4 * GIB + 3 * CHUNK_BYTES - 5
    need_free(cupy, 2 * size + GIB)
    source, target = Device(cupy, size), Device(cupy, size + 1)
    window = 2 * MIB
    starts = [0, 2 * GIB - MIB, size - window]  # the last two cross what 31 and 32 bits can say
    data = np.random.default_rng(0).integers(0, 256, (len(starts), window), np.uint8)
    cupy.cuda.runtime.memset(source.address, 0, size)
    cupy.cuda.runtime.memset(target.address, FILLER, size + 1)
    for row, start in zip(data, starts, strict=True):
        source.put(row, start)
    cupy.cuda.runtime.deviceSynchronize()
    copy(
        np.array([source.address], np.uint64),
        np.array([target.address], np.uint64),
        np.array([size]),
        stream.ptr,
    )
    stream.synchronize()
    for row, start in zip(data, starts, strict=True):
        assert np.array_equal(target.get(start, window), row), start
    assert target.get(size, 1)[0] == FILLER


def need_free(cupy: Any, nbytes: int) -> None:
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < nbytes:
        pytest.skip(f"needs {nbytes / GIB:.1f} GiB of free device memory, there are {free / GIB:.1f}")


def test_nothing_to_copy(cupy: Any, stream: Any) -> None:
    empty = np.empty(0, np.uint64)
    ByKernel(cupy)(empty, empty, np.empty(0, np.int64), stream.ptr)
