"""Cursors of a chain's scans, and what each scan has reported."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple, Self

import msgpack

from tiercache.storage.base import ScanEntry

_MAX_SCANS: Final = 64
"""Maximum number of scans under way; beyond it, the scan that was used longest ago is dropped."""
_MAX_FIELDS: Final = 64
"""Maximum number of fields of a cursor, and of tiers in it."""
_MAX_REPORTED: Final = 1 << 20
"""Maximum number of objects that are remembered for all scans together, about 70 MB.

Beyond it, the scan that was used longest ago is dropped. A scan that is alone remembers no more then, and may
name further objects twice.
"""


class Cursor(NamedTuple):
    """Place at which a scan goes on."""

    lineup: int
    """Number of the lineup with which the scan began."""
    scan: int
    """Number of the scan in `ScansUnderWay`."""
    tier: str
    """Name of the tier that is scanned next."""
    inner: bytes = b""
    """The tier's own cursor."""
    done: tuple[str, ...] = ()
    """Names of the tiers that were scanned to their end."""

    def to_bytes(self) -> bytes:
        """Return the cursor as bytes for the caller of a scan."""
        packed: bytes = msgpack.packb(tuple(self))
        return packed

    @classmethod
    def from_bytes(cls, cursor: bytes) -> Self | None:
        """Return a cursor that `to_bytes` made, or None: a client of a daemon may pass any bytes."""
        try:
            # Without limits, nested arrays of a few KiB announce gigabytes, which are allocated.
            lineup, scan, tier, inner, done = msgpack.unpackb(
                cursor, max_array_len=_MAX_FIELDS, max_map_len=0, max_ext_len=0
            )
        except (ValueError, TypeError):
            return None
        given = (
            isinstance(lineup, int)
            and isinstance(scan, int)
            and isinstance(tier, str)
            and isinstance(inner, bytes)
        )
        if not (given and isinstance(done, list) and all(isinstance(name, str) for name in done)):
            return None
        return cls(lineup, scan, tier, inner, tuple(done))


class ScansUnderWay:
    """Memory of scans under way: which objects each has reported.

    A scan goes from tier to tier, and several tiers have the same object. What the other tiers have *now*
    does not tell whether the object was reported, because objects move while a scan goes on:

        1. scan: passes the place of object 5 in tier 1, which does not have it
        2. get: object 5 comes up from tier 2 to tier 1
        3. scan: finds object 5 in tier 2, and has to report it

    Thread safety: any thread.
    """

    def __init__(self, max_reported: int = _MAX_REPORTED) -> None:
        self._max_reported: Final = max_reported
        self._lock: Final = Lock()
        self._reported: OrderedDict[int, set[int]] = OrderedDict()

    def begin(self) -> int:
        """Return the number of a new scan, which nobody can guess."""
        scan = secrets.randbits(63)
        with self._lock:
            self._reported[scan] = set()
            if len(self._reported) > _MAX_SCANS:
                self._reported.popitem(last=False)
        return scan

    def unreported(
        self, scan: int, entries: Sequence[ScanEntry], *, remember: bool
    ) -> list[ScanEntry] | None:
        """Return the entries that a scan has not reported; None if the scan was dropped.

        `remember`: note them, because another tier comes after this one.
        """
        with self._lock:
            reported = self._reported.get(scan)
            if reported is None:
                return None
            self._reported.move_to_end(scan)
            new = [entry for entry in entries if hash(entry.key.digest) not in reported]
            if remember:
                self._make_room(len(new))
                if self._count() + len(new) <= self._max_reported:
                    reported.update(hash(entry.key.digest) for entry in new)
        return new

    def end(self, scan: int) -> None:
        """Forget a scan."""
        with self._lock:
            self._reported.pop(scan, None)

    def _make_room(self, objects: int) -> None:
        """Drop the scans that were used longest ago, but not the last one, until so many objects fit."""
        while len(self._reported) > 1 and self._count() + objects > self._max_reported:
            self._reported.popitem(last=False)

    def _count(self) -> int:
        return sum(map(len, self._reported.values()))
