"""Refreshes of the directory, on a thread of their own: no lookup waits for a listing.

    ask    a lookup has missed: the bucket is listed behind it, `refresh` seconds after the last time
    sync   a call that is no lookup waits until what was in the bucket when it began is known

A refresh lists the names of the last minutes, which is one request, and goes on with the sweep that is under
way. The first sweep begins when the store is opened, another one after each twelfth refresh. No refresh
begins a page of names after its deadline: the rest is left to the next one.

    recent   the names of the last minutes: what all writers have written since the last listing
    sweep    all names, in parts, one after the other: also what is gone, and what skewed clocks have written

Names of packs and tombstones sort by the time of their writers' clocks.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import inf
from threading import Condition, Thread
from typing import Final

from tiercache_backends.s3.directory import BucketDirectory, Pack
from tiercache_backends.s3.failures import AbsentError, RequestError, ShortError, UnreachableError
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
from tiercache_backends.s3.settings import S3Settings

_log = logging.getLogger(__name__)

_SKEW: Final = 600_000
"""Milliseconds by which the clock of a writer may lag: packs of an older name are found by a sweep only."""


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

    def recent(self, until: float) -> bool:
        """Take in what was written in the last minutes; return whether that is all. Raises RequestError."""
        after = make_name(max(0, self._newest - _SKEW), "0" * 16, 0, None)
        for page in self._client.pages(FOLDER, after):
            self._take_in(page)
            if time.monotonic() >= until:
                return False
        return True

    def sweep(self, until: float) -> bool:
        """Go on with the sweep, or begin one; return whether it is over. Raises RequestError."""
        sweep = self._sweep = self._sweep or _Sweep(self._directory)
        for page in self._client.pages(FOLDER, sweep.after):
            self._take_in(page)
            self._directory.forget(sweep.pass_over(page[-1].name, {entry.name for entry in page}))
            if time.monotonic() >= until:
                return False
        self._directory.forget(sweep.pass_over(None, set()))
        self._sweep = None
        needless = list(sweep.forsaken)
        self._client.delete([f"{FOLDER}/{name}" for name in needless], self._client.deadline())
        self._directory.forget(needless)
        return True

    def _take_in(self, page: Sequence[Listed]) -> None:
        """Take in the new names of a page, those that are names of packs and tombstones."""
        new = self._directory.unknown([entry.name for entry in page])
        self._load(
            [(name, entry.size) for entry in page if entry.name in new and (name := parse_name(entry.name))]
        )

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
                    raise UnreachableError(f"{self._client.where}: too much is in flight")
                self._read(*waiting.pop(0))
            waiting.append((name, size, self._client.read(f"{FOLDER}/{name.text}", 0, wanted, until)))
        for part in waiting:
            self._read(*part)

    def _read(self, name: PackName, size: int, request: PendingRequest[memoryview]) -> None:
        """Take in the head of a pack, or a tombstone."""
        try:
            data = bytes(request.result())
        except AbsentError:
            return  # removed since it was listed
        except ShortError:
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


_SWEEP: Final = 12
"""Number of refreshes from the end of a sweep to the next one."""
_PAUSE: Final = 1.0
"""Most seconds from a refresh that failed to the next one."""


class Refresher:
    """Refresher of a directory.

    Thread safety: any thread may call; a thread of its own does the work.
    """

    def __init__(
        self, settings: S3Settings, client: BucketClient, listing: BucketListing, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._client = client
        self._listing = listing
        self._clock = clock
        self._thread = Thread(target=self._work, name="tiercache-s3-refresh", daemon=True)
        self._changed = Condition()  # guards the fields from here on
        self._closing = False
        self._begun = self._ended = self._awaited = 0
        """Numbers, from 1 on, of the last refreshes that began, that ended, and for whose end calls wait."""
        self.is_complete = False
        """Whether everything in the bucket was listed once."""
        self._sweeping = False
        self._until_sweep = 0
        """Number of refreshes before the one that begins another sweep."""
        self._more = False
        """Whether the last refresh left new names to the next."""
        self._asked = False
        self._due = -inf
        self._failure: tuple[int, RequestError] | None = None
        """Number of the last refresh, and why it failed; None if it did not fail."""
        self.early = 0
        """Number of objects that were missed before everything in the bucket was listed once."""

    def start(self) -> None:
        """Begin the first sweep, and wait for its end, but not beyond a deadline.

        Raises RequestError if the service cannot be asked.
        """
        self._thread.start()
        if not self._await(1):
            _log.warning(
                "%s is still being listed; until that is over, objects in it may be misses", self._settings
            )

    def ask(self, missed: int = 0) -> RequestError | None:
        """Cause a refresh behind a call that has missed so many objects; return why the last one failed."""
        with self._changed:
            if not self.is_complete:
                self.early += missed
            self._asked = True
            self._changed.notify_all()
            return None if self._failure is None else self._failure[1]

    def sync(self) -> None:
        """Wait until what was written before this call is known.

        Raises RequestError if the service cannot be asked, or the answer takes longer than a deadline.
        """
        self._client.check()
        with self._changed:
            following = self._begun + 1
        if not self._await(following):
            raise UnreachableError(f"{self._client.where} is still being listed; wait, or raise deadline")

    def close(self) -> None:
        """End the thread, unless it waits for an answer for longer than a deadline."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(self._settings.deadline)

    def _await(self, refresh: int) -> bool:
        """Wait for the ends of a refresh and of the first sweep; return False after a deadline."""

        def ended() -> bool:
            failed = self._failure is not None and self._failure[0] >= refresh
            return failed or (self._ended >= refresh and self.is_complete)

        with self._changed:
            self._awaited = max(self._awaited, refresh)
            self._changed.notify_all()
            if not self._changed.wait_for(ended, self._settings.deadline):
                return False
            if self._failure is not None and self._failure[0] >= refresh:
                raise type(self._failure[1])(str(self._failure[1]))
            return True

    def _pause(self) -> float:
        """Return the seconds until the next refresh, as it looks now."""
        behind = self._more or not self.is_complete
        if self._begun < self._awaited or (behind and self._failure is None):
            return 0.0
        return max(0.0, self._due - self._clock()) if behind or self._asked else inf

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (pause := self._pause()) > 0:
                    self._changed.wait(None if pause == inf else pause)
                if self._closing:
                    return
                self._begun += 1
                self._asked = False
                if not self._sweeping:
                    self._sweeping = not self._until_sweep
                    self._until_sweep = self._until_sweep - 1 if self._until_sweep else _SWEEP
            failure = None
            swept = more = False
            try:
                self._client.check()
                until = self._client.deadline()
                more = self.is_complete and not self._listing.recent(until)
                swept = self._sweeping and time.monotonic() < until and self._listing.sweep(until)
            except RequestError as error:
                failure = error
            with self._changed:
                self._ended = self._begun
                self._more = more
                self._sweeping = self._sweeping and not swept
                self.is_complete = self.is_complete or swept
                self._failure = None if failure is None else (self._begun, failure)
                pause = self._settings.refresh if failure is None else min(_PAUSE, self._settings.refresh)
                self._due = self._clock() + pause
                self._changed.notify_all()
