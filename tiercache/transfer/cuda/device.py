"""Interface to CUDA: all calls of the driver that the transfer engine makes.

`hardware` implements this interface with a real device, `tests.transfer.simulated_cuda` without hardware.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from tiercache_kernels.batch import MAX_COPIES as MAX_COPIES

from tiercache.transfer.descriptors import Descriptors


class Method(StrEnum):
    """Method of copying across the bus; `copying.best_method` chooses one.

    The first two use the device's copy engines, which take no multiprocessors from the model's computation.
    """

    BATCH = "batch"
    """One `cuMemcpyBatchAsync` for up to `MAX_COPIES` copies, made by the copy engines."""
    MEMCPY = "memcpy"
    """One `cudaMemcpyAsync` per copy, made by the copy engines."""
    KERNEL = "kernel"
    """Tiercache's own kernel, which reads or writes page-locked host memory itself."""


DEFAULT_STREAMS: Final = (0, 1, 2)
"""CUDA's handles of the default streams, which take no batch of copies."""


@dataclass(frozen=True, slots=True)
class Card:
    """Description of a device."""

    name: str
    bus: str
    """Address on the PCI bus."""
    driver: int
    """CUDA version of the driver, 13000 for 13.0."""
    multiprocessors: int
    """Number of multiprocessors."""

    def __str__(self) -> str:
        return f"{self.name} at {self.bus}, driver for CUDA {_version(self.driver)}"


class CudaDevice(Protocol):
    """One CUDA device. Streams, events and addresses are CUDA's own, as integers.

    Every call may raise any error of the driver, as a RuntimeError. After an error that CUDA calls sticky,
    every later call raises the same error.

    Calls that wait for the device release the GIL. Before any other call, a thread must *enter* the device,
    by `activate` or in `current()`. For a thread that has not entered, the driver would create a context on
    device 0.

    Thread safety: any thread that has entered the device.
    """

    ordinal: int
    card: Card
    unavailable: dict[Method, str]
    """Methods that cannot be used on this device, each with the reason."""

    def activate(self) -> None:
        """Make this the calling thread's device until the thread ends. Meant for threads of the engine."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the calling thread's device within a `with` block. Meant for threads of callers.

        Afterwards, the thread has its former device again. Neither this method nor `activate` touches another
        device. A thread that has entered the device may call the driver even while another thread captures a
        CUDA graph.
        """

    def create_stream(self, *, urgent: bool) -> int:
        """Create a stream of the highest priority if `urgent`, of the lowest otherwise.

        Work in the stream does not wait for work in the default stream.
        """

    def destroy_stream(self, stream: int) -> None: ...  # noqa: D102

    def synchronize_stream(self, stream: int) -> None:
        """Block until everything in the stream is over."""

    def create_event(self) -> int:
        """Create an event. A thread that waits for it sleeps."""

    def destroy_event(self, event: int) -> None: ...  # noqa: D102

    def record(self, event: int, stream: int) -> None:
        """Record the event behind everything that is in the stream now."""

    def wait_event(self, stream: int, event: int) -> None:
        """Make work that is queued in the stream from now on wait for the event's latest recording."""

    def synchronize_event(self, event: int) -> None:
        """Block until all work before the recorded event is over."""

    def has_passed(self, event: int) -> bool:
        """Return whether all work before the recorded event is over."""

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` bytes on the device and return the address; RuntimeError if memory is short."""

    def release(self, address: int) -> None: ...  # noqa: D102

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate page-locked host memory, shape [nbytes].

        The memory is freed with the array, so the caller keeps the array while any copy uses the memory.
        """

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock memory of this process for all devices, which use the host's addresses of it."""

    def unlock(self, address: int) -> None:
        """Undo `lock`. `address` is the address that was passed to `lock`."""

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        """Queue one copy; the addresses decide its direction."""

    def copy_batch(self, copies: Descriptors, stream: int) -> None:
        """Queue up to `MAX_COPIES` copies as one piece of work. The device makes the copies in any order.

        The stream must not be a default stream.
        """

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        """Queue tiercache's kernel for some rows of a table on the device, on up to `blocks` thread blocks.

        `table` is the address of the first of `rows` rows on the device. These rows have `chunks` chunks.
        `tiercache_kernels.kernel` describes the table and its chunks.
        """


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
