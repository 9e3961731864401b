"""Batched copies through a stand-in driver, compiled against NVIDIA's header: arguments and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiercache_kernels.batch import BatchCopy
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
@pytest.mark.parametrize(
    ("code", "index", "said"),
    [
        (INVALID_VALUE, 7, r"cuMemcpyBatchAsync failed with CUDA_ERROR_INVALID_VALUE \(1\) at segment 7$"),
        (ILLEGAL_ADDRESS, NO_COPY, r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$"),
        (4321, NO_COPY, r"an unknown error \(4321\)"),
    ],
)
def test_an_error_names_its_segment_if_it_has_one(code, index, said, library, driver):
    driver.stand_in_fail(code, index)
    copies = Copies()
    with pytest.raises(CudaError, match=said) as caught:
        BatchCopy.load(str(library))(copies.sources, copies.destinations, copies.lengths, STREAM)
    assert (caught.value.code, caught.value.index) == (code, None if index == NO_COPY else index)


@needs_nvcc
@pytest.mark.parametrize(
    ("built", "said"),
    [
        ("VERSION=12060", r"need a driver for CUDA 12\.8; .* is for 12\.6"),
        ("WITHOUT_BATCH", "does not export"),
        ("VERSION=0", "CUDA_ERROR_SYSTEM_NOT_READY"),
    ],
)
def test_a_driver_that_will_not_do(built: str, said: str, folder: Path) -> None:
    BatchCopy.load(str(build(folder, "VERSION=12080")))
    with pytest.raises(Unavailable, match=said):
        BatchCopy.load(str(build(folder, built)))


@pytest.mark.parametrize(
    ("name", "said"),
    [("libcuda_that_does_not_exist.so", "driver cannot be loaded"), ("libc.so.6", "is not a CUDA driver")],
)
def test_no_driver(name: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said):
        BatchCopy.load(name)
