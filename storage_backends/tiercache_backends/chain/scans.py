"""Scans of a chain: from tier to tier, with each object named once."""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple, Self

from tiercache.storage.base import ScanEntry

_MAX_SCANS: Final = 64
"""Maximum number of scans under way; beyond it, the scan that was used longest ago is dropped."""
_MAX_REPORTED: Final = 1 << 20
"""Maximum number of objects that are remembered for all scans together, about 70 MB.

Beyond it, the scan that was used longest ago is dropped. A scan that is alone remembers no more then, and may
name further objects twice.
"""
_CURSOR: Final = struct.Struct("<4sIQBB")
_MAGIC: Final = b"scan"


class Cursor(NamedTuple):
    """Place at which a scan goes on."""

    lineup: int
    """Number of the lineup with which the scan began."""
    scan: int
    """Number of the scan in `ScansUnderWay`."""
    tier: int
    """Position of the tier that is scanned next."""
    done: int = 0
    """Set of bits: the positions of the tiers that were scanned to their end."""
    inner: bytes = b""
    """The tier's own cursor."""

    def to_bytes(self) -> bytes:
        """Return the cursor as bytes for the caller of a scan."""
        return _CURSOR.pack(_MAGIC, self.lineup, self.scan, self.tier, self.done) + self.inner

    @classmethod
    def from_bytes(cls, cursor: bytes) -> Self | None:
        """Return a cursor that `to_bytes` made, or None: a client of a daemon may pass any bytes."""
        if len(cursor) < _CURSOR.size or not cursor.startswith(_MAGIC):
            return None
        _, lineup, scan, tier, done = _CURSOR.unpack_from(cursor)
        return cls(lineup, scan, tier, done, cursor[_CURSOR.size :])


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

    def unreported(self, scan: int, entries: Sequence[ScanEntry]) -> list[ScanEntry] | None:
        """Return the entries that a scan has not reported, and note them; None if the scan was dropped."""
        with self._lock:
            reported = self._reported.get(scan)
            if reported is None:
                return None
            self._reported.move_to_end(scan)
            new = [entry for entry in entries if hash(entry.key.digest) not in reported]
            room = self._max_reported - sum(map(len, self._reported.values())) - len(new)
            while room < 0 and len(self._reported) > 1:
                room += len(self._reported.popitem(last=False)[1])
            if room >= 0:
                reported.update(hash(entry.key.digest) for entry in new)
        return new

    def end(self, scan: int) -> None:
        """Forget a scan."""
        with self._lock:
            self._reported.pop(scan, None)
