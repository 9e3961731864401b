"""The selection of objects that the options of a verb describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tiercache.cli.output import clean
from tiercache.cli.store.names import Namespaces
from tiercache.config import parse_duration, parse_size
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.storage.base import ScanEntry, StorageBackend

_DEPTHS: Final = re.compile(r"(\d{1,10})?(\.\.)?(\d{1,10})?")
_ENDLESS: Final = 2**32
"""The upper bound of an open range of depths, in pages."""


@dataclass(slots=True)
class Filter:
    """Conditions that an object must meet, all of them.

    Sizes are in bytes, depths in pages (both ends included), times in seconds since 1970.

    Thread safety: one thread.
    """

    namespace: str = ""
    pool: PoolName | None = None
    depths: tuple[int, int] | None = None
    least: int = 0
    most: int | None = None
    before: float | None = None
    """Only objects stored before this time; never one without a time."""
    after: float | None = None
    """Only objects stored after this time; never one without a time."""
    names: Namespaces = field(default_factory=lambda: Namespaces({}))
    _fits: dict[bytes, bool] = field(default_factory=dict)

    def admits(self, entry: ScanEntry) -> bool:
        """Whether the object meets all conditions."""
        meta = entry.meta
        if self.pool is not None and entry.key.pool != self.pool:
            return False
        if not self.least <= meta.length or (self.most is not None and meta.length > self.most):
            return False
        if self.depths is not None and (meta.depth is None or not self.depths[0] <= meta.depth <= self.depths[1]):
            return False
        if self.before is not None and (entry.stored_at is None or entry.stored_at >= self.before):
            return False
        if self.after is not None and (entry.stored_at is None or entry.stored_at <= self.after):
            return False
        return not self.namespace or self._meant(meta.namespace)

    def scan(self, store: StorageBackend, entries: Iterable[ScanEntry] | None = None) -> Iterator[ScanEntry]:
        """Yield the wanted objects of a store, or of `entries` if it was scanned already; raises ConfigError if no namespace matches."""
        self.names = Namespaces.of(store)
        named = [name for name in self.names.records if self._meant(name)] if self.namespace else []
        yield from (entry for entry in (store.scan_all() if entries is None else entries) if self.admits(entry))
        if self.namespace and not named and not any(self._fits.values()):
            self.names.matching(self.namespace, self._fits)

    def _meant(self, namespace: bytes) -> bool:
        known = self._fits.get(namespace)
        if known is None:
            known = self._fits[namespace] = self.names.fits(namespace, self.namespace)
        return known


def make_filter(
    now: float,
    *,
    namespace: str = "",
    pool: str = "",
    depth: str = "",
    min_size: str = "",
    max_size: str = "",
    older: str = "",
    newer: str = "",
) -> Filter:
    """Return the filter that the options describe; raises ConfigError that names the wrong option. `now`: seconds since 1970."""
    least, most = _size("--min-size", min_size), _size("--max-size", max_size)
    before, after = _seconds("--older", older), _seconds("--newer", newer)
    if least is not None and most is not None and least > most:
        raise ConfigError(f"--min-size {min_size} is more than --max-size {max_size}, which leaves nothing; exchange them")
    if before is not None and after is not None and before >= after:
        raise ConfigError(f"--older {older} and --newer {newer} leave nothing; --newer must be the longer time")
    return Filter(
        namespace=namespace,
        pool=_pool(pool) if pool else None,
        depths=_depths(depth) if depth else None,
        least=least or 0,
        most=most,
        before=None if before is None else now - before,
        after=None if after is None else now - after,
    )


def _pool(text: str) -> PoolName:
    try:
        return PoolName(text.lower())
    except ValueError:
        raise ConfigError(f"--pool {clean(text)!r} is not a pool; use one of {', '.join(PoolName)}") from None


def _depths(text: str) -> tuple[int, int]:
    match = _DEPTHS.fullmatch(text.strip())
    if match is None or not (match[1] or match[3]):
        raise ConfigError(f"--depth {clean(text)!r} is not a range; write pages as 3..17, 3.., ..17 or 3")
    low = int(match[1] or 0)
    high = int(match[3]) if match[3] else _ENDLESS if match[2] else low
    if low > high:
        raise ConfigError(f"--depth {text} is empty; write the smaller depth first")
    return low, high


def _size(option: str, text: str) -> int | None:
    try:
        return parse_size(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{option}: {clean(str(error))}") from error


def _seconds(option: str, text: str) -> float | None:
    try:
        return parse_duration(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{option}: {clean(str(error))}") from error
