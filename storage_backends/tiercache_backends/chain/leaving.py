"""Copies of what only one tier has to the other tiers, before it leaves the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tiercache.errors import ClosedError, RefusedError, StorageError, UnavailableError, UnlistedError
from tiercache.storage.base import ScanEntry
from tiercache.storage.tiers import Progress, Report
from tiercache.text import readable_size
from tiercache_backends.chain.examination import CANARY
from tiercache_backends.chain.movement import Deletions, Digests, Mover
from tiercache_backends.chain.tier import Tier

_PASSES: Final = 4
"""Maximum number of times that a leaving tier is looked through for objects that no other tier has."""


class Leaving:
    """Move of a leaving tier's objects to the tiers that stay.

    An object counts as kept if one of the `keepers` has it: the tiers that stay or, if the leaving tier is
    persistent, the persistent ones among them. It is copied to the tier below or, if that has no room, to
    another keeper. The movers copy, so that deletions are heeded.

    `nearest`: the tiers that stay, the best place for the objects first. `movers`: those of the chain's
    tiers. `is_given_up`: asked often; once it returns True, `copy` ends.

    Thread safety: one thread; the tier takes no new objects meanwhile.
    """

    def __init__(
        self,
        tier: Tier,
        nearest: Sequence[Tier],
        movers: Mapping[Tier, Mover],
        deletions: Deletions,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._tier: Final = tier
        self._movers: Final = movers
        self._deletions: Final = deletions
        self._is_given_up: Final = is_given_up
        persistent = [other for other in nearest if other.capabilities.persistent]
        self._keepers: Final = (tier.capabilities.persistent and persistent) or list(nearest)

    def copy(self, progress: Report) -> None:
        """Copy all objects that no keeper has; `progress` is called after each page of the tier's scan.

        Raises RefusedError if objects are left that cannot be copied, StorageError if the tier cannot be
        read, ClosedError if the chain is closed meanwhile.
        """
        with self._deletions.watch() as deleted:
            self._copy(progress, deleted)

    def _copy(self, progress: Report, deleted: Digests) -> None:
        objects, nbytes = self._count(deleted)
        room = self._room() if objects else 0
        if objects and room < nbytes:
            raise self._refusal(objects, nbytes, f"the others have room for {readable_size(room)}")
        done = Progress(0, 0, objects, nbytes)
        for _ in range(_PASSES):
            for entries in self._only_here(deleted):
                left = self._copy_page(entries, deleted)
                copied = done.copied_objects + len(entries) - len(left)
                copied_bytes = done.copied_bytes + _nbytes(entries) - _nbytes(left)
                done = Progress(copied, copied_bytes, max(objects, copied), max(nbytes, copied_bytes))
                progress(done)
            for keeper in self._keepers:
                if keeper.is_writable:
                    keeper.begin_flush(nbytes)()
            # Count again: an object may be left, or evicted where it was when its page was looked at, or a
            # copy of it that was under way may have arrived in the leaving tier before the one below.
            left_objects, left_bytes = self._count(deleted)
            if not left_objects:
                return
        raise self._refusal(left_objects, left_bytes, "the others did not take them")

    def _refusal(self, objects: int, nbytes: int, why: str) -> RefusedError:
        return RefusedError(
            f"tier {self._tier.name!r} stays in the chain, because {objects} objects"
            f" ({readable_size(nbytes)}) would be lost: {why}; make room, or give the objects up with"
            " keep_contents=False"
        )

    def _count(self, deleted: Digests) -> tuple[int, int]:
        """Return the number of objects that no keeper has, and their bytes."""
        objects = nbytes = 0
        for entries in self._only_here(deleted):
            objects += len(entries)
            nbytes += _nbytes(entries)
        return objects, nbytes

    def _only_here(self, deleted: Digests) -> Iterator[list[ScanEntry]]:
        """Yield the objects that no keeper has, page by page.

        A deletion goes from tier to tier, so an object may be here only because it is being deleted. Such
        objects are in `deleted`, and do not count.
        """
        cursor = b""
        while True:
            if self._is_given_up():
                raise ClosedError("the chain of tiers is being closed; open it again and repeat the change")
            try:
                page = self._tier.call("scan", lambda store, at=cursor: store.scan(None, at))  # type: ignore[misc]
            except UnlistedError as error:
                raise RefusedError(
                    f"tier {self._tier.name!r} stays in the chain, because what only it has cannot be found:"
                    f" {error}; or give its objects up with keep_contents=False"
                ) from error
            left = [entry for entry in page.entries if entry.meta.namespace != CANARY]
            for keeper in self._keepers:
                left = _missing(keeper, left)
            yield [entry for entry in left if entry.key.digest not in deleted]
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

    def _copy_page(self, entries: list[ScanEntry], deleted: Digests) -> list[ScanEntry]:
        """Copy objects to the first keepers that take them; return those that none took."""
        left = entries
        for keeper in self._keepers:
            before = len(left) + 1
            # Again while it helps: a full queue drops objects.
            while left and len(left) < before and keeper.is_writable and not self._is_given_up():
                before = len(left)
                left = self._copy_to(keeper, left, deleted)
        return left

    def _copy_to(self, keeper: Tier, entries: Sequence[ScanEntry], deleted: Digests) -> list[ScanEntry]:
        """Copy objects to a keeper; return those that it does not have then."""
        mover = self._movers[keeper]
        try:
            mover.offer_behind_parents(self._tier, entries, deleted)
        except StorageError:
            return list(entries)
        mover.settle(
            {entry.key.digest for entry in entries}, lambda: self._is_given_up() or not keeper.is_writable
        )
        left = _missing(keeper, list(entries))
        return [entry for entry in left if entry.key.digest not in deleted]


def check_readable(tier: Tier) -> None:
    """Raise UnavailableError if a tier's objects cannot be read."""
    if not tier.is_readable:
        raise UnavailableError(
            f"tier {tier.name!r} is left out ({tier.why}), so what only it has cannot be copied; wait until"
            " it is back, or give its objects up with keep_contents=False"
        )


def _missing(tier: Tier, entries: list[ScanEntry]) -> list[ScanEntry]:
    """Return the objects that a tier does not have; all of them if it cannot be asked."""
    try:
        held = tier.exists([entry.key for entry in entries])
    except StorageError:
        return entries
    return [entry for entry, there in zip(entries, held, strict=True) if not there]


def _nbytes(entries: Sequence[ScanEntry]) -> int:
    return sum(entry.meta.length for entry in entries)
