"""Memory of `bench device`: a model's pools on the device and the host, with objects in random places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ConfigError, TransferError
from tiercache.geometry import DTYPE_BITS, Geometry, kv_geometry, state_geometry
from tiercache.models.fields import Fields
from tiercache.models.layer_kinds import LayerKind, every_nth
from tiercache.models.profile import CONFIGS
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer.base import Ticket
from tiercache.transfer.cuda import Calibration, CudaDevice, CudaEngine, Direction, Method
from tiercache.transfer.cuda.copying import CopySet, bus_blocks, layer_groups
from tiercache.transfer.descriptors import Copies, build_descriptors, join_descriptors

PAGE_SIZE: Final = 64
"""Tokens per page."""
_SHIFT: Final = 4099
"""Distance in bytes between the starts of two consecutive fillings in the random bytes.

Each filling of the device memory is a window of the same random bytes:

    random bytes   |0 ..... 4099 ..... 8198 ...
    filling 0      [----------------------)
    filling 1            [----------------------)
"""
_SHIFTS: Final = 16
"""Number of different fillings; the next filling is the first one again."""


_ALIGN: Final = 256
"""Alignment of tensors in bytes, as in allocators of device memory."""
_TIMEOUT_S: Final = 120.0
"""Seconds to wait for one transfer."""


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
class Objects:
    """Numbers of pages and states."""

    pages: int = 0
    states: int = 0

    @property
    def count(self) -> int:
        """Number of pages and states together."""
        return self.pages + self.states

    def nbytes(self, shapes: Shapes) -> int:
        """Return the payload bytes of these objects for a model."""
        return self.pages * shapes.pages.nbytes + self.states * shapes.states.nbytes

    def of(self, pool: PoolName) -> int:
        """Return the number of objects in one pool, KV or MAMBA."""
        return {PoolName.KV: self.pages, PoolName.MAMBA: self.states}[pool]

    def times(self, factor: int) -> Objects:
        """Return both numbers multiplied by `factor`."""
        return Objects(self.pages * factor, self.states * factor)


@dataclass(frozen=True, slots=True)
class Work:
    """Copies, and the groups in which they are queued."""

    copies: Copies
    groups: tuple[slice, ...]


class Mover:
    """Stream of copies, and the resources that the copies need until they are done.

    Thread safety: one thread at a time, with the device current.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._blocks = bus_blocks(device.card.multiprocessors)
        self._resources = CopySet(device)
        self._stream = device.create_stream(urgent=False)

    def move(self, work: Work, methods: Sequence[Method]) -> None:
        """Queue each group of copies by its method, and wait until all copies are done."""
        groups = list(zip(work.groups, methods, strict=True))
        queue = self._resources.queue(work.copies, groups, self._blocks, self._stream)
        for rows, method in groups:
            queue.put(rows, method)
        self._device.synchronize_stream(self._stream)

    def copy(self, source: int, destination: int, nbytes: int) -> None:
        """Make one contiguous copy and wait until it is done."""
        self._device.copy(source, destination, nbytes, self._stream)
        self._device.synchronize_stream(self._stream)

    def settle(self) -> None:
        """Wait for copies that an error or Ctrl-C may have left under way."""
        with suppress(RuntimeError):  # raised by a lost device, on which no copy runs any more
            self._device.synchronize_stream(self._stream)

    def close(self) -> None:
        """Wait until all copies are done, then release the resources and the stream."""
        self.settle()
        with suppress(RuntimeError):  # raised by a lost device, whose error was raised before
            self._resources.destroy()
            self._device.destroy_stream(self._stream)


class Ground:
    """Memory for a benchmark, on the device and on the host.

    There are `nbytes` bytes on the device, and two page-locked areas of about this size on the host. One is
    for contiguous copies. The other has random bytes, with which the device memory is filled. Closing `stack`
    releases all memory. Raises ConfigError if there is not enough memory.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, device: CudaDevice, calibration: Calibration, nbytes: int, stack: ExitStack) -> None:
        self.device = device
        self.calibration = calibration
        try:
            self.address = device.allocate(nbytes)
            stack.callback(_release, device, self.address)
            # Host memory for the contiguous copy, which is the limit for all other copies. It is allocated by
            # the driver, because no other host memory is faster.
            self.plain = device.allocate_host(nbytes)
            self._noise = device.allocate_host(nbytes + _SHIFT * _SHIFTS)
        except RuntimeError as error:
            raise ConfigError(
                f"{nbytes >> 20} MiB of device memory and twice as much host memory are not available"
                f" ({error}); lower --most"
            ) from error
        whole = len(self._noise) // 8 * 8
        self._noise[:whole].view(np.uint64)[:] = np.random.default_rng(0).integers(
            0, 1 << 64, whole // 8, np.uint64
        )
        self.mover = Mover(device)
        stack.callback(self.mover.close)
        self._turn = 0

    def contiguous(self, direction: Direction, nbytes: int) -> None:
        """Make one contiguous copy of `nbytes` bytes, the limit for other copies."""
        ends = self.address, self.plain.ctypes.data
        self.mover.copy(*(ends if direction is Direction.TO_HOST else ends[::-1]), nbytes)

    def fill(self, nbytes: int) -> np.ndarray:
        """Fill the first `nbytes` of the device memory with the next random bytes; return them as uint8."""
        self._turn += 1
        noise = self._noise[self._turn % _SHIFTS * _SHIFT :][:nbytes]
        self.mover.copy(noise.ctypes.data, self.address, nbytes)
        return noise

    def read(self, nbytes: int) -> np.ndarray:
        """Return the first `nbytes` of the device memory, read by one contiguous copy."""
        self.plain[:nbytes] = 0
        self.contiguous(Direction.TO_HOST, nbytes)
        return self.plain[:nbytes]


def _release(device: CudaDevice, address: int) -> None:
    with suppress(RuntimeError):  # raised by a lost device
        device.release(address)


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
    """Pools for `objects` of a model in the memory of `ground`, and an engine that copies between the pools.

    Slots are used in a random order. Object i is stored from slot i of that order and loaded into the next
    slot, so nothing is ever loaded into the first slot:

        order      s0  s1  s2  s3
        store      0   1   2           (object stored from the slot)
        load           0   1   2       (object loaded into the slot)

    Blocks of the arena have the size of a page, as in a worker. The engine page-locks the arena. Closing
    `stack` releases everything.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, ground: Ground, shapes: Shapes, objects: Objects, stack: ExitStack) -> None:
        self.ground, self.shapes, self.objects = ground, shapes, objects
        rng, block_bytes = np.random.default_rng(objects.count), shapes.pages.padded_nbytes
        geometries = [geometry for geometry in (shapes.pages, shapes.states) if objects.of(geometry.pool)]
        blocks = sum(
            objects.of(geometry.pool) * -(-geometry.nbytes // block_bytes) for geometry in geometries
        )
        self._arena = HostArena(blocks * block_bytes, block_bytes)
        stack.callback(self._arena.close)
        self._arena.free(rng.permutation(self._arena.alloc(blocks)))
        self._devices = _device_pools(geometries, objects, ground.address, f"cuda:{ground.device.ordinal}")
        self._hosts = {geometry.pool: HostPool(geometry, self._arena) for geometry in geometries}
        self._slots = {name: rng.permutation(pool.capacity) for name, pool in self._devices.items()}
        self._handles = {name: host.alloc(objects.of(name)) for name, host in self._hosts.items()}
        # Page-lock the arena in one piece. If there were several pieces, a copy that crosses the border of
        # two pieces would have to be cut there.
        engine = CudaEngine(
            self._devices,
            self._hosts,
            device=ground.device,
            calibration=ground.calibration,
            piece_bytes=self._arena.nbytes,
        )
        self.engine = stack.enter_context(engine)
        # A stack closes in reverse order: `settle` waits for all copies, then the engine unlocks the arena.
        stack.callback(ground.mover.settle)

    def work(self, direction: Direction, objects: Objects) -> Work:
        """Return the copies of the first objects of each pool, in the groups that the engine queues.

        `objects` gives the number of objects in each pool. A store is one group. A load has one group for
        each layer, but small layers share a group.
        """
        found = join_descriptors(
            [
                build_descriptors(
                    pool.segments, self._ends(name, direction)[: objects.of(name)],
                    self._hosts[name].blocks(self._handles[name][: objects.of(name)]),
                    self._arena.block_bytes, self._arena.address,
                )
                for name, pool in self._devices.items()
            ]
        )  # fmt: skip
        to_host = direction is Direction.TO_HOST
        copies = found.copies(to_host=to_host)
        return Work(
            copies, (slice(0, len(copies)),) if to_host else tuple(rows for _, rows in layer_groups(found))
        )

    def choice(self, direction: Direction, work: Work) -> list[Method]:
        """Return the method that the calibration chooses for each group of copies."""
        return [self.ground.calibration.choose(direction, work.copies[rows]) for rows in work.groups]

    def units(self, direction: Direction, parts: int = 1) -> list[list[CacheTransferUnits]]:
        """Return all objects, divided into at most `parts` transfers of nearly equal size."""
        pieces: list[list[CacheTransferUnits]] = [[] for _ in range(parts)]
        for name, handles in self._handles.items():
            ends = self._ends(name, direction)
            for piece, chosen in zip(pieces, np.array_split(np.arange(len(handles)), parts), strict=True):
                if len(chosen):
                    # (sources, destinations): slots and handles for a store, the reverse for a load
                    both = (ends[chosen], handles[chosen])
                    piece.append(
                        CacheTransferUnits(name, *(both if direction is Direction.TO_HOST else both[::-1]))
                    )
        return [piece for piece in pieces if piece]

    def transfer(self, direction: Direction, transfers: list[list[CacheTransferUnits]]) -> None:
        """Submit all transfers to the engine and wait until all are done."""
        call: Callable[[list[CacheTransferUnits]], Ticket] = (
            self.engine.store if direction is Direction.TO_HOST else self.engine.load
        )
        finish([call(units) for units in transfers])

    def check(self, what: str, store: Callable[[], object], load: Callable[[], object]) -> None:
        """Raise TransferError unless `load` restores the bytes that `store` took.

        The first slot, into which nothing is loaded, must not change either. The device memory is filled with
        random bytes before the store, and with other random bytes before the load.
        """
        # The end of the last tensor: pools begin at `ground.address`.
        nbytes = max(
            int((p.segments.base.astype(np.int64) + p.capacity * p.segments.stride).max())
            for p in self._devices.values()
        )
        nbytes -= self.ground.address
        stored = self.ground.fill(nbytes)
        store()
        wiped = self.ground.fill(nbytes)
        load()
        found = self.ground.read(nbytes)
        wrong = sum(not same for same in self._compare(stored, wiped, found))
        if wrong:
            raise TransferError(
                f"{what}: {wrong} segments of {self.objects.count} objects of {self.shapes.name} were wrong"
                " after a store and a load, so their speed was not measured; do not use this device for a"
                " cache"
            )

    def _compare(self, stored: np.ndarray, wiped: np.ndarray, found: np.ndarray) -> Iterator[bool]:
        """Yield, for each segment, whether the first slot is unchanged and whether each object is correct.

        The arguments are the device memory before the store, before the load, and after it.
        """
        for name, pool in self._devices.items():
            sources, targets = (self._ends(name, direction).tolist() for direction in Direction)
            untouched = int(self._slots[name][0])
            table = pool.segments
            for base, stride, length in zip(
                table.base.tolist(), table.stride.tolist(), table.length.tolist(), strict=True
            ):
                at_store, before_load, after_load = (
                    _slots(memory, base - self.ground.address, stride, length)
                    for memory in (stored, wiped, found)
                )
                yield np.array_equal(after_load(untouched), before_load(untouched))
                for source, target in zip(sources, targets, strict=True):
                    yield np.array_equal(after_load(target), at_store(source))

    def _ends(self, name: PoolName, direction: Direction) -> np.ndarray:
        slots = self._slots[name]
        return slots[:-1] if direction is Direction.TO_HOST else slots[1:]


def _slots(memory: np.ndarray, first: int, stride: int, length: int) -> Callable[[int], np.ndarray]:
    """Return a function that returns the bytes of a slot of one tensor; all offsets are in bytes."""
    return lambda slot: memory[first + slot * stride :][:length]


def finish(tickets: Sequence[Ticket]) -> None:
    """Wait for all transfers.

    Raises TransferError if a transfer does not end within two minutes. If all transfers end but some have
    failed, raises the error of the first that failed.
    """
    for ticket in tickets:
        if not ticket.wait(_TIMEOUT_S):
            raise TransferError(
                f"a transfer did not end within {_TIMEOUT_S:g} s; check that the device still answers"
            )
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error


def _device_pools(
    geometries: list[Geometry], objects: Objects, address: int, device: str
) -> dict[PoolName, DevicePool]:
    """Return pools with one slot more than objects. Their tensors follow each other from `address` on."""
    pools = {}
    for geometry in geometries:
        slots, tensors = objects.of(geometry.pool) + 1, {}
        for segment in geometry.segments:
            address = -(-address // _ALIGN) * _ALIGN
            tensors[segment.layer, segment.name] = DeviceArray(
                address, (slots, *segment.shape), segment.dtype, device
            )
            address += slots * segment.nbytes
        pools[geometry.pool] = DevicePool.from_tensors(geometry, tensors)
    return pools
