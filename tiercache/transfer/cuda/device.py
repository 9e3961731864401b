"""What the engine asks of CUDA, and no more: the one door to the driver.

`hardware` is the real thing; `tiercache.testing.cuda` has a device without hardware that keeps to the same contract.
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
    """How bytes cross the bus. In the order of preference where two are as fast: copy engines leave the multiprocessors alone."""

    BATCH = "batch"
    """One `cuMemcpyBatchAsync` for all copies, done by the copy engines."""
    MEMCPY = "memcpy"
    """One `cudaMemcpyAsync` a copy, done by the copy engines."""
    KERNEL = "kernel"
    """A kernel of ours that reads or writes page-locked host memory."""


class Direction(StrEnum):
    """Which way."""

    TO_HOST = "device_to_host"
    TO_DEVICE = "host_to_device"


DEFAULT_STREAMS: Final = (0, 1, 2)
"""CUDA's handles of the default streams, into which a batch of copies cannot be queued."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a device is. `driver` and `runtime` as CUDA counts, 13000 for 13.0; `uuid` tells it, or its MIG instance, from all others."""

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

    Every call may raise anything of the driver's, as a RuntimeError. An error that the driver calls sticky is raised by every later call.

    Thread safety: any thread that has entered `current()`, or called `activate` once as its own master; every call on another thread is an
    error, for the driver would answer it with a context on device 0. Calls that wait for the device release the GIL.
    """

    ordinal: int
    card: Card
    unavailable: dict[Method, str]
    """Methods that cannot be used here, each with the reason."""

    @property
    def methods(self) -> list[Method]:
        """Those that can be used."""
        return [method for method in Method if method not in self.unavailable]

    def activate(self) -> None:
        """Make this the calling thread's device, for a thread of our own."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the calling thread's device for a while, for somebody else's thread, which has its own back afterwards.

        Neither this nor `activate` touches another device. Both let the thread work on while another one captures a CUDA graph, from
        before the first call of the driver.
        """

    def create_stream(self, *, urgent: bool) -> int:
        """A stream that does not wait for the default one, with the highest or the lowest priority."""

    def destroy_stream(self, stream: int) -> None: ...  # noqa: D102

    def synchronize_stream(self, stream: int) -> None:
        """Block until everything in it is over."""

    def create_event(self, *, timed: bool = False) -> int:
        """An event whose waiters sleep; with `timed`, for `seconds_between`."""

    def destroy_event(self, event: int) -> None: ...  # noqa: D102

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for everything in the stream so far."""

    def wait_event(self, stream: int, event: int) -> None:
        """Let what is queued in the stream from now on wait for what the event stands for now."""

    def synchronize_event(self, event: int) -> None:
        """Block until what the event stands for is over."""

    def has_passed(self, event: int) -> bool:
        """Is what the event stands for over?"""

    def seconds_between(self, first: int, second: int) -> float:
        """The device's time from one timed event to another, both over."""

    def allocate(self, nbytes: int) -> int:
        """Device memory; RuntimeError if there is not enough."""

    def release(self, address: int) -> None: ...  # noqa: D102

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, shape [nbytes]; the caller keeps the array until nothing uses its address any more."""

    def lock(self, address: int, nbytes: int) -> int:
        """Page-lock memory of this process for all devices; the address by which copies of this device are to name it, all of them."""

    def unlock(self, address: int) -> None:
        """Undo `lock`, for the address it was given."""

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        """Queue one copy, in whichever direction the addresses say."""

    def copy_batch(self, copies: Copies, stream: int) -> None:
        """Queue up to `MOST_COPIES` copies as one piece of work, in no order among each other. Not in a default stream."""

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        """Queue our kernel, on at most `blocks` blocks, over `rows` rows of a table (`tiercache_kernels.table`) in device memory."""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
