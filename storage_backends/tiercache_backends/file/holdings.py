"""In-memory state of a `file` store: where each object lies, how often it is being read, what is being written or removed, what is free.

Every state change of an object happens here, under one mutex, and nothing here does I/O:

    absent -> claimed (being written) -> resident -> leaving (being removed) -> absent

Blocks go back to the free space only when the object's removal is in the catalog *and* the last reader is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event, Lock
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.policy import Policy
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import RESIDENT, Standing, parents_first
from tiercache_backends.file.catalog import Loaded
from tiercache_backends.file.objects import Facts, Objects, Placement
from tiercache_backends.file.recovery import sound_records
from tiercache_backends.file.space import Extent, Space


class Pin(NamedTuple):
    """Hold on an object's blocks. `reused`: the object was read before, since the store was opened."""

    row: int
    number: int
    placement: Placement
    reused: bool


class Wanted(NamedTuple):
    """Item of a batch: its index, its object, the page that it follows, and the room that it needs.

    `page`: key of the page that the object is or hangs on; `parent`: key of the page that it names as its parent, which is `page` for an
    object that hangs on a page; `space`: id of its namespace.
    """

    item: int
    digest: bytes
    page: bytes
    parent: bytes | None
    blocks: int
    depth: int
    space: int


@dataclass(slots=True)
class Claim:
    """Item `index` of a batch that is being written on the page of `node`, behind the page of node `parent` (None: not known).

    `is_page`: it is a page, which others can follow. `extents`: empty until blocks are allocated.
    """

    index: int
    wanted: Wanted
    node: int
    parent: int | None
    is_page: bool
    extents: tuple[Extent, ...] = ()

    @property
    def blocks(self) -> int:
        """Number of blocks that the object takes."""
        return self.wanted.blocks


@dataclass(slots=True)
class Claims:
    """Sorted batch: what it may write now, and what becomes of its other items, which are named by their index.

    - `fresh`: claims to write now, parents before what follows them.
    - `hits`: items whose object is stored already.
    - `refused`: items that must not be written, with their outcomes.
    - `later`: items to claim again: beyond the limit, busy in another call or earlier in this batch, or behind such a page.
    - `waits`: events that end the other calls' work on items in `later`.
    - `held`: nodes by page key; they stay in place until `Holdings.let_go`.
    - `missing`: keys of pages of the batch that were not stored.
    - `done`: set when the batch was published.
    """

    fresh: list[Claim] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    refused: dict[int, Outcome] = field(default_factory=dict)
    later: list[int] = field(default_factory=list)
    waits: set[Event] = field(default_factory=set)
    held: dict[bytes, int] = field(default_factory=dict)
    missing: set[bytes] = field(default_factory=set)
    done: Event = field(default_factory=Event)


@dataclass(slots=True)
class Leaver:
    """Object that is being removed. `suspect`: its blocks must be proven before they are used again."""

    row: int
    number: int
    digest: bytes
    parent: bytes | None
    suspect: bool = False


@dataclass(slots=True)
class Departure:
    """Objects that were taken out together; the caller must end this with `removed`, `restored` or `strand`."""

    leavers: list[Leaver] = field(default_factory=list)
    done: Event = field(default_factory=Event)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the catalog records to remove."""
        return [leaver.number for leaver in self.leavers]


class Holdings:
    """Objects, pins, claims and free blocks of a store, with every change of their state.

    Thread safety: any thread may call; each method is one critical section, of microseconds, or of milliseconds when much is evicted.
    """

    def __init__(self, slab_blocks: int, policy: Policy, *, with_macs: bool) -> None:
        self._mutex: Final = Lock()
        self._objects = Objects(with_macs=with_macs)
        self._order = EvictionOrder(self._objects, policy)
        self._writing: dict[int, Claims] = {}
        self._busy: dict[bytes, Event] = {}
        self._gone: dict[int, Leaver] = {}
        self._space = Space(slab_blocks)
        self._stranded = 0
        self._retired = 0
        self._counts = {"corrupt": 0, "evicted": 0, "refused_absent_parent": 0, "refused_impossible": 0}

    def load(self, loaded: Loaded, slabs: Sequence[Extent], holds: Callable[[int], bool]) -> list[int]:
        """Take in the catalog and rebuild the free space; return the numbers of records that have no sound place or are outdated.

        `holds`: see `sound_records`.
        """
        sound, unsound, gaps = sound_records(loaded, slabs, self._space.slab_blocks, holds)
        self._objects.load_catalog(sound)
        self._space.size += sum(slab.blocks for slab in slabs)
        self._space.give(gaps)
        return unsound

    def present(self, digests: Sequence[bytes]) -> list[bool]:
        """Return which objects can be read."""
        with self._mutex:
            return [row >= 0 for row in self._objects.find_many(digests)]

    def numbers(self, digests: Sequence[bytes]) -> list[int]:
        """Return the number of each object's catalog record; 0 where the object cannot be read. Does not count as a use."""
        with self._mutex:
            return [self._objects.number[row] if row >= 0 else 0 for row in self._objects.find_many(digests)]

    def current(self, keys: Sequence[tuple[int, bytes]]) -> list[bool]:
        """Return which (number, digest) pairs of catalog records describe an object that can be read."""
        with self._mutex:
            rows = self._objects.find_many([digest for _, digest in keys])
            return [row >= 0 and self._objects.number[row] == number for row, (number, _) in zip(rows, keys, strict=True)]

    def pin(self, digests: Sequence[bytes]) -> list[Pin | None]:
        """Hold the blocks of these objects until `unpin` and record a use of each; None for an object that cannot be read."""
        objects = self._objects
        pins: list[Pin | None] = []
        with self._mutex:
            for row in objects.find_many(digests):
                if row < 0:
                    pins.append(None)
                    continue
                pins.append(Pin(row, objects.number[row], objects.placement(row), objects.hits[row] > 0))
                objects.pins[row] += 1
                objects.hits[row] = min(objects.hits[row] + 1, 2**32 - 1)
                objects.touch(row)
        return pins

    def unpin(self, pins: Iterable[Pin | None]) -> list[Extent]:
        """Undo one pin of each object; return extents of suspects that have no reader left: prove them, then `give` or `retire` them."""
        suspects: list[Extent] = []
        with self._mutex:
            for pin in pins:
                if pin is not None:
                    self._objects.pins[pin.row] -= 1
                    if pin.row in self._gone:
                        suspects += self._vacate(pin.row)
        return suspects

    def require_states(self, space: int) -> None:
        """Record that prefixes of the namespace with this id need states: KV without a state at or below it cannot be restored."""
        with self._mutex:
            self._objects.require_states(space)

    def claim(self, batch: Sequence[Wanted], limit: int, missing: Iterable[bytes] = ()) -> Claims:
        """Sort a batch: claim at most `limit` objects for writing, and put those that come after them into `later`.

        A page whose parent is neither stored, nor being written, nor in the batch could never be read: it is THROTTLED, and so is what
        hangs on it. An item that contradicts what is stored is an ERROR. `missing`: keys of pages that this call has failed to store.
        """
        claims = Claims(missing=set(missing))
        later: set[bytes] = set()
        ordered = [batch[i] for i in parents_first([(wanted.page, wanted.parent) for wanted in batch])]
        with self._mutex:
            for wanted, row in zip(ordered, self._objects.find_many([wanted.digest for wanted in ordered]), strict=True):
                if row >= 0:
                    self._objects.renew(row)
                    claims.hits.append(wanted.item)
                    self._hold(wanted.page, claims)
                elif wanted.digest in self._busy or len(claims.fresh) == limit or wanted.parent in later:
                    claims.later.append(wanted.item)
                    if wanted.parent != wanted.page:
                        later.add(wanted.page)
                    if (event := self._busy.get(wanted.digest)) not in (None, claims.done):
                        claims.waits.add(event)
                else:
                    self._claim(wanted, claims)
            if claims.fresh:
                self._writing[id(claims)] = claims
        return claims

    def let_go(self, nodes: Iterable[int]) -> None:
        """Release the nodes that a call held, so that what it wrote or found may be evicted again."""
        with self._mutex:
            for node in nodes:
                self._objects.release(node)

    def allocate(self, claims: Sequence[Claim]) -> int:
        """Give blocks to the claims that have none, as far as they go; return the number of blocks that the rest still lacks."""
        with self._mutex:
            without = [claim for claim in claims if not claim.extents]
            for claim, extents in zip(without, self._space.allocate_all([claim.blocks for claim in without]), strict=True):
                claim.extents = extents
            return max(0, sum(claim.blocks for claim in without if not claim.extents) - self._space.free)

    def publish(self, claims: Claims, facts: dict[int, Facts]) -> None:
        """End a batch: claims with `facts`, by item index, become resident; the blocks of the others are freed."""
        objects = self._objects
        with self._mutex:
            for claim in claims.fresh:
                found, wanted = facts.get(claim.index), claim.wanted
                if claim.is_page:
                    objects.expected(claim.node)
                if found is not None:
                    objects.store(found, wanted.digest, claim.node, claim.parent, claim.extents)
                else:
                    self._space.give(claim.extents)
                    if claim.is_page:
                        claims.missing.add(wanted.page)
                del self._busy[wanted.digest]
            self._writing.pop(id(claims), None)
        claims.done.set()

    def needs_second_slab(self, blocks: int) -> bool:
        """Return whether a batch of `blocks` blocks would be placed in one slab because there is no room in another."""
        with self._mutex:
            return self._space.needs_second_slab(blocks)

    def shortage(self, budget_blocks: int | None, share: int) -> int:
        """Return how many blocks are missing until one in `share` is free or can still be preallocated; 0 or less if none is.

        `budget_blocks`: blocks that the slabs may have in all; None: the slabs cannot grow.
        """
        with self._mutex:
            size = self._space.size if budget_blocks is None else budget_blocks
            return size // share - self._space.free - max(0, size - self._space.size)

    def evict(self, blocks: int, objects: int, most: int, claims: Sequence[Claim] = ()) -> Departure:
        """Take out objects in eviction order until `blocks` blocks and `objects` objects are gained, `most` have left, or none is left.

        `claims`: the writes for which room is needed. See `EvictionOrder.evict`.
        """
        departure, residents = Departure(), self._objects
        with self._mutex:
            promising = any(residents.is_promising(c.node, c.wanted.space, hangs=not c.is_page) for c in claims)
            attached = (claim.parent for claims in self._writing.values() for claim in claims.fresh if claim.parent is not None)
            self._order.evict(_Evicting(self, departure, blocks, objects, most), attached, promising=promising)
        return departure

    def sweep(self, most: int) -> Departure:
        """Take out the objects that the last eviction left useless, until none is left or `most` have left."""
        departure = Departure()
        with self._mutex:
            if self._order.unfinished:
                self._order.sweep(_Evicting(self, departure, 0, 0, most))
        return departure

    def take_out(self, digests: Iterable[bytes]) -> Departure:
        """Take out those of these objects that are resident."""
        departure = Departure()
        with self._mutex:
            for digest in dict.fromkeys(digests):
                row = self._objects.find(digest)
                if row >= 0:
                    self._leave(departure, row)
        return departure

    def take_out_suspects(self, pins: Iterable[Pin]) -> Departure:
        """Take out pinned objects whose blocks are damaged, except those that have left already."""
        departure = Departure()
        with self._mutex:
            for pin in pins:
                if self._objects.number[pin.row] == pin.number and self._objects.state[pin.row] == RESIDENT:
                    self._leave(departure, pin.row, suspect=True)
        return departure

    def removed(self, departure: Departure) -> list[Extent]:
        """Free the blocks of a departure as soon as they have no reader; return suspect extents as `unpin` does.

        Call it once the catalog no longer has the records.
        """
        suspects: list[Extent] = []
        with self._mutex:
            for leaver in departure.leavers:
                self._gone[leaver.row] = leaver
                del self._busy[leaver.digest]
                self._objects.pins[leaver.row] -= 1
                suspects += self._vacate(leaver.row)
        departure.done.set()
        return suspects

    def restored(self, departure: Departure) -> None:
        """Make the objects of a departure resident again, because the catalog could not remove their records."""
        with self._mutex:
            for leaver in reversed(departure.leavers):  # a page left after those that follow it, and returns first
                del self._busy[leaver.digest]
                self._objects.pins[leaver.row] -= 1
                self._objects.enter(leaver.row, leaver.digest, leaver.parent)
        departure.done.set()

    def strand(self, departure: Departure) -> None:
        """Keep objects unreadable whose records the catalog could not remove: their blocks are lost until the store is opened again."""
        with self._mutex:
            for leaver in departure.leavers:
                del self._busy[leaver.digest]
                self._stranded += self._objects.blocks(leaver.row)
        departure.done.set()

    def grow(self, extent: Extent) -> None:
        """Add a slab's new blocks to the free space."""
        with self._mutex:
            self._space.grow(extent)

    def give(self, extent: Extent) -> None:
        """Free blocks that were proven to keep their data."""
        with self._mutex:
            self._space.give([extent])

    def retire(self, extent: Extent) -> None:
        """Count blocks that do not keep their data; they are not used again until the store is opened again."""
        with self._mutex:
            self._retired += extent.blocks

    def count(self, name: str, n: int) -> None:
        """Add `n` to the counter of this name."""
        with self._mutex:
            self._counts[name] = self._counts.get(name, 0) + n

    def digests_since(self, number: int) -> list[bytes]:
        """Return the digests of the objects whose records are newer than record `number`."""
        with self._mutex:
            rows = self._objects.residents()
            rows = rows[self._objects.columns["number"][rows] > number]
            return [self._objects.digest(row) for row in rows.tolist()]

    def figures(self) -> dict[str, int]:
        """Return the figures for `usage`: objects, payload_bytes, blocks by kind, memory_bytes of the columns, `Worth`, all counters."""
        with self._mutex:
            return {
                "objects": len(self._objects),
                "payload_bytes": self._objects.payload,
                "blocks_used": self._space.size - self._space.free,
                "blocks_free": self._space.free,
                "blocks_stranded": self._stranded,
                "blocks_retired": self._retired,
                "memory_bytes": self._objects.memory_bytes(),
                **self._objects.worth()._asdict(),
                **self._counts,
            }

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + used = capacity, no two objects share a block and no pin is held.

        Call it while no other call is running.
        """
        with self._mutex:
            self._space.check_integrity()
            self._objects.check_integrity()
            rows = self._objects.residents().tolist()
            assert not self._busy, "nothing is on its way in or out"
            assert not self._gone, "nothing that is gone is still read"
            assert not any(self._objects.pins[row] for row in rows), "nobody holds a pin"
            held = sorted(extent for row in rows for extent in self._objects.extents(row))
            assert all(a.start + a.blocks <= b.start for a, b in pairwise(held)), "no two objects share a block"
            used = sum(extent.blocks for extent in held) + self._stranded + self._retired
            assert used + self._space.free == self._space.size, "free + used = capacity"

    def _claim(self, wanted: Wanted, claims: Claims) -> None:
        objects, page = self._objects, wanted.page
        is_page = wanted.parent != page
        # The parent before the page: in a chain the parent is the page before, whose node this call holds already.
        parent = None if wanted.parent is None else self._hold(wanted.parent, claims)
        node = self._hold(page, claims)
        standing = objects.standing(node, parent, wanted.depth, wanted.space, refused=page in claims.missing)
        if standing is not Standing.FINE:
            claims.refused[wanted.item] = Outcome.ERROR if standing is Standing.IMPOSSIBLE else Outcome.THROTTLED
            self._counts[f"refused_{standing.value}"] += 1
            if is_page:
                claims.missing.add(page)
            return
        self._busy[wanted.digest] = claims.done
        if is_page:
            objects.expect(node, wanted.depth, wanted.space)
        claims.fresh.append(Claim(wanted.item, wanted, node, parent, is_page))

    def _hold(self, page: bytes, claims: Claims) -> int:
        """Return the node of a page, which the call holds from now on until `let_go`."""
        node = claims.held.get(page)
        if node is None:
            node = claims.held[page] = self._objects.hold(page)
        return node

    def _leave(self, departure: Departure, row: int, *, suspect: bool = False) -> None:
        number = self._objects.number[row]
        digest, parent = self._objects.leave(row)
        # Busy until the catalog has removed the record: a set of the same key that overtook the removal would be removed with it.
        self._busy[digest] = departure.done
        self._objects.pins[row] += 1
        departure.leavers.append(Leaver(row, number, digest, parent, suspect))

    def _vacate(self, row: int) -> tuple[Extent, ...]:
        """Free the row and blocks of an object that left, if it has no reader; suspect extents are returned instead of freed."""
        if self._objects.pins[row]:
            return ()
        leaver = self._gone.pop(row)
        extents = self._objects.extents(row)
        self._objects.drop(row)
        if leaver.suspect:
            return extents
        self._space.give(extents)
        return ()


class _Evicting:
    """Receiver of the objects of one eviction (see `eviction.Taker`), which tells whether enough have left.

    Thread safety: none of its own; it is used under the mutex of its holdings.
    """

    def __init__(self, holdings: Holdings, departure: Departure, blocks: int, objects: int, most: int) -> None:
        self._holdings = holdings
        self._departure = departure
        self._blocks = blocks
        self._objects = objects
        self._most = most
        self._gained = 0

    def take(self, rows: list[int]) -> None:
        """Take out the objects in these rows."""
        for row in rows:
            self._gained += self._holdings._objects.blocks(row)
            self._holdings._leave(self._departure, row)

    def enough(self) -> bool:
        """Return whether the wanted blocks and objects were gained."""
        return self._gained >= self._blocks and len(self._departure.leavers) >= self._objects

    def full(self) -> bool:
        """Return whether as many objects left as one transaction may remove."""
        return len(self._departure.leavers) >= self._most


def blocks_for(length: int) -> int:
    """Return the number of blocks that `length` bytes take."""
    return -(-length // BLOCK_ALIGN)
