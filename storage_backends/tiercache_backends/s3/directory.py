"""A process's knowledge of the bucket: what lies there, and where each object is.

    sizes         names -> bytes, of packs, tombstones, and what cannot be used
    packs         names -> index of the pack, and the entries of it that were removed
    objects       digests -> the pack and the entry that are the object of a key
    copies        digests -> further entries of the same key, from writers who did not know of each other
    writes        digests -> what sets of this process are writing

The bucket is the truth. This is a copy of it, which may lag behind: an object that is gone is a miss when it
is read, and an object that others have written is found by the next refresh.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Final, NamedTuple

from tiercache.core import ObjectKey, Outcome
from tiercache.events.base import ChangeNote
from tiercache.storage.base import ScanEntry, SetItem
from tiercache_backends.s3.pack import MAX_ENTRIES, PackEntry, PackIndex

_SCAN_PAGE: Final = 1024
_MAX_USELESS: Final = 1 << 16
"""Number of useless names that are remembered, at some 150 bytes of memory each."""


@dataclass(slots=True, eq=False)
class Pack:
    """A pack in the bucket."""

    name: str
    size: int
    stored_at: float
    """Seconds since 1970 on the clock of its writer."""
    index: PackIndex
    number: int = 0
    """Number in the order in which this process came to know the packs, from 1 on."""
    live: int = 0
    """Number of entries that are the object of their key."""
    dead: set[int] = field(default_factory=set)
    """Entries that were removed, as tombstones say or as this process will say."""
    condemned: bool = False
    """Whether the pack is being removed, so that no entry of it may become live again."""


class ObjectPlace(NamedTuple):
    """Place of an object in the bucket."""

    pack: Pack
    number: int
    """Number of the entry in the pack."""

    @property
    def entry(self) -> PackEntry:
        """Entry of the object."""
        return self.pack.index[self.number]

    def scan_entry(self) -> ScanEntry:
        """Return the object as scans report it."""
        entry = self.entry
        return ScanEntry(entry.key, entry.meta, self.pack.stored_at)


class PackRemoval(NamedTuple):
    """Objects that were taken out, and what has to be done in the bucket."""

    objects: Mapping[bytes, Sequence[ObjectPlace]]
    """All entries of each object, by its digest, the one that was read first."""
    packs: Sequence[Pack]
    """Packs without a live entry, which can be removed as a whole."""
    dead: Mapping[str, set[int]]
    """Dead entries of packs that stay: what a tombstone has to say."""


@dataclass(slots=True, eq=False)
class ObjectWrite:
    """An object that a call of this process writes; other calls that store it wait for the outcome."""

    index: int
    """Position in the batch of that call."""
    item: SetItem
    outcome: Outcome = Outcome.UNAVAILABLE
    ended: Event = field(default_factory=Event)


class WritePlan(NamedTuple):
    """Items of a set, sorted by what is to be done with them."""

    outcomes: list[Outcome | None]
    writes: list[ObjectWrite]
    waits: list[tuple[int, ObjectWrite]]
    """Items that another call is writing."""


class Tombstones:
    """The tombstones in the bucket, and what they say of each pack.

    Thread safety: none of its own; the directory calls it under its mutex.
    """

    def __init__(self, limit: int) -> None:
        """Make room for so many removed entries."""
        self._limit = limit
        self._entries = 0
        self._dead: dict[str, Mapping[str, set[int]]] = {}
        self._of_pack: dict[str, set[str]] = {}

    def add(self, name: str, dead: Mapping[str, set[int]]) -> bool:
        """Take in a tombstone; return False if there is no room for what it says."""
        entries = sum(map(len, dead.values()))
        if self._entries + entries > self._limit:
            return False
        self._entries += entries
        self._dead[name] = dead
        for pack in dead:
            self._of_pack.setdefault(pack, set()).add(name)
        return True

    def remove(self, name: str) -> None:
        """Take out a tombstone, whether it is known or not."""
        dead = self._dead.pop(name, {})
        self._entries -= sum(map(len, dead.values()))
        for pack in dead:
            self._of_pack[pack].discard(name)
            if not self._of_pack[pack]:
                del self._of_pack[pack]

    def of(self, pack: str) -> set[int]:
        """Return the entries of a pack that were removed."""
        return set().union(*(self._dead[name][pack] for name in self._of_pack.get(pack, ())))

    def forsaken(self, packs: Container[str]) -> dict[str, set[str]]:
        """Return the tombstones none of whose packs is among `packs`, and the names of these packs."""
        return {
            name: set(dead) for name, dead in self._dead.items() if not any(pack in packs for pack in dead)
        }


class BucketDirectory:
    """The objects that this process knows.

    Thread safety: any thread may call; one mutex guards everything, and is never held during a request.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: objects, and removed entries, that may be known."""
        self._limit = limit
        self._mutex = Lock()
        self._sizes: dict[str, int] = {}
        self._coming: set[str] = set()
        """Names that this process is writing."""
        self._useless: set[str] = set()
        """Names of what cannot be read, and of packs of which no object is known; at most _MAX_USELESS."""
        self._tombstones = Tombstones(limit)
        self._packs: dict[str, Pack] = {}
        self._last_number = 0
        self._objects: dict[bytes, ObjectPlace] = {}
        self._copies: dict[bytes, list[ObjectPlace]] = {}
        self._writes: dict[bytes, ObjectWrite] = {}
        self._payload = self._used = 0
        self._note: ChangeNote | None = None
        self._counts = dict.fromkeys(("corrupt", "unreadable", "not_indexed"), 0)

    # --- reading
    # --------------------------------------------------------------------------------------------------------

    def present(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return for each key whether its object is known."""
        with self._mutex:
            return [key.digest in self._objects for key in keys]

    def find(self, keys: Sequence[ObjectKey]) -> list[ObjectPlace | None]:
        """Return the place of each object, or None if it is not known."""
        with self._mutex:
            return [self._objects.get(key.digest) for key in keys]

    def scan(self, namespace: bytes | None, start: int) -> tuple[list[ScanEntry], int]:
        """Return entries from the place `start` on, and the place of the next part; 0: the end.

        A place is the number of a pack times MAX_ENTRIES, plus the number of an entry.
        """
        found: list[ScanEntry] = []
        looked_at = 0
        first, skipped = divmod(start, MAX_ENTRIES)
        with self._mutex:
            for pack in self._packs.values():  # in the order of their numbers
                if pack.number < first:
                    continue
                for at in range(skipped if pack.number == first else 0, len(pack.index)):
                    if looked_at == _SCAN_PAGE:
                        return found, pack.number * MAX_ENTRIES + at
                    looked_at += 1
                    entry = ObjectPlace(pack, at).scan_entry()
                    is_object = self._objects.get(entry.key.digest) == (pack, at)
                    if is_object and namespace in (None, entry.meta.namespace):
                        found.append(entry)
        return found, 0

    def watch(self, note: ChangeNote | None) -> None:
        """Call `note` for objects that this process knows from now on, or no longer."""
        with self._mutex:
            self._note = note

    def figures(self) -> tuple[int, int, int, dict[str, int]]:
        """Return the number of objects, their payload bytes, all bytes in the bucket, and further figures."""
        with self._mutex:
            more = {**self._counts, "packs": len(self._packs), "copies": sum(map(len, self._copies.values()))}
            return len(self._objects), self._payload, self._used, more

    # --- names
    # --------------------------------------------------------------------------------------------------------

    def unknown(self, names: Iterable[str]) -> set[str]:
        """Return those of these names that are not known yet."""
        with self._mutex:
            return {name for name in names if name not in self._sizes}

    def known(self) -> set[str]:
        """Return all names that are known, without those that this process is writing."""
        with self._mutex:
            return self._sizes.keys() - self._coming

    def expect(self, name: str, size: int) -> None:
        """Count a pack or tombstone that is about to be written; `publish`, `bury` or `fail` follows."""
        with self._mutex:
            self._enter(name, size)
            self._coming.add(name)

    def load(self, pack: Pack) -> None:
        """Take in a pack that another process wrote."""
        with self._mutex:
            if pack.name in self._packs:
                return
            if len(self._objects) + len(pack.index) > self._limit:
                self._pass_over(pack.name, pack.size, "not_indexed")
                return
            self._enter(pack.name, pack.size)
            pack.dead |= self._tombstones.of(pack.name)
            self._enlist(pack)

    def unreadable(self, name: str, size: int) -> None:
        """Remember that a pack or tombstone cannot be read, so that it is not read again."""
        with self._mutex:
            self._pass_over(name, size, "unreadable")

    def bury(self, name: str, size: int, dead: Mapping[str, set[int]]) -> None:
        """Take in a tombstone."""
        with self._mutex:
            if self._tombstones.add(name, dead):
                self._enter(name, size)
            else:
                self._pass_over(name, size, "not_indexed")
            for pack_name, numbers in dead.items():
                if (pack := self._packs.get(pack_name)) is not None:
                    fresh = {number for number in numbers if number < len(pack.index)} - pack.dead
                    pack.dead |= fresh
                    for number in fresh:
                        self._lose(ObjectPlace(pack, number))

    def forget(self, names: Iterable[str]) -> None:
        """Take out packs and tombstones that are not in the bucket any more."""
        with self._mutex:
            for name in names:
                self._strike(name)
                self._tombstones.remove(name)
                if (pack := self._packs.pop(name, None)) is not None:
                    pack.condemned = True  # so that no entry of it takes the place of another
                    for number in range(len(pack.index)):
                        if number not in pack.dead:
                            self._lose(ObjectPlace(pack, number))

    def forsaken_tombstones(self) -> dict[str, set[str]]:
        """Return the tombstones none of whose packs is known any more, and the names of these packs."""
        with self._mutex:
            return self._tombstones.forsaken(self._packs)

    # --- writing
    # --------------------------------------------------------------------------------------------------------

    def plan(self, items: Sequence[SetItem]) -> WritePlan:
        """Sort the items of a set, of different keys; each of its writes must be ended."""
        plan = WritePlan([None] * len(items), [], [])
        with self._mutex:
            for i, item in enumerate(items):
                digest = item.key.digest
                if digest in self._objects:
                    plan.outcomes[i] = Outcome.HIT
                elif (write := self._writes.get(digest)) is not None:
                    plan.waits.append((i, write))
                elif len(self._objects) >= self._limit:
                    plan.outcomes[i] = Outcome.THROTTLED
                else:
                    self._writes[digest] = write = ObjectWrite(i, item)
                    plan.writes.append(write)
        return plan

    def publish(self, pack: Pack, writes: Sequence[ObjectWrite]) -> None:
        """Make the objects of a pack visible that has them in this order, and end the writes."""
        with self._mutex:
            self._enter(pack.name, pack.size)
            self._enlist(pack)
            for write in writes:
                self._end(write, Outcome.STORED)

    def fail(self, writes: Iterable[ObjectWrite], outcome: Outcome, name: str = "") -> None:
        """End writes of objects that were not written.

        The pack `name` may still come, and is then found by a refresh.
        """
        with self._mutex:
            self._strike(name)
            for write in writes:
                self._end(write, outcome)

    # --- removing
    # --------------------------------------------------------------------------------------------------------

    def take_out(self, digests: Iterable[bytes], only: Mapping[bytes, Pack] | None = None) -> PackRemoval:
        """Take objects out, so that no call finds them, and say what is to be done in the bucket.

        `only`: the packs in which the objects must lie. `removed` or `undo` follows.
        """
        objects: dict[bytes, Sequence[ObjectPlace]] = {}
        dead: dict[str, set[int]] = {}
        with self._mutex:
            for digest in digests:
                place = self._objects.get(digest)
                if place is None or (only is not None and place.pack is not only[digest]):
                    continue
                objects[digest] = [place, *self._copies.pop(digest, ())]
                self._leave(digest, place)
                for pack, number in objects[digest]:
                    pack.dead.add(number)
                    dead.setdefault(pack.name, set()).add(number)
            known = [self._packs[name] for name in dead if name in self._packs]
            whole = [pack for pack in known if not pack.live]
            for pack in whole:
                pack.condemned = True
                del dead[pack.name]
        return PackRemoval(objects, whole, dead)

    def removed(self, removal: PackRemoval) -> None:
        """Note that the bucket has done what a removal asked for."""
        with self._mutex:
            for pack in removal.packs:
                self._strike(pack.name)
                self._packs.pop(pack.name, None)

    def undo(self, removal: PackRemoval, *, keep: bool) -> None:
        """Note that the bucket could not be changed. With `keep` the objects are found again."""
        with self._mutex:
            for pack in removal.packs:
                pack.condemned = False
            for digest, places in removal.objects.items() if keep else ():
                for place in places:
                    if place.pack.name in self._packs:
                        place.pack.dead.discard(place.number)
                        self._add(digest, place)

    def count_corrupt(self, objects: int) -> None:
        """Count objects whose bytes were wrong."""
        with self._mutex:
            self._counts["corrupt"] += objects

    # --- under the mutex
    # --------------------------------------------------------------------------------------------------------

    def _enter(self, name: str, size: int) -> None:
        self._used += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self._coming.discard(name)

    def _strike(self, name: str) -> None:
        """Take out a name, whether it is known or not."""
        self._used -= self._sizes.pop(name, 0)
        self._coming.discard(name)
        self._useless.discard(name)

    def _pass_over(self, name: str, size: int, why: str) -> None:
        """Remember a useless name, unless there are too many already: those are found anew by each sweep."""
        self._counts[why] += 1
        if len(self._useless) < _MAX_USELESS:
            self._enter(name, size)
            self._useless.add(name)

    def _enlist(self, pack: Pack) -> None:
        """Take in a pack with the objects that are not dead."""
        self._last_number += 1
        pack.number = self._last_number
        self._packs[pack.name] = pack
        for number in range(len(pack.index)):
            if number not in pack.dead:
                self._add(pack.index[number].key.digest, ObjectPlace(pack, number))

    def _add(self, digest: bytes, place: ObjectPlace) -> None:
        """Let an object be found at this place, unless it is found elsewhere already."""
        if digest in self._objects:
            self._copies.setdefault(digest, []).append(place)
            return
        self._objects[digest] = place
        place.pack.live += 1
        self._payload += place.entry.meta.length
        if self._note is not None:
            self._note((digest,), True)

    def _leave(self, digest: bytes, place: ObjectPlace) -> None:
        """Let an object not be found any more."""
        del self._objects[digest]
        place.pack.live -= 1
        self._payload -= place.entry.meta.length
        if self._note is not None:
            self._note((digest,), False)

    def _lose(self, place: ObjectPlace) -> None:
        """Take out an entry that is gone; if it was its key's object, a copy takes its place."""
        digest = place.entry.key.digest
        copies = [copy for copy in self._copies.pop(digest, ()) if copy != place]
        if self._objects.get(digest) == place:
            self._leave(digest, place)
        for copy in copies:
            if not copy.pack.condemned and copy.number not in copy.pack.dead:
                self._add(digest, copy)

    def _end(self, write: ObjectWrite, outcome: Outcome) -> None:
        write.outcome = outcome
        del self._writes[write.item.key.digest]
        write.ended.set()
