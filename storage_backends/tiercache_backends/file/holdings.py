"""What a `file` store holds, in memory: which object lies where, who is reading it, what is on its way in or out, what is free.

Every state change of an object happens here, under one mutex, and nothing here does I/O:

    absent -> claimed (being written) -> resident -> leaving (being removed) -> absent

Blocks go back to the free space only when the object's removal is in the catalog *and* the last reader is done.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event, Lock
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.residents import Resident, Residents
from tiercache_backends.file.catalog import Loaded, Placement, placement
from tiercache_backends.file.space import Extent, Space

_FEW: Final = 1024


class Entry(Resident):
    """A stored object: its catalog record, kept packed, and who needs its blocks. `pins` counts readers, and a removal under way."""

    __slots__ = ("gone", "pins", "record", "suspect")

    def __init__(self, digest: bytes, parent: bytes | None, record: bytes) -> None:
        super().__init__(digest, parent)
        self.record = record
        self.pins = 0
        self.gone = False
        self.suspect = False

    @property
    def placement(self) -> Placement:
        """Where it lies."""
        return placement(self.record)


@dataclass(slots=True)
class Claim:
    """An object that is being written: item `index` of its batch."""

    index: int
    digest: bytes
    parent: bytes
    blocks: int
    extents: tuple[Extent, ...] = ()


@dataclass(slots=True)
class Claims:
    """What a batch may write now, what is there already, and what another call is busy with."""

    fresh: list[Claim] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    waits: set[Event] = field(default_factory=set)
    done: Event = field(default_factory=Event)


class Holdings:
    """The maps of a store and the moves between them.

    Thread rule: any thread; each method is one critical section of microseconds to (when much is evicted) milliseconds.
    """

    def __init__(self, slab_blocks: int) -> None:
        self._mutex: Final = Lock()
        self._entries: Residents[Entry] = Residents()
        self._busy: dict[bytes, Event] = {}
        self._space = Space(slab_blocks)
        self._slab_blocks = slab_blocks
        self._payload = 0
        self._stranded = 0
        self._retired = 0
        self._counts = {"corrupt": 0, "evicted": 0}

    def load(self, loaded: Loaded, slabs: Sequence[Extent]) -> list[bytes]:
        """Take in the catalog and rebuild the free space. Returns the digests whose extents overlap, lie outside the slabs or are short."""
        bad = _misplaced(loaded, slabs, self._slab_blocks)
        sound = [i for i in loaded.order.tolist() if not bad[i]]
        with _no_collection():
            self._entries.load(Entry(loaded.digests[i], loaded.parents[i], loaded.records[i]) for i in sound)
        self._payload = int(loaded.lengths[~bad].sum())
        kept = ~bad[loaded.owner]
        starts, counts = loaded.starts[kept], loaded.counts[kept]
        for slab in slabs:
            self._space.size += slab.blocks
            inside = (starts >= slab.start) & (starts < slab.start + slab.blocks)
            self._space.give(_gaps(slab, starts[inside], counts[inside]))
        return loaded.damaged + [loaded.digests[i] for i in np.flatnonzero(bad)]

    def present(self, digests: Iterable[bytes]) -> list[bool]:
        """Which objects can be read."""
        with self._mutex:
            return [digest in self._entries for digest in digests]

    def pin(self, digests: Iterable[bytes]) -> list[Entry | None]:
        """Hold the blocks of these objects until `unpin`, and note their use."""
        with self._mutex:
            found = [self._entries.get(digest) for digest in digests]
            for entry in found:
                if entry is not None:
                    entry.pins += 1
                    self._entries.touch(entry)
            return found

    def unpin(self, entries: Iterable[Entry]) -> list[Extent]:
        """Undo one pin of each. Returns the extents of suspects that nobody uses any more: to be proven, and then `give` or `retire`."""
        with self._mutex:
            return self._unpin(entries)

    def claim(self, wanted: Iterable[tuple[int, bytes, bytes, int]], limit: int) -> Claims:
        """Sort a batch of (index, digest, parent, blocks): at most `limit` are claimed for writing, whatever comes after them waits."""
        claims = Claims()
        with self._mutex:
            for index, digest, parent, blocks in wanted:
                entry = self._entries.get(digest)
                if entry is not None:
                    self._entries.touch(entry)
                    claims.hits.append(index)
                elif digest in self._busy or len(claims.fresh) == limit:
                    claims.later.append(index)
                    if (event := self._busy.get(digest)) not in (None, claims.done):
                        claims.waits.add(event)
                else:
                    self._busy[digest] = claims.done
                    # What is being written holds its page in place: evicting that page to make room for it would leave an orphan.
                    self._entries.hold(parent)
                    claims.fresh.append(Claim(index, digest, parent, blocks))
        return claims

    def allocate(self, claims: Sequence[Claim]) -> int:
        """Give blocks to the claims in order, up to the first that does not fit; returns the blocks that are missing for the rest."""
        with self._mutex:
            missing = 0
            for claim in claims:
                if not claim.extents and not missing:
                    claim.extents = self._space.allocate(claim.blocks) or ()
                if not claim.extents:
                    missing += claim.blocks
            return max(0, missing - self._space.free)

    def publish(self, claims: Claims, records: dict[bytes, bytes]) -> None:
        """End a batch: what has a record is resident now; the blocks of the rest are free again."""
        with self._mutex:
            for claim in claims.fresh:
                record = records.get(claim.digest)
                if record is not None:
                    self._entries.add(Entry(claim.digest, claim.parent, record))
                    self._payload += placement(record).length
                else:
                    self._space.give(claim.extents)
                self._entries.release(claim.parent)
                del self._busy[claim.digest]
        claims.done.set()

    def evict(self, blocks: int, objects: int, slack: int) -> tuple[list[Entry], Event]:
        """Take out the objects to give up: for `blocks` blocks, at least `objects` objects, and a few more for the next sets.

        The few are what makes `slack` blocks, but not more than `_FEW`, so that nobody waits long for the mutex. `removed` or `restored`
        must follow.
        """
        gained = taken = 0

        def enough(entry: Entry) -> bool:
            nonlocal gained, taken
            gained += _blocks(entry)
            taken += 1
            return gained >= blocks and taken >= objects and (gained >= slack or taken >= _FEW)

        with self._mutex:
            return self._leave(self._entries.victims(enough, spare=lambda entry: entry.pins > 0))

    def take_out(self, digests: Iterable[bytes], *, only: Callable[[Entry], bool] = lambda _: True) -> tuple[list[Entry], Event]:
        """Take out these objects, if they are resident and `only` agrees; `removed`, `restored` or `strand` must follow."""
        with self._mutex:
            found = [e for d in dict.fromkeys(digests) if (e := self._entries.get(d)) is not None and only(e)]
            for entry in found:
                self._entries.pop(entry)
            return self._leave(found)

    def removed(self, entries: Sequence[Entry], done: Event) -> list[Extent]:
        """The catalog has forgotten them: their blocks are free as soon as nobody reads them. Returns as `unpin`."""
        with self._mutex:
            for entry in entries:
                entry.gone = True
                del self._busy[entry.digest]
            suspects = self._unpin(entries)
        done.set()
        return suspects

    def restored(self, entries: Sequence[Entry], done: Event) -> None:
        """The catalog could not forget them: they are resident again."""
        with self._mutex:
            for entry in entries:
                del self._busy[entry.digest]
                entry.pins -= 1
                self._entries.add(entry)
                self._payload += entry.placement.length
        done.set()

    def strand(self, entries: Sequence[Entry], done: Event) -> None:
        """The catalog could not forget them, and they must not be read: their blocks are lost until the store is opened again."""
        with self._mutex:
            for entry in entries:
                del self._busy[entry.digest]
                self._stranded += _blocks(entry)
        done.set()

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
        """Add to one of the counters `corrupt` and `evicted`."""
        with self._mutex:
            self._counts[name] += n

    def figures(self) -> dict[str, int]:
        """objects, payload_bytes, blocks_used, blocks_free, blocks_stranded, blocks_retired, corrupt, evicted."""
        with self._mutex:
            return {
                "objects": len(self._entries),
                "payload_bytes": self._payload,
                "blocks_used": self._space.size - self._space.free,
                "blocks_free": self._space.free,
                "blocks_stranded": self._stranded,
                "blocks_retired": self._retired,
                **self._counts,
            }

    def orphans(self) -> int:
        """Objects whose page is known and not stored."""
        return self._entries.orphans()

    def check_integrity(self) -> None:
        """Raise AssertionError unless, at a quiet moment, free + used = capacity, no two objects share a block and nobody holds a pin."""
        with self._mutex:
            self._space.check_integrity()
            assert not self._busy, "nothing is on its way in or out"
            assert all(not e.pins for e in self._entries), "nobody holds a pin"
            held = sorted(x for e in self._entries for x in e.placement.extents)
            assert all(a.start + a.blocks <= b.start for a, b in pairwise(held)), "no two objects share a block"
            used = sum(x.blocks for x in held) + self._stranded + self._retired
            assert used + self._space.free == self._space.size, "free + used = capacity"
            assert self._payload == sum(e.placement.length for e in self._entries), "payload bytes are counted right"

    def _leave(self, entries: list[Entry]) -> tuple[list[Entry], Event]:
        done = Event()
        for entry in entries:
            # Busy until the catalog has forgotten it: a set of the same key that overtook the removal would be removed with it.
            self._busy[entry.digest] = done
            entry.pins += 1
            self._payload -= entry.placement.length
        return entries, done

    def _unpin(self, entries: Iterable[Entry]) -> list[Extent]:
        suspects: list[Extent] = []
        for entry in entries:
            entry.pins -= 1
            if entry.gone and not entry.pins:
                if entry.suspect:
                    suspects += entry.placement.extents
                else:
                    self._space.give(entry.placement.extents)
        return suspects


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would walk over a million new objects again and again: half of the time of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def blocks_for(length: int) -> int:
    """Blocks that `length` bytes take."""
    return -(-length // BLOCK_ALIGN)


def _blocks(entry: Entry) -> int:
    return sum(extent.blocks for extent in entry.placement.extents)


def _misplaced(loaded: Loaded, slabs: Sequence[Extent], slab_blocks: int) -> npt.NDArray[np.bool_]:
    """`out[i]`: do the extents of record i overlap another's, leave their slab, or hold fewer bytes than its length?"""
    bad = np.zeros(len(loaded.records), np.bool_)
    limits = np.zeros(max((s.start // slab_blocks + 1 for s in slabs), default=0) + 1, np.int64)
    for slab in slabs:
        limits[slab.start // slab_blocks] = slab.start + slab.blocks
    slab_of = np.clip(loaded.starts // slab_blocks, 0, len(limits) - 1)
    ends = loaded.starts + loaded.counts
    outside = (loaded.starts < 0) | (loaded.counts < 1) | (ends > limits[slab_of]) | (loaded.starts // slab_blocks != slab_of)
    bad[loaded.owner[outside]] = True
    room = np.bincount(loaded.owner, weights=loaded.counts, minlength=len(bad)).astype(np.int64) * BLOCK_ALIGN
    bad |= (loaded.lengths == 0) | (room < loaded.lengths.astype(np.int64))
    order = np.argsort(loaded.starts, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    clash = np.flatnonzero(loaded.starts[order][1:] < reach[:-1]) + 1
    # The one that reaches into a later one is bad as well; it need not be its neighbour in this order.
    for i in clash.tolist():
        earlier = order[:i][ends[order[:i]] > loaded.starts[order[i]]]
        bad[loaded.owner[earlier]] = True
        bad[loaded.owner[order[i]]] = True
    return bad


def _gaps(slab: Extent, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[Extent]:
    """What the extents (disjoint, inside the slab) leave of it."""
    order = np.argsort(starts)
    lows = np.concatenate([[slab.start], starts[order] + counts[order]])
    highs = np.concatenate([starts[order], [slab.start + slab.blocks]])
    found = highs > lows
    return [Extent(low, high - low) for low, high in zip(lows[found].tolist(), highs[found].tolist(), strict=True)]
