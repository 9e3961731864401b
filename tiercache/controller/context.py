"""The context that the parts of a controller share: index, pools, store and transfer engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from tiercache.controller.allocation import DeviceWork, ObjectAllocator
from tiercache.controller.depths import Speeds
from tiercache.controller.in_flight import EventQueue, InFlightTable
from tiercache.controller.options import ControllerOptions
from tiercache.controller.ranks.landings import AgreedLandings, Ends, Landing
from tiercache.controller.residency_events import ResidencyEvents
from tiercache.controller.store_calls import AgreedCalls, StoreCalls
from tiercache.core import CacheTransferUnits, HitPolicy, Locations, PoolName
from tiercache.errors import ClosedError, GeometryError, TransferError
from tiercache.index import HybridIndex
from tiercache.keys import Identity
from tiercache.metrics import Metrics
from tiercache.policy import ModelProfile
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.storage.hybrid import HybridStorage
from tiercache.threads import IoThreads
from tiercache.transfer import Fence, LayerTicket, Ticket, TransferEngine

_log = logging.getLogger(__name__)
T = TypeVar("T")
AnyTicket = TypeVar("AnyTicket", bound=Ticket)
_MIN_DEADLINE_S: Final = 1.0
"""Minimum time in seconds before a store call counts as hung.

This minimum applies even if restores wait for a shorter time, because a call may be slow without hanging.
"""
_QUERY_THREADS: Final = 2
"""Threads for queries of the store. With two, a slow query does not delay every restore."""
POLL_S: Final = 0.001
"""Seconds between two checks of the fences. No event is posted when the device passes a fence."""


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
    gave_up: bool = False
    """Whether a write to storage was given up that no `flush` has reported yet."""
    is_draining: bool = False
    """Whether a caller waits until nothing is under way, so that no check and no prefetch begins."""
    residency: ResidencyEvents | None = None
    """Source of the KV events of device and host; None if none are published."""
    landings: AgreedLandings | None = None
    """Ends of copies and calls that wait for other ranks; None if each is applied as it comes."""
    on_landed: Callable[[], None] = lambda: None
    """Callback on the owner's thread, after operations have landed or slots were freed."""
    release: Callable[[Any], None] = lambda _: None
    """The controller's `release`."""
    _pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        slots = {p: pool.capacity for p, pool in self.device.items()}
        self.speeds = Speeds(self.profile, self.options.read_threads, self.clock)
        self.allocator = ObjectAllocator(self.index, self.device, self.host, self.arena, self.metrics)
        self.device_work = DeviceWork(self.allocator, slots)
        # A fetch needs room for at least one object of every pool: a page, and the state at its end.
        budget = max(int(self.arena.blocks * self.options.in_flight_share), self.allocator.widest)
        self.in_flight = InFlightTable(slots, self.host, self.arena.blocks, budget, self.metrics)
        self._io = {
            "query": self.threads("query", _QUERY_THREADS),
            "fetch": self.threads("read", self.options.read_threads),
            "write": self.threads("write", self.options.write_threads),
        }
        self._make_queues()

    def _make_queues(self) -> None:
        self.events = EventQueue(self.clock)
        self.queries, self.reads, self.writes = (self._calls(kind, io) for kind, io in self._io.items())

    def _calls(self, kind: str, threads: IoThreads) -> StoreCalls:
        deadline = self.options.storage_deadline or max(self.options.restore_deadline, _MIN_DEADLINE_S)
        on_hang = partial(self.metrics.increment, "storage_hangs_total", kind)
        if self.landings is not None:
            return AgreedCalls(kind, threads, self.events.post, deadline, on_hang, self.landings)
        return StoreCalls(kind, threads, self.events.post, self.clock, deadline, on_hang)

    def agree_by(self, least: Callable[[Ends], Ends]) -> None:
        """Let all ranks apply ends, results and the time alike (see `AgreedLandings`); nothing has begun."""
        self.landings = AgreedLandings(least, self.clock, lambda: self.events.post(lambda: None))
        self.clock = self.landings.now
        self._make_queues()

    def agree(self) -> None:
        """Apply what has ended on all ranks, if there are others; all call this at the same place."""
        if self.landings is not None:
            suspended = any(calls.is_suspended for calls in (self.queries, self.reads, self.writes))
            self.landings.apply(busy=suspended or bool(self.in_flight.operations))

    @property
    def pools(self) -> tuple[PoolName, ...]:
        """Names of all pools, page pools first."""
        return self.index.pools

    @property
    def has_host(self) -> bool:
        """Whether the arena can hold a page and the states at its end; a smaller one serves as none."""
        return self.arena.blocks >= self.allocator.widest

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
        self.events.wait(min(timeout, POLL_S) if self.device_work.retired else timeout)

    def copy_end(self, land: Landing) -> Landing:
        """Return the function that ends a copy, on any thread; the owner's thread then calls `land`."""
        if self.landings is None:
            return lambda error: self.events.post(partial(land, error))
        return self.landings.expect_copy(land)

    def is_quarantined(self, objects: Iterable[tuple[PoolName, Locations]]) -> bool:
        """Return whether a store may still use the memory of these host objects after its call's end."""
        arena, size = self.arena, self.arena.block_bytes
        return arena.is_quarantined([(0, arena.nbytes)]) and arena.is_quarantined(
            [
                (block * size, size)
                for pool, handles in objects
                for block in np.ravel(self.host[pool].blocks(handles)).tolist()
            ]
        )

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
        if self.landings is not None and self.landings.is_alone:
            self.agree()
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

    # An engine may raise any exception when it is to begin a copy, which then counts as failed.

    def begin_store(self, units: Sequence[CacheTransferUnits], after: Sequence[Fence]) -> Ticket:
        """Begin a copy from device slots to host objects, which starts after these fences."""
        try:
            return self.engine.store(units, after=after)
        except Exception as error:  # noqa: BLE001  see above
            return _failed(Ticket(), error)

    def begin_load(self, units: Sequence[CacheTransferUnits], after: Sequence[Fence]) -> LayerTicket:
        """Begin a copy from host objects to device slots, which starts after these fences."""
        try:
            return self.engine.load(units, after=after)
        except Exception as error:  # noqa: BLE001  see above
            return _failed(LayerTicket(range(self.layers)), error)

    def call_storage(self, call: Callable[[HybridStorage], T], otherwise: T, doing: str) -> T:
        """Return what `call` returns for storage, on any thread; `otherwise` if it raises.

        An exception breaks the store's contract. Only this call fails then, and counts as failed.
        """
        assert self.storage is not None
        try:
            return call(self.storage)
        except Exception:  # noqa: BLE001  a store that breaks its contract may raise any exception
            _log.exception("%s failed", doing)
            return otherwise

    def give_up(self, pool: PoolName, reason: str, count: int, *, final: bool = True) -> None:
        """Count `count` objects of `pool` that will not reach storage unless they are committed again.

        `reason` is the label of the metric. The next `flush` reports it. If the objects stay on the host, and
        a flush offers them again, the attempt was not the `final` one.
        """
        self.metrics.increment("write_through_skipped_total", pool, reason, by=count)
        self.gave_up |= final and self.storage is not None


def _failed(ticket: AnyTicket, error: Exception) -> AnyTicket:
    ticket.finish(TransferError(f"the copy could not begin: {error}"))
    return ticket


def split_pools(
    identity: Identity, pools: Mapping[PoolName, DevicePool]
) -> tuple[list[PoolName], list[PoolName]]:
    """Return the page pools and the state pools among `pools`; there may be no page pool.

    Raises GeometryError for a pool that the index cannot serve.
    """
    if not pools:
        raise GeometryError(
            "no pool is registered, so there is nothing to keep; pass the device pool of the KV pages, of the"
            " states, or of both"
        )
    kinds: dict[HitPolicy, list[PoolName]] = {HitPolicy.ALL_PAGES: [], HitPolicy.TRAILING_PAGES: []}
    for name, pool in pools.items():
        geometry = pool.geometry
        kind = geometry.pool
        if kind is not name:
            raise GeometryError(f"the pool given as {name} is a {kind} pool; name each by its own kind")
        if geometry.page_size != identity.page_size:
            raise GeometryError(
                f"pool {name} has pages of {geometry.page_size} tokens and the identity {identity.page_size};"
                " make them equal"
            )
        if geometry.hit_policy is HitPolicy.TRAILING_PAGES and geometry.trailing != 1:
            raise GeometryError(
                f"pool {name} needs its last {geometry.trailing} pages; the controller serves whole prefixes"
                " and single states"
            )
        kinds[geometry.hit_policy].append(name)
    if kinds[HitPolicy.ALL_PAGES] and PoolName.KV not in kinds[HitPolicy.ALL_PAGES]:
        raise GeometryError(
            f"there are page pools ({', '.join(kinds[HitPolicy.ALL_PAGES])}), and none is named kv; a hit is"
            " anchored on KV pages, or on the tokens alone where there are only states"
        )
    return kinds[HitPolicy.ALL_PAGES], kinds[HitPolicy.TRAILING_PAGES]
