"""Scans of a chain: from tier to tier, with each object named once."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from tiercache.errors import UnavailableError
from tiercache.storage.base import ScanEntry, ScanPage
from tiercache_backends.chain.tier import Tier

_MAX_SCANS: Final = 64
"""Maximum number of scans under way; beyond it, the scan that was used longest ago is dropped."""
_MAX_REPORTED: Final = 1 << 20
"""Maximum number of objects that are remembered for all scans together, about 70 MB.

Beyond it, the scan that was used longest ago is dropped. A scan that is alone remembers no more then, and may
name further objects twice.
"""
_MAGIC: Final = b"scan"
_CURSOR_BYTES: Final = len(_MAGIC) + 8


@dataclass(slots=True)
class _Scan:
    """One scan under way."""

    tiers: Sequence[Tier]
    """Tiers of the chain when the scan began."""
    tier: Tier
    """Tier that is scanned now."""
    cursor: bytes = b""
    """Cursor in that tier; empty at its beginning."""
    done: list[Tier] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)
    """Objects that were reported, by the hash of their digests."""


class Scans:
    """Scans under way. The cursor of each is a name that nobody can guess; every call with it goes on.

    A scan goes from tier to tier, and several tiers have the same object. What the other tiers have *now*
    does not tell whether the object was reported, because objects move while a scan goes on:

        1. scan: passes the place of object 5 in tier 1, which does not have it
        2. get: object 5 comes up from tier 2 to tier 1
        3. scan: finds object 5 in tier 2, and has to report it

    Thread safety: any thread; one at a time for each scan.
    """

    def __init__(self) -> None:
        self._lock: Final = Lock()
        self._scans: OrderedDict[bytes, _Scan] = OrderedDict()

    def page(
        self, tiers: Sequence[Tier], answering: Sequence[Tier], namespace: bytes | None, cursor: bytes
    ) -> ScanPage:
        """Return a part of the objects of a chain with these tiers; see `StorageBackend.scan`."""
        if cursor and not (cursor.startswith(_MAGIC) and len(cursor) == _CURSOR_BYTES):
            return ScanPage([], b"")  # a client of a daemon may pass any bytes
        cursor = cursor or self._begin(_Scan(tiers, answering[0]))
        scan = self._scans.get(cursor)
        if scan is None:
            raise UnavailableError("the scan was dropped for newer ones; begin again")
        if scan.tiers != tiers:
            raise UnavailableError("the tiers of the chain were changed during the scan; begin again")
        tier = scan.tier
        if not tier.is_readable:
            raise UnavailableError(f"tier {tier.name!r} was left out during the scan; begin again")
        page = tier.scan(namespace, scan.cursor)
        found = self._unreported(cursor, scan, [entry._replace(tier=tier.name) for entry in page.entries])
        scan.cursor = page.cursor
        if not page.cursor:
            scan.done.append(tier)
            left = [other for other in tiers if other.is_readable and other not in scan.done]
            if not left:
                with self._lock:
                    self._scans.pop(cursor, None)
                return ScanPage(found, b"")
            scan.tier = left[0]
        return ScanPage(found, cursor)

    def _begin(self, scan: _Scan) -> bytes:
        cursor = _MAGIC + secrets.token_bytes(_CURSOR_BYTES - len(_MAGIC))
        with self._lock:
            self._scans[cursor] = scan
            if len(self._scans) > _MAX_SCANS:
                self._scans.popitem(last=False)
        return cursor

    def _unreported(self, cursor: bytes, scan: _Scan, entries: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Return the entries that a scan has not reported, and note them."""
        new = [entry for entry in entries if hash(entry.key.digest) not in scan.reported]
        with self._lock:
            if cursor in self._scans:
                self._scans.move_to_end(cursor)
            room = _MAX_REPORTED - sum(len(one.reported) for one in self._scans.values()) - len(new)
            while room < 0 and len(self._scans) > 1:
                room += len(self._scans.popitem(last=False)[1].reported)
            if room >= 0:
                scan.reported.update(hash(entry.key.digest) for entry in new)
        return new
