"""Objects in packs: which entry of which pack is the object of each key, and notes on their changes.

packs       name -> Pack (its index, and how many of its entries are the object of their key here)
residents   digest -> row -> number of the pack, number of the entry
copies      digest -> further entries with the same key, from writers who did not know of each other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Final, NamedTuple

import numpy as np

from tiercache.core import ObjectMeta, Outcome
from tiercache.storage.base import ScanEntry, SetItem
from tiercache.storage.residents import Residents, parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.s3.pack import PackEntry, PackIndex


@dataclass(slots=True, eq=False)
class Pack:
    """A pack in the bucket."""

    name: str
    size: int
    stored_at: float
    """Seconds since 1970 on the clock of its writer."""
    index: PackIndex
    number: int = -1
    live: int = 0
    """Number of entries that are the object of their key."""
    dead: set[int] = field(default_factory=set)
    """Entries that were removed, as tombstones say or as this process will say."""
    condemned: bool = False
    """Whether the pack is being removed, so that no entry of it may become live again."""


class ObjectPlace(NamedTuple):
    """ObjectPlace of an object in the bucket."""

    pack: Pack
    number: int
    """Number of the entry in the pack."""
    entry: PackEntry


class RemovedObject(NamedTuple):
    """An object that was taken out of the directory."""

    row: int
    digest: bytes
    parent: bytes | None
    places: list[tuple[Pack, int]]
    """All of its entries, the one that was read first."""


class PackRemoval(NamedTuple):
    """Objects that were taken out, and what has to be done in the bucket."""

    objects: list[RemovedObject]
    packs: list[Pack]
    """Packs without a live entry, which can be removed as a whole."""
    dead: dict[str, set[int]]
    """Dead entries of packs that stay: what a tombstone has to say."""
    rubbish: Sequence[str] = ()
    """Other names to remove: packs that cannot be read, or of which this process knows no object."""

    @property
    def names(self) -> list[str]:
        """All names to remove."""
        return [*(pack.name for pack in self.packs), *self.rubbish]


class Writing:
    """Note that a call of this process is writing an object; others wait for its outcome.

    Thread safety: one thread ends it, any may wait.
    """

    __slots__ = ("ended", "outcome")

    def __init__(self) -> None:
        self.ended = Event()
        self.outcome = Outcome.UNAVAILABLE


@dataclass(slots=True)
class PackClaim:
    """An item of a batch that its call may write."""

    index: int
    item: SetItem
    node: int
    parent: int | None
    writing: Writing

    @property
    def is_page(self) -> bool:
        """Whether the object is the page itself, which others can follow."""
        return self.parent != self.node


@dataclass(slots=True)
class WritePlan:
    """Items of a set, sorted by what is to be done with them."""

    outcomes: list[Outcome | None]
    claims: list[PackClaim] = field(default_factory=list)
    """Objects to write, parents first."""
    waits: list[tuple[int, Writing]] = field(default_factory=list)
    """Items that another call is writing."""
    held: list[int] = field(default_factory=list)


_PACKS: Final = 1 << 32
"""Number of packs that can have a number; the column has 32 bits."""


class PackedObjects:
    """The packs that are known, and their objects.

    Thread safety: none of its own; the directory calls it under its mutex.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.residents: Final = Residents({"pack": np.uint32, "entry": np.uint32}, clock)
        self.packs: Final[dict[str, Pack]] = {}
        self.copies: Final[dict[bytes, list[tuple[Pack, int]]]] = {}
        self._by_number: dict[int, Pack] = {}
        self._next_number = 0
        self._namespace_ids: dict[bytes, int] = {}

    def namespace_id(self, namespace: bytes) -> int:
        """Return the number of a namespace."""
        return self._namespace_ids.setdefault(namespace, len(self._namespace_ids))

    def place_of(self, row: int) -> tuple[Pack, int]:
        """Return the pack of an object, and the number of its entry."""
        columns = self.residents.columns
        return self._by_number[int(columns["pack"][row])], int(columns["entry"][row])

    def place(self, row: int) -> ObjectPlace:
        """Return the place of an object in the bucket."""
        pack, number = self.place_of(row)
        return ObjectPlace(pack, number, pack.index[number])

    def scan_entry(self, row: int) -> ScanEntry:
        """Return an object as scans report it."""
        pack, _, entry = self.place(row)
        meta: ObjectMeta = self.residents.valued(row, entry.meta)
        return ScanEntry(entry.key, meta, pack.stored_at)

    def enlist(self, pack: Pack) -> None:
        """Take in a pack, without its objects."""
        while self._next_number in self._by_number:  # after 2**32 packs the numbers begin again
            self._next_number = (self._next_number + 1) % _PACKS
        pack.number = self._next_number
        self._next_number = (self._next_number + 1) % _PACKS
        self.packs[pack.name] = self._by_number[pack.number] = pack

    def delist(self, pack: Pack) -> None:
        """Take out a pack without live entries."""
        if self.packs.pop(pack.name, None) is pack:
            del self._by_number[pack.number]
            pack.condemned = True

    def load(self, pack: Pack) -> None:
        """Take in a pack with its objects, without dead entries and those that contradict known objects."""
        self.enlist(pack)
        entries = [(i, pack.index[i]) for i in range(len(pack.index)) if i not in pack.dead]
        batch = [(entry.key.page_key, entry.meta.parent) for _, entry in entries]
        for at in parents_first(batch):
            self.add(pack, *entries[at])

    def add(self, pack: Pack, number: int, entry: PackEntry) -> None:
        """Let the object of an entry be found, unless the key has an object already."""
        residents, meta = self.residents, entry.meta
        if residents.find(entry.key.digest) >= 0:
            self.copies.setdefault(entry.key.digest, []).append((pack, number))
            return
        pages = residents.pages
        node = pages.hold(entry.key.page_key)
        parent = None if meta.parent is None else pages.hold(meta.parent)
        namespace_id = self.namespace_id(meta.namespace)
        sound = pages.admissibility(node, parent, meta.depth or 0, namespace_id)
        if sound is not Admissibility.IMPOSSIBLE:
            row = residents.add(
                entry.key.digest,
                node,
                parent,
                residents.newest + 1,
                meta.length,
                namespace_id,
                meta.depth or 0,
            )
            residents.columns["pack"][row], residents.columns["entry"][row] = pack.number, number
            residents.hint(row, meta.value, meta.worker)
            pack.live += 1
        for held in (node, parent):
            if held is not None:
                pages.release(held)

    def lose(self, pack: Pack, number: int) -> None:
        """Take out the object of an entry that is gone; a copy of it takes its place."""
        digest = pack.index[number].key.digest
        row = self.residents.find(digest)
        copies = self.copies.pop(digest, [])
        if row < 0 or self.place_of(row) != (pack, number):
            left = [copy for copy in copies if copy != (pack, number)]
            if left:
                self.copies[digest] = left
            return
        self.residents.leave(row)
        self.residents.drop(row)
        pack.live -= 1
        for other, i in copies:
            if other.name in self.packs and not other.condemned and i not in other.dead:
                self.add(other, i, other.index[i])

    def lose_all(self, pack: Pack) -> None:
        """Take out a pack that is gone, with its objects."""
        pack.condemned = True  # so that no entry of it takes the place of another
        for number in range(len(pack.index)):
            if number not in pack.dead:
                self.lose(pack, number)
        self.delist(pack)

    def take(self, row: int) -> RemovedObject:
        """Take out an object with all of its copies, until `put_back`, or the row is dropped."""
        digest = self.residents.digest(row)
        copies = [copy for copy in self.copies.pop(digest, []) if copy[0].name in self.packs]
        places = [self.place_of(row), *copies]
        _, parent = self.residents.leave(row)
        places[0][0].live -= 1
        for pack, number in places:
            pack.dead.add(number)
        return RemovedObject(row, digest, parent, places)

    def put_back(self, removed: RemovedObject) -> None:
        """Undo `take`, unless the key has an object again."""
        if self.residents.find(removed.digest) >= 0:
            self.residents.drop(removed.row)
            return
        self.residents.enter(removed.row, removed.digest, removed.parent)
        (pack, _), *copies = removed.places
        pack.live += 1
        for other, i in removed.places:
            other.dead.discard(i)
        if copies:
            self.copies[removed.digest] = copies

    def move(self, row: int, pack: Pack, number: int) -> None:
        """Let an object be found at another entry."""
        self.place_of(row)[0].live -= 1
        columns = self.residents.columns
        columns["pack"][row], columns["entry"][row] = pack.number, number
        pack.live += 1

    def live(self, pack: Pack) -> list[int]:
        """Return the entries of a pack that are the object of their key."""
        rows = self.residents.find_many([pack.index[number].key.digest for number in range(len(pack.index))])
        return [
            number for number, row in enumerate(rows) if row >= 0 and self.place_of(row) == (pack, number)
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts add up."""
        self.residents.check_integrity()
        live: dict[str, int] = dict.fromkeys(self.packs, 0)
        for row in self.residents.residents().tolist():
            pack, number = self.place_of(row)
            assert pack.index[number].key.digest == self.residents.digest(row), "a row leads to its entry"
            assert number not in pack.dead, "an object that is found is not dead"
            live[pack.name] += 1
        assert live == {name: pack.live for name, pack in self.packs.items()}, "live entries are counted"
