"""`tiercache bench device`: stores and loads between a CUDA device and the host, beside one contiguous copy.

Stores and loads are measured by each method, by the method that the engine chooses, and through the
transfer engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from tiercache.config import parse_size
from tiercache.core import CacheTransferUnits
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.geometry import DTYPE_BITS, Geometry, kv_geometry, state_geometry
from tiercache.models.architecture import LayerKind, every_nth
from tiercache.models.fields import Fields
from tiercache.models.profile import CONFIGS
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer.base import Ticket
from tiercache.transfer.cuda import CudaDevice, CudaEngine, Method
from tiercache.transfer.cuda.copying import CopySet, Pace, best_method, layer_groups
from tiercache.transfer.cuda.self_test import self_test
from tiercache.transfer.descriptors import Copies, build_descriptors
from tiercache_lab.bench.rows import MIB, Row
from tiercache_lab.bench.timing import Side, medians

MODEL: Final = "qwen3-next-80b-a3b"
"""Model whose pages and states are copied."""
CHOICE: Final = "choice"
"""Way that stands for the methods that the engine chooses."""
COUNTS: Final = (1, 4, 16, 64, 256)
"""Numbers of objects in a group."""
PAGE_SIZE: Final = 64
"""Tokens per page."""
TRANSFERS: Final = 4
"""Number of transfers in the engine at once.

The engine queues three transfers in its stream; the fourth waits in the engine.
"""
_SMALL: Final = 64 * MIB
"""Size in bytes below which a group counts as small. Its copies take about 1 ms or less."""
_MORE: Final = 5
"""Factor by which the number of runs is multiplied for a small group."""
_PLAIN: Final = "contiguous"
_ENGINE: Final = "engine"
_ALIGN: Final = 256
"""Alignment of tensors in bytes, as in allocators of device memory."""
_TIMEOUT_S: Final = 120.0
"""Seconds to wait for one transfer."""
Say = Callable[[str], None]
"""Function that shows progress. It is called with a description of each step."""


class Direction(StrEnum):
    """Direction of a copy across the bus."""

    TO_HOST = "device_to_host"
    TO_DEVICE = "host_to_device"


@dataclass(frozen=True, slots=True)
class Shapes:
    """Geometries of one model."""

    name: str
    pages: Geometry
    states: Geometry


def shapes_of(name: str) -> Shapes:
    """Return the geometries of pages and states of a model with attention in every n-th layer.

    A page has 64 tokens. For each attention layer it has K and V of shape `[64, heads, dim]` in bfloat16. A
    state has two tensors for each recurrent layer, as in engines. `conv` has the past inputs of the
    convolution over q, k and v, `[channels, kernel - 1]` in bfloat16. `ssm` has the recurrent state,
    `[value heads, key dim, value dim]` in float32.
    """
    config = CONFIGS[name]
    fields = Fields(config.get("text_config", config), name)
    kinds = every_nth(fields)
    full = [n for n, kind in enumerate(kinds) if kind is LayerKind.FULL]
    key_heads, heads, key_dim, dim, kernel = (
        fields.count(f"linear_{part}")
        for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    channels = 2 * key_heads * key_dim + heads * dim
    parts = (("conv", (channels, kernel - 1), "bfloat16"), ("ssm", (heads, key_dim, dim), "float32"))
    states = [(n, *part) for n, kind in enumerate(kinds) if kind is LayerKind.RECURRENT for part in parts]
    return Shapes(
        name,
        kv_geometry(
            full, fields.count("num_key_value_heads"), fields.count("head_dim"), "bfloat16", PAGE_SIZE
        ),
        state_geometry(states, PAGE_SIZE),
    )


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Plan of one run of `bench device`."""

    shapes: Shapes
    max_bytes: int
    """Maximum payload bytes of a group."""
    repeats: int
    """Number of runs for each median. One more run comes first and is not counted."""
    counts: tuple[int, ...] = COUNTS

    def groups(self) -> Iterator[tuple[str, Geometry, int]]:
        """Yield the groups: pages and states, with all counts that fit into `max_bytes`."""
        for count in self.counts:
            for kind, geometry in (("pages", self.shapes.pages), ("states", self.shapes.states)):
                if count * geometry.nbytes <= self.max_bytes:
                    yield kind, geometry, count

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest group needs on the device, with one free slot."""
        spare = max(one.nbytes for one in (self.shapes.pages, self.shapes.states))
        return self.max_bytes + spare + MIB  # for the alignment of tensors


def device_plan(most: str, repeats: int) -> DevicePlan:
    """Return the plan that the options describe; raises ConfigError if it cannot be carried out."""
    shapes = shapes_of(MODEL)
    try:
        nbytes = parse_size(most.strip())
    except ConfigError as error:
        raise ConfigError(f"--most: {error}") from error
    if nbytes < shapes.pages.nbytes:
        raise ConfigError(
            f"--most {nbytes} does not hold one page of {MODEL}; give at least {shapes.pages.nbytes}"
        )
    return DevicePlan(shapes, nbytes, repeats)


def footer(plan: DevicePlan, device: CudaDevice) -> list[str]:
    """Return the sentences that explain the figures."""
    return [
        (
            f"{device.card}. Medians of at least {plan.repeats} interleaved runs; objects in random slots and"
            " blocks."
        ),
        (
            "gb_s: all copies in one stream, from the start of queuing to the end of the last copy. A load"
            " queues its copies layer by layer. contiguous_gb_s: one contiguous copy of the same size, with"
            " host memory that the driver page-locked. engine_gb_s: through the transfer engine, with"
            f" the objects in {TRANSFERS} transfers at once."
        ),
        *(f"No copies by {method}: {reason}." for method, reason in device.unavailable.items()),
    ]


def run(plan: DevicePlan, device: CudaDevice, say: Say) -> Generator[Row]:
    """Yield every row as soon as it is known.

    A method that fails the engine's self-test, which compares all bytes, is left out. Closing the generator
    releases everything on the device. Raises TransferError if the driver fails, and ConfigError if this
    device cannot carry out the plan.
    """
    try:
        with device.current(), ExitStack() as stack:
            yield from _run(plan, device, say, stack)
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"{device.card} failed: {error}") from error


def _run(plan: DevicePlan, device: CudaDevice, say: Say, stack: ExitStack) -> Generator[Row]:
    say("trying each method")
    self_test(device)
    methods = [method for method in Method if method not in device.unavailable]
    ground = Ground(device, plan.device_bytes, stack)
    for kind, geometry, count in plan.groups():
        with ExitStack() as group:
            bed = Bed(ground, geometry, count, plan.shapes.pages.padded_nbytes, group)
            for direction in Direction:
                say(f"{count} {kind}: {direction.replace('_', ' ')}")
                yield from _rows(plan, bed, kind, direction, methods)


class Ground:
    """Memory for a benchmark on the device and on the host, and the stream of its copies.

    There are `nbytes` bytes on the device, and as many page-locked on the host, for contiguous copies.
    Closing `stack` releases all memory. Raises ConfigError if there is not enough memory.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        try:
            self.address = device.allocate(nbytes)
            stack.callback(self._release)
            # Host memory for the contiguous copy, which is the limit for all other copies. It is allocated by
            # the driver, because no other host memory is faster.
            self.plain = device.allocate_host(nbytes)
        except RuntimeError as error:
            raise ConfigError(
                f"{nbytes >> 20} MiB of device memory and as much host memory are not available"
                f" ({error}); lower --most"
            ) from error
        self._stream = device.create_stream(urgent=False)
        self._pace = Pace(device, self._stream)
        self._resources = CopySet(device, self._pace)
        stack.callback(self._close_stream)

    def move(self, work: Work, methods: Sequence[Method]) -> None:
        """Queue each group of copies by its method, and wait until all copies are done."""
        self._resources.begin_transfer(work.copies, methods)
        for rows, method in zip(work.groups, methods, strict=True):
            self._resources.put(rows, method)
        self.device.synchronize_stream(self._stream)

    def contiguous(self, direction: Direction, nbytes: int) -> None:
        """Make one contiguous copy of `nbytes` bytes, the limit for other copies."""
        ends = self.address, self.plain.ctypes.data
        source, destination = ends if direction is Direction.TO_HOST else ends[::-1]
        self.device.copy(source, destination, nbytes, self._stream)
        self.device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for copies that an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # raised by a lost device, on which no copy runs any more
            self.device.synchronize_stream(self._stream)

    def _close_stream(self) -> None:
        self.settle()
        with suppress(RuntimeError):  # raised by a lost device, whose error was raised before
            self._resources.destroy()
            self._pace.destroy()
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


@dataclass(frozen=True, slots=True)
class Work:
    """Copies, and the groups in which they are queued."""

    copies: Copies
    groups: tuple[slice, ...]


class Bed:
    """Pools for `count` objects of a geometry in the memory of `ground`, and an engine that copies between.

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
        self, ground: Ground, geometry: Geometry, count: int, block_bytes: int, stack: ExitStack
    ) -> None:
        self.ground, self.count = ground, count
        rng, pool = np.random.default_rng(count), geometry.pool
        blocks = count * -(-geometry.nbytes // block_bytes)
        self._arena = HostArena(blocks * block_bytes, block_bytes)
        stack.callback(self._arena.close)
        self._arena.free(rng.permutation(self._arena.alloc(blocks)))
        self._device = _device_pool(geometry, count + 1, ground.address, f"cuda:{ground.device.ordinal}")
        self._host = HostPool(geometry, self._arena)
        self._slots = rng.permutation(self._device.capacity)
        self._handles = self._host.alloc(count)
        self._pool = pool
        # Page-lock the arena in one piece. If there were several pieces, a copy that crosses the border of
        # two pieces would have to be cut there.
        self._engine = stack.enter_context(
            CudaEngine(
                {pool: self._device}, {pool: self._host}, device=ground.device,
                piece_bytes=self._arena.nbytes,
            )
        )  # fmt: skip
        # A stack closes in reverse order: `settle` waits for all copies, then the engine unlocks the arena.
        stack.callback(ground.settle)

    def work(self, direction: Direction) -> Work:
        """Return all copies in the groups that the engine queues.

        A store is one group. A load has one group for each layer, but small layers share a group.
        """
        found = build_descriptors(
            self._device.segments, self._ends(direction), self._host.blocks(self._handles),
            self._arena.block_bytes, self._arena.address,
        )  # fmt: skip
        to_host = direction is Direction.TO_HOST
        copies = found.copies(to_host=to_host)
        groups = (slice(0, len(copies)),) if to_host else tuple(rows for _, rows in layer_groups(found))
        return Work(copies, groups)

    def units(self, direction: Direction) -> list[list[CacheTransferUnits]]:
        """Return all objects, divided into at most `TRANSFERS` transfers of nearly equal size."""
        ends, pieces = self._ends(direction), []
        for chosen in np.array_split(np.arange(self.count), min(TRANSFERS, self.count)):
            # (sources, destinations): slots and handles for a store, the reverse for a load
            both = (ends[chosen], self._handles[chosen])
            pair = both if direction is Direction.TO_HOST else both[::-1]
            pieces.append([CacheTransferUnits(self._pool, *pair)])
        return pieces

    def transfer(self, direction: Direction, transfers: list[list[CacheTransferUnits]]) -> None:
        """Submit all transfers to the engine and wait until all are done.

        Raises TransferError if a transfer does not end within two minutes, or the error of one that failed.
        """
        call: Callable[[list[CacheTransferUnits]], Ticket] = (
            self._engine.store if direction is Direction.TO_HOST else self._engine.load
        )
        tickets = [call(units) for units in transfers]
        for ticket in tickets:
            if not ticket.wait(_TIMEOUT_S):
                raise TransferError(
                    f"a transfer did not end within {_TIMEOUT_S:g} s; check that the device still answers"
                )
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def _ends(self, direction: Direction) -> np.ndarray:
        return self._slots[:-1] if direction is Direction.TO_HOST else self._slots[1:]


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


def _rows(
    plan: DevicePlan, bed: Bed, kind: str, direction: Direction, methods: Sequence[Method]
) -> Iterator[Row]:
    """Measure one direction of one group of objects."""
    ground, work = bed.ground, bed.work(direction)
    nbytes = work.copies.nbytes
    chosen = [best_method(ground.device, work.copies[rows]) for rows in work.groups]
    transfers = bed.units(direction)
    ways = {str(method): [method] * len(work.groups) for method in methods} | {CHOICE: chosen}
    sides = [
        Side(_PLAIN, lambda _: ground.contiguous(direction, nbytes)),
        Side(_ENGINE, lambda _: bed.transfer(direction, transfers)),
        *(Side(name, lambda _, way=way: ground.move(work, way)) for name, way in ways.items()),  # type: ignore[misc]
    ]
    seconds = medians(sides, plan.repeats * (_MORE if nbytes < _SMALL else 1))
    limit = nbytes / seconds[_PLAIN]
    for name in ways:
        is_choice, speed = name == CHOICE, nbytes / seconds[name]
        figures = {
            "kind": kind, "direction": str(direction), "objects": bed.count,
            "mib": round(nbytes / MIB, 3), "copies": len(work.copies), "method": name,
            "chosen": " + ".join(map(str, dict.fromkeys(chosen))) if is_choice else None,
            "gb_s": speed / 1e9, "contiguous_gb_s": limit / 1e9, "ratio": speed / limit,
            "engine_gb_s": nbytes / seconds[_ENGINE] / 1e9 if is_choice else None,
            "transfers": len(transfers) if is_choice else None,
        }  # fmt: skip
        yield Row("copy", figures, (kind, bed.count, direction))
