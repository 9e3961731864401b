"""The `mooncake` backend: the store contract over memory that many hosts pool through Mooncake."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.errors import UnavailableError, UnlistedError
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    SharedMemory,
    StorageBackend,
    StoreContext,
    Usage,
    first_of_each,
    storable,
)
from tiercache.storage.gate import CallGate
from tiercache.storage.vectors import usable
from tiercache.storage.wrappers import decide, store_once
from tiercache_backends.mooncake.header import HEADER_BYTES, ObjectNames, read_header
from tiercache_backends.mooncake.library import INVALID, MooncakeClient, library, outcome_of
from tiercache_backends.mooncake.link import Link, Patience
from tiercache_backends.mooncake.namespaces import Listing, NamespaceLog
from tiercache_backends.mooncake.payload import NameClaims, PoolReader, PoolWriter
from tiercache_backends.mooncake.settings import MooncakeSettings, read_settings

_NAMES: Final = 1024
"""Names in one call of the master."""
_HEADERS: Final = 128
"""Headers that are read at once."""
_SCAN_PAGE: Final = 1024


class MooncakeBackend(StorageBackend):
    """Store in the memory of a Mooncake pool, under one prefix.

    The pool evicts by itself, and loses everything when its master ends. It knows nothing of pages and what
    depends on them, and it lists its objects only with `http`. `describe` and `exists` make Mooncake keep the
    objects for some seconds.

    The store can be opened while the master is out of reach. Calls then fail at once, and connect anew.

    Thread safety: as the contract says.
    """

    capabilities = Capabilities(shared=True, bounded=True, ordered=False, listed=False)

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connect; raises ConfigError if Mooncake's library is not installed or lacks something."""
        library()
        self.capabilities = replace(type(self).capabilities, listed=settings.http is not None)
        self._settings: Final = settings
        self._gate: Final = CallGate(f"the store at {settings}", os.getpid)
        self._names: Final = ObjectNames(settings.prefix)
        self._link: Final = Link(settings)
        self._claims: Final = NameClaims()
        self._reader: Final = PoolReader(self._link, self._names, self._claims)
        self._writer: Final = PoolWriter(self._link, settings, self._exist)
        self._namespaces: Final = NamespaceLog(self._link, settings.prefix)
        self._listing: Final = Listing(settings.http, settings.deadline) if settings.http else None
        self._listed: list[bytes] = []
        """Digests of all objects, sorted, as the scan found them that began last."""

    @classmethod
    def capabilities_of(cls, section: Mapping[str, Any]) -> Capabilities:
        return replace(cls.capabilities, listed=read_settings(section).http is not None)

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(read_settings(section))

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        read_settings(section)
        library()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            possible = {key.digest for key in keys if len(key.digest) == DIGEST_BYTES}
            codes = self._exist(self._link.patience(), [self._names.of(digest) for digest in possible])
            if codes and min(codes) < 0:
                raise self._unavailable(min(codes))
            there = {digest for digest, code in zip(possible, codes, strict=True) if code}
            return [key.digest in there for key in keys]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, _unreadable, self._reader.get)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(
                items,
                lambda item: None if storable(item) else Outcome.ERROR,
                lambda sound: store_once(sound, self._set),
            )

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            wanted = list(dict.fromkeys(key.digest for key in keys if len(key.digest) == DIGEST_BYTES))
            names = [self._names.of(digest) for digest in wanted]
            patience = self._link.patience()
            codes = self._claims.each(
                names, patience, lambda mine: self._by_names(patience, "delete", mine, MooncakeClient.remove)
            )
            if len(codes) < len(names):
                raise UnavailableError(f"{self._settings}: other threads change these objects")
            failed = [code for code in codes.values() if code and outcome_of(code) is not Outcome.MISS]
            if failed:
                raise self._unavailable(min(failed))
            return first_of_each(keys, {d for d, name in zip(wanted, names, strict=True) if not codes[name]})

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            if not cursor or not self._listed:
                self._listed = sorted(self._digests())
            digests = self._listed
            start = bisect_right(digests, cursor) if cursor else 0
            page = digests[start : start + _SCAN_PAGE]
            entries = [entry for entry in self._describe(page) if entry is not None]
            more = start + _SCAN_PAGE < len(digests)
            if not more:
                self._listed = []
            return ScanPage(
                [entry for entry in entries if namespace in (None, entry.meta.namespace)],
                page[-1] if more else b"",
            )

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            wanted = list(dict.fromkeys(key.digest for key in keys if len(key.digest) == DIGEST_BYTES))
            found = dict(zip(wanted, self._describe(wanted), strict=True))
            return [found.get(key.digest) for key in keys]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            self._namespaces.register(record)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._namespaces.records()

    def usage(self) -> Usage:
        """Return what is known: without `http`, all counts are 0, and `details` says so.

        The bytes used and the capacity are those of the whole pool. The payload is an estimate from them.
        """
        with self._gate:
            details: dict[str, str | int] = {
                "prefix": self._settings.prefix,
                "corrupt": self._reader.corrupt,
                "second_reads": self._reader.second_reads,
                "leases_over": self._reader.leases_over,
                "lost_calls": self._link.guard.lost,
                "hung_calls": self._link.guard.hung,
                "staging_free_bytes": self._link.staging.free.nbytes,
            }
            if self._listing is None:
                return Usage(0, 0, 0, 0, {**details, "unlisted": self._cannot_list()})
            objects, gauges = len(self._digests()), self._listing.gauges()
            used = gauges.get("allocated_bytes", 0)
            payload = used * objects // max(1, gauges.get("key_count", 0)) - objects * HEADER_BYTES
            return Usage(objects, max(0, payload), used, gauges.get("total_capacity_bytes", 0), details)

    def clear(self) -> int:
        """Remove all objects and records of namespaces of this store's prefix; return how many they were.

        Raises UnavailableError if that fails.
        """
        with self._gate:
            count = self._link.ask(
                self._link.patience(), "clear", lambda client: client.remove_all_with(self._names.prefix)
            )
            if count < 0:
                raise self._unavailable(count)
            return count

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            pass  # the pool evicts by its own rules

    def flush(self) -> None:
        with self._gate:
            pass  # there is no medium: nothing in the pool survives a power cut of its hosts

    def close(self) -> None:
        if self._gate.close():
            self._link.close()

    def attach(self, memory: SharedMemory) -> None:
        with self._gate:
            self._link.attach(memory)

    # --- parts of calls
    # --------------------------------------------------------------------------------------------------------

    def _set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store well-formed items of different keys."""
        wanted = {self._names.of(item.key.digest): item for item in items}
        patience = self._link.patience()
        answers = self._claims.each(
            list(wanted),
            patience,
            lambda mine: self._writer.set(patience, mine, [wanted[name] for name in mine]),
        )
        return [answers.get(name, Outcome.UNAVAILABLE) for name in wanted]

    def _exist(self, patience: Patience, names: Sequence[str]) -> list[int]:
        return self._by_names(patience, "exists", names, MooncakeClient.exist)

    def _by_names(
        self,
        patience: Patience,
        what: str,
        names: Sequence[str],
        work: Callable[[MooncakeClient, Sequence[str]], list[int]],
    ) -> list[int]:
        """Return the codes of all names, asked in several calls; raises UnavailableError."""
        codes: list[int] = []
        for at in range(0, len(names), _NAMES):
            part = names[at : at + _NAMES]
            found = self._link.ask(patience, what, lambda client, part=part: work(client, part))  # type: ignore[misc]
            patience.answered(found)
            codes += found
        return codes

    def _describe(self, digests: Sequence[bytes]) -> list[ScanEntry | None]:
        found: list[ScanEntry | None] = []
        patience = self._link.patience()
        for at in range(0, len(digests), _HEADERS):
            part = digests[at : at + _HEADERS]
            names = [self._names.of(digest) for digest in part]
            heads = self._link.heads(patience, "describe", names)
            for digest, name, head in zip(part, names, heads, strict=True):
                # INVALID: an object of somebody else, shorter than a header.
                if isinstance(head, int) and head != INVALID and outcome_of(head) is not Outcome.MISS:
                    raise self._unavailable(head)
                header = None if isinstance(head, int) else read_header(memoryview(head), name)
                found.append(None if header is None else header.entry(digest))
        return found

    def _digests(self) -> list[bytes]:
        """Return the digests of all objects."""
        if self._listing is None:
            raise UnlistedError(self._cannot_list())
        return list(filter(None, map(self._names.digest, self._listing.names())))

    def _cannot_list(self) -> str:
        return (
            f"{self._settings} cannot list or count its objects, because Mooncake does so only over HTTP; add"
            " http=HOST:PORT, the -metrics_host and -metrics_port of mooncake_master"
        )

    def _unavailable(self, code: int) -> UnavailableError:
        self._link.guard.failed(f"the master does not answer (code {code})")
        return UnavailableError(
            f"{self._settings}: the pool does not answer (code {code}); look whether mooncake_master and its"
            " hosts run"
        )


def _unreadable(item: GetItem) -> Outcome | None:
    if len(item.key.digest) != DIGEST_BYTES:
        return Outcome.MISS
    return None if usable(item.buffers, item.length, writable=True) else Outcome.ERROR
