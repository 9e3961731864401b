"""Write-back, which writes ahead of evictions what is likely to be hit, and the wait for all writes.

`flush` and `close` of a controller wait, and say whether storage lacks something.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import compress
from typing import TYPE_CHECKING, Final

from tiercache.controller.context import ControllerContext
from tiercache.controller.options import WRITE_BACK
from tiercache.controller.writes import UnitWrite, Write
from tiercache.core import Tier
from tiercache.index import Node
from tiercache.policy import UnitKind

if TYPE_CHECKING:
    from tiercache.controller.write_through import WriteThrough

_AHEAD: Final = 0.2
"""Share of the host's blocks that is kept written ahead: the units that are evicted next, and free blocks."""
_STEPS: Final = 4
"""Divisor of what is kept written ahead: a look is due when the host has taken a quarter of it."""
_DECAY: Final = 0.95
"""Share of the earlier writes that each look keeps, in the measured rate of writes."""
_MAX_TIMES: Final = 2
"""Number of times that the objects of a unit may be written; more happens if storage loses them meanwhile."""
_FIRST_TICKS: Final = 2.0**14
"""Ticks that storage is assumed to keep an object before anything was written."""


class WriteBack:
    """Writer of the units that the host evicts next and that storage lacks.

        blocks of the host   |-- in use, recently used --------------|== evicted next ==|-- free --|
        written to storage                                           |<----- _AHEAD of all ------->|

    A unit is written if the chance of a hit, in the time that storage keeps it, is at least `write_chance` of
    the options. Storage keeps an object for about as long as it takes to write all that it holds.

    An eviction never waits for a write: a unit that is evicted before its write began is lost.
    No method waits.
    """

    def __init__(self, context: ControllerContext, write_unit: Callable[[Node], UnitWrite]) -> None:
        """`write_unit`: see `WriteThrough`."""
        self._context = context
        self._write_unit = write_unit
        self._looked_at = 0
        """Number of blocks that the host had taken at the last look (see `ObjectAllocator.taken_blocks`)."""
        self._wanted: deque[Node] = deque()
        """Nodes whose units are to be written, and for which there was no room yet."""
        self._spent = self._needed = 0
        """Number of blocks written for the first of `_wanted`, and the number of those that it needs."""
        self._tick = context.index.now
        # Blocks that were written, and the ticks that this took; earlier ones count less (see `_DECAY`).
        self._written = self._ticks = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no write waits for room on the host; also True while storage takes no writes."""
        return not self._wanted or self._context.writes.is_suspended

    @property
    def lacks_objects(self) -> bool:
        """Whether storage lacks a part of what can be restored."""
        return self._context.storage is not None and bool(self._restorable())

    def follow(self) -> None:
        """Begin the writes that are due, as far as there is room.

        There is a look for more when the host has taken a quarter of what is kept written ahead.
        """
        context = self._context
        if context.storage is None or context.writes.is_held_up:
            return
        ahead = int(_AHEAD * context.arena.blocks)
        if not self._wanted and context.allocator.taken_blocks - self._looked_at >= ahead // _STEPS:
            self._looked_at = context.allocator.taken_blocks
            found = self._evicted_next(ahead)
            likely = context.index.appraiser.chance(found, self._residence()) >= context.options.write_chance
            self._wanted.extend(compress(found, likely.tolist()))
        self._begin()

    def want_all(self) -> None:
        """Let `follow` write everything on the host that can be restored."""
        if self._context.storage is not None:
            self._wanted = deque(self._restorable())
            self._spent = self._needed = 0

    def _begin(self) -> None:
        share, least = self._context.in_flight.writing, self._context.allocator.widest
        # While calls of storage are suspended, one write at a time goes on: the trial that ends this.
        while self._wanted and share.left >= least and not self._context.writes.is_held_up:
            node = self._wanted[0]
            if node.parent is not None and _is_unwritten(node):  # neither evicted nor written meanwhile
                begun = self._write_unit(node)
                self._written += begun.blocks
                self._spent += begun.blocks
                self._needed = max(self._needed, begun.needed)
                # Storage may lose the first pages before the last are written. Without an end, the same pages
                # would be written for ever.
                if not begun.is_over and self._spent <= _MAX_TIMES * self._needed:
                    return
            self._wanted.popleft()
            self._spent = self._needed = 0

    def _restorable(self) -> list[Node]:
        """Return the nodes with units that storage lacks in part, and whose path is in some tier.

        Of the node itself, leading pages are enough if hits can end there.
        """
        whole: set[Node | None] = {None}
        found = []
        for node in self._context.index.nodes():  # parents come before their children
            if node.parent in whole:
                if node.complete_pages == node.pages:
                    whole.add(node)
                if node.parent is not None and _is_unwritten(node):
                    found.append(node)
        return found

    def _evicted_next(self, ahead: int) -> list[Node]:
        """Return the nodes with units among the next `ahead` blocks that storage lacks in part."""
        index, blocks_of = self._context.index, self._context.allocator.blocks_of
        pools, first_state = (*index.page_pools, *index.state_pools), len(index.page_pools)
        blocks, found = self._context.arena.available, list[Node]()
        for node, kind in index.coldest_on_host():
            first = 0 if kind is UnitKind.LEAF else first_state  # a state is evicted without its pages
            blocks += sum(map(blocks_of, pools[first:], node.resident[Tier.HOST][first:]))
            if blocks > ahead:
                break
            if _is_unwritten(node):
                found.append(node)
        return found

    def _residence(self) -> float:
        """Return the ticks for which storage keeps an object: what it holds, by what is written in a tick."""
        index, allocator = self._context.index, self._context.allocator
        self._ticks, self._tick = _DECAY * self._ticks + index.now - self._tick, index.now
        self._written *= _DECAY
        stored = sum(allocator.blocks_of(pool, n) for pool, n in index.evictable(Tier.STORAGE).items())
        return stored * self._ticks / self._written if self._written else _FIRST_TICKS


def _is_unwritten(node: Node) -> bool:
    """Return whether storage lacks something that the host has, and that a hit at the node can restore.

    Without state pools, a hit can also end within the edge: with its `complete_pages`.
    """
    if not node.holds(Tier.HOST) or (node.has_pages(Tier.STORAGE) and node.has_state(Tier.STORAGE)):
        return False  # as most nodes, and far faster than a look at the pages
    if node.state_pools and not (node.is_complete and node.complete_pages == node.pages):
        return False
    # Counts of pages would not do: storage may have as many pages as the host, but other ones.
    pages = node.where[:, :, : node.complete_pages] >= 0
    return bool((pages[Tier.HOST] & ~pages[Tier.STORAGE]).any()) or any(
        node.state(Tier.HOST, pool) >= 0 > node.state(Tier.STORAGE, pool) for pool in range(node.state_pools)
    )


class Draining:
    """Waits for operations, and says whether storage lacks something."""

    def __init__(self, context: ControllerContext, through: WriteThrough, back: WriteBack) -> None:
        self._context = context
        self._write_through, self._write_back = through, back
        self._hanging: threading.Thread | None = None

    @property
    def lacks_objects(self) -> bool:
        """Whether something is not in storage: it was given up, waits, or is being written.

        With write-back, everything counts that can be restored from the host and not from storage.
        """
        return (
            self._context.gave_up
            or self._write_through.waits
            or any(isinstance(operation, Write) for operation in self._context.in_flight.operations.values())
            or (self._context.options.write == WRITE_BACK and self._write_back.lacks_objects)
        )

    def within(self, timeout: float, call: Callable[[], None]) -> bool:
        """Run `call` on a thread, and return whether the call ended within `timeout` seconds.

        Returns False at once while an earlier call still hangs. A thread that hangs is left behind. If `call`
        raises in time, the exception is raised here.
        """
        if self._hanging is not None and self._hanging.is_alive():
            return False
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
                raised.append(error)

        self._hanging = threading.Thread(target=run, name="tiercache-flush", daemon=True)
        self._hanging.start()
        self._hanging.join(max(0.0, timeout))
        if raised:
            raise raised[0]
        return not self._hanging.is_alive()

    def drain_all(self, timeout: float) -> bool:
        """Apply events until no operation is in flight; return False after `timeout` seconds.

        With write-back, everything on the host is written. Writes that wait until a failed store works again
        do not count.
        """
        end = time.monotonic() + timeout
        self._context.is_draining = True
        try:
            drained = self._drain_until(end)
            if self._context.options.write == WRITE_BACK:
                self._write_back.want_all()  # only now is everything on the host
                if drained:
                    self._write_back.follow()
                    drained = self._drain_until(end)
            return drained
        finally:
            self._context.is_draining = False

    def _drain_until(self, end: float) -> bool:
        self._context.drain()
        # Every call in `writes.waiting` belongs to one operation, so the difference of the two numbers is the
        # number of operations that do not wait for a failed store.
        while len(self._context.in_flight.operations) > len(self._context.writes.waiting) or not (
            self._write_through.is_idle and self._write_back.is_idle
        ):
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._context.events.arrived.wait(min(left, 0.1))
            self._context.drain()
        return True
