"""Copies of what only one tier has to the other tiers, before it leaves the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tiercache.errors import ClosedError, RefusedError, StorageError
from tiercache.storage.base import ScanEntry
from tiercache.storage.tiers import LEAVING
from tiercache.text import readable_size
from tiercache_backends.chain.movement import Digests, Mover
from tiercache_backends.chain.tier import Tier

_PASSES: Final = 5
"""Maximum number of times that a leaving tier is looked through for objects that no other tier has."""


class Leaving:
    """Move of a leaving tier's objects to the tiers that stay.

    An object counts as kept if one of the `keepers` has it: the tiers that stay or, if the leaving tier is
    persistent, the persistent ones among them. It is copied to the tier below or, if that has no room, to
    another keeper. The movers copy, so that deletions are heeded.

    `nearest`: the tiers that stay, the best place for the objects first. `movers`: those of the chain's
    tiers. `deleted`: watch of deletions. `is_given_up`: asked often; once it returns True, `copy` ends.

    Thread safety: one thread; the tier takes no new objects meanwhile.
    """

    def __init__(
        self,
        tier: Tier,
        nearest: Sequence[Tier],
        movers: Mapping[Tier, Mover],
        deleted: Digests,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._tier: Final = tier
        self._movers: Final = movers
        self._deleted: Final = deleted
        self._is_given_up: Final = is_given_up
        persistent = [other for other in nearest if other.capabilities.persistent]
        self._keepers: Final = (tier.capabilities.persistent and persistent) or list(nearest)

    def copy(self) -> None:
        """Copy all objects that no keeper has; the tier shows how much is left.

        Raises RefusedError if objects are left that cannot be copied, StorageError if the tier cannot be
        read, ClosedError if it is given up.
        """
        for _ in range(_PASSES):
            # Counted again after each pass: an object may be left, or evicted where it was when its page was
            # looked at, or a copy of it that was under way may have arrived here before it did below.
            objects, nbytes = self._count()
            if objects and (room := self._room()) < nbytes:
                raise self._refusal(objects, nbytes, f"the others have room for {readable_size(room)}")
            left_objects, left_bytes = objects, nbytes
            for entries in self._only_here() if objects else ():
                self._show(left_objects, left_bytes)
                left = self._copy_page(entries)
                left_objects -= len(entries) - len(left)
                left_bytes -= _nbytes(entries) - _nbytes(left)
            for keeper in self._keepers:
                if keeper.is_writable:
                    keeper.begin_flush(nbytes)()
            if not objects:
                return
        raise self._refusal(objects, nbytes, "the others did not take them")

    def _show(self, objects: int, nbytes: int) -> None:
        size = readable_size(max(0, nbytes))
        self._tier.leaving = f"{LEAVING}: {max(0, objects):,} objects ({size}) that only it has are left"

    @staticmethod
    def _refusal(objects: int, nbytes: int, why: str) -> RefusedError:
        return RefusedError(
            f"{objects:,} objects ({readable_size(nbytes)}) would be lost: {why}; make room, or drop the tier"
        )

    def _count(self) -> tuple[int, int]:
        """Return the number of objects that no keeper has, and their bytes."""
        objects = nbytes = 0
        for entries in self._only_here():
            objects += len(entries)
            nbytes += _nbytes(entries)
        return objects, nbytes

    def _only_here(self) -> Iterator[list[ScanEntry]]:
        """Yield the objects that no keeper has, page by page.

        A deletion goes from tier to tier, so an object may be here only because it is being deleted. Such
        objects are in `deleted`, and do not count.
        """
        cursor = b""
        while True:
            if self._is_given_up():
                raise ClosedError("the tier need not leave any more, or the chain is being closed")
            page = self._tier.scan(None, cursor)
            left = list(page.entries)
            for keeper in self._keepers:
                left = _missing(keeper, left)
            yield [entry for entry in left if entry.key.digest not in self._deleted]
            if not page.cursor:
                return
            cursor = page.cursor

    def _room(self) -> int:
        """Return the bytes that the keepers can take without an eviction."""
        room = 0
        for keeper in self._keepers:
            if keeper.is_writable:
                try:
                    usage = keeper.call("usage", lambda store: store.usage())
                except StorageError:
                    continue
                room += (usage.capacity_bytes or 1 << 62) - usage.used_bytes
        return room

    def _copy_page(self, entries: list[ScanEntry]) -> list[ScanEntry]:
        """Copy objects to the first keepers that take them; return those that none took."""
        left = entries
        for keeper in self._keepers:
            before = len(left) + 1
            # Again while it helps: a full queue drops objects.
            while left and len(left) < before and keeper.is_writable and not self._is_given_up():
                before = len(left)
                left = self._copy_to(keeper, left)
        return left

    def _copy_to(self, keeper: Tier, entries: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Copy objects to a keeper; return those that it does not have then."""
        mover = self._movers[keeper]
        try:
            mover.offer_behind_parents(self._tier, entries, self._deleted)
        except StorageError:
            return list(entries)
        mover.settle(
            {entry.key.digest for entry in entries}, lambda: self._is_given_up() or not keeper.is_writable
        )
        left = _missing(keeper, list(entries))
        return [entry for entry in left if entry.key.digest not in self._deleted]


def _missing(tier: Tier, entries: list[ScanEntry]) -> list[ScanEntry]:
    """Return the objects that a tier does not have; all of them if it cannot be asked."""
    try:
        return tier.lacking(entries)
    except StorageError:
        return entries


def _nbytes(entries: Sequence[ScanEntry]) -> int:
    return sum(entry.meta.length for entry in entries)
