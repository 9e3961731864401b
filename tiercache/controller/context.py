"""Options of a controller, and the context that its parts share: index, pools, store and transfer engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from tiercache.controller.allocation import DeviceWork, ObjectAllocator
from tiercache.controller.in_flight import EventQueue, InFlightTable
from tiercache.controller.prefetch_rules import PrefetchRules
from tiercache.controller.residency_events import ResidencyEvents
from tiercache.controller.speeds import Speeds
from tiercache.controller.store_calls import StoreCalls
from tiercache.core import Locations, PoolName, Tier
from tiercache.errors import ClosedError, ConfigError
from tiercache.events.settings import EventSettings
from tiercache.index import CheckpointRules, HybridIndex, Pin, checkpoints_named
from tiercache.metrics import Metrics
from tiercache.policy import ModelProfile
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.storage.hybrid import HybridStorage
from tiercache.threads import IoThreads
from tiercache.transfer import TransferEngine

_MIN_DEADLINE_S: Final = 1.0
"""Minimum time in seconds before a store call counts as hung.

This minimum applies even if restores wait for a shorter time, because a call may be slow without hanging.
"""
_POLL_S: Final = 0.001
"""Seconds between two checks of the fences. No event is posted when the device passes a fence."""


WRITE_THROUGH: Final = "write_through"
"""Value of `ControllerOptions.write`: objects go to storage at their commit."""
WRITE_BACK: Final = "write_back"
"""Value of `ControllerOptions.write`: objects go to storage ahead of their eviction from the host."""
WRITE_CHANCE: Final = 0.02
"""Default of `ControllerOptions.write_chance`."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Limits and settings of a controller. Times are in seconds."""

    restore_deadline: float = 5.0
    """Time that an admission may wait for storage.

    After this time, the admission restores what device and host have.
    """
    storage_deadline: float = 0.0
    """Time that a store call may take before it counts as hung.

    After a hang, store calls are suspended for a while. 0 stands for `restore_deadline`, but at least 1 s.
    """
    in_flight_share: float = 0.25
    """Maximum share of the host's blocks that all fetches may hold at a time.

    The same maximum applies to all writes to storage, and to all copies that end on the host.
    """
    pin_share: float = 0.25
    """Maximum share of the host's blocks that pinned prefixes may keep; 0 for no pins."""
    park_share: float = 0.25
    """Maximum share of the host's blocks that parked requests may keep; 0 for no parking."""
    belief_checks: int = 512
    """Approximate number of objects that one check asks the store about; 0 for no checks.

    A check finds out whether the store still has objects that the index notes as stored. Two checks are at
    least 0.05 s apart. In an index so small that one check covers it whole, this pause is skipped after a
    write to storage.
    """
    write_retries: int = 3
    """Number of times that objects are offered to storage again if storage does not take them.

    The pause before the first retry is 0.1 s, and each further pause is four times as long.
    """
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    """Rules that say how long an admission waits for fetches, within its deadline.

    `HybridCacheController.admit` takes other rules for one request.
    """
    min_fetch_tokens: int = 0
    """Minimum number of tokens that a fetch must add to those that device and host can restore.

    A smaller number of tokens is computed instead, with the reason `not_worth`.
    """
    close_deadline: float = 10.0
    """Time that `close` may wait for operations to end."""
    piece_bytes: int = 32 << 20
    """Approximate number of bytes of one piece of a restore from storage.

    The reads of a restore are cut into pieces. A piece that lies verified on the host is copied to the device
    while the next pieces are read. A smaller amount is copied together with the rest. Each piece costs
    hand-overs between threads: with 8 MiB, a restore of 265 MiB on two cores takes a tenth longer.
    """
    load_or_recompute: bool = True
    """Whether tokens are computed that would take longer to restore, by the speeds measured so far.

    The speed of the prefill is known from `note_prefill`; without it, all that can be restored is restored.
    With False, what is restored does not depend on how fast anything is.
    """
    check_order: bool = False
    """Whether the ranks of a group compare the calls of their engines, to find one that differs.

    For debugging: each call costs a message, and a digest of its tokens.
    """
    join_deadline: float = 60.0
    """Time in which all ranks of a group must be there, from the start of this one."""
    max_queries: int = 64
    """Maximum number of storage queries in flight. At the maximum, a lookup does not ask storage."""
    query_threads: int = 2
    """Threads for queries of the store. With two threads, a slow query does not delay every restore."""
    read_threads: int = 2
    """Threads for reads from the store."""
    write_threads: int = 1
    """Threads for writes to the store."""
    refresh_path: bool = False
    """Whether a hit counts as a use of its whole path in the index, and not only of the path's last node."""
    events: EventSettings | None = None
    """Publisher of KV events of device, host and storage; None: none. `docs/events.md` has more."""
    write: str = WRITE_THROUGH
    """When objects are written to storage: `write_through` at their commit, or `write_back` ahead of their
    eviction from the host.

    With `write_back`, what only the host holds is lost if the process ends without `flush` or `close`. A
    sequence that does not fit on the host is written through.
    """
    write_chance: float = WRITE_CHANCE
    """With `write_back`, the least chance of a hit with which a unit is written; from 0, for all units, to 1.

    A higher value spares the medium. On the conversation trace, 0.02 writes 7.6 bytes for each byte that is
    read, and 0.18 writes 3.0; where prefixes are shared, it costs hits (docs/benchmarks.md).
    """
    policy: str = "hvd"
    """Name of the eviction policy; see `policy_named`."""
    checkpoints: str | CheckpointRules = "rules"
    """Rules that choose where prefills leave states, or their name; see `checkpoints_named`."""
    seed: int = 0
    """Seed of the index's random draws."""
    load_flops_per_byte: float = 0.0
    """FLOPs that the device computes in the time in which it loads one byte from the host.

    For example, the value is 5,000 for 250 TFLOP/s and 50 GB/s. A state that is cheaper to compute again than
    to load is not copied to the host. With 0, every state is copied, and the eviction policy assumes 5,000.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoints, str | CheckpointRules):
            raise ConfigError(
                f"checkpoints={self.checkpoints!r} is not possible; use the name of a checkpoint policy, or"
                " CheckpointRules(...)"
            )
        checkpoints_named(self.checkpoints)  # a wrong name raises here
        if not isinstance(self.prefetch, PrefetchRules):
            raise ConfigError(f"prefetch={self.prefetch!r} is not possible; use PrefetchRules(policy=...)")
        if not isinstance(self.events, EventSettings | None):
            raise ConfigError(f"events={self.events!r} is not possible; use EventSettings(endpoint=...)")
        if not 0.0 <= self.load_flops_per_byte < float("inf"):
            raise ConfigError(
                f"load_flops_per_byte={self.load_flops_per_byte} is not possible; use a finite number from 0"
            )
        if not 0.0 <= self.storage_deadline < float("inf"):
            raise ConfigError(
                f"storage_deadline={self.storage_deadline} is not possible; use a finite number of seconds"
                " from 0"
            )
        if self.write not in (WRITE_THROUGH, WRITE_BACK):
            raise ConfigError(f"write={self.write!r} is not possible; use {WRITE_THROUGH} or {WRITE_BACK}")
        if not 0.0 <= self.write_chance <= 1.0:
            raise ConfigError(
                f"write_chance={self.write_chance} is not possible; use a probability from 0 to 1"
            )
        if not 0.0 < self.in_flight_share <= 1.0:
            raise ConfigError(
                f"in_flight_share={self.in_flight_share} is not possible; use a share above 0, and 1 at most"
            )
        if not 0.0 <= self.pin_share < 1.0:
            raise ConfigError(f"pin_share={self.pin_share} is not possible; use a share from 0, and below 1")
        if not 0.0 <= self.park_share < 1.0:
            raise ConfigError(
                f"park_share={self.park_share} is not possible; use a share from 0, and below 1"
            )
        if not 0.0 <= self.join_deadline < float("inf"):
            raise ConfigError(
                f"join_deadline={self.join_deadline} is not possible; use a finite number of seconds from 0"
            )
        if self.piece_bytes < 1:
            raise ConfigError(
                f"piece_bytes={self.piece_bytes} is not possible; use a positive number of bytes, such as"
                f" {32 << 20}"
            )
        if self.belief_checks < 0:
            raise ConfigError(
                f"belief_checks={self.belief_checks} is not possible; use a number of objects from 0"
            )
        if self.min_fetch_tokens < 0:
            raise ConfigError(
                f"min_fetch_tokens={self.min_fetch_tokens} is not possible; use a number of tokens from 0"
            )
        if not 0 <= self.write_retries <= 8:
            raise ConfigError(f"write_retries={self.write_retries} is not possible; use 0 to 8")
        for name in ("query_threads", "read_threads", "write_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} would leave storage unserved; use 1 or more")


@dataclass
class ControllerContext:
    """Parts of one controller, which its requests and operations share.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). Any thread may call
    `events.post`.
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
    elsewhere: frozenset[PoolName] = frozenset()
    """Pools whose objects another rank writes to storage."""
    unstored: int = 0
    """Number of objects whose write to storage was given up and that no `flush` has reported yet."""
    stored: int = 0
    """Number of objects that storage has taken so far."""
    is_draining: bool = False
    """Whether a caller waits until nothing is under way, so that no check and no prefetch begins."""
    residency: ResidencyEvents | None = None
    """Source of the KV events of device and host; None if none are published."""
    on_landed: Callable[[], None] = lambda: None
    """Callback on the owner's thread, after operations have landed or slots were freed."""
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        slots = {p: pool.capacity for p, pool in self.device.items()}
        self.events = EventQueue(self.clock)
        self.speeds = Speeds(self.profile, self.options.read_threads, self.clock)
        self.allocator = ObjectAllocator(self.index, self.device, self.host, self.arena, self.metrics)
        self.device_work = DeviceWork(self.allocator, slots)
        # A fetch needs room for at least one object of every pool: a page, and the state at its end.
        budget = max(int(self.arena.blocks * self.options.in_flight_share), self.allocator.widest)
        self.in_flight = InFlightTable(slots, self.host, self.arena.blocks, budget, self.metrics)
        self.queries = self._calls("query", "query", self.options.query_threads)
        self.reads = self._calls("fetch", "read", self.options.read_threads)
        self.writes = self._calls("write", "write", self.options.write_threads)

    def _calls(self, kind: str, threads: str, count: int) -> StoreCalls:
        return StoreCalls(
            kind,
            self.threads(threads, count),
            self.events.post,
            self.clock,
            deadline=self.options.storage_deadline or max(self.options.restore_deadline, _MIN_DEADLINE_S),
            on_hang=partial(self.metrics.increment, "storage_hangs_total", kind),
        )

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """Names of all pools, page pools first."""
        return (*self.index.page_pools, *self.index.state_pools)

    @property
    def layers(self) -> int:
        """1 + the highest layer number in any pool."""
        return 1 + max(segment.layer for pool in self.device.values() for segment in pool.geometry.segments)

    @property
    def under_way(self) -> bool:
        """Whether slots or pins will become free later, because an operation or a fence is pending."""
        return bool(self.in_flight.operations or self.device_work.retired)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the process that made the context."""
        return os.getpid() != self._pid

    def await_event(self, timeout: float) -> None:
        """Block until an event is posted or due, for at most `timeout` seconds."""
        # No event is posted when the device passes a fence. While fences are pending, the wait is short.
        self.events.wait(min(timeout, _POLL_S) if self.device_work.retired else timeout)

    def drain(self) -> None:
        """Apply all events that have come in, and free slots and pins that the device no longer uses.

        Raises ClosedError in a forked process: the threads, the memory and the slots are the parent's.
        """
        # This is checked before any lock is taken: a lock that a thread of the parent held at the fork stays
        # locked in the child.
        if self.is_forked:
            raise ClosedError(
                f"this process is a fork of process {self._pid}, which owns this controller; make a new"
                " controller here"
            )
        self.events.apply()
        for calls in (self.queries, self.reads, self.writes):
            calls.watch()
        self.events.apply_due()
        self.device_work.free_passed()
        if self.in_flight.landed or self.device_work.freed:
            self.in_flight.landed = self.device_work.freed = False
            self.on_landed()
        if self.residency is not None:
            self.residency.post(self.clock())

    def give_up(self, pool: PoolName, reason: str, count: int, *, final: bool = True) -> None:
        """Count `count` objects of `pool` that will not reach storage unless they are committed again.

        `reason` is the label of the metric. `flush` reports the sum of all these objects. If they stay on the
        host, and a flush offers them again, the attempt was not the `final` one.
        """
        self.metrics.increment("write_through_skipped_total", pool, reason, by=count)
        if final and self.storage is not None:
            self.unstored += count

    def check_integrity(
        self,
        private: Sequence[Mapping[PoolName, Locations]],
        pins: Sequence[Pin],
        parked: Sequence[Mapping[PoolName, Locations]] = (),
    ) -> None:
        """Check that every slot, block and pin in use has exactly one owner; raise AssertionError otherwise.

        An owner is the index, a request, an operation or a fence. `private` has the slots that belong to each
        request alone, `pins` has the pins of all requests, and `parked` has the host objects that belong to
        each parked request alone.
        """
        self.index.check_integrity()
        quarantined = sum(
            self.allocator.blocks_of(pool, objects) for pool, objects in self.in_flight.quarantined.items()
        )
        self.in_flight.check_integrity(quarantined)
        retired = self.device_work.retired
        operations = [*self.in_flight.operations.values(), *self.in_flight.stranded.values()]
        held_by = [
            *pins,
            *(pin for r in retired for pin in r.pins),
            *(pin for o in operations for pin in o.pins),
        ]
        assert self.index.holds_only(held_by), "a pin has no owner"
        for name, pool in self.device.items():
            held = np.concatenate(
                [
                    self.index.owned(Tier.DEVICE, name),
                    *(r.slots[name] for r in retired if name in r.slots),
                    *(slots[name] for slots in private if name in slots),
                ]
            )
            assert len(np.unique(held)) == len(held), f"a device slot of pool {name} is held twice"
            assert len(held) == pool.capacity - pool.available, (
                f"pool {name}: {len(held)} slots are held, {pool.capacity - pool.available} taken"
            )
        blocks = quarantined
        for name in self.host:
            handles = np.concatenate(
                [self.index.owned(Tier.HOST, name), *(held[name] for held in parked if name in held)]
            )
            assert len(np.unique(handles)) == len(handles), f"a host object of pool {name} is held twice"
            blocks += self.allocator.blocks_of(name, len(handles))
        taken = self.arena.blocks - self.arena.available - self.arena.withheld
        assert blocks == taken, f"{blocks} blocks are held, {taken} taken"
