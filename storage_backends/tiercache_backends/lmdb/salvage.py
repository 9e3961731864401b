"""Salvage of a damaged `lmdb` store: the readable objects are copied into a new environment.

The damaged file is read without LMDB. Every LMDB page in use is read by itself, whether or not the tree still
leads to it. An object is copied if its record and all pieces of its payload are found and its checksum is
right. So only the objects on damaged LMDB pages are lost. If the list of free LMDB pages or a head page is
damaged, free pages are read too, and an object that was deleted shortly before may come back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.core import DIGEST_BYTES
from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.payload import PART_PAGES, part_key
from tiercache_backends.lmdb.records import SIZE, Record, Size
from tiercache_backends.lmdb.transaction import Transaction
from tiercache_backends.local.lmdb_file import LmdbFile, LmdbPages
from tiercache_backends.local.lmdb_file import LmdbPlace as Value
from tiercache_backends.local.names import unpack_name

_PART_KEY_BYTES: Final = len(part_key(0, 0))
_MAX_NAME_BYTES: Final = 64
"""Maximum length of a namespace in bytes."""
_MAX_VALUE_BYTES: Final = 1 << 16
"""Maximum bytes of a value that may be a record, a namespace or the size; longer values are not read."""
_BATCH_OBJECTS: Final = 64
"""Maximum number of objects written in one transaction."""


@dataclass(slots=True)
class SalvagedData:
    """Everything of use that was found in the damaged file.

    A damaged file may hold outdated copies of an entry, so a key can have several records or pieces. They are
    in the order of their LMDB pages in the file.

    Thread safety: one thread uses it.
    """

    records: dict[bytes, list[Record]] = field(default_factory=dict)
    """Records by the place of their object."""
    pieces: dict[bytes, list[Value]] = field(default_factory=dict)
    """Places of the pieces of payloads in the file, by their keys in the database `parts`."""
    size: bytes = b""
    """The stored `Size`, packed; empty where none was found."""
    names: dict[int, bytes] = field(default_factory=dict)
    """Namespaces by their numbers."""
    registered: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    """Namespace records by namespace."""


def salvage(env: Env, source: str, target: Environment, mac_key: MacKey) -> int:
    """Copy all readable objects of the file `source` into the empty environment `target`.

    Returns the number of objects copied. Raises OSError.
    """
    copied = 0
    with closing(LmdbFile(env, source)) as file:
        found = _find(file)
        batch: list[tuple[bytes, SetItem, Record]] = []
        for place, item, record in _objects(file, found, mac_key):
            batch.append((place, item, record))
            if len(batch) == _BATCH_OBJECTS:
                copied += _write(target, batch)
                batch = []
        copied += _write(target, batch)
        target.write(lambda txn: _finish(target, txn, found))
    return copied


def _find(file: LmdbFile) -> SalvagedData:
    found = SalvagedData()
    inside = 0
    for number, page in _pages(file):
        # A run of LMDB pages holds one large value, and only its first page has a header. Skip the others,
        # because payload bytes could look like a header:
        #   | header, piece ... | ... piece ... | ... piece |    `inside` is the page behind the run
        if number < inside or not file.is_whole(page, number):
            continue
        inside = number + file.run_of(page)
        for value in file.places(page, number):
            if len(value.key) == _PART_KEY_BYTES:
                found.pieces.setdefault(value.key, []).append(value)
            elif value.size <= _MAX_VALUE_BYTES:
                _keep(found, value.key, bytes(file.read(value)))
    return found


def _pages(file: LmdbFile) -> Iterator[tuple[int, LmdbPages]]:
    for first, pages in file.pages():
        yield from enumerate(pages, first)


def _keep(found: SalvagedData, key: bytes, value: bytes) -> None:
    record = Record.unpack(value) if len(key) == DIGEST_BYTES else None
    if key == SIZE and Size.unpack(value) is not None:
        found.size = value
    elif record is not None and record.key(key) is not None:
        found.records.setdefault(key, []).append(record)
    elif 0 < len(key) <= _MAX_NAME_BYTES:
        with suppress(ValueError):
            number, named = unpack_name(key, value)
            found.names[number] = key
            if named is not None:
                found.registered[key] = named


def _objects(file: LmdbFile, found: SalvagedData, mac_key: MacKey) -> Iterator[tuple[bytes, SetItem, Record]]:
    """Yield each whole object with its place and record, the least recently used object first.

    If a place has several records, only the newest record whose object is whole is used.
    """
    ordered = sorted(found.records.items(), key=lambda entry: max(record.tick for record in entry[1]))
    for place, records in ordered:
        for record in sorted(records, key=lambda record: (record.number, record.tick), reverse=True):
            item = _object(file, found, mac_key, place, record)
            if item is not None:
                yield place, item, record
                break


def _object(
    file: LmdbFile, found: SalvagedData, mac_key: MacKey, place: bytes, record: Record
) -> SetItem | None:
    """Return the object of a record; None where a piece is missing or the checksum does not match."""
    key = record.key(place)
    assert key is not None, "records of unknown pools were left out"
    payload = bytearray()
    part = 0
    while len(payload) < record.length:
        # If there are several copies of a piece, use the last. The checksum tells whether all pieces match.
        pieces = found.pieces.get(part_key(record.number, part))
        if not pieces or pieces[-1].size == 0 or len(payload) + pieces[-1].size > record.length:
            return None
        payload += file.read(pieces[-1])
        part += 1
    verifier = mac_key.verifier(key, record.length)
    verifier.add([memoryview(payload)])
    return (
        SetItem(
            key,
            [memoryview(payload)],
            record.meta(found.names.get(record.namespace, b"unknown namespace %d" % record.namespace)),
        )
        if verifier.matches(record.checksums)
        else None
    )


def _write(target: Environment, batch: list[tuple[bytes, SetItem, Record]]) -> int:
    def work(txn: Any) -> None:
        transaction = Transaction(target, txn)
        transaction.add([(place, item, record.checksums) for place, item, record in batch], PART_PAGES)
        transaction.save()

    if batch:
        target.write(work)
    return len(batch)


def _finish(target: Environment, txn: Any, found: SalvagedData) -> None:
    transaction = Transaction(target, txn)
    for named in found.registered.values():
        transaction.register(named)
    transaction.save()
    if found.size:
        txn.put(SIZE, found.size, db=target.facts)


def data_file(directory: str) -> str:
    """Return the path of LMDB's file in a directory."""
    return os.path.join(directory, "data.mdb")
