"""Targets whose bytes come from a disk, a bucket, or memory that hosts pool."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import msgpack
import numpy as np
from tiercache_backends.file import records as catalog
from tiercache_backends.file.opening import find_log, log_path
from tiercache_backends.lmdb.records import Facts, Record, proof_of, record_of
from tiercache_backends.local.directory import StoreDirectory
from tiercache_backends.local.names import Names, pack_name
from tiercache_backends.mooncake import namespaces as pooled_names
from tiercache_backends.mooncake.header import (
    HEADER_BYTES,
    ObjectNames,
    payload_sum,
    read_header,
    write_header,
)
from tiercache_backends.s3 import compression, pack
from tiercache_backends.s3.compression import Codec
from xxhash import xxh3_128_digest

from tests.fuzz.base import Target, folder, promised
from tests.fuzz.received import KEYS, META
from tiercache.daemon.tenants import account
from tiercache.errors import StoreFormatError
from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.checksum import Checksums
from tiercache.storage.env import Env
from tiercache.storage.records import identity_in, unpack_record

ITEM = SetItem(KEYS[0], [memoryview(bytes(4096))], META)
RECORD = NamespaceRecord(b"n" * 32, {"model": "m", "page_size": 16}, states=True)

# -- local stores: the catalog of `file`, the records of `lmdb`, the small JSON files


STORE = bytes(range(catalog.ID_BYTES))


def _catalog(found: bytes) -> None:
    """Read a log as it is, and with the guards that it should have."""
    size = catalog.RECORD_BYTES
    whole = found[: len(found) // size * size]
    directory = StoreDirectory(Env(), str(folder()), kind="file", version=3, database="log")
    directory.make_part(directory.database)
    for sealed in (False, True):
        rows = np.frombuffer(whole, catalog.RECORD).copy()
        if sealed:
            rows["guard"] = catalog.guards(rows, 0, catalog.keys_of(STORE, 1))
        with open(log_path(directory.database, 1), "wb") as file:
            file.write(rows.tobytes())
        log = find_log(Env(), directory, STORE, read_only=True)
        log.close(Env())
        promised(len(log.numbers) <= len(rows), "more records than there are")
        for row in log.contents.records:
            entry = catalog.entry(row, b"n")
            promised(len(entry.key.digest) == 64, "a key of another length")


def _catalog_seeds() -> list[bytes]:
    places = catalog.Places([0, 8], [8, 4], {1: (catalog.Extent(20, 4),)})
    metas = [META, replace(META, parent=None, depth=None)]
    items = [SetItem(key, ITEM.buffers, meta) for key, meta in zip(KEYS, metas, strict=False)]
    rows = catalog.pack(items, places, [b"c" * 16] * 2, [bytes(16)] * 2, [1, 1], 1)
    rows["number"] = [1, 2]
    parts = [
        catalog.LogHead(STORE, 0, 0).pack(),
        catalog.pack_value(catalog.RecordKind.NAME, b"\x01n" + pack_name(1, RECORD)),
        rows,
        catalog.pack_value(catalog.RecordKind.EXTENTS, catalog.pack_extents(places.further[1])),
        catalog.pack_gone([1]),
    ]
    return [b"".join(part.tobytes() for part in parts), rows.tobytes()]


def _record(found: bytes) -> None:
    with suppress(struct.error):  # it is none of a record's length
        Facts.unpack(found)
    proof_of(found)
    record = Record.unpack(found)
    record.key(b"k" * 64)
    record.meta(b"n")
    promised(record.pack() == found, "a record that is written otherwise than read")


def _record_seeds() -> list[bytes]:
    record = record_of(1, KEYS[0], META, 3, Checksums(b"c" * 16, b"m" * 16))
    return [record, Facts(1, 2, 3).pack()]


def _name(found: bytes) -> None:
    Names().add_packed(b"n" * 32, found)


@cache
def _directory() -> StoreDirectory:
    """A directory whose format is of an earlier version, so that both outcomes are reached."""
    return StoreDirectory(Env(), str(folder()), kind="file", version=2, database="database")


def _format(found: bytes) -> None:
    """Read the files that say what a store is and how it was closed, as the start of a store does."""
    directory = _directory()
    for name in ("format", "state"):
        with open(directory.at(name), "wb") as file:
            file.write(found)
    try:
        directory.settle_format({"block": 4096})
    finally:
        directory.state()


def _formats() -> Sequence[bytes]:
    whole = b'{"kind": "file", "version": 2, "block": 4096, "capacity": 65536, "suspect": false}'
    return [whole, whole.replace(b"2", b"1", 1), whole.replace(b"2", b"3", 1), b"{}" + bytes(8)]


# -- a bucket


def _pack(found: bytes) -> None:
    """Read the head of a pack as it is, and with the checksum that it should have."""
    for sealed in (found, _sealed_head(found)):
        index = pack.read_head(sealed, 1 << 30)
        for number in range(len(index) if index is not None else 0):
            promised(index[number].stored >= 0, "an entry of less than no bytes")
    for sealed in (found, found[:8] + xxh3_128_digest(found[24:]) + found[24:]):
        pack.read_tombstone(sealed)
    pack.parse_name(found.decode("latin-1"))


def _sealed_head(head: bytes) -> bytes:
    size = pack._HEADER.size  # private: the layout of the checksum
    if len(head) < size:
        return head
    bare = head[: size - 16] + bytes(16)
    return bare[: size - 16] + xxh3_128_digest(bare + head[size:]) + head[size:]


def _pack_seeds() -> list[bytes]:
    entries = [pack.NewEntry(key, META, codec, 100) for codec, key in enumerate(KEYS)]
    name = pack.make_name(1, "0" * 16, 2, 300)
    return [pack.pack_head(entries), pack.tombstone({name: {0, 2}}), name.encode()]


def _payload(found: bytes) -> None:
    """Decode a stored payload: codec, length (4 bytes), stored bytes."""
    if len(found) < 5:
        return
    length = int.from_bytes(found[1:5], "little") % 20_000
    plain = compression.decode(found[0] % 8, memoryview(found)[5:], length)
    promised(plain is None or plain.nbytes == length, "a payload of another length")


def _payload_seeds() -> list[bytes]:
    plain = np.arange(2001, dtype=np.float32).astype(np.float16).tobytes()
    made = []
    for codec in Codec:
        pieces = [plain] if codec == Codec.RAW else compression.encode(codec, [memoryview(plain)], len(plain))
        if pieces is not None:
            stored = b"".join(bytes(piece) for piece in pieces)
            made.append(bytes([codec]) + len(plain).to_bytes(4, "little") + stored)
    return made


def _bucket_name(found: bytes) -> None:
    identity_in(unpack_record(found))


# -- memory that hosts pool

NAME = ObjectNames("p").of(KEYS[0].digest)


def _header(found: bytes) -> None:
    head = found[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    sealed = head[:-16] + xxh3_128_digest(head[:-16] + NAME.encode())
    for each in (head, sealed):
        header = read_header(memoryview(each), NAME)
        promised(header is None or 0 < len(header.meta.namespace) <= 64, "a namespace of another length")
        payload_sum(memoryview(each), NAME, 4096)
    ObjectNames("p").digest(found.decode("latin-1"))


def _header_seeds() -> list[bytes]:
    target = bytearray(HEADER_BYTES)
    write_header(memoryview(target), NAME, ITEM, 10**18)
    return [bytes(target), NAME.encode()]


def _pooled_name(found: bytes) -> None:
    for sealed in (found, xxh3_128_digest(found[16:]) + found[16:]):
        pooled_names._unpacked(sealed)  # private: what the object says, without a pool


def _pooled_name_seeds() -> list[bytes]:
    return [pooled_names._packed(RECORD)]  # private: as above


# -- the account of tenants


def _account(found: bytes) -> None:
    account._parsed(found)  # private: a file of them needs a daemon


def _account_seeds() -> list[bytes]:
    return [account._line(3, "t", account.Counts(saved_flops=1e9))]  # private: as above


def _names() -> Sequence[bytes]:
    return [pack_name(1, RECORD), pack_name(2, None), msgpack.packb([3, {"a": 1}])]


STORED = (
    Target("catalog log", _catalog, _catalog_seeds, costs=5),
    Target("lmdb record", _record, _record_seeds, (struct.error,)),
    Target("namespace record", _name, _names, (ValueError,)),
    Target("store format", _format, _formats, (StoreFormatError,), costs=20),
    Target("pack head", _pack, _pack_seeds),
    Target("packed payload", _payload, _payload_seeds, max_bytes=8192, costs=3),
    Target("bucket namespace", _bucket_name, lambda: [msgpack.packb(dict(RECORD.identity))], (ValueError,)),
    Target("pooled header", _header, _header_seeds),
    Target("pooled namespace", _pooled_name, _pooled_name_seeds),
    Target("account row", _account, _account_seeds),
)
