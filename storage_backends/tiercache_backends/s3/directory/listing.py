"""Listings of the bucket, which show new packs and tombstones, and names that are gone.

packs/   packs and tombstones; their names sort by the time of their writers' clocks

recent   the names of the last minutes: what all writers have written since the last listing
sweep    all names, in parts, one after the other: also what is gone, and what skewed clocks have written
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from tiercache_backends.s3.directory.directory import BucketDirectory
from tiercache_backends.s3.directory.notes import Pack
from tiercache_backends.s3.failures import FailureKind, RequestError
from tiercache_backends.s3.pack import (
    FOLDER,
    MAX_TOMBSTONE,
    PackName,
    make_name,
    parse_name,
    read_head,
    read_tombstone,
)
from tiercache_backends.s3.service import BucketClient, Listed, PendingRequest

_log = logging.getLogger(__name__)

_SKEW: Final = 600_000
"""Milliseconds by which clocks of writers may differ before only a sweep finds what they write."""
_HEADS: Final = 1024
"""Number of new names that one part of the work reads."""


class Portion:
    """Part of the work that is done in one go: until a time, and so many new names.

    Thread safety: one thread at a time.
    """

    def __init__(self, until: float) -> None:
        self._until = until
        self._heads = _HEADS

    @property
    def is_spent(self) -> bool:
        """Whether the rest is to be left for the next portion."""
        return self._heads <= 0 or time.monotonic() >= self._until

    def take(self, names: int) -> int:
        """Take a share for so many new names; return for how many there is one."""
        share = max(0, min(names, self._heads))
        self._heads -= share
        return share


class _Sweep:
    """A listing of everything that has come as far as the name `after`."""

    def __init__(self, directory: BucketDirectory) -> None:
        self.after = ""
        self.known = sorted(directory.known())
        """Names that were known when the sweep began: what it does not list is gone."""
        self.forsaken = directory.forsaken_tombstones()
        """Tombstones whose packs were all gone when the sweep began, and these packs."""

    def pass_over(self, last: str | None, listed: set[str]) -> list[str]:
        """Go on to the name `last` (None: the end); return what was known up to there, and is not listed."""
        start = bisect_right(self.known, self.after)
        stop = len(self.known) if last is None else bisect_right(self.known, last)
        self.after = self.after if last is None else last
        self.forsaken = {name: packs for name, packs in self.forsaken.items() if not packs & listed}
        return [name for name in self.known[start:stop] if name not in listed]


class BucketListing:
    """Listings that keep a directory up to date.

    Thread safety: one thread at a time.
    """

    def __init__(self, client: BucketClient, directory: BucketDirectory) -> None:
        self._client = client
        self._directory = directory
        self._newest = 0
        """Largest time of a name that was seen, in milliseconds."""
        self._sweep: _Sweep | None = None
        self._warned = False

    def recent(self, portion: Portion) -> bool:
        """Take in what was written in the last minutes; return whether that is all. Raises RequestError."""
        after = make_name(max(0, self._newest - _SKEW), "0" * 16, 0, None)
        pages = self._client.pages(FOLDER, after)
        return all(self._take_in(page, portion) == len(page) for page in pages)

    def sweep(self, portion: Portion) -> bool:
        """Go on with the sweep, or begin one; return whether it is over. Raises RequestError."""
        sweep = self._sweep = self._sweep or _Sweep(self._directory)
        for page in self._client.pages(FOLDER, sweep.after):
            done = self._take_in(page, portion)
            listed = {entry.name for entry in page[:done]}
            if done:
                self._directory.forget(sweep.pass_over(page[done - 1].name, listed))
            if done < len(page) or portion.is_spent:
                return False
        self._directory.forget(sweep.pass_over(None, set()))
        self._sweep = None
        needless = list(sweep.forsaken)
        self._client.delete([f"{FOLDER}/{name}" for name in needless], self._client.deadline())
        self._directory.forget(needless)
        return True

    def _take_in(self, page: Sequence[Listed], portion: Portion) -> int:
        """Take in the new names of a page; return how many names of it are dealt with."""
        new = self._directory.unknown([entry.name for entry in page])
        fresh = [
            (name, entry.size) for entry in page if entry.name in new and (name := parse_name(entry.name))
        ]
        share = portion.take(len(fresh))
        self._load(fresh[:share])
        if share == len(fresh):
            return len(page)
        left = fresh[share][0].text
        return next(at for at, entry in enumerate(page) if entry.name == left)

    def _load(self, names: Sequence[tuple[PackName, int]]) -> None:
        """Read the heads of new packs, and new tombstones, many at a time."""
        waiting: list[tuple[PackName, int, PendingRequest[memoryview]]] = []
        for name, size in names:
            self._newest = max(self._newest, name.milliseconds)
            wanted = size if name.head is None else name.head
            if wanted > size or (name.head is None and size > MAX_TOMBSTONE):
                self._pass_over(name, size)
                continue
            until = self._client.deadline(wanted)
            while not self._client.has_room(wanted, until, wait=not waiting):
                if not waiting:
                    raise RequestError(
                        FailureKind.UNREACHABLE, f"{self._client.where}: too much is in flight"
                    )
                self._read(*waiting.pop(0))
            waiting.append((name, size, self._client.read(f"{FOLDER}/{name.text}", 0, wanted, until)))
        for part in waiting:
            self._read(*part)

    def _read(self, name: PackName, size: int, request: PendingRequest[memoryview]) -> None:
        """Take in the head of a pack, or a tombstone."""
        try:
            data = bytes(request.result())
        except RequestError as error:
            if error.kind is FailureKind.ABSENT:
                return  # removed since it was listed
            if error.kind is not FailureKind.SHORT:
                raise
            data = b""
        if name.head is None:
            dead = read_tombstone(data)
            if dead is not None:
                self._directory.bury(name.text, size, dead)
                return
        else:
            index = read_head(data, size)
            if index is not None:
                self._directory.load(Pack(name.text, size, name.milliseconds / 1e3, index))
                return
        self._pass_over(name, size)

    def _pass_over(self, name: PackName, size: int) -> None:
        self._directory.unreadable(name.text, size)
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: %s cannot be read and is passed over, as more like it will be: remove what is no pack of"
                " tiercache from the folder %s (`unreadable` in the usage counts them)",
                self._client.where,
                name.text,
                FOLDER,
            )
