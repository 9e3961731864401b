"""The interface to CUDA: everything that the engine asks of the driver.

`hardware` implements it with a real device; `tiercache.testing.cuda` has a device without hardware that keeps to the same contract.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from tiercache_kernels.batch import MOST_COPIES as MOST_COPIES

from tiercache.transfer.descriptors import Copies


class Method(StrEnum):
    """A way to copy across the bus. Of equally fast ones the first is preferred: copy engines leave the multiprocessors alone."""

    BATCH = "batch"
    """One `cuMemcpyBatchAsync` for all copies of a group (up to `MOST_COPIES` a call), done by the copy engines."""
    MEMCPY = "memcpy"
    """One `cudaMemcpyAsync` per copy, done by the copy engines."""
    KERNEL = "kernel"
    """Tiercache's own kernel, which reads or writes page-locked host memory."""


class Direction(StrEnum):
    """Direction of a copy across the bus."""

    TO_HOST = "device_to_host"
    TO_DEVICE = "host_to_device"


DEFAULT_STREAMS: Final = (0, 1, 2)
"""CUDA's handles of the default streams, in which a batch of copies cannot be queued."""


@dataclass(frozen=True, slots=True)
class Card:
    """Description of a device.

    `driver` and `runtime` are CUDA's version numbers, 13000 for 13.0. `uuid` identifies the device, or its MIG instance; empty if unknown.
    """

    name: str
    bus: str
    driver: int
    runtime: int
    multiprocessors: int
    uuid: str = ""

    def __str__(self) -> str:
        return f"{self.name} at {self.bus}, driver for CUDA {_version(self.driver)}"


class CudaDevice(Protocol):
    """One CUDA device. Streams, events and addresses are CUDA's own, as integers.

    Every call may raise any error of the driver, as a RuntimeError. An error that the driver calls sticky is raised by every later call.

    Calls that wait for the device release the GIL. A call on a thread that has not entered is an error, for the driver would answer it with
    a context on device 0.

    Thread safety: any thread that has entered `current()`, or a thread of the engine's own that has called `activate` once.
    """

    ordinal: int
    card: Card
    unavailable: dict[Method, str]
    """Methods that cannot be used on this device, each with the reason."""

    @property
    def methods(self) -> list[Method]:
        """Methods that can be used, in the order of `Method`."""
        return [method for method in Method if method not in self.unavailable]

    def activate(self) -> None:
        """Make this the calling thread's device for good, on a thread of the engine's own."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the calling thread's device within a `with` block, on a caller's thread; its former device is restored afterwards.

        Neither this nor `activate` touches another device. Both let the thread call the driver, from the very first call on, while another
        thread captures a CUDA graph.
        """

    def create_stream(self, *, urgent: bool) -> int:
        """Create a stream that does not wait for the default one, with the highest (`urgent`) or the lowest priority."""

    def destroy_stream(self, stream: int) -> None: ...  # noqa: D102

    def synchronize_stream(self, stream: int) -> None:
        """Block until everything in the stream is over."""

    def create_event(self, *, timed: bool = False) -> int:
        """Create an event whose waiting threads sleep; with `timed`, one for `seconds_between`."""

    def destroy_event(self, event: int) -> None: ...  # noqa: D102

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for everything that is in the stream now."""

    def wait_event(self, stream: int, event: int) -> None:
        """Let work that is queued in the stream from now on wait for what the event stands for now."""

    def synchronize_event(self, event: int) -> None:
        """Block until what the event stands for is over."""

    def has_passed(self, event: int) -> bool:
        """Return whether what the event stands for is over."""

    def seconds_between(self, first: int, second: int) -> float:
        """Return the device's seconds from one timed event to another. Both must be over."""

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` of device memory and return its address; RuntimeError if there is not enough."""

    def release(self, address: int) -> None: ...  # noqa: D102

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate page-locked host memory, shape [nbytes]. The caller keeps the array until nothing uses its address any more."""

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock memory of this process for all devices; return the address that every copy of this device must use for it."""

    def unlock(self, address: int) -> None:
        """Undo `lock`. `address`: the one that was passed to it."""

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        """Queue one copy; the addresses decide its direction."""

    def copy_batch(self, copies: Copies, stream: int) -> None:
        """Queue up to `MOST_COPIES` copies as one piece of work, in no order among themselves. Not possible in a default stream."""

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        """Queue tiercache's kernel over `rows` rows, `chunks` chunks together, of a table in device memory, on at most `blocks` blocks.

        `tiercache_kernels.table` describes the table.
        """


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
