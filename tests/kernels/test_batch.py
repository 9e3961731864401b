"""Batched copies through a stand-in driver, compiled against NVIDIA's header: what is handed over, and what
comes of errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiercache_kernels.batch import MAX_COPIES, BatchCopy
from tiercache_kernels.driver import CudaError, Unavailable

from tests.kernels.toolkit import build, needs_nvcc

STREAM = 0x7F00_1234_5678
INVALID_VALUE = 1
ILLEGAL_ADDRESS = 700
NO_COPY = ctypes.c_size_t(-1).value


@pytest.fixture
def driver(library: Path) -> Iterator[ctypes.CDLL]:
    loaded = ctypes.CDLL(str(library))
    loaded.stand_in_fail.argtypes = (ctypes.c_int, ctypes.c_size_t)
    loaded.stand_in_stream.restype = ctypes.c_void_p
    loaded.stand_in_complaint.restype = ctypes.c_char_p
    yield loaded
    loaded.stand_in_fail(0, NO_COPY)


class Copies:
    """Some copies that do not overlap, and what they should make of the target."""

    def __init__(self, n: int = 50) -> None:
        rng = np.random.default_rng(n)
        self.memory = rng.integers(0, 256, 64 * max(n, 1), np.uint8)
        self.target, self.expected = np.zeros_like(self.memory), np.zeros_like(self.memory)
        self.lengths = rng.integers(1, 64, n)
        starts, places = 64 * np.arange(n, dtype=np.uint64), 64 * rng.permutation(n).astype(np.uint64)
        self.sources = starts + np.uint64(self.memory.ctypes.data)
        self.destinations = places + np.uint64(self.target.ctypes.data)
        for start, place, length in zip(starts.tolist(), places.tolist(), self.lengths.tolist(), strict=True):
            self.expected[place : place + length] = self.memory[start : start + length]

    def made(self) -> bool:
        return bool((self.target == self.expected).all())


@needs_nvcc
def test_columns_attributes_and_stream_arrive(library: Path, driver: ctypes.CDLL) -> None:
    copies, calls = Copies(), driver.stand_in_calls()
    BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert copies.made()
    assert driver.stand_in_calls() == calls + 1
    assert driver.stand_in_stream() == STREAM


@needs_nvcc
@pytest.mark.parametrize("field", ["srcAccessOrder", "srcLocHint", "dstLocHint", "flags"])
def test_the_stand_in_sees_each_field(field: str, library: Path, driver: ctypes.CDLL) -> None:
    batch, copies = BatchCopy.load(str(library)), Copies()
    wrong = batch._attributes  # private: no argument of a copy can make a field wrong
    if field == "srcAccessOrder":
        wrong.source_order = 3
    elif field == "flags":
        wrong.flags = 0
    else:
        (wrong.source_hint if field == "srcLocHint" else wrong.destination_hint).id = 1
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        batch(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert driver.stand_in_complaint() == field.encode()


@needs_nvcc
def test_columns_that_are_not_contiguous_or_of_other_types_are_converted(library: Path) -> None:
    copies = Copies()
    doubled = np.repeat(copies.sources, 2)[::2]
    assert not doubled.flags.c_contiguous
    BatchCopy.load(str(library))(
        doubled, copies.destinations.astype(np.int64), copies.lengths.astype(np.int32), STREAM
    )
    assert copies.made()


@needs_nvcc
def test_no_copies_make_no_call(library: Path, driver: ctypes.CDLL) -> None:
    calls, none = driver.stand_in_calls(), Copies(0)
    BatchCopy.load(str(library))(none.sources, none.destinations, none.lengths, STREAM)
    assert driver.stand_in_calls() == calls


@needs_nvcc
@pytest.mark.parametrize("count", [MAX_COPIES, MAX_COPIES + 1, 3 * MAX_COPIES - 1])
def test_no_call_has_more_copies_than_a_driver_bears(count: int, library: Path, driver: ctypes.CDLL) -> None:
    copies, calls = Copies(count), driver.stand_in_calls()
    BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert copies.made()
    assert driver.stand_in_calls() - calls == -(-count // MAX_COPIES)
    assert driver.stand_in_largest() <= MAX_COPIES


@needs_nvcc
def test_an_error_of_a_later_call_names_the_segment_of_all(library: Path, driver: ctypes.CDLL) -> None:
    copies, batch, calls = Copies(2 * MAX_COPIES), BatchCopy.load(str(library)), driver.stand_in_calls()
    copies.lengths[MAX_COPIES + 7] = driver.stand_in_poison()
    with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_VALUE \(1\) at segment 4103$"):
        batch(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert driver.stand_in_calls() == calls + 2


@needs_nvcc
def test_an_error_names_the_segment(library: Path, driver: ctypes.CDLL) -> None:
    driver.stand_in_fail(INVALID_VALUE, 7)
    copies = Copies()
    with pytest.raises(
        CudaError, match=r"cuMemcpyBatchAsync failed with CUDA_ERROR_INVALID_VALUE \(1\) at segment 7$"
    ) as caught:
        BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert (caught.value.code, caught.value.name, caught.value.index) == (
        INVALID_VALUE,
        "CUDA_ERROR_INVALID_VALUE",
        7,
    )


@needs_nvcc
def test_an_earlier_failure_names_none(library: Path, driver: ctypes.CDLL) -> None:
    driver.stand_in_fail(ILLEGAL_ADDRESS, NO_COPY)
    copies = Copies()
    with pytest.raises(CudaError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$") as caught:
        BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert caught.value.index is None


@needs_nvcc
def test_an_error_that_the_driver_cannot_name(library: Path, driver: ctypes.CDLL) -> None:
    driver.stand_in_fail(4321, NO_COPY)
    copies = Copies()
    with pytest.raises(CudaError, match=r"an unknown error \(4321\)"):
        BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)


@needs_nvcc
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_are_refused(stream: int, library: Path, driver: ctypes.CDLL) -> None:
    calls, copies = driver.stand_in_calls(), Copies()
    with pytest.raises(ValueError, match="default stream"):
        BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, stream)
    assert driver.stand_in_calls() == calls


@needs_nvcc
def test_columns_of_different_lengths_are_refused(library: Path) -> None:
    copies = Copies()
    with pytest.raises(ValueError, match="columns of shapes"):
        BatchCopy.load(str(library))(copies.sources[1:], copies.destinations, copies.lengths, STREAM)


@needs_nvcc
def test_a_driver_that_is_too_old(folder: Path) -> None:
    with pytest.raises(Unavailable, match=r"need a driver for CUDA 12\.8; .* is for 12\.6"):
        BatchCopy.load(str(build(folder, "VERSION=12060")))


@needs_nvcc
def test_the_oldest_driver_that_will_do(folder: Path) -> None:
    BatchCopy.load(str(build(folder, "VERSION=12080")))


@needs_nvcc
def test_a_driver_without_the_call(folder: Path) -> None:
    with pytest.raises(Unavailable, match="does not export"):
        BatchCopy.load(str(build(folder, "WITHOUT_BATCH")))


@needs_nvcc
def test_a_driver_that_does_not_tell_its_version(folder: Path) -> None:
    with pytest.raises(Unavailable, match="CUDA_ERROR_SYSTEM_NOT_READY"):
        BatchCopy.load(str(build(folder, "VERSION=0")))


def test_no_driver() -> None:
    with pytest.raises(Unavailable, match="without the CUDA driver"):
        BatchCopy.load("libcuda_that_does_not_exist.so")


def test_a_library_that_is_no_driver() -> None:
    with pytest.raises(Unavailable, match="is not a CUDA driver"):
        BatchCopy.load("libc.so.6")
