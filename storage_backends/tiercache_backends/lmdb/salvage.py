"""Salvage of a damaged `lmdb` store: what its environment still holds is written into a new one.

The damaged file is read without LMDB, each page in use by itself. An object is copied if its record and all its pieces are found and its
checksum holds, so that only what lay on the damaged pages is missing. Where the list of free pages or a head page is damaged, an object
that was deleted lately may come back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.storage.base import DIGEST_BYTES, NamespaceRecord, SetItem
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.payload import PART_PAGES
from tiercache_backends.lmdb.records import SIZE, Record, Size, part_key
from tiercache_backends.local.lmdb_file import LmdbFile, Pages
from tiercache_backends.local.lmdb_file import Place as Value
from tiercache_backends.local.names import unpack_name

_PART_KEY_BYTES: Final = len(part_key(0, 0))
_LONGEST_NAME: Final = 64
"""Bytes of a namespace, at most."""
_LONGEST_VALUE: Final = 1 << 16
"""Bytes of a value that may be a record, a namespace or the size; longer ones are not read."""
_BATCH_OBJECTS: Final = 64
"""Objects written in one transaction."""


@dataclass(slots=True)
class Found:
    """Everything that was found in the damaged file.

    `records`: records by place, in the order of their pages. `pieces`: where the pieces of payloads lie, by their keys. `size`: the stored
    `Size`, empty where none was found. `names`: namespaces by their numbers. `registered`: namespace records by namespace.

    Thread safety: one thread uses it.
    """

    records: dict[bytes, list[Record]] = field(default_factory=dict)
    pieces: dict[bytes, list[Value]] = field(default_factory=dict)
    size: bytes = b""
    names: dict[int, bytes] = field(default_factory=dict)
    registered: dict[bytes, NamespaceRecord] = field(default_factory=dict)


def salvage(env: Env, source: str, target: Environment, seal: Seal) -> int:
    """Copy what can be read of the file `source` into the empty environment `target`; return the number of objects. Raises OSError."""
    copied = 0
    with closing(LmdbFile(env, source)) as file:
        found = _find(file)
        batch: list[tuple[bytes, SetItem, Record]] = []
        for place, item, record in _objects(file, found, seal):
            batch.append((place, item, record))
            if len(batch) == _BATCH_OBJECTS:
                copied += _write(target, batch)
                batch = []
        copied += _write(target, batch)
        target.write(lambda txn: _finish(target, txn, found))
    return copied


def _find(file: LmdbFile) -> Found:
    found = Found()
    inside = 0
    for number, page in _pages(file):
        # Pages that continue a large value hold payload, which could look like any page.
        if number < inside or not file.is_whole(page, number):
            continue
        inside = number + file.run_of(page)
        for value in file.places(page, number):
            if len(value.key) == _PART_KEY_BYTES:
                found.pieces.setdefault(value.key, []).append(value)
            elif value.size <= _LONGEST_VALUE:
                _note(found, value.key, bytes(file.read(value)))
    return found


def _pages(file: LmdbFile) -> Iterator[tuple[int, Pages]]:
    for first, pages in file.pages():
        yield from enumerate(pages, first)


def _note(found: Found, key: bytes, value: bytes) -> None:
    record = Record.unpack(value) if len(key) == DIGEST_BYTES else None
    if key == SIZE and Size.unpack(value) is not None:
        found.size = value
    elif record is not None and record.key(key) is not None:
        found.records.setdefault(key, []).append(record)
    elif 0 < len(key) <= _LONGEST_NAME:
        with suppress(ValueError):
            number, named = unpack_name(key, value)
            found.names[number] = key
            if named is not None:
                found.registered[key] = named


def _objects(file: LmdbFile, found: Found, seal: Seal) -> Iterator[tuple[bytes, SetItem, Record]]:
    """Yield the objects that are whole, the least recently used first; of several records at a place the newest that is whole."""
    ordered = sorted(found.records.items(), key=lambda entry: max(record.tick for record in entry[1]))
    for place, records in ordered:
        for record in sorted(records, key=lambda record: (record.number, record.tick), reverse=True):
            item = _object(file, found, seal, place, record)
            if item is not None:
                yield place, item, record
                break


def _object(file: LmdbFile, found: Found, seal: Seal, place: bytes, record: Record) -> SetItem | None:
    key = record.key(place)
    assert key is not None, "records of unknown pools were left out"
    payload = bytearray()
    part = 0
    while len(payload) < record.length:
        pieces = found.pieces.get(part_key(record.number, part))
        if not pieces or pieces[-1].size == 0 or len(payload) + pieces[-1].size > record.length:
            return None
        payload += file.read(pieces[-1])
        part += 1
    proof = seal.proof(key, record.length)
    proof.add([memoryview(payload)])
    return (
        SetItem(key, [memoryview(payload)], record.meta(found.names.get(record.namespace, b"unknown namespace %d" % record.namespace)))
        if proof.holds(record.sealed)
        else None
    )


def _write(target: Environment, batch: list[tuple[bytes, SetItem, Record]]) -> int:
    def work(txn: Any) -> None:
        ledger = Ledger(target, txn)
        for place, item, record in batch:
            ledger.add(item, place, record.sealed, PART_PAGES)
        ledger.save()

    if batch:
        target.write(work)
    return len(batch)


def _finish(target: Environment, txn: Any, found: Found) -> None:
    ledger = Ledger(target, txn)
    for named in found.registered.values():
        ledger.register(named)
    ledger.save()
    if found.size:
        txn.put(SIZE, found.size, db=target.facts)


def data_file(directory: str) -> str:
    """Return the path of LMDB's file in a directory."""
    return os.path.join(directory, "data.mdb")
