"""Records of namespaces in the bucket, each of which is an object that is written again at every change.

    namespaces/<namespace in hex>.plain     the latest identity
    namespaces/<namespace in hex>.states    the same, of writers who know that there are states

Two names, so that a writer without states never takes back what another writer knows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from threading import Lock
from typing import Any, Final

import msgpack

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.s3.failures import AbsentError, RequestError, ShortError
from tiercache_backends.s3.service import BucketClient

_log = logging.getLogger(__name__)

_FOLDER: Final = "namespaces"
_MAX_BYTES: Final = 64 << 10
"""Largest record that is read."""


class Namespaces:
    """The namespaces of a store.

    Thread safety: any thread may call.
    """

    def __init__(self, service: BucketClient) -> None:
        self._service = service
        self._lock = Lock()  # guards the fields
        self._told: dict[bytes, NamespaceRecord] = {}
        """Records that were registered through this process."""
        self._written: dict[bytes, NamespaceRecord] = {}

    def register(self, record: NamespaceRecord) -> None:
        """Keep a record, and write it now or, if the service cannot be asked, with a later call."""
        with self._lock:
            self._told[record.namespace] = record.over(self._told.get(record.namespace))
        self.write()

    def write(self) -> None:
        """Write the records that have not been written yet, if the service can be asked."""
        with self._lock:
            due = [record for name, record in self._told.items() if self._written.get(name) != record]
        for record in due:
            name = f"{_FOLDER}/{record.namespace.hex()}.{'states' if record.states else 'plain'}"
            data = msgpack.packb(dict(record.identity))
            try:
                self._service.overwrite(name, data)
            except RequestError as error:
                _log.debug("a namespace will be registered later: %s", error)
                return
            with self._lock:
                self._written[record.namespace] = record

    def read(self) -> list[NamespaceRecord]:
        """Return the record of every namespace. Raises RequestError."""
        self.write()
        found: dict[bytes, NamespaceRecord] = {}
        # In the order in which they were written, so that the latest identity is kept.
        listed = chain.from_iterable(self._service.pages(_FOLDER))
        for entry in sorted(listed, key=lambda entry: (entry.modified, entry.name)):
            hexes, _, kind = entry.name.rpartition(".")
            try:
                data = self._service.contents(f"{_FOLDER}/{entry.name}", min(entry.size, _MAX_BYTES))
                record = NamespaceRecord(bytes.fromhex(hexes), _identity(data), states=kind == "states")
            except ValueError:
                continue  # not of ours
            except (AbsentError, ShortError):
                continue
            found[record.namespace] = record.over(found.get(record.namespace))
        return list(found.values())


def _identity(data: bytes) -> Mapping[str, str | int]:
    """Return the identity in a record; raises ValueError for anything else."""
    try:
        fields: Any = msgpack.unpackb(
            data, strict_map_key=True, max_map_len=256, max_array_len=0, max_ext_len=0
        )
    except msgpack.UnpackException as error:
        raise ValueError("not a record") from error
    if not isinstance(fields, dict) or not all(isinstance(value, str | int) for value in fields.values()):
        raise ValueError("not a record")
    return fields
