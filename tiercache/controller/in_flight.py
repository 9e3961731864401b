"""Queue of events for the thread that owns a controller, and table of the operations that are under way.

Only the owner's thread (the engine's thread, which calls the controller) changes the controller's state.
Other threads post events, which the owner's thread applies.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from tiercache.core import Locations, Mask, PoolName, Tier
from tiercache.metrics import Metrics


class EventQueue:
    """Queue of events that the owner's thread applies. An event is posted by any thread, or timed.

    Thread safety: any thread may call `post`; the rest belongs to the owner's thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.arrived = threading.Event()
        """Flag that is set if an event was posted since the last `apply`."""
        self._clock = clock
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Tasks of the owner's thread that wait for an event."""

    def post(self, event: Callable[[], None]) -> None:
        """Hand an event to the owner's thread, whose next call of `apply` applies the event."""
        self._posted.put(event)
        self.arrived.set()
        while self._waiting:
            with suppress(IndexError, RuntimeError):  # another thread wakes it, or its loop has ended
                future = self._waiting.popleft()
                future.get_loop().call_soon_threadsafe(_wake, future)

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Keep an event for `seconds` seconds. The next call of `apply_due` after that applies the event."""
        self._due.append((self._clock() + seconds, event))

    def wait(self, timeout: float) -> None:
        """Block until an event is posted or a timed event is due, for at most `timeout` seconds."""
        self.arrived.wait(self._until_due(timeout))

    async def arrival(self, timeout: float) -> None:
        """Let other tasks of this thread run in a `wait`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        end = loop.call_later(self._until_due(timeout), _wake, future)
        self._waiting.append(future)
        if self.arrived.is_set():  # and `post` may have missed the future
            _wake(future)
        try:
            await future
        finally:
            end.cancel()
            with suppress(ValueError, IndexError):  # a thread wakes it, or another
                self._waiting.remove(future)

    def _until_due(self, timeout: float) -> float:
        return min([timeout, *(max(0.0, due - self._clock()) for due, _ in self._due)])

    def apply(self) -> None:
        """Apply every posted event, in the order of `post`."""
        # The flag is cleared before the queue is emptied. An event that is posted in between sets the flag
        # again, so the next `wait` returns at once. In the other order, an event could be left behind.
        if not self.arrived.is_set():  # of an event that is queued already, the flag follows at once
            return
        self.arrived.clear()
        while True:
            try:
                event = self._posted.get_nowait()
            except queue.Empty:
                return
            event()

    def apply_due(self) -> None:
        """Apply the events whose time has come."""
        if not self._due:
            return
        now = self._clock()
        waiting, self._due = self._due, [entry for entry in self._due if entry[0] > now]
        for due, event in waiting:
            if due <= now:
                event()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InFlight(Protocol):
    """Interface of an operation that is under way.

    An operation holds pins and reservations until it has landed (its results have been applied).
    """

    kind: str
    """Kind of the operation in counts and metrics, such as `fetch`."""
    done: bool
    """Whether the operation has landed."""


class BlockBudget:
    """Budget of host blocks that all operations of one kind may hold at a time.

    There are three kinds: fetches, writes to storage, and copies to the host alone. An operation that hangs
    in the store keeps its blocks.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held = 0

    @property
    def left(self) -> int:
        """Number of blocks that may still be taken."""
        return self.blocks - self.held

    def take(self, blocks: int) -> None:
        """Hold `blocks` more blocks, which must not exceed `left`."""
        assert blocks <= self.left, "more is held than may be"
        self.held += blocks

    def give(self, blocks: int) -> None:
        """Give back `blocks` of the held blocks."""
        self.held -= blocks
        assert self.held >= 0, "more is given back than was held"


class InFlightTable:
    """Table of the operations under way, and of the slots and host objects that the operations are filling.

    - `slots` is the number of device slots of each pool.
    - `host_pools` are the pools with host objects.
    - `blocks` is the number of host blocks, and so the number of possible handles.
    - `budget` is the number of host blocks of each `BlockBudget`: `fetching`, `writing` and `copying`.
    """

    def __init__(
        self,
        slots: Mapping[PoolName, int],
        host_pools: Iterable[PoolName],
        blocks: int,
        budget: int,
        metrics: Metrics,
    ) -> None:
        self.operations: dict[int, InFlight] = {}
        """Operations that `flush` and `close` wait for, by their `id`."""
        self.stranded: dict[int, InFlight] = {}
        """Writes that were given up while the store may still read their objects."""
        self.quarantined: Counter[PoolName] = Counter()
        """Number of host objects, by pool, to which a store call may still write after its deadline."""
        self.landed = False
        """Whether an operation has ended since the controller last cleared this flag."""
        self.fetching, self.writing, self.copying = (BlockBudget(budget) for _ in range(3))
        self._metrics = metrics
        places = {(Tier.DEVICE, pool): count for pool, count in slots.items()}
        places |= {(Tier.HOST, pool): blocks for pool in host_pools}
        self._claims = {place: np.zeros(count, np.int64) for place, count in places.items()}
        """For each slot or host object, the key in `operations` of the operation that fills it, or 0."""
        self.storing: dict[PoolName, Mask] = {pool: np.zeros(blocks, np.bool_) for pool in host_pools}
        """Mask of the host objects that a write to storage is reading, by pool.

        A second commit does not write these objects again.
        """

    def begin(self, operation: InFlight) -> None:
        """Register `operation` as under way, so that `flush` and `close` wait for it."""
        self.operations[id(operation)] = operation
        self._report(operation.kind)

    def end(self, operation: InFlight) -> None:
        """Remove `operation`, which has landed."""
        self.landed = True
        if self.stranded.pop(id(operation), None) is None:
            self._remove(operation)

    def strand(self, operation: InFlight) -> None:
        """Stop waiting for `operation`, which keeps its pins and blocks until it ends."""
        self.landed = True
        self.stranded[id(operation)] = operation
        self._remove(operation)

    def count(self, kind: str) -> int:
        """Return how many operations of `kind` are under way."""
        return sum(o.kind == kind for o in self.operations.values())

    # Loads and fetches are shared: a request that finds a location pending waits for the operation that
    # `claimants` names. A slot is unclaimed before it is freed. In the other order, a new load could take and
    # claim the slot in between, and the first load would then erase the new claim.

    def claim(self, operation: InFlight, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """Record that `operation` is filling `locations`."""
        self._claims[tier, pool][locations] = id(operation)

    def unclaim(self, tier: Tier, pool: PoolName, locations: Locations) -> None:
        """Record that no operation fills `locations` any more. Call this before the locations are freed."""
        self._claims[tier, pool][locations] = 0

    def claimants(self, tier: Tier, pool: PoolName, locations: Locations) -> set[InFlight]:
        """Return the operations that are filling these slots or handles."""
        return {self.operations[i] for i in np.unique(self._claims[tier, pool][locations]).tolist() if i}

    def _remove(self, operation: InFlight) -> None:
        del self.operations[id(operation)]
        self._report(operation.kind)

    def _report(self, kind: str) -> None:
        self._metrics.set("in_flight_operations", kind, to=self.count(kind))
