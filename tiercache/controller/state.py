"""State shared by the parts of a controller: the index, the pools, the store, the copy engine, and the queue of events."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Final, Protocol

import numpy as np

from tiercache.controller.io_threads import IoThreads
from tiercache.controller.store_calls import StoreCalls
from tiercache.core import Locations, Mask, PoolName, Tier
from tiercache.errors import ClosedError, ConfigError, PoolFullError
from tiercache.index import CheckpointRules, Eviction, HybridIndex, Pin
from tiercache.metrics import Metrics
from tiercache.policy import ModelProfile
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.storage.hybrid import HybridStorage
from tiercache.transfer import TransferEngine

_log = logging.getLogger(__name__)

_LEAST_DEADLINE: Final = 1.0
"""Least seconds before a store call counts as hung, even where restores wait for less: a call that is merely slow is not hung."""
_LOOK_S: Final = 0.001
"""Seconds between two checks of the fences, which send no event when they are passed."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Limits and settings of a controller. Times are in seconds; "near" means on the device or the host.

    `restore_deadline`: how long an admission may wait for storage before it goes on with what is near; `max_queries`: storage queries in
    flight, beyond which a lookup does not ask; `query_threads`, `read_threads`, `write_threads`: threads that call the store, two for
    queries so that a slow one does not hold up every restore; `storage_deadline`: how long one store call may take before it counts as
    hung and the store is left alone for a while (0: as long as `restore_deadline`, and at least one second); `in_flight_share`: share of
    the host's blocks that fetches may hold at a time, and that writes may hold likewise; `belief_checks`: about how many of the objects
    believed to be stored the store is asked about at a time, in turn, up to 20 times a second (0: none); `write_retries`: how often objects
    that storage did not take are offered to it again, first after 0.1 s and then after four times the last pause; `close_deadline`: how
    long `close` may take to drain.
    `policy`: name of the eviction policy (see `policy_named`); `refresh_path`: whether a hit refreshes its whole path in the index instead
    of its last node; `checkpoints`: which states are asked for; `seed`: seed of the index's random draws.
    `min_fetch_tokens`: least tokens that storage must restore beyond what is near for a fetch to be worth its wait; fewer are computed
    (reason `not_worth`).
    `load_flops_per_byte`: FLOPs that the device computes while one byte comes up from the host (250 TFLOP/s and 50 GB/s: 5,000). A state
    that is cheaper to compute again than to load is not sent down. With 0 every state is sent down, and the policy weighs loads by 5,000.
    """

    restore_deadline: float = 5.0
    storage_deadline: float = 0.0
    in_flight_share: float = 0.25
    belief_checks: int = 512
    write_retries: int = 3
    min_fetch_tokens: int = 0
    close_deadline: float = 10.0
    max_queries: int = 64
    query_threads: int = 2
    read_threads: int = 2
    write_threads: int = 1
    refresh_path: bool = False
    policy: str = "hvd"
    checkpoints: CheckpointRules = field(default_factory=CheckpointRules)
    seed: int = 0
    load_flops_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_flops_per_byte < float("inf"):
            raise ConfigError(f"load_flops_per_byte={self.load_flops_per_byte} is not possible; use a finite number from 0")
        if not 0.0 <= self.storage_deadline < float("inf"):
            raise ConfigError(f"storage_deadline={self.storage_deadline} is not possible; use a finite number of seconds from 0")
        if not 0.0 < self.in_flight_share <= 1.0:
            raise ConfigError(f"in_flight_share={self.in_flight_share} is not possible; use a share above 0, and 1 at most")
        if self.belief_checks < 0:
            raise ConfigError(f"belief_checks={self.belief_checks} is not possible; use a number of objects from 0")
        if self.min_fetch_tokens < 0:
            raise ConfigError(f"min_fetch_tokens={self.min_fetch_tokens} is not possible; use a number of tokens from 0")
        if not 0 <= self.write_retries <= 8:
            raise ConfigError(f"write_retries={self.write_retries} is not possible; use 0 to 8")
        for name in ("query_threads", "read_threads", "write_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} would leave storage unserved; use 1 or more")


class Fence(Protocol):
    """A point in the device's work, such as a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> object:
        """Return once the device has passed it."""


class InFlight(Protocol):
    """An operation or a question to the store that is under way. It holds its own pins and reservations until it has landed."""

    kind: str
    done: bool

    @property
    def pins(self) -> Sequence[Pin]:
        """Pins that it holds in the index."""


@dataclass(frozen=True, slots=True)
class Retired:
    """Slots and pins that only device work queued before `fence` still uses."""

    fence: Fence
    slots: Mapping[PoolName, Locations]
    pins: Sequence[Pin]


class Share:
    """Budget of host blocks that operations of one direction may hold at a time.

    An operation that hangs in the store keeps its blocks.

    Thread safety: the owner's thread.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held = 0

    @property
    def left(self) -> int:
        """Number of blocks that may still be taken."""
        return self.blocks - self.held

    def take(self, blocks: int) -> None:
        """Hold `blocks` more blocks, at most `left`."""
        assert blocks <= self.left, "more is held than may be"
        self.held += blocks

    def give(self, blocks: int) -> None:
        """Give `blocks` held blocks back."""
        self.held -= blocks
        assert self.held >= 0, "more is given back than was held"


@dataclass
class ControllerState:
    """The shared state of one controller.

    Thread safety: the owner's thread only, except `post`, which any thread may call.
    """

    index: HybridIndex
    device: Mapping[PoolName, DevicePool]
    host: Mapping[PoolName, HostPool]
    arena: BlockArena
    engine: TransferEngine
    storage: HybridStorage | None
    metrics: Metrics
    options: ControllerOptions
    page_size: int
    namespace: bytes
    profile: ModelProfile
    clock: Callable[[], float] = time.monotonic
    threads: Callable[[str, int], IoThreads] = IoThreads
    operations: dict[int, InFlight] = field(default_factory=dict)
    unstored: int = 0
    """Number of objects given up on their way to storage since the last `flush` that reported them."""
    stored: int = 0
    """Number of objects that storage has taken so far."""
    on_landed: Callable[[], None] = lambda: None
    """Callback on the owner's thread, after operations have landed."""
    _events: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _retired: list[Retired] = field(default_factory=list)
    _ahead: dict[int, Fence] = field(default_factory=dict)
    _last_fence: int = 0
    _doubted: bool = False
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.queries = self._calls("query", self.options.query_threads)
        self.reads = self._calls("fetch", self.options.read_threads)
        self.writes = self._calls("write", self.options.write_threads)
        self.widest = sum(pool.blocks_per_object for pool in self.host.values())
        share = max(int(self.arena.blocks * self.options.in_flight_share), self.widest)
        self._landed = False
        self.fetching, self.writing, self.copying = Share(share), Share(share), Share(share)
        # Number of host objects, by pool, that a store call which was given up may still write to; and the writes that were given up
        # while the store may still read their objects.
        self.quarantined: Counter[PoolName] = Counter()
        self.stranded: dict[int, InFlight] = {}
        self.arrived = threading.Event()
        # For each device slot and host object, the operation that is filling it: its key in `operations`, 0 for none.
        sizes = {Tier.DEVICE: {p: pool.capacity for p, pool in self.device.items()}, Tier.HOST: dict.fromkeys(self.host, self.arena.blocks)}
        self._claims = {(tier, p): np.zeros(n, np.int64) for tier, pools in sizes.items() for p, n in pools.items()}
        # For each device slot, the number of the last fence before which it was used; 0 for none.
        self._used = {p: np.zeros(pool.capacity, np.int64) for p, pool in self.device.items()}
        # For each host object, whether a storage write is reading it, so that a second commit does not write it again.
        self.storing: dict[PoolName, Mask] = {p: np.zeros(self.arena.blocks, np.bool_) for p in self.host}

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """Names of all pools, page pools first."""
        return (*self.index.page_pools, *self.index.state_pools)

    def post(self, event: Callable[[], None]) -> None:
        """Hand an event to the owner's thread, which applies it at its next `drain`. Any thread may call this."""
        self._events.put(event)
        self.arrived.set()

    @property
    def layers(self) -> int:
        """Number of layers up to the last that has bytes in any pool."""
        return 1 + max(segment.layer for pool in self.device.values() for segment in pool.geometry.segments)

    @property
    def under_way(self) -> bool:
        """Whether an operation or a fence will free slots or pins without a further call by the engine."""
        return bool(self.operations or self._retired)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the state."""
        return os.getpid() != self._pid

    def await_event(self, timeout: float) -> None:
        """Block until an event comes in, for at most `timeout` seconds. While fences are pending, wait only briefly: they send no event."""
        if self._due:
            timeout = min(timeout, max(0.0, min(due for due, _ in self._due) - self.clock()))
        self.arrived.wait(min(timeout, _LOOK_S) if self._retired else timeout)

    def drain(self) -> None:
        """Apply every event that has come in, and free what was retired behind fences that the device has passed by now.

        Raises ClosedError in a forked process: it has none of the threads, and memory and slots belong to the parent.
        """
        if self.is_forked:  # checked before any lock is taken: another thread of the parent may have held it at the fork
            raise ClosedError(f"this controller belongs to process {self._pid}, from which this one was forked; make one here")
        self.arrived.clear()
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            event()
        for calls in (self.queries, self.reads, self.writes):
            calls.watch()
        if self._due:
            self._run_due()
        if self._retired:
            self._free_retired()
        if self._landed:
            self._landed = False
            self.on_landed()

    def _calls(self, kind: str, threads: int) -> StoreCalls:
        deadline = self.options.storage_deadline or max(self.options.restore_deadline, _LEAST_DEADLINE)
        hung = partial(self.metrics.increment, "storage_hangs_total", kind)
        return StoreCalls(kind, self.threads({"fetch": "read"}.get(kind, kind), threads), self.post, self.clock, deadline, hung)

    def blocks_of(self, pool: PoolName, objects: int) -> int:
        """Return the number of host blocks that `objects` objects of `pool` take."""
        return objects * self.host[pool].blocks_per_object

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Apply an event on the owner's thread, at the first `drain` after `seconds`."""
        self._due.append((self.clock() + seconds, event))

    def give_up(self, pool: PoolName, reason: str, count: int) -> None:
        """Count objects that will not be written through until they are committed again, and report them to `flush`."""
        self.metrics.increment("write_through_skipped_total", pool, reason, by=count)
        if self.storage is not None:
            self.unstored += count

    def begin(self, operation: InFlight) -> None:
        """Register `operation` as under way, so that `flush` and `close` wait for it."""
        self.operations[id(operation)] = operation
        self.metrics.set("in_flight_operations", operation.kind, to=self.in_flight(operation.kind))

    def end(self, operation: InFlight) -> None:
        """Remove `operation`, which has landed."""
        self._landed = True
        if self.stranded.pop(id(operation), None) is None:
            self.strand(operation, keep=False)

    def strand(self, operation: InFlight, *, keep: bool = True) -> None:
        """Stop waiting for `operation`. With `keep`, it is still counted as stranded and keeps its pins and blocks until it ends."""
        del self.operations[id(operation)]
        if keep:
            self.stranded[id(operation)] = operation
        self._landed = True
        self.metrics.set("in_flight_operations", operation.kind, to=self.in_flight(operation.kind))

    def in_flight(self, kind: str) -> int:
        """Return how many operations of `kind` are under way."""
        return sum(o.kind == kind for o in self.operations.values())

    def claim(self, operation: InFlight, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """Note that `operation` is filling `locations`."""
        self._claims[tier, pool][locations] = id(operation)

    def unclaim(self, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """Note that no operation is filling `locations` any more. Call it before they are freed: their next owner claims them again."""
        self._claims[tier, pool][locations] = 0

    def claimants(self, tier: Tier, pool: PoolName, locations: Locations) -> set[InFlight]:
        """Return the operations that are filling `locations` (plain locations, not encoded as pending)."""
        return {self.operations[i] for i in np.unique(self._claims[tier, pool][locations]).tolist() if i}

    def take_device(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Allocate device slots for every pool of `need`, evicting where there are too few.

        Raises PoolFullError, with no change, if that is not enough.
        """
        short = {p: n - self.device[p].available for p, n in need.items() if n > self.device[p].available}
        if short:
            self._give_back(self.index.evict_device(short), Tier.DEVICE)
        return {p: self.device[p].alloc(n) for p, n in need.items()}

    def take_host(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Allocate host objects for every pool of `need` out of the shared arena, evicting where needed.

        Raises PoolFullError if that is not enough. Nothing is taken then, and nothing evicted, except where evicted blocks turned out to
        be withheld by an embargo.
        """
        blocks = sum(n * self.host[p].blocks_per_object for p, n in need.items())
        if blocks > self.arena.blocks:
            raise PoolFullError(f"{blocks} blocks are needed at once, and the host arena has {self.arena.blocks}; give it more bytes")
        if blocks > self.arena.available:
            cost = {p: pool.blocks_per_object for p, pool in self.host.items()}
            self._give_back(self.index.evict_host(blocks - self.arena.available, cost), Tier.HOST)
            # An embargo may withhold what was evicted. Checked here, since slots allocated for one pool would leak if the next one failed.
            if blocks > self.arena.available:
                raise PoolFullError(
                    f"{blocks} blocks are needed, {self.arena.available} are free and {self.arena.withheld} under an embargo"
                )
        return {p: self.host[p].alloc(n) for p, n in need.items()}

    def require_host(self, blocks: int) -> None:
        """Raise PoolFullError unless the host could give `blocks` blocks by evicting everything that is not in use."""
        evictable = sum(self.blocks_of(pool, count) for pool, count in self.index.evictable(Tier.HOST).items())
        if blocks > self.arena.available + evictable:
            raise PoolFullError(f"{blocks} blocks are needed, {self.arena.available} are free and {evictable} can be evicted")

    def evict_all(self, tier: Tier) -> None:
        """Free every object of `tier` (device or host) that is not pinned."""
        evictable = self.index.evictable(tier)
        if tier is Tier.DEVICE:
            self._give_back(self.index.evict_device(evictable), tier)
        else:
            cost = {p: pool.blocks_per_object for p, pool in self.host.items()}
            self._give_back(self.index.evict_host(sum(n * cost[p] for p, n in evictable.items()), cost), tier)

    def free_device(self, pool: PoolName, slots: Locations) -> None:
        """Give device slots back to their pool."""
        if len(slots):
            self.device[pool].free(slots)

    def note_fence(self, fence: Fence | None, slots: Iterable[tuple[PoolName, Locations | int]]) -> None:
        """Note that device work before `fence` may still use `slots`, which the index may give to other requests from now on."""
        self._ahead = {number: ahead for number, ahead in self._ahead.items() if not self._has_passed(ahead)}
        if fence is None or self._has_passed(fence):
            return
        number = self._last_fence = self._last_fence + 1
        self._ahead[number] = fence
        for pool, mine in slots:
            self._used[pool][mine] = number

    def fences(self, slots: Iterable[tuple[PoolName, Locations]]) -> list[Fence]:
        """Return the fences that a copy from or into these device slots must wait for: earlier work may still be using them."""
        if not self._ahead:
            return []
        newest = max((int(self._used[pool][mine].max(initial=0)) for pool, mine in slots), default=0)
        return [fence for number, fence in self._ahead.items() if number <= newest and not self._has_passed(fence)]

    def _has_passed(self, fence: Fence) -> bool:
        """Whether the device is known to have passed the fence. If the fence cannot be queried, False: its slots stay out of use."""
        try:
            return fence.query()
        except Exception as error:  # noqa: BLE001  a driver may raise anything, as after the loss of its device
            if not self._doubted:
                _log.warning("a fence cannot be asked, what is behind it stays out of use: %s", error)
            self._doubted = True
            return False

    def retire(self, slots: Mapping[PoolName, Locations], fence: Fence | None, pins: Sequence[Pin] = ()) -> None:
        """Free slots and release pins once the device has passed `fence` (None: at once)."""
        if fence is not None and not self._has_passed(fence):
            self._retired.append(Retired(fence, slots, pins))
            return
        for pool, mine in slots.items():
            self.free_device(pool, mine)
        for pin in pins:
            pin.release()
        self._landed = True  # writes that wait for room can go on now, or are given up

    def free_host(self, pool: PoolName, handles: Locations) -> None:
        """Give host objects back to the arena."""
        if len(handles):
            self.host[pool].free(handles)

    def _run_due(self) -> None:
        now = self.clock()
        waiting, self._due = self._due, [entry for entry in self._due if entry[0] > now]
        for due, event in waiting:
            if due <= now:
                event()

    def _free_retired(self) -> None:
        passed = [self._has_passed(r.fence) for r in self._retired]
        waiting, self._retired = self._retired, [r for r, free in zip(self._retired, passed, strict=True) if not free]
        for retired in compress(waiting, passed):
            self.retire(retired.slots, None, retired.pins)

    def _give_back(self, eviction: Eviction, tier: Tier) -> None:
        free = self.free_device if tier is Tier.DEVICE else self.free_host
        for pool, locations in eviction.freed.items():
            free(pool, locations)
        self.metrics.increment("evicted_objects_total", str(tier), "demoted", by=eviction.demoted)
        self.metrics.increment("evicted_objects_total", str(tier), "lost", by=eviction.lost)

    def check_integrity(self, private: Sequence[Mapping[PoolName, Locations]], pins: Sequence[Pin]) -> None:
        """Assert that every slot, block and pin in use has exactly one owner.

        The owners are the index, a request (`private`, `pins`), an operation and a fence. Raises AssertionError otherwise.
        """
        self.index.check_integrity()
        operations = [*self.operations.values(), *self.stranded.values()]
        assert not any(o.done for o in operations), "an operation that has landed is still counted"
        held_by = [*pins, *(pin for r in self._retired for pin in r.pins), *(pin for o in operations for pin in o.pins)]
        assert self.index.holds_only(held_by), "a pin belongs to nobody"
        claimed = np.unique(np.concatenate([claims.ravel() for claims in self._claims.values()])).tolist()
        assert set(claimed) <= {0, *self.operations}, "a slot or a host object waits for an operation that is over"
        if not any(o.kind == "write" for o in operations):
            assert not self.writing.held + self.copying.held, "blocks are held for a write that is over"
            assert not any(storing.any() for storing in self.storing.values()), "a host object counts as being stored, and is not"
        quarantined = sum(self.blocks_of(pool, objects) for pool, objects in self.quarantined.items())
        if not self.in_flight("fetch"):
            assert self.fetching.held == quarantined, "blocks are held for a fetch that is over"
        for name, pool in self.device.items():
            retired = [r.slots[name] for r in self._retired if name in r.slots]
            held = np.concatenate([self.index.owned(Tier.DEVICE, name), *retired, *(slots[name] for slots in private)])
            assert len(np.unique(held)) == len(held), f"a device slot of pool {name} is held twice"
            assert len(held) == pool.capacity - pool.available, (
                f"pool {name}: {len(held)} slots are held, {pool.capacity - pool.available} taken"
            )
        blocks = quarantined + sum((len(self.index.owned(Tier.HOST, p)) * pool.blocks_per_object) for p, pool in self.host.items())
        taken = self.arena.blocks - self.arena.available - self.arena.withheld
        assert blocks == taken, f"{blocks} blocks are held, {taken} taken"
