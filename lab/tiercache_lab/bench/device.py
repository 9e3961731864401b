"""`tiercache bench device`: stores and loads of the transfer engine, beside one contiguous copy.

Each is measured with one method of copying at a time, and with those that the engine chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from tiercache.config import parse_size
from tiercache.core import CacheTransferUnits
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.geometry import DTYPE_BITS, Geometry, kv_geometry, state_geometry
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer.base import Ticket
from tiercache.transfer.cuda import CudaDevice, CudaEngine, Method
from tiercache.transfer.cuda.copying import best_method
from tiercache.transfer.cuda.engine import self_test
from tiercache_lab.bench.rows import MIB, Row
from tiercache_lab.bench.timing import Side, medians

MODEL: Final = "qwen3-next-80b-a3b"
"""Model whose pages and states are copied."""
PAGES: Final = kv_geometry(range(3, 48, 4), 2, 256, "bfloat16", 64)
STATES: Final = state_geometry(
    [
        (layer, *part)
        for layer in range(48)
        if layer % 4 != 3
        for part in (("conv", (8192, 3), "bfloat16"), ("ssm", (32, 128, 128), "float32"))
    ],
    64,
)
"""States of its recurrent layers: the past inputs of the convolution, and the recurrent state."""
CHOICE: Final = "choice"
"""Way that stands for the methods that the engine chooses."""
TRANSFERS: Final = 4
"""Number of transfers in the engine at once. The engine queues three transfers in its stream; the fourth
waits in the engine."""
_SMALL: Final = 64 * MIB
"""Size in bytes below which a group counts as small. Its copies take about 1 ms or less."""
_MORE: Final = 5
"""Factor by which the number of runs is multiplied for a small group."""
_PLAIN: Final = "contiguous"
_ALIGN: Final = 256
"""Alignment of tensors in bytes, as in allocators of device memory."""
_TIMEOUT_S: Final = 120.0


class Direction(StrEnum):
    """Direction of a copy across the bus."""

    TO_HOST = "device_to_host"
    TO_DEVICE = "host_to_device"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Plan of one run of `bench device`."""

    max_bytes: int
    """Maximum payload bytes of a group."""
    repeats: int
    """Number of runs for each median. One more run comes first and is not counted."""
    counts: tuple[int, ...] = (1, 4, 16, 64, 256)
    pages: Geometry = PAGES
    states: Geometry = STATES

    def groups(self) -> Iterator[tuple[str, Geometry, int]]:
        """Yield the groups: pages and states, with all counts that fit into `max_bytes`."""
        for count in self.counts:
            for kind, geometry in (("pages", self.pages), ("states", self.states)):
                if count * geometry.nbytes <= self.max_bytes:
                    yield kind, geometry, count

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest group needs on the device, with one free slot."""
        return self.max_bytes + max(self.pages.nbytes, self.states.nbytes) + MIB  # aligned tensors


def device_plan(most: str, repeats: int) -> DevicePlan:
    """Return the plan that the options describe; raises ConfigError if it cannot be carried out."""
    try:
        nbytes = parse_size(most.strip())
    except ConfigError as error:
        raise ConfigError(f"--most: {error}") from error
    if nbytes < PAGES.nbytes:
        raise ConfigError(f"--most {nbytes} does not hold one page of {MODEL}; give at least {PAGES.nbytes}")
    return DevicePlan(nbytes, repeats)


def footer(plan: DevicePlan, device: CudaDevice) -> list[str]:
    """Return the sentences that explain the figures."""
    return [
        (
            f"{device.card}. Medians of at least {plan.repeats} interleaved runs; objects in random slots and"
            f" blocks, in {TRANSFERS} transfers of the engine at once."
        ),
        "contiguous_gb_s: one contiguous copy of the same size, with host memory page-locked by the driver.",
        *(f"No copies by {method}: {reason}." for method, reason in device.unavailable.items()),
    ]


def run(plan: DevicePlan, device: CudaDevice, say: Callable[[str], None]) -> Generator[Row]:
    """Yield every row as soon as it is known.

    A method that fails the engine's self-test, which compares all bytes, is left out. Closing the generator
    releases everything on the device. Raises TransferError if the driver fails, and ConfigError if this
    device cannot carry out the plan.
    """
    try:
        with device.current(), ExitStack() as stack:
            say("trying each method")
            self_test(device)
            plain = ContiguousCopy(device, plan.device_bytes, stack)
            for kind, geometry, count in plan.groups():
                with ExitStack() as group:
                    bed = Bed(plain, geometry, count, plan.pages.padded_nbytes, group)
                    for direction in Direction:
                        say(f"{count} {kind}: {direction.replace('_', ' ')}")
                        yield from _rows(plan, bed, kind, direction)
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"{device.card} failed: {error}") from error


class ContiguousCopy:
    """One contiguous copy between the device and page-locked host memory, the limit for all other copies.

    Its `nbytes` bytes on the device are also the memory of the pools. Closing `stack` releases all memory.
    Raises ConfigError if there is not enough of it.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        try:
            self.address = device.allocate(nbytes)
            stack.callback(self._release)
            # The host memory is allocated by the driver, because no other host memory is faster.
            self._host = device.allocate_host(nbytes)
        except RuntimeError as error:
            raise ConfigError(
                f"{nbytes >> 20} MiB of device memory and as much host memory are not available"
                f" ({error}); lower --most"
            ) from error
        self._stream = device.create_stream(urgent=False)
        stack.callback(self._close_stream)

    def move(self, direction: Direction, nbytes: int) -> None:
        """Copy the first `nbytes` bytes, and wait until they are copied."""
        ends = self.address, self._host.ctypes.data
        source, destination = ends if direction is Direction.TO_HOST else ends[::-1]
        self.device.copy(source, destination, nbytes, self._stream)
        self.device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for a copy that an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # raised by a lost device, on which no copy runs any more
            self.device.synchronize_stream(self._stream)

    def _close_stream(self) -> None:
        self.settle()
        with suppress(RuntimeError):  # raised by a lost device, whose error was raised before
            self.device.destroy_stream(self._stream)

    def _release(self) -> None:
        with suppress(RuntimeError):  # raised by a lost device
            self.device.release(self.address)


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Dense tensor in device memory, with the attributes and methods that a pool reads."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: str

    def data_ptr(self) -> int:  # noqa: D102
        return self.address

    def stride(self) -> tuple[int, ...]:  # noqa: D102
        return tuple(math.prod(self.shape[n + 1 :]) for n in range(len(self.shape)))

    def element_size(self) -> int:  # noqa: D102
        return DTYPE_BITS[self.dtype] // 8


class Bed:
    """Pools for `count` objects of a geometry in the device memory of `plain`, and an engine between them.

    Slots are used in a random order. Object i is stored from slot i of that order and loaded into the next
    slot, so nothing is ever loaded into the first slot:

        order      s0  s1  s2  s3
        store      0   1   2           (object stored from the slot)
        load           0   1   2       (object loaded into the slot)

    Blocks of the arena have the size of a page, as in a worker. The engine page-locks the arena. Closing
    `stack` releases everything.

    Thread safety: one thread, with the device current.
    """

    def __init__(
        self, plain: ContiguousCopy, geometry: Geometry, count: int, block_bytes: int, stack: ExitStack
    ) -> None:
        self.plain, self.count, self.nbytes = plain, count, count * geometry.nbytes
        rng, self._pool = np.random.default_rng(count), geometry.pool
        blocks = count * -(-geometry.nbytes // block_bytes)
        arena = HostArena(blocks * block_bytes, block_bytes)
        stack.callback(arena.close)
        arena.free(rng.permutation(arena.alloc(blocks)))
        device = _device_pool(geometry, count + 1, plain.address, f"cuda:{plain.device.ordinal}")
        host = HostPool(geometry, arena)
        self._method: Method | None = None
        self._slots, self._handles = rng.permutation(device.capacity), host.alloc(count)
        # Page-lock the arena in one piece. If there were several pieces, a copy that crosses the border of
        # two pieces would have to be cut there.
        self._engine = stack.enter_context(
            CudaEngine(
                {self._pool: device}, {self._pool: host}, device=plain.device,
                choose=lambda copies: self._method or best_method(plain.device, copies),
                piece_bytes=arena.nbytes,
            )
        )  # fmt: skip
        # A stack closes in reverse order: `settle` waits for the copy, then the engine unlocks the arena.
        stack.callback(plain.settle)

    def transfer(self, direction: Direction, method: Method | None) -> None:
        """Move all objects through the engine, which uses `method` alone; None: those that it chooses.

        Raises TransferError if a transfer does not end within two minutes, or the error of one that failed.
        """
        self._method, to_host = method, direction is Direction.TO_HOST
        call: Callable[[list[CacheTransferUnits]], Ticket] = (
            self._engine.store if to_host else self._engine.load
        )
        slots = self._slots[:-1] if to_host else self._slots[1:]
        tickets = []
        for chosen in np.array_split(np.arange(self.count), min(TRANSFERS, self.count)):
            # (sources, destinations): slots and handles for a store, the reverse for a load
            both = slots[chosen], self._handles[chosen]
            tickets.append(call([CacheTransferUnits(self._pool, *(both if to_host else both[::-1]))]))
        for ticket in tickets:
            if not ticket.wait(_TIMEOUT_S):
                raise TransferError(
                    f"a transfer did not end within {_TIMEOUT_S:g} s; check that the device still answers"
                )
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error


def _device_pool(geometry: Geometry, slots: int, address: int, device: str) -> DevicePool:
    """Return a pool whose tensors follow each other from `address` on."""
    tensors = {}
    for segment in geometry.segments:
        address = -(-address // _ALIGN) * _ALIGN
        tensors[segment.layer, segment.name] = DeviceArray(
            address, (slots, *segment.shape), segment.dtype, device
        )
        address += slots * segment.nbytes
    return DevicePool.from_tensors(geometry, tensors)


def _rows(plan: DevicePlan, bed: Bed, kind: str, direction: Direction) -> Iterator[Row]:
    """Measure one direction of one group of objects."""
    works = [method for method in Method if method not in bed.plain.device.unavailable]
    ways: dict[str, Method | None] = {str(method): method for method in works} | {CHOICE: None}
    sides = [
        Side(_PLAIN, lambda _: bed.plain.move(direction, bed.nbytes)),
        *(Side(name, lambda _, way=way: bed.transfer(direction, way)) for name, way in ways.items()),  # type: ignore[misc]
    ]
    seconds = medians(sides, plan.repeats * (_MORE if bed.nbytes < _SMALL else 1))
    for name in ways:
        figures = {
            "kind": kind, "direction": str(direction), "objects": bed.count,
            "mib": round(bed.nbytes / MIB, 3), "method": name, "gb_s": bed.nbytes / seconds[name] / 1e9,
            "contiguous_gb_s": bed.nbytes / seconds[_PLAIN] / 1e9, "ratio": seconds[_PLAIN] / seconds[name],
        }  # fmt: skip
        yield Row("copy", figures, (kind, bed.count, direction))
