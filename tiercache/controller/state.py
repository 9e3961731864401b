"""What the parts of a controller share: the index, the pools, the store, the engine that copies, and the queue of what has happened."""

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
"""Seconds that a call of the store may take at least, however short restores may wait: calls that are merely slow are not hung."""
_LOOK_S: Final = 0.001
"""Seconds between two looks at fences."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Bounds of a controller. Times in seconds.

    `restore_deadline`: how long an admission may wait for storage before it goes on with what is near; `max_queries`: storage queries in
    flight, beyond which a lookup does not ask; `query_threads`, `read_threads`, `write_threads`: threads on the store, two for queries so
    that a slow one does not hold up every restore. `storage_deadline`: how long one call of the store may take before it counts as hung and
    the store is left alone for a while (0: as long as `restore_deadline`, and a second at least); `in_flight_share`: of the host's blocks,
    how many may be behind fetches, and how many behind writes, at a time; `belief_checks`: about how many objects that are believed to be
    stored the store is asked for at a time, in turn, up to 20 times a second (0: none); `write_retries`: how often what storage did not
    take is offered to it again, after 0.1 s at first and then after four times the last pause. `policy`: what is evicted first (see
    `policy_named`); `checkpoints`: which states are asked for; `seed`: of what the index draws at random.
    `min_fetch_tokens`: what storage must restore beyond what is near for a fetch to be worth its wait; less is computed (`not_worth`).
    `load_flops_per_byte`: what the device computes while one byte comes up from the host (250 TFLOP/s and 50 GB/s: 5,000). A state that is
    cheaper to compute again than to load is not sent down; 0 sends every state down, and lets the policy weigh by those 5,000.
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
        """Has the device passed it?"""

    def synchronize(self) -> object:
        """Return once the device has passed it."""


class InFlight(Protocol):
    """Something under way between two tiers; it holds its own pins and reservations until it has landed."""

    kind: str
    done: bool

    @property
    def pins(self) -> Sequence[Pin]:
        """What it holds in the index."""


@dataclass(frozen=True, slots=True)
class Retired:
    """Slots and pins that nobody uses any more, but for device work that is queued before `fence`."""

    fence: Fence
    slots: Mapping[PoolName, Locations]
    pins: Sequence[Pin]


class Share:
    """The host blocks that operations of one direction may hold at a time.

    What hangs in the store keeps its part. Thread safety: the owner's thread.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held = 0

    @property
    def left(self) -> int:
        """Blocks that may still be taken."""
        return self.blocks - self.held

    def take(self, blocks: int) -> None:
        """Hold so many of what is left."""
        assert blocks <= self.left, "more is held than may be"
        self.held += blocks

    def give(self, blocks: int) -> None:
        """Hold so many no longer."""
        self.held -= blocks
        assert self.held >= 0, "more is given back than was held"


@dataclass
class ControllerState:
    """The shared state of one controller. Thread safety: the owner's thread only, except `post`, which any thread may call."""

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
    """Objects that were to go to storage and did not, since somebody asked."""
    stored: int = 0
    """Objects that storage took so far."""
    on_landed: Callable[[], None] = lambda: None
    """Called on the owner's thread when operations have landed."""
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
        # Host objects that a call of the store may still write to, though nobody waits for it any more; and pins of what one still reads.
        self.quarantined: Counter[PoolName] = Counter()
        self.stranded: dict[int, InFlight] = {}
        self.arrived = threading.Event()
        # Which operation is filling a slot or a host object: its key in `operations`, 0 for none.
        sizes = {Tier.DEVICE: {p: pool.capacity for p, pool in self.device.items()}, Tier.HOST: dict.fromkeys(self.host, self.arena.blocks)}
        self._claims = {(tier, p): np.zeros(n, np.int64) for tier, pools in sizes.items() for p, n in pools.items()}
        # By device slot, the number of the last fence before which it was used.
        self._used = {p: np.zeros(pool.capacity, np.int64) for p, pool in self.device.items()}
        # Which host objects a storage write is reading, so that a second commit does not write them again.
        self.storing: dict[PoolName, Mask] = {p: np.zeros(self.arena.blocks, np.bool_) for p in self.host}

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """Every cache kind, page pools first."""
        return (*self.index.page_pools, *self.index.state_pools)

    def post(self, event: Callable[[], None]) -> None:
        """Hand an event to the owner's thread. Any thread."""
        self._events.put(event)
        self.arrived.set()

    @property
    def layers(self) -> int:
        """Layers up to the last that has bytes in any pool."""
        return 1 + max(segment.layer for pool in self.device.values() for segment in pool.geometry.segments)

    @property
    def under_way(self) -> bool:
        """Is there anything that will free slots or pins without anybody's doing?"""
        return bool(self.operations or self._retired)

    @property
    def is_forked(self) -> bool:
        """Is this another process than the one that made it?"""
        return os.getpid() != self._pid

    def await_event(self, timeout: float) -> None:
        """Block until an event has come in, for `timeout` seconds at most. Fences send none, so that beside them it is a short while."""
        if self._due:
            timeout = min(timeout, max(0.0, min(due for due, _ in self._due) - self.clock()))
        self.arrived.wait(min(timeout, _LOOK_S) if self._retired else timeout)

    def drain(self) -> None:
        """Apply every event that has come in, and free what has been retired behind fences that are passed now.

        ClosedError in a process that was forked off: it has none of the threads, and memory and slots are the parent's.
        """
        if self.is_forked:  # before any lock, which another thread of the parent may have held at the fork
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
        """Host blocks of so many objects."""
        return objects * self.host[pool].blocks_per_object

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Apply an event on the owner's thread after `seconds`, or a little later."""
        self._due.append((self.clock() + seconds, event))

    def give_up(self, pool: PoolName, reason: str, count: int) -> None:
        """Count objects that are not written through until they are committed again, and tell `flush` of them."""
        self.metrics.increment("write_through_skipped_total", pool, reason, by=count)
        if self.storage is not None:
            self.unstored += count

    def begin(self, operation: InFlight) -> None:
        """`operation` is under way: `flush` and `close` wait for it."""
        self.operations[id(operation)] = operation
        self.metrics.set("in_flight_operations", operation.kind, to=self.in_flight(operation.kind))

    def end(self, operation: InFlight) -> None:
        """`operation` has landed."""
        self._landed = True
        if self.stranded.pop(id(operation), None) is None:
            self.strand(operation, keep=False)

    def strand(self, operation: InFlight, *, keep: bool = True) -> None:
        """Nobody waits for `operation` any more; while it is kept it holds what it holds until it ends."""
        del self.operations[id(operation)]
        if keep:
            self.stranded[id(operation)] = operation
        self._landed = True
        self.metrics.set("in_flight_operations", operation.kind, to=self.in_flight(operation.kind))

    def in_flight(self, kind: str) -> int:
        """How many operations of a kind are under way."""
        return sum(o.kind == kind for o in self.operations.values())

    def claim(self, operation: InFlight, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """Note that `operation` fills `locations`."""
        self._claims[tier, pool][locations] = id(operation)

    def unclaim(self, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """What filled `locations` has landed there, or will not. Before they are freed: who takes them next claims them anew."""
        self._claims[tier, pool][locations] = 0

    def claimants(self, tier: Tier, pool: PoolName, locations: Locations) -> set[InFlight]:
        """The operations that fill `locations` (not encoded as pending)."""
        return {self.operations[i] for i in np.unique(self._claims[tier, pool][locations]).tolist() if i}

    def take_device(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Device slots for every pool of `need`, evicting where there are too few; PoolFullError and no change if that is not enough."""
        short = {p: n - self.device[p].available for p, n in need.items() if n > self.device[p].available}
        if short:
            self._give_back(self.index.evict_device(short), Tier.DEVICE)
        return {p: self.device[p].alloc(n) for p, n in need.items()}

    def take_host(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Host objects for every pool of `need` out of the one budget, evicting where needed.

        PoolFullError if that is not enough, with nothing taken; and nothing evicted, but for what went under an embargo.
        """
        blocks = sum(n * self.host[p].blocks_per_object for p, n in need.items())
        if blocks > self.arena.blocks:
            raise PoolFullError(f"{blocks} blocks are needed at once, and the host arena has {self.arena.blocks}; give it more bytes")
        if blocks > self.arena.available:
            cost = {p: pool.blocks_per_object for p, pool in self.host.items()}
            self._give_back(self.index.evict_host(blocks - self.arena.available, cost), Tier.HOST)
            # An embargo may withhold what was evicted; half an allocation would be lost with the error of the other half.
            if blocks > self.arena.available:
                raise PoolFullError(
                    f"{blocks} blocks are needed, {self.arena.available} are free and {self.arena.withheld} under an embargo"
                )
        return {p: self.host[p].alloc(n) for p, n in need.items()}

    def require_host(self, blocks: int) -> None:
        """Raise PoolFullError unless the host could give so many blocks by evicting everything that nobody uses."""
        evictable = sum(self.blocks_of(pool, count) for pool, count in self.index.evictable(Tier.HOST).items())
        if blocks > self.arena.available + evictable:
            raise PoolFullError(f"{blocks} blocks are needed, {self.arena.available} are free and {evictable} can be evicted")

    def evict_all(self, tier: Tier) -> None:
        """Free every object of a near tier that is not pinned."""
        evictable = self.index.evictable(tier)
        if tier is Tier.DEVICE:
            self._give_back(self.index.evict_device(evictable), tier)
        else:
            cost = {p: pool.blocks_per_object for p, pool in self.host.items()}
            self._give_back(self.index.evict_host(sum(n * cost[p] for p, n in evictable.items()), cost), tier)

    def free_device(self, pool: PoolName, slots: Locations) -> None:
        """Give slots back."""
        if len(slots):
            self.device[pool].free(slots)

    def note_fence(self, fence: Fence | None, slots: Iterable[tuple[PoolName, Locations | int]]) -> None:
        """Device work before `fence` may still use these slots, which the index can give away from now on."""
        self._ahead = {number: ahead for number, ahead in self._ahead.items() if not self._has_passed(ahead)}
        if fence is None or self._has_passed(fence):
            return
        number = self._last_fence = self._last_fence + 1
        self._ahead[number] = fence
        for pool, mine in slots:
            self._used[pool][mine] = number

    def fences(self, slots: Iterable[tuple[PoolName, Locations]]) -> list[Fence]:
        """What a copy into these device slots has to wait for: whoever had them before may not be through with them."""
        if not self._ahead:
            return []
        newest = max((int(self._used[pool][mine].max(initial=0)) for pool, mine in slots), default=0)
        return [fence for number, fence in self._ahead.items() if number <= newest and not self._has_passed(fence)]

    def _has_passed(self, fence: Fence) -> bool:
        """Has the device passed it, as far as can be told? In doubt not: its slots stay out of use."""
        try:
            return fence.query()
        except Exception as error:  # noqa: BLE001  a driver may raise anything, as after the loss of its device
            if not self._doubted:
                _log.warning("a fence cannot be asked, what is behind it stays out of use: %s", error)
            self._doubted = True
            return False

    def retire(self, slots: Mapping[PoolName, Locations], fence: Fence | None, pins: Sequence[Pin] = ()) -> None:
        """Give slots back and let go of pins, once the device has passed `fence`."""
        if fence is not None and not self._has_passed(fence):
            self._retired.append(Retired(fence, slots, pins))
            return
        for pool, mine in slots.items():
            self.free_device(pool, mine)
        for pin in pins:
            pin.release()
        self._landed = True  # what waits for room may go on, or has waited in vain

    def free_host(self, pool: PoolName, handles: Locations) -> None:
        """Give host objects back."""
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
        """Recount slots, blocks and pins: every one in use belongs to the index, to one of the requests (`private`, `pins`), to an
        operation or to a fence; none to two.
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
