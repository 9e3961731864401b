"""Eviction order of every store: unrestorable objects first, then the units of the lowest rank.

1. Dead objects, the least recently used first. Some of these could be restored in the past, but can no longer
   be restored. The others have waited too long for the object that would make them useful.
2. Units. A unit is a leaf (a page that no page follows), with its states and with the earlier pages that
   become useless without the leaf. A state in the middle of a path may be a unit as well, which is evicted
   without its page. Values that callers gave rank the units, or else their last use (`values`).
3. Waiting objects: recent KV that may still get its state, and recent states that may still get their KV. A
   new object that has to wait evicts units of group 2 only while waiting objects take at most three quarters
   of all bytes. Without this limit, a conversation without any state would evict everything that can be
   restored.

With shares (`shares`) the pages of each owner have queues of their own, and the lowest entry of those that
may be evicted is next. An owner that has no more than its guarantee is passed over by the writes of others. A
set beyond its owner's quota evicts pages of that owner only.

A page stays while another page follows it. A conversation therefore loses its end first, and its beginning
can still be restored. When a page is evicted, the page before it gets the later of the two times of last use
and the higher of the two ranks. A page is therefore never ranked below a page that followed it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final, Protocol

import numpy as np

from tiercache.policy.order import Front
from tiercache.storage.coldest import Survey
from tiercache.storage.pages import BROKEN, NONE, QUEUED, Ints
from tiercache.storage.residents import Residents
from tiercache.storage.shares import Owners, Writer
from tiercache.storage.values import Ranks

_FRONT: Final = 1024
"""Minimum number of units that a pass over the columns puts into the front of one lane (see `Front`)."""
_STATES, _KV = 0, 1
"""Queues of waiting pages: states that wait for KV, and KV that waits for a state."""
_LIVE, _DEAD, _WAITING = QUEUED, 2 * QUEUED, (4 * QUEUED, 8 * QUEUED)
"""Flags of a node by the queue in which it is."""
_QUEUED: Final = _LIVE | _DEAD | _WAITING[_STATES] | _WAITING[_KV]


class Taker(Protocol):
    """The store's side of an eviction, which removes objects and says when to stop.

    Thread safety: the store's mutex is held.
    """

    def take(self, rows: list[int]) -> None:
        """Remove these objects of one page; the implementation calls `Residents.leave` for each."""

    def enough(self) -> bool:
        """Return whether there is enough room now. Called between units."""

    def full(self) -> bool:
        """Return whether this eviction has removed as many objects as it may. Called between pages."""


@dataclass(slots=True)
class _Eviction:
    """One eviction: for whom it makes room, and what it has put aside."""

    taker: Taker | None
    """Receiver of the objects; None to look only."""
    writer: Writer | None
    states_to_keep: set[int] = field(default_factory=set)
    spared: list[tuple[float, int]] = field(default_factory=list)
    """Entries of live units that must stay during this eviction."""


class Lane(Front[tuple[float, int]]):
    """Queues of the pages of one owner; a store without shares has one lane.

    An entry is a rank and a node; for a dead page the page's `tick` (see `PageTable`) and its node, for a
    waiting one its `number` and its node.

    Thread safety: none of its own; the eviction order uses it.
    """

    def __init__(self, owner: int) -> None:
        super().__init__(steady=True, fewest=_FRONT)
        self.owner: Final = owner
        """Number of the owner."""
        self.waiting: Final[tuple[list[tuple[float, int]], ...]] = [], []
        """Heaps of waiting pages: `_STATES` and `_KV`."""
        self.barren_at = (-1, -1)
        """The clock, and `taken`, when a pass found no live page for this lane."""
        self.taken = 0
        """Number of live units that were evicted."""

    def __len__(self) -> int:
        return super().__len__() + len(self.waiting[_STATES]) + len(self.waiting[_KV])

    def is_barren(self, owners: Owners, clock: int) -> bool:
        """Return whether a pass over the columns would find no live page that is not in the queue.

        Without this, each eviction would make a pass for every owner of which nothing can be evicted.
        """
        return self.horizon == inf or not owners.used[self.owner] or self.barren_at == (clock, self.taken)


class EvictionOrder:
    """Queues of the pages of a store, in the order in which they are evicted.

    An entry may be out of date, and is checked when it comes to the front of its queue. This class reads the
    tables of the store; the tables note which pages may have become evictable, and never call this class.

    Live pages (here: pages that a restore can use) are ordered by rank (`Values`): the lowest rank is
    evicted first. When the queue of live pages is empty, a pass over the columns of the page table ranks all
    units, and queues the units of the lowest ranks (see `Front`). If a rank has risen since the pass, the
    unit is put back. If a value has made it fall, the unit is queued a second time, and the later of the two
    entries is dropped or put back in its turn.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._owners = residents.owners
        self._values = residents.pages.values
        self._lanes = [Lane(0)]
        """Queues by number of the owner."""
        self._by_value = False
        """Whether the ranks in the queues are those of values; before the first hint they are ticks."""
        self.unfinished = False
        """Whether the last eviction stopped in the middle of a unit.

        The rest of that unit is useless: call `sweep` to evict the rest.
        """
        self.not_worth = False
        """Whether the last eviction stopped at a unit of a higher rank than the new objects."""

    def __len__(self) -> int:
        """Return the number of entries in the queues, also of those that are out of date."""
        return sum([len(lane) for lane in self._lanes])

    def restart(self) -> None:
        """Fill the queues anew at the next eviction; call this when the owners have changed."""
        self._residents.pages.columns["flags"] &= 0xFF ^ _QUEUED
        self._lanes = [Lane(owner) for owner in range(len(self._owners.names))]
        self._by_value = self._values.given

    def _offer(self, node: int) -> None:
        """Put a page into the queue to which it belongs, if it is a leaf or has a state to evict alone."""
        residents = self._residents
        if not residents.pages.is_leaf(node):
            if self._values.stands_alone(node):
                self._offer_live(node)
            return
        if residents.pages.is_useless(node):
            self._push_useless(node, dead=residents.is_dead(node))
        elif self._values.given or not residents.pages.flags[node] & _LIVE:
            self._offer_live(node)

    def _offer_live(self, node: int) -> None:
        """Put a unit into the queue of live pages if its rank is within the horizon."""
        rank = self._values.rank_of(node)
        if self._lane_of(node).admits(rank):
            self._push_live(rank, node)

    def evict(
        self,
        taker: Taker,
        write_parents: Iterable[int] = (),
        *,
        promising: bool = True,
        rank: float | None = None,
        writer: Writer | None = None,
    ) -> None:
        """Evict units until the taker has enough, or no unit is left that may be evicted.

        `rank`: the rank of the new objects that need the room (`Residents.rank`), None if they have no value.
        If the next unit has a higher rank, the eviction stops, and sets `not_worth`.

        `promising` says that a restore can use the new objects as soon as they are stored. Other objects
        evict nothing that can be restored while more than three quarters of all bytes are unproven
        (`Residents.is_mostly_unproven`). A byte is unproven until a restore can use it.

        `write_parents` are the pages whose next page is being written now. The nearest state at or before
        each of these pages stays. Without that state, all pages after it would be useless until the next
        state is stored. Pages that are being read or held stay too.

        `writer`: whose objects need the room, which decides what may be evicted if there are shares; None if
        nobody's do.
        """
        self.not_worth = False
        if taker.enough():
            return
        self._refresh()
        eviction = _Eviction(taker, writer, self._states_to_keep(write_parents))
        highest = inf if rank is None else rank
        while not taker.full() and self._take_next(eviction, highest, promising=promising):
            if taker.enough():
                break
            self._catch_up()
        for spared in eviction.spared:
            self._push_live(*spared)

    def _take_next(self, eviction: _Eviction, highest: float, *, promising: bool) -> bool:
        """Evict one unit; return False if there is none that may be evicted."""
        lanes = self._lanes_for(eviction.writer)
        if self._take_dead(eviction, lanes):
            return True
        # While most bytes are unproven, new objects that are not promising replace no live page, unless the
        # unproven bytes are of owners that are passed over.
        keep_live = self._residents.is_mostly_unproven and not promising
        if keep_live and self._take_waiting(eviction, lanes):
            return True
        if keep_live and len(lanes) == len(self._lanes):
            return False
        for group, highest_here in _turns(lanes, self._owners, eviction.writer, highest):
            if self._take_live(eviction, group, highest_here):
                return True
            if not self.not_worth and self._take_waiting(eviction, group):
                return True
        return False

    def sweep(self, taker: Taker) -> None:
        """Evict objects that no restore can use, until none is left or the taker is full."""
        self._catch_up()
        eviction = _Eviction(taker, None)
        while not taker.full() and self._take_dead(eviction, self._lanes_for(None)):
            self._catch_up()
        self.unfinished = taker.full()

    def is_worth(self, rank: float, writer: Writer | None = None) -> bool:
        """Return whether new objects of this rank would be stored if room had to be made for them.

        They are, unless there is something to evict, and all of it is of use and has a higher rank.
        """
        self._refresh()
        lanes = self._lanes_for(writer)
        if any(lane.dead for lane in lanes) or len(_turns(lanes, self._owners, writer, rank)) > 1:
            return True
        self.not_worth = False
        eviction = _Eviction(None, writer)
        # No unit has a rank below minus infinity, so the first one stays, and is put back into the queue.
        self._take_live(eviction, lanes, -inf)
        for entry in eviction.spared:
            self._push_live(*entry)
        return not self.not_worth or min(lane.live[0][0] for lane in lanes if lane.live) <= rank

    def survey(self) -> Survey:
        """Return copies of all columns that say what is evicted next; this changes no order."""
        return Survey(self._residents)

    def _refresh(self) -> None:
        """Bring the queues up to date, before an eviction."""
        residents, values = self._residents, self._values
        if (
            residents.pages.recount_orphans()
            or (values.given and (values.settle() or not self._by_value))
            # Entries of deleted pages stay in the queues. Without this, the queues of a store in which
            # objects are only stored and deleted would grow without limit.
            or len(self) > 3 * residents.count + _FRONT
        ):
            self.restart()
        self._catch_up()

    def _catch_up(self) -> None:
        """Queue the pages that may have become evictable since the last call.

        These pages are not known at the first call, nor when there were too many to note. The queues are then
        rebuilt from all pages.
        """
        noted = self._residents.pages.take_evictable()
        if noted is None:
            self.restart()
        if self._lanes[0].horizon == -inf:
            self._scan(self._lanes)
        else:
            self._offer_all(noted or ())

    def _offer_all(self, noted: Collection[int]) -> None:
        """Queue those of these pages that belong in a queue."""
        if not self._values.given:
            for node in noted:
                self._offer(node)
            return
        # Values come in batches of thousands, most of them for units of high ranks.
        units, others = self._sorted(np.fromiter(noted, np.int64, len(noted)))
        for node in others.tolist():
            self._offer(node)
        if len(units):
            ranks = self._values.ranks(units)
            low = ranks <= max(lane.horizon for lane in self._lanes)
            for rank, node in zip(ranks[low].tolist(), units[low].tolist(), strict=True):
                if self._lane_of(node).admits(rank):
                    self._push_live(rank, node)

    def _lanes_for(self, writer: Writer | None) -> Sequence[Lane]:
        """Return the lanes whose pages may be evicted for these writes (None: for nobody's in particular)."""
        lanes, owners = self._lanes, self._owners
        if not owners.active:
            return lanes
        if writer is not None and writer.for_quota:
            return (lanes[writer.owner],)
        mine = None if writer is None else writer.owner
        # This runs for each unit, so it asks no methods.
        used, guarantees = owners.used, owners.guarantees
        return [lane for lane in lanes if used[lane.owner] > guarantees[lane.owner] or lane.owner == mine]

    def _take_dead(self, eviction: _Eviction, lanes: Sequence[Lane]) -> bool:
        """Evict the dead page that was used least recently; return False if there is none."""
        residents = self._residents
        for lane in lanes:
            for kind, heap in enumerate(lane.waiting):
                while heap and residents.is_overdue(int(heap[0][0]), kv=kind == _KV):
                    self._offer(self._pop(heap, _WAITING[kind]))
        queues = [(lane.dead, _DEAD) for lane in lanes if lane.dead]
        return bool(queues) and self._take_first(eviction, queues, residents.is_dead)

    def _take_waiting(self, eviction: _Eviction, lanes: Sequence[Lane]) -> bool:
        """Evict the waiting page with the lowest number; return False if there is none."""
        queues = [(heap, _WAITING[kind]) for lane in lanes for kind, heap in enumerate(lane.waiting)]
        return self._take_first(eviction, queues, self._residents.pages.is_useless)

    def _take_first(
        self,
        eviction: _Eviction,
        queues: Sequence[tuple[list[tuple[float, int]], int]],
        belongs: Callable[[int], bool],
    ) -> bool:
        """Evict the first page of these queues, heaps with their flags; return False if there is none.

        `belongs` says whether a page is still in the right queue.
        """
        residents, pages = self._residents, self._residents.pages
        # Pages that are being read are put aside until the loop ends. Otherwise the loop would not end.
        pinned: list[tuple[int, bool]] = []
        taken = False
        while not taken and (filled := [queue for queue in queues if queue[0]]):
            heap, flag = min(filled, key=lambda queue: queue[0][0])
            since, dead = heap[0][0], flag == _DEAD
            node = self._pop(heap, flag)
            if not pages.is_leaf(node) or not belongs(node) or (dead and pages.tick[node] > since):
                self._offer(node)
            elif residents.is_pinned(node) or not self._take(eviction, residents.rows_of(node)):
                pinned.append((node, dead))
            else:
                taken = True
        for node, dead in pinned:
            self._push_useless(node, dead=dead)
        return taken

    def _take(self, eviction: _Eviction, rows: list[int]) -> int:
        """Evict these objects of one page; return how many of them may be evicted.

        Each is taken only if its owner may still lose one: the states of a page come before its KV, which is
        of no use with them gone, but stays if it is all that its owner is guaranteed.
        """
        taker, writer, owners, residents = eviction.taker, eviction.writer, self._owners, self._residents
        assert taker is not None, "an eviction has a receiver"
        node, pages = residents.page[rows[0]], residents.pages
        above = pages.parent_node[node]
        if above >= 0 and not pages.children[node] and self._values.given:
            # Before the states go: with them goes their rank, which the page has if its KV has none.
            self._values.inherit(above, node)
        if not owners.active:
            taker.take(rows)
            return len(rows)
        mine = None if writer is None else writer.owner
        only_mine = writer is not None and writer.for_quota
        taken = 0
        if len(rows) > 1:
            rows = sorted(rows, key=lambda row: not residents.attached[row])
        for row in rows:
            owner = owners.of(residents.namespace[row])
            if owner != mine and (only_mine or not owners.is_above(owner)):
                continue
            taker.take([row])
            taken += 1
        return taken

    def _take_live(self, eviction: _Eviction, lanes: Sequence[Lane], highest: float) -> bool:
        """Evict the live unit with the lowest rank; return False if there is none, or if it is `not_worth`.

        It is if its rank is above `highest`.
        """
        residents, pages = self._residents, self._residents.pages
        # The branches below decide on the page with the lowest rank:
        #   1. it has no object, or is a useless leaf           the leaf goes to another queue
        #   2. it is no leaf, and has no state to evict alone   it is queued again once it is a leaf
        #   3. its rank has risen                               it is put back, or waits for the next pass
        #   4. it is being read, or a writer needs its state    it is put aside until this eviction ends
        #   5. it is worth more than the new objects            it is put back, and nothing is evicted
        #   6. otherwise                                        it is evicted
        while (lane := self._lowest(lanes)) is not None:
            rank, node = heappop(lane.live)
            pages.flags[node] &= 0xFF ^ _LIVE
            leaf = residents.pages.is_leaf(node)
            if pages.first[node] < 0 or (residents.pages.is_useless(node) and leaf):
                self._offer(node)
            elif not leaf and not self._values.stands_alone(node):
                continue
            elif (now := self._values.rank_of(node)) > rank:
                if lane.admits(now):
                    self._push_live(now, node)
            elif residents.is_pinned(node) or (
                not leaf and (node in eviction.states_to_keep or pages.holds[node])
            ):
                eviction.spared.append((rank, node))
                pages.flags[node] |= _LIVE
            elif rank > highest or eviction.taker is None:
                self._push_live(rank, node)
                self.not_worth = True
                return False
            elif self._take_unit(node, eviction, leaf=leaf):
                lane.taken += 1
                return True
            else:
                eviction.spared.append((rank, node))
                pages.flags[node] |= _LIVE
        return False

    def _lowest(self, lanes: Sequence[Lane]) -> Lane | None:
        """Return the lane with the live unit of the lowest rank; None if there is no live unit."""
        if not self._owners.active:
            return lanes[0] if lanes[0].live or self._scan(lanes) else None
        clock = self._residents.clock
        empty = [lane for lane in lanes if not lane.live and not lane.is_barren(self._owners, clock)]
        if empty:
            self._scan(empty)
        return min((lane for lane in lanes if lane.live), key=lambda lane: lane.live[0], default=None)

    def _take_unit(self, node: int, eviction: _Eviction, *, leaf: bool) -> bool:
        """Evict a leaf and the pages that are useless without it. Of any other page, evict the states.

        Returns False if nothing was evicted.
        """
        residents, up = self._residents, self._residents.pages.parent_node
        taker = eviction.taker
        assert taker is not None, "an eviction has a receiver"
        if not leaf:
            return (
                self._take(eviction, [row for row in residents.rows_of(node) if residents.attached[row]]) > 0
            )
        some = False
        while node >= 0 and not taker.full():
            # page    1 <- 2 <- 3 [state] <- 4 <- 5 [state]    without 5, page 4 is useless and is evicted
            #                                                  as well; 3 has a state and stays
            above = up[node]
            rows = residents.rows_of(node)
            taken = self._take(eviction, rows)
            some = some or taken > 0
            if taken < len(rows):
                return some
            alone = (
                above >= 0
                and residents.pages.is_leaf(above)
                and residents.pages.is_useless(above)
                and not residents.is_pinned(above)
            )
            node = above if alone else NONE
        self.unfinished = node >= 0
        return some

    def _states_to_keep(self, write_parents: Iterable[int]) -> set[int]:
        """Return the nearest page with a state at or before each of `write_parents`.

        The result is empty before the first hint, until which no state is evicted without its page.
        """
        found: set[int] = set()
        if not self._values.given:
            return found
        pages = self._residents.pages
        # Pages of one conversation share their path. A walk ends where an earlier walk has been.
        seen: set[int] = set()
        for node in write_parents:
            while node >= 0 and node not in seen:
                seen.add(node)
                if pages.states[node]:
                    found.add(node)
                    break
                node = pages.parent_node[node]
        return found

    def _scan(self, lanes: Sequence[Lane]) -> bool:
        """Queue the live units with the lowest ranks of these lanes, and their leaves that are in no queue.

        Returns whether live units were queued.
        """
        residents, pages = self._residents, self._residents.pages
        nodes = np.arange(pages.used)
        if len(lanes) < len(self._lanes):
            of = self._owners.of_all(pages.columns["namespace_id"][nodes])
            nodes = nodes[np.isin(of, [lane.owner for lane in lanes])]
        for lane in lanes:
            # The horizon is the highest rank that belongs in the queue. If there is nothing to rank now,
            # every later unit belongs in the queue.
            lane.horizon = inf
            lane.barren_at = (residents.clock, lane.taken)
        flags = pages.columns["flags"]
        units, others = self._sorted(nodes)
        for node in others.tolist():
            self._offer(node)
        nodes = units[flags[units] & _LIVE == 0]
        if not len(nodes):
            return False
        ranks = self._values.ranks(nodes)
        owners = self._owners.of_all(pages.columns["namespace_id"][nodes]) if self._owners.active else None
        for lane in lanes:
            mine = slice(None) if owners is None else owners == lane.owner
            if len(nodes[mine]):
                self._fill(lane, nodes[mine], ranks[mine])
        return True

    def _fill(self, lane: Lane, nodes: Ints, ranks: Ranks) -> None:
        """Queue the lowest of these live units of one lane."""
        chosen = lane.choose(ranks)
        nodes, ranks = nodes[chosen], ranks[chosen]
        self._residents.pages.columns["flags"][nodes] |= _LIVE
        lane.fill(list(zip(ranks.tolist(), nodes.tolist(), strict=True)), self._residents.clock)

    def _sorted(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return those of the pages that are live units, and the other leaves that are in no queue."""
        columns = self._residents.pages.columns
        first, children, holds, flags, live = (
            columns[name][nodes] for name in ("first", "children", "holds", "flags", "live")
        )
        there = first >= 0
        leaf = there & (children == 0) & (holds == 0)
        useful = (live > 0) & (flags & BROKEN == 0)
        inner = there & ~leaf & self._values.stand_alone(nodes)
        return nodes[(leaf & useful) | inner], nodes[leaf & ~useful & (flags & (_QUEUED ^ _LIVE) == 0)]

    def _lane_of(self, node: int) -> Lane:
        if not self._owners.active:
            return self._lanes[0]
        return self._lanes[self._owners.of(self._residents.pages.namespace_id[node])]

    def _push_live(self, rank: float, node: int) -> None:
        self._residents.pages.flags[node] |= _LIVE
        self._lane_of(node).push((rank, node))

    def _push_useless(self, node: int, *, dead: bool) -> None:
        """Put a page that no restore can use into the queue of dead pages, or into one of waiting pages."""
        pages, lane = self._residents.pages, self._lane_of(node)
        kind = _KV if pages.kv[node] else _STATES
        flag = _DEAD if dead else _WAITING[kind]
        if not pages.flags[node] & flag:
            pages.flags[node] |= flag
            key = pages.tick[node] if dead else pages.number[node]
            heappush(lane.dead if dead else lane.waiting[kind], (key, node))

    def _pop(self, heap: list[tuple[float, int]], flag: int) -> int:
        _, node = heappop(heap)
        self._residents.pages.flags[node] &= 0xFF ^ flag
        return node


def _turns(
    lanes: Sequence[Lane], owners: Owners, writer: Writer | None, highest: float
) -> Sequence[tuple[Sequence[Lane], float]]:
    """Return these lanes in the order in which their live and waiting pages are taken, each with a limit.

    The limit is the highest rank that is taken.

    Usually all are one group, up to the rank `highest` of the new objects. New objects within the guarantee
    of their owner are stored at the expense of those who have more than theirs, whatever these are worth:
    values of two tenants need not be comparable, and a tenant that just replaced its own objects would never
    get what it is guaranteed.
    """
    if writer is None or writer.for_quota or not owners.active or not owners.is_entitled(writer):
        return ((lanes, highest),)
    others = [lane for lane in lanes if lane.owner != writer.owner]
    own = [lane for lane in lanes if lane.owner == writer.owner]
    return ((others, inf), (own, highest))
