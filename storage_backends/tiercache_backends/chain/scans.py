"""Scans of all tiers of a chain: for callers, and to count what the tiers hold together."""

from __future__ import annotations

import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Final, NamedTuple, Self

import msgpack
import numpy as np

from tiercache.errors import ClosedError, StorageError, UnlistedError
from tiercache.storage.base import ScanEntry
from tiercache.storage.pages import NONE, spread
from tiercache.storage.restorable import Worth
from tiercache_backends.chain.tier import Tier

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


_EVERY_S: Final = 60.0
"""Minimum seconds from the end of one count to the begin of the next."""
_SHARE: Final = 0.05
"""Part of the time in which a count may scan, so that the calls of clients hardly notice it."""
_PATIENCE_S: Final = 0.2
"""Seconds that a caller waits for the first count; that of a small chain is over by then."""
_MAX_OBJECTS: Final = 1 << 22
"""Objects and copies beyond which nothing is counted; this many take some 0.5 GB while they are counted."""
_CLOSE_S: Final = 5.0


class _Columns(NamedTuple):
    """Scanned objects; keys as hashes with a secret of this process, so that nobody can make two collide."""

    objects: array[int]
    pages: array[int]
    parents: array[int]
    """0: not known."""
    lengths: array[int]
    namespaces: array[int]


class UnionWorth:
    """How much of what all tiers of a chain hold together a restore can use, counted in the background.

    The tiers' own figures do not add up: a copy would count twice, and a page in one tier may have its state
    in another. Tiers that are out do not count.

        tier     objects                             restorable alone    together
        ssd      pages 1, 2                          nothing             pages 1, 2, 3 and the state
        hdd      pages 2, 3, the state of page 3     nothing

    Thread safety: any thread.
    """

    def __init__(self, tiers: Callable[[], Sequence[Tier]], every: float = _EVERY_S) -> None:
        """Count what the readable ones of `tiers` hold, at most every `every` seconds."""
        self._tiers: Final = tiers
        self._every: Final = every
        self._lock: Final = Lock()
        self._closing: Final = Event()
        self._first: Final = Event()
        self._due = 0.0
        self._thread: Thread | None = None
        self._worth: Worth | None = None

    def latest(self) -> dict[str, str | int]:
        """Return the figures of the latest count by their names, and begin another if it is time.

        There are none before the first count, and if a tier cannot list its objects or there are too many.
        """
        with self._lock:
            idle = self._thread is None or not self._thread.is_alive()
            if idle and time.monotonic() >= self._due and not self._closing.is_set():
                self._thread = Thread(target=self._run, name="tiercache-chain-union", daemon=True)
                self._thread.start()
        self._first.wait(_PATIENCE_S)
        worth = self._worth
        return {} if worth is None else dict(worth._asdict())

    def close(self) -> None:
        """Count no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._worth = self._count()
        except UnlistedError:
            self._worth = None
        except (StorageError, ClosedError):
            pass  # a tier has left or does not answer; the next count is without it
        finally:
            self._due = time.monotonic() + self._every
            self._first.set()

    def _count(self) -> Worth | None:
        found = _Columns(*(array("q") for _ in _Columns._fields))
        numbers: dict[bytes, int] = {}
        hybrid: set[int] = set()
        for tier in [tier for tier in self._tiers() if tier.is_readable]:
            records = tier.call("namespaces", lambda store: store.namespaces())
            hybrid |= {numbers.setdefault(one.namespace, len(numbers)) for one in records if one.states}
            cursor = b""
            while True:
                began = time.monotonic()
                page = tier.scan(None, cursor)
                _add(found, page.entries, numbers)
                cursor = page.cursor
                if len(found.objects) > _MAX_OBJECTS:
                    return None
                if not cursor:
                    break
                if self._closing.wait((time.monotonic() - began) * (1 / _SHARE - 1)):
                    return self._worth
        return _worth_of(found, hybrid)


def _add(found: _Columns, entries: Sequence[ScanEntry], numbers: dict[bytes, int]) -> None:
    for key, meta, *_ in entries:
        found.objects.append(hash(key.digest))
        found.pages.append(hash(key.page_key))
        found.parents.append(0 if meta.parent is None else hash(meta.parent))
        found.lengths.append(meta.length)
        found.namespaces.append(numbers.setdefault(meta.namespace, len(numbers)))


def _worth_of(found: _Columns, hybrid: set[int]) -> Worth:
    """Return the worth of these objects; `hybrid`: namespaces that are known to need states."""
    _, first = np.unique(np.frombuffer(found.objects, np.int64), return_index=True)
    own, above, lengths, namespaces = (
        np.frombuffer(column, np.int64)[first]
        for column in (found.pages, found.parents, found.lengths, found.namespaces)
    )
    attached, known = above == own, above != 0
    pages, nodes = np.unique(np.concatenate([own, above[known]]), return_inverse=True)
    mine, parents = nodes[: len(own)], np.full(len(own), NONE)
    parents[known] = nodes[len(own) :]
    whole, alive, up = np.zeros(len(pages), bool), np.zeros(len(pages), bool), np.full(len(pages), NONE)
    needs = np.isin(namespaces, [*hybrid, *np.unique(namespaces[attached])])
    whole[mine[~attached]] = True
    alive[mine[attached | ~needs]] = True
    up[mine[~attached]] = parents[~attached]
    while len(circle := spread(up, alive, whole)):
        up[circle], whole[circle] = NONE, False
    good, sound = alive[mine], whole[mine]
    return Worth(int(lengths[good & sound].sum()), int(lengths[~good & sound].sum()), int((~sound).sum()))
