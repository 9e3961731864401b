"""Records of namespaces in the pool, and the master's list of all names over HTTP.

The records are a log in the pool, one small object a record, that is only ever appended to:

    tc1/<prefix>/namespace/0    tc1/<prefix>/namespace/1    ...

A put of a name that is there changes nothing, so two clients that append at once cannot overwrite each other.
Each reads its record back; a client that finds the other's record there tries the next name.
"""

from __future__ import annotations

import http.client
import logging
import re
from threading import Lock
from typing import Final

from xxhash import xxh3_128_digest

from tiercache.config.urls import Address
from tiercache.errors import StorageError, UnavailableError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.records import MAX_RECORD_BYTES, identity_in, pack_record, unpack_record
from tiercache_backends.mooncake.header import prefix_of
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 64
"""Names asked for at once; the log ends where so many in a row are not there."""
_MAX_RECORDS: Final = 4096


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
    data = pack_record([record.namespace, dict(record.identity), record.states])
    return xxh3_128_digest(data) + data


def _unpacked(data: bytes) -> NamespaceRecord | None:
    """Return the record in an object of the log; None for anything else."""
    if len(data) > MAX_RECORD_BYTES or xxh3_128_digest(data[16:]) != data[:16]:
        return None
    try:
        namespace, identity, states = unpack_record(data[16:])
        record = NamespaceRecord(namespace, identity_in(identity), states)
    except (ValueError, TypeError):
        return None
    is_sound = isinstance(namespace, bytes) and isinstance(states, bool) and record.is_possible
    return record if is_sound else None


_MAX_ANSWER: Final = 1 << 30
"""Maximum number of bytes of an answer: some seven million names."""
_GAUGE: Final = re.compile(r"^master_(\w+)(?:\{\})? ([0-9.e+]+)$", re.MULTILINE)


class Listing:
    """The HTTP side of a master.

    Thread safety: stateless; share it freely.
    """

    def __init__(self, address: Address, deadline: float) -> None:
        """Ask the master at `address`; an answer may take `deadline` seconds between two packets."""
        self._address: Final = address
        self._deadline: Final = deadline

    def names(self) -> list[str]:
        """Return the names of all objects of the master; raises UnavailableError."""
        return self._ask("/get_all_keys").split("\n")

    def gauges(self) -> dict[str, int]:
        """Return the figures of the whole pool, by their names in Mooncake; raises UnavailableError."""
        return {name: int(float(value)) for name, value in _GAUGE.findall(self._ask("/metrics"))}

    def _ask(self, path: str) -> str:
        connection = http.client.HTTPConnection(
            self._address.host, self._address.port, timeout=self._deadline
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(_MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"the master does not serve http={self._address} ({error}); give the -metrics_host and"
                " -metrics_port of mooncake_master, or omit http"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK or len(body) > _MAX_ANSWER:
            raise UnavailableError(
                f"http://{self._address}{path} answers {answer.status} and {len(body)} bytes; is that the"
                " metrics port of mooncake_master?"
            )
        return body.decode("utf-8", "replace")
