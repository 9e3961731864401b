"""Refreshes of the directory: what others have written and removed.

    packs/   packs and tombstones; their names sort by the time of their writers' clocks

Most refreshes list only the names of the last minutes, which is one request. Now and then, and at first,
everything is listed, which also shows what is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition
from typing import Final

from tiercache_backends.s3.directory import BucketDirectory
from tiercache_backends.s3.failures import FailureKind, RequestError
from tiercache_backends.s3.notes import Pack
from tiercache_backends.s3.pack import (
    FOLDER,
    MAX_TOMBSTONE,
    PackName,
    make_name,
    parse_name,
    read_head,
    read_tombstone,
)
from tiercache_backends.s3.service import BucketClient, PendingRequest
from tiercache_backends.s3.settings import S3Settings

_log = logging.getLogger(__name__)

_SKEW: Final = 600_000
"""Milliseconds by which clocks of writers may differ before only a full listing finds what they write."""
_MAX_NEW: Final = 256
"""Number of new names that one refresh reads, so that no lookup waits for many; the first reads all."""
_FULL: Final = 12
"""Number of refreshes after which one lists everything."""


class Refresher:
    """Refresher of a directory. A lookup that misses calls `refresh`, which asks the service now and then.

    Thread safety: any thread may call; one of them refreshes while the others wait for it.
    """

    def __init__(
        self,
        settings: S3Settings,
        service: BucketClient,
        directory: BucketDirectory,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._service = service
        self._directory = directory
        self._clock = clock
        self._changed = Condition()  # guards the fields from here on
        self._running = False
        self._ended = 0
        """Number of refreshes that have ended."""
        self._due = float("-inf")
        self._until_full = 0
        self._newest = 0
        """Largest time of a name that was seen, in milliseconds."""
        self._more = False
        """Whether the last refresh left names for the next."""
        self._failure: RequestError | None = None

    def refresh(self, *, force: bool = False, full: bool = False) -> None:
        """Take in what is new in the bucket, unless the last refresh was a moment ago.

        With `full`, everything is listed, and what is gone is forgotten. `force` does not look at the time.

        Raises RequestError if the service cannot be asked.
        """
        self._service.check()
        with self._changed:
            if not force and self._clock() < self._due:
                return
            if self._running:
                # The refresh under way may have listed before this call began. So wait for one more.
                wanted = self._ended + (2 if force or not self._settings.refresh else 1)
                self._changed.wait_for(lambda: not self._running or self._ended >= wanted)
                if self._ended >= wanted:
                    if self._failure is not None:
                        raise RequestError(self._failure.kind, self._failure.text)
                    return
            self._running = True
            full = full or self._until_full <= 0 or not self._settings.refresh
        failure: RequestError | None = None
        try:
            self._refresh(full=full)
        except RequestError as error:
            failure = error
            raise
        finally:
            with self._changed:
                self._running = False
                self._failure = failure
                self._ended += 1
                if failure is None:
                    self._due = self._clock() + (0.0 if self._more else self._settings.refresh)
                    self._more = False
                    self._until_full = _FULL if full else self._until_full - 1
                self._changed.notify_all()

    def _refresh(self, *, full: bool) -> None:
        known = self._directory.known() if full else set()
        after = "" if full else make_name(max(0, self._newest - _SKEW), "0" * 16, 0, None)
        listed = {entry.name: entry.size for entry in self._service.listing(FOLDER, after)}
        fresh = self._directory.unknown(listed)
        if self._ended and len(fresh) > _MAX_NEW:
            fresh, self._more = fresh[:_MAX_NEW], True
        names = [(parse_name(text), listed[text]) for text in fresh]
        self._load([(name, size) for name, size in names if name is not None])
        if full:
            needless = self._directory.needless_tombstones(listed.keys() & known)
            self._directory.forget(known - listed.keys())
            if needless:
                self._service.delete([f"{FOLDER}/{name}" for name in needless], self._service.deadline())
                self._directory.forget(needless)

    def _load(self, names: list[tuple[PackName, int]]) -> None:
        """Read the heads of new packs, and new tombstones, many at a time."""
        waiting: list[tuple[PackName, int, PendingRequest[memoryview]]] = []
        for name, size in names:
            self._newest = max(self._newest, name.milliseconds)
            wanted = size if name.head is None else name.head
            if wanted > size or (name.head is None and size > MAX_TOMBSTONE):
                self._directory.unreadable(name.text, size)
                continue
            until = self._service.deadline(wanted)
            while not self._service.has_room(wanted, until, wait=not waiting):
                if not waiting:
                    raise RequestError(
                        FailureKind.UNREACHABLE, f"{self._service.where}: too much is in flight"
                    )
                self._take_in(*waiting.pop(0))
            waiting.append((name, size, self._service.read(f"{FOLDER}/{name.text}", 0, wanted, until)))
        for part in waiting:
            self._take_in(*part)

    def _take_in(self, name: PackName, size: int, request: PendingRequest[memoryview]) -> None:
        try:
            data = bytes(request.result())
        except RequestError as error:
            if error.kind is FailureKind.ABSENT:
                return  # removed since it was listed
            if error.kind is FailureKind.SHORT:
                self._directory.unreadable(name.text, size)
                return
            raise
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
        _log.warning("%s: %s cannot be read, and is passed over", self._settings, name.text)
        self._directory.unreadable(name.text, size)
