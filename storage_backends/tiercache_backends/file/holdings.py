"""What a `file` store holds, in memory: which object lies where, who is reading it, what is on its way in or out, what is free.

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
    """A hold on an object's blocks. `reused`: it was read before."""

    row: int
    number: int
    placement: Placement
    reused: bool


class Wanted(NamedTuple):
    """An item of a batch: which object it is, what it follows, and how much room it needs. `page`: the key of the page that it is or hangs
    on; `space`: the id of its namespace.
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
    """Item `index` of a batch, which is being written on the page of `node`, behind the page of node `parent`, where it is not None.

    `is_page`: others can follow it.
    """

    index: int
    wanted: Wanted
    node: int
    parent: int | None
    is_page: bool
    extents: tuple[Extent, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks that it takes."""
        return self.wanted.blocks


@dataclass(slots=True)
class Claims:
    """What a batch may write now, parents before what follows them; what is there already, what it may not write, and what another call
    is busy with. All nodes in `held`, by page key, stay in place until they are let go. `missing`: pages of the batch that were not stored.
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
    """An object that is being removed. `suspect`: its blocks must be proven before anything is written there again."""

    row: int
    number: int
    digest: bytes
    parent: bytes | None
    suspect: bool = False


@dataclass(slots=True)
class Departure:
    """Objects that left together; `removed`, `restored` or `strand` must follow."""

    leavers: list[Leaver] = field(default_factory=list)
    done: Event = field(default_factory=Event)

    @property
    def numbers(self) -> list[int]:
        """Of the catalog records that must go."""
        return [leaver.number for leaver in self.leavers]


class Holdings:
    """The maps of a store and the moves between them.

    Thread safety: any thread; each method is one critical section of microseconds to (when much is evicted) milliseconds.
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
        """Take in the catalog and rebuild the free space. Returns the numbers of records that have no sound place, or are outdated.

        `holds`: see `sound_records`.
        """
        sound, unsound, gaps = sound_records(loaded, slabs, self._space.slab_blocks, holds)
        self._objects.load_catalog(sound)
        self._space.size += sum(slab.blocks for slab in slabs)
        self._space.give(gaps)
        return unsound

    def present(self, digests: Sequence[bytes]) -> list[bool]:
        """Which objects can be read."""
        with self._mutex:
            return [row >= 0 for row in self._objects.find_many(digests)]

    def numbers(self, digests: Sequence[bytes]) -> list[int]:
        """The number of each object's catalog record; 0 where the object cannot be read. Does not count as a use."""
        with self._mutex:
            return [self._objects.number[row] if row >= 0 else 0 for row in self._objects.find_many(digests)]

    def current(self, keys: Sequence[tuple[int, bytes]]) -> list[bool]:
        """Which (number, digest) pairs of catalog records speak of an object that can be read."""
        with self._mutex:
            rows = self._objects.find_many([digest for _, digest in keys])
            return [row >= 0 and self._objects.number[row] == number for row, (number, _) in zip(rows, keys, strict=True)]

    def pin(self, digests: Sequence[bytes]) -> list[Pin | None]:
        """Hold the blocks of these objects until `unpin`, and note their use."""
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
        """Undo one pin of each. Returns the extents of suspects that nobody uses any more: to be proven, and then `give` or `retire`."""
        suspects: list[Extent] = []
        with self._mutex:
            for pin in pins:
                if pin is not None:
                    self._objects.pins[pin.row] -= 1
                    if pin.row in self._gone:
                        suspects += self._vacate(pin.row)
        return suspects

    def require_states(self, space: int) -> None:
        """Prefixes of the namespace with this id need states: KV without one at or below it is worth nothing."""
        with self._mutex:
            self._objects.require_states(space)

    def claim(self, batch: Sequence[Wanted], limit: int, missing: Iterable[bytes] = ()) -> Claims:
        """Sort a batch: at most `limit` objects are claimed for writing, whatever comes after them waits.

        A page whose parent is neither stored, nor being written, nor in the batch could never be read: THROTTLED, and what hangs on it
        too. One that contradicts what is stored is an ERROR. `missing`: pages that the call could not store before.
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
        """A call is over: what it wrote or found may be given up again."""
        with self._mutex:
            for node in nodes:
                self._objects.release(node)

    def allocate(self, claims: Sequence[Claim]) -> int:
        """Give blocks to those claims that have none, as far as they go; returns the blocks that are missing for the rest."""
        with self._mutex:
            without = [claim for claim in claims if not claim.extents]
            for claim, extents in zip(without, self._space.allocate_all([claim.blocks for claim in without]), strict=True):
                claim.extents = extents
            return max(0, sum(claim.blocks for claim in without if not claim.extents) - self._space.free)

    def publish(self, claims: Claims, facts: dict[int, Facts]) -> None:
        """End a batch: what has facts, by item, is resident now; the blocks of the rest are free again."""
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
        """Would a batch of so many blocks lie in one slab, for want of room in another?"""
        with self._mutex:
            return self._space.needs_second_slab(blocks)

    def shortage(self, budget_blocks: int | None, share: int) -> int:
        """Blocks that are missing until one in `share` is free or could still be made; None: the slabs cannot grow."""
        with self._mutex:
            size = self._space.size if budget_blocks is None else budget_blocks
            return size // share - self._space.free - max(0, size - self._space.size)

    def evict(self, blocks: int, objects: int, most: int, claims: Sequence[Claim] = ()) -> Departure:
        """Take out the objects to give up: for `blocks` blocks and at least `objects` objects, if so much is there and `most` allows it.

        `claims`: for what the room is wanted. See `EvictionOrder.evict`.
        """
        departure, residents = Departure(), self._objects
        with self._mutex:
            promising = any(residents.is_promising(c.node, c.wanted.space, hangs=not c.is_page) for c in claims)
            attached = (claim.parent for claims in self._writing.values() for claim in claims.fresh if claim.parent is not None)
            self._order.evict(_Evicting(self, departure, blocks, objects, most), attached, promising=promising)
        return departure

    def sweep(self, most: int) -> Departure:
        """Take out the rest of what the last eviction left useless, at most so many objects at once."""
        departure = Departure()
        with self._mutex:
            if self._order.unfinished:
                self._order.sweep(_Evicting(self, departure, 0, 0, most))
        return departure

    def take_out(self, digests: Iterable[bytes]) -> Departure:
        """Take out these objects, if they are resident."""
        departure = Departure()
        with self._mutex:
            for digest in dict.fromkeys(digests):
                row = self._objects.find(digest)
                if row >= 0:
                    self._leave(departure, row)
        return departure

    def take_out_suspects(self, pins: Iterable[Pin]) -> Departure:
        """Take out these objects because their blocks are damaged, unless they left by themselves."""
        departure = Departure()
        with self._mutex:
            for pin in pins:
                if self._objects.number[pin.row] == pin.number and self._objects.state[pin.row] == RESIDENT:
                    self._leave(departure, pin.row, suspect=True)
        return departure

    def removed(self, departure: Departure) -> list[Extent]:
        """The catalog has forgotten them: their blocks are free as soon as nobody reads them. Returns as `unpin`."""
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
        """The catalog could not forget them: they are resident again."""
        with self._mutex:
            for leaver in reversed(departure.leavers):  # what followed a page left before it
                del self._busy[leaver.digest]
                self._objects.pins[leaver.row] -= 1
                self._objects.enter(leaver.row, leaver.digest, leaver.parent)
        departure.done.set()

    def strand(self, departure: Departure) -> None:
        """The catalog could not forget them, and they must not be read: their blocks are lost until the store is opened again."""
        with self._mutex:
            for leaver in departure.leavers:
                del self._busy[leaver.digest]
                self._stranded += self._objects.blocks(leaver.row)
        departure.done.set()

    def grow(self, extent: Extent) -> None:
        """A slab's new blocks are there."""
        with self._mutex:
            self._space.grow(extent)

    def give(self, extent: Extent) -> None:
        """Blocks that were proven may be used again."""
        with self._mutex:
            self._space.give([extent])

    def retire(self, extent: Extent) -> None:
        """Blocks that do not keep what is written are never used again."""
        with self._mutex:
            self._retired += extent.blocks

    def count(self, name: str, n: int) -> None:
        """Add to the counter of this name."""
        with self._mutex:
            self._counts[name] = self._counts.get(name, 0) + n

    def digests_since(self, number: int) -> list[bytes]:
        """The objects whose records came after this one."""
        with self._mutex:
            rows = self._objects.residents()
            rows = rows[self._objects.columns["number"][rows] > number]
            return [self._objects.digest(row) for row in rows.tolist()]

    def figures(self) -> dict[str, int]:
        """What `usage` tells: objects, payload_bytes, the blocks by what they are, memory_bytes of the columns, and all counters."""
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
        """Raise AssertionError unless, at a quiet moment, free + used = capacity, no two objects share a block and nobody holds a pin."""
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
        # The parent first: in a chain it is the page before, which is held.
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
        """The node of a page, which the call holds from now on."""
        node = claims.held.get(page)
        if node is None:
            node = claims.held[page] = self._objects.hold(page)
        return node

    def _leave(self, departure: Departure, row: int, *, suspect: bool = False) -> None:
        number = self._objects.number[row]
        digest, parent = self._objects.leave(row)
        # Busy until the catalog has forgotten it: a set of the same key that overtook the removal would be removed with it.
        self._busy[digest] = departure.done
        self._objects.pins[row] += 1
        departure.leavers.append(Leaver(row, number, digest, parent, suspect))

    def _vacate(self, row: int) -> tuple[Extent, ...]:
        """Give up a row that is gone, if nobody reads it; returns its extents where they are suspect."""
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
    """One eviction: what left, and whether that is enough. See `eviction.Taker`.

    Thread safety: under the mutex of its holdings.
    """

    def __init__(self, holdings: Holdings, departure: Departure, blocks: int, objects: int, most: int) -> None:
        self._holdings = holdings
        self._departure = departure
        self._blocks = blocks
        self._objects = objects
        self._most = most
        self._gained = 0

    def take(self, rows: list[int]) -> None:
        """Let them leave."""
        for row in rows:
            self._gained += self._holdings._objects.blocks(row)
            self._holdings._leave(self._departure, row)

    def enough(self) -> bool:
        """Are there the blocks and the objects?"""
        return self._gained >= self._blocks and len(self._departure.leavers) >= self._objects

    def full(self) -> bool:
        """Are there as many as one transaction may take?"""
        return len(self._departure.leavers) >= self._most


def blocks_for(length: int) -> int:
    """Blocks that `length` bytes take."""
    return -(-length // BLOCK_ALIGN)
