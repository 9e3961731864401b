"""Lease of the right to evict: an object in the bucket that its owner writes again and again.

    owner    {"owner": id, "count": n, "lease": seconds}     each count gives the object another etag

    take     the object is absent        put it if it is absent
             its owner has let go        put it if it has the etag that was read
             its etag did not change     the same, after `lease` seconds of waiting
    renew                                put it if it has the etag of our last put

No clocks of two hosts are compared: who waits measures how long the etag stays the same, and the owner counts
from the time before it sent its last renewal. The clock goes on while a process is stopped or the host sleeps
(CLOCK_BOOTTIME). An owner uses a quarter of its lease without asking, and renews before it removes anything
after that: if another owner has taken over, the etag is another, and nothing is removed.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

from tiercache_backends.s3.failures import FailureKind, RequestError
from tiercache_backends.s3.service import BucketClient

_log = logging.getLogger(__name__)

_NAME: Final = "owner"
_MAX_BYTES: Final = 4096


def boot_time() -> float:
    """Return seconds since the host was started, the time included for which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EvictionLease:
    """One process's part in the election of the owner.

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
            data, etag = self._client.versioned(_NAME, _MAX_BYTES)
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
            self._etag = self._client.replace(_NAME, data, etag)
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
