"""Records of namespaces: a log in the pool, one small object a record, that is only ever appended to.

    tc1/<prefix>/namespace/0    tc1/<prefix>/namespace/1    ...

A put of a name that is there changes nothing, so two clients that append at once cannot overwrite each other:
the one whose record is not what it reads back tries the next name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

import msgpack
from xxhash import xxh3_128_digest

from tiercache.errors import StorageError
from tiercache.storage.base import NAMESPACE_BYTES, NamespaceRecord
from tiercache_backends.mooncake.header import prefix_of
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 64
"""Names asked for at once; the log ends where so many in a row are not there."""
_MAX_RECORDS: Final = 4096
_MAX_BYTES: Final = 64 << 10
_MAX_FIELDS: Final = 256
"""Maximum number of fields of an identity. Without it, nested arrays announce gigabytes."""


class NamespaceLog:
    """The records of one store, in the pool and in this process.

    Thread safety: any thread.
    """

    def __init__(self, link: Link, prefix: str) -> None:
        self._link: Final = link
        self._prefix: Final = f"{prefix_of(prefix)}namespace/"
        self._lock: Final = Lock()
        self._own: dict[bytes, NamespaceRecord] = {}
        """Records that this process has registered, which are appended again if the pool loses them."""

    def register(self, record: NamespaceRecord) -> None:
        """Append a record unless it says nothing new; what cannot be appended now is kept for later."""
        with self._lock:
            record = record.over(self._own.get(record.namespace))
            self._own[record.namespace] = record
        try:
            self._link.ask(self._link.patience(), "register", self._append_own)
        except StorageError as error:
            _log.debug("a namespace will be registered later: %s", error)

    def records(self) -> list[NamespaceRecord]:
        """Return all records; raises UnavailableError."""
        return list(self._link.ask(self._link.patience(), "namespaces", self._append_own).values())

    def _append_own(self, client: MooncakeClient) -> dict[bytes, NamespaceRecord]:
        """Append what the pool lacks; return all records."""
        known, end = self._read(client)
        with self._lock:
            own = list(self._own.values())
        for record in own:
            wanted = record.over(known.get(record.namespace))
            if wanted != known.get(record.namespace):
                end = self._append(client, wanted, end)
                known[wanted.namespace] = wanted
        return known

    def _append(self, client: MooncakeClient, record: NamespaceRecord, at: int) -> int:
        data = _packed(record)
        while at < _MAX_RECORDS:
            name = f"{self._prefix}{at}"
            at += 1
            if client.put_bytes(name, data) or client.get_bytes(name) == data:
                return at
        _log.warning("%s has %d records; no more are kept", self._prefix, _MAX_RECORDS)
        return at

    def _read(self, client: MooncakeClient) -> tuple[dict[bytes, NamespaceRecord], int]:
        """Return the records in the pool, and the number after the last of them."""
        found: dict[bytes, NamespaceRecord] = {}
        end = 0
        for start in range(0, _MAX_RECORDS, _AT_ONCE):
            names = [f"{self._prefix}{n}" for n in range(start, start + _AT_ONCE)]
            there = client.exist(names)
            if min(there) < 0:
                raise StorageError(f"the master does not answer (code {min(there)})")
            for n, code in enumerate(there):
                if code:
                    end = start + n + 1
                    record = _unpacked(client.get_bytes(names[n]))
                    if record is not None:
                        found[record.namespace] = record.over(found.get(record.namespace))
            if not any(there):
                break
        return found, end


def _packed(record: NamespaceRecord) -> bytes:
    data: bytes = msgpack.packb([record.namespace, dict(record.identity), record.states])
    return xxh3_128_digest(data) + data


def _unpacked(data: bytes) -> NamespaceRecord | None:
    """Return the record in an object of the log; None for anything else."""
    if len(data) > _MAX_BYTES or xxh3_128_digest(data[16:]) != data[:16]:
        return None
    try:
        found: Any = msgpack.unpackb(
            data[16:], max_array_len=_MAX_FIELDS, max_map_len=_MAX_FIELDS, max_ext_len=0
        )
        namespace, identity, states = found
    except (ValueError, TypeError):
        return None
    if not (isinstance(namespace, bytes) and 0 < len(namespace) <= NAMESPACE_BYTES):
        return None
    if not isinstance(identity, Mapping) or not isinstance(states, bool):
        return None
    if not all(isinstance(k, str) and isinstance(v, str | int) for k, v in identity.items()):
        return None
    return NamespaceRecord(namespace, identity, states)
