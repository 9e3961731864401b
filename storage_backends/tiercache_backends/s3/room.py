"""Room under the capacity: sets ask for it, and one process, the owner of the lease, makes it.

    limit = capacity - slack     what sets may fill; the slack is for tombstones and rewritten packs

A set of the owner evicts as much as it needs. A set of another process is THROTTLED while there is no room,
and the owner makes some in the background. What several processes write at the same moment, before they see
each other's packs, may exceed the capacity until the owner's next round.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Any, Final

from tiercache_backends.s3.directory.directory import BucketDirectory
from tiercache_backends.s3.directory.objects import Pack, PackClaim, PackRemoval
from tiercache_backends.s3.directory.refreshing import Refresher
from tiercache_backends.s3.failures import FailureKind, RequestError
from tiercache_backends.s3.pack import FOLDER, NewEntry
from tiercache_backends.s3.service import BucketClient
from tiercache_backends.s3.settings import S3Settings

_log = logging.getLogger(__name__)

_SLACK: Final = 16
"""Divisor of the capacity for the slack."""
_LOW_WATER: Final = 8
"""Divisor of the capacity for what the owner keeps free if others write as well."""
_ROUNDS: Final = 16
"""Number of times that a set makes room which other sets take first, before it gives up."""
_REWRITES: Final = 8
"""Number of packs that one round in the background rewrites."""

Rewrite = Callable[[Sequence[NewEntry], Sequence[memoryview]], Pack]
"""Function that writes entries and their stored bytes into a new pack. Raises RequestError."""


class Room:
    """Capacity of a store, and this process's part in keeping it.

    Thread safety: any thread may call `take`; a thread of its own makes the rounds of the owner.
    """

    def __init__(
        self, settings: S3Settings, client: BucketClient, directory: BucketDirectory, refresher: Refresher
    ) -> None:
        self._settings = settings
        self._client = client
        self._directory = directory
        self._refresher = refresher
        self.capacity: Final = settings.capacity
        self.limit: Final = settings.capacity - settings.capacity // _SLACK
        self.lease: Final = EvictionLease(client, settings.lease)
        self._closing = Event()
        self._thread: Thread | None = None
        self._loaded = 0

    def start(self, rewrite: Rewrite) -> None:
        """Seek the lease, and go on doing so in the background. Raises RequestError."""
        if self.limit:
            self.lease.seek()
            self._thread = Thread(
                target=self._rounds, args=(rewrite,), name="tiercache-s3-owner", daemon=True
            )
            self._thread.start()

    def take(self, name: str, nbytes: int, claims: Sequence[PackClaim]) -> bool:
        """Count a pack that is to be written; return False if there is no room, or not all that is in the
        bucket is known yet.

        Raises RequestError if the service cannot be asked to remove anything.
        """
        if not self.limit:
            return self._directory.expect(name, nbytes)
        if nbytes > self.limit or not self._refresher.is_complete:
            return False
        for _ in range(_ROUNDS):
            if self._directory.expect(name, nbytes, self.limit):
                return True
            if not self.lease.is_held:
                # The owner may have removed packs, which only a sweep shows.
                self._refresher.ask(0, sweep=True)
                return False
            if not self._evict(nbytes, self.limit, claims):
                return False
        return False

    def close(self) -> None:
        """End the rounds and let go of the lease."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._settings.deadline)
            try:
                self.lease.release()
            except RequestError as error:
                _log.debug("the lease ends by itself: %s", error.text)

    def round(self, rewrite: Rewrite) -> None:
        """Do what an owner does now and then: evict what is too much, rewrite packs that are mostly dead.

        Raises RequestError.
        """
        if not self.lease.seek():
            return
        self._refresher.sync()
        loaded = self._directory.counts["loaded"]
        others, self._loaded = loaded > self._loaded, loaded
        free = self._settings.capacity // _LOW_WATER if others else 0
        while self._directory.used + free > self.limit and self._evict(free, self.limit):
            pass
        for _ in range(_REWRITES):
            if not self._rewrite(rewrite):
                return

    def _rounds(self, rewrite: Rewrite) -> None:
        while not self._closing.wait(self._settings.lease / 5):
            try:
                self.round(rewrite)
            except RequestError as error:
                _log.debug("a round of the owner failed: %s", error.text)

    def _evict(self, nbytes: int, limit: int, claims: Sequence[PackClaim] = ()) -> bool:
        """Evict until so many bytes fit into `limit`; return whether anything was removed."""
        removal, enough = self._directory.evict(nbytes, limit, claims)
        return self._remove(removal) and (enough or bool(removal.names))

    def _remove(self, removal: PackRemoval) -> bool:
        """Remove packs, if this process is still the owner."""
        try:
            if removal.names:
                if not self.lease.confirm():
                    raise RequestError(FailureKind.REFUSED, "another process is the owner now")
                self._client.delete([f"{FOLDER}/{name}" for name in removal.names], self._client.deadline())
        except RequestError:
            self._directory.undo(removal, keep=True)
            return False
        self._directory.removed(removal)
        return True

    def _rewrite(self, rewrite: Rewrite) -> bool:
        """Rewrite one pack that is mostly dead; return whether there may be another."""
        found = self._directory.mostly_dead()
        if found is None:
            return False
        old, numbers = found
        entries = [old.index[number] for number in numbers]
        begin, end = min(e.offset for e in entries), max(e.offset + e.stored for e in entries)
        until = self._client.deadline(end - begin)
        if not self._client.has_room(end - begin, until, wait=True):
            return False
        try:
            data = self._client.read(f"{FOLDER}/{old.name}", begin, end, until).result()
        except RequestError as error:
            if error.kind is FailureKind.ABSENT:
                self._directory.forget([old.name])
            raise
        new = rewrite(
            [NewEntry(e.key, e.meta, e.codec, e.stored) for e in entries],
            [data[e.offset - begin : e.offset - begin + e.stored] for e in entries],
        )
        return self._remove(self._directory.moved(old, numbers, new))


_LEASE: Final = "owner"
_MAX_LEASE_BYTES: Final = 4096


def boot_time() -> float:
    """Return seconds since the host was started, the time included for which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EvictionLease:
    """Lease of the right to evict: an object in the bucket that its owner writes again and again.

        owner    {"owner": id, "count": n, "lease": seconds}     each count gives the object another etag

        take     the object is absent        put it if it is absent
                 its owner has let go        put it if it has the etag that was read
                 its etag did not change     the same, after `lease` seconds of waiting
        renew                                put it if it has the etag of our last put

    No clocks of two hosts are compared: who waits measures how long the etag stays the same, and the owner
    counts from the time before it sent its last renewal. The clock goes on while a process is stopped or the
    host sleeps (CLOCK_BOOTTIME). An owner uses a quarter of its lease without asking, and renews before it
    removes anything after that: if another owner has taken over, the etag is another, and nothing is removed.

    Thread safety: any thread may call; one at a time talks to the service.
    """

    def __init__(self, client: BucketClient, seconds: float, clock: Callable[[], float] = boot_time) -> None:
        self._client = client
        self._seconds = seconds
        self._clock = clock
        self._id: Final = secrets.token_hex(16)
        self._lock = Lock()
        self._etag = ""
        """Etag of our last put; empty while another process is the owner, or none."""
        self._renewed = 0.0
        self._count = 0
        self._seen: tuple[str, float] = ("", 0.0)
        """Etag of another owner, and when it was first seen."""

    @property
    def is_held(self) -> bool:
        """Whether this process is the owner, as far as it knows without asking."""
        return bool(self._etag) and self._clock() - self._renewed < self._seconds / 2

    def confirm(self) -> bool:
        """Return whether this process is the owner, and ask if it has not done so for a while.

        Raises RequestError if the service cannot be asked.
        """
        with self._lock:
            if self._etag and self._clock() - self._renewed < self._seconds / 4:
                return True
            return bool(self._etag) and self._renew()

    def seek(self) -> bool:
        """Renew the lease, or take it if nobody has it any more; return whether this process is the owner.

        Raises RequestError if the service cannot be asked.
        """
        with self._lock:
            return self._renew() if self._etag else self._take()

    def release(self) -> None:
        """Let go of the lease, so that another process need not wait for its end."""
        with self._lock:
            if self._etag:
                self._put("", self._etag)
                self._etag = ""

    def _renew(self) -> bool:
        if self._put(self._id, self._etag):
            return True
        self._etag = ""
        # The answer to an earlier put may have been lost. Then the object is ours, with another etag.
        if self._take():
            return True
        _log.warning("another process evicts now from %s", self._client.where)
        return False

    def _take(self) -> bool:
        try:
            data, etag = self._client.versioned(_LEASE, _MAX_LEASE_BYTES)
        except RequestError as error:
            if error.kind is FailureKind.ABSENT:
                return self._put(self._id, None)
            raise
        owner, lease = _parsed(data)
        if owner == self._id:
            return self._put(self._id, etag)
        if self._seen[0] != etag:
            self._seen = (etag, self._clock())
        if owner and self._clock() - self._seen[1] < max(lease, self._seconds):
            return False
        return self._put(self._id, etag)

    def _put(self, owner: str, etag: str | None) -> bool:
        """Write the object if it has this etag, or is absent (None); return whether that was so."""
        began = self._clock()
        self._count += 1
        data = json.dumps({"owner": owner, "count": self._count, "lease": self._seconds}).encode()
        # If the answer is lost, the put may have been done: `_take` then finds our id.
        try:
            self._etag = self._client.replace(_LEASE, data, etag)
        except RequestError as error:
            if error.kind is FailureKind.EXISTS:
                return False
            raise
        self._renewed = began
        return True


def _parsed(data: bytes) -> tuple[str, float]:
    """Return owner and seconds of a lease; of what is none, an owner that does not renew it."""
    try:
        found: Any = json.loads(data)
        return str(found["owner"])[:64], min(3600.0, max(1.0, float(found["lease"])))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "unknown", 1.0
