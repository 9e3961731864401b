"""The catalog of a `file` store: an LMDB environment that says where every object lies.

The format, version 1. All integers are little-endian.

    DIR/LOCK            held with flock by the owner; its pid in ASCII
    DIR/format          JSON {"kind": "tiercache.file", "version": 1, "block": 4096, "slab_blocks": N}
    DIR/state           JSON {"boot_id": ..., "catalog": [size, mtime_ns] of a clean shutdown, or null while open}
    DIR/slabs/%06d.slab slab_blocks blocks of 4,096 bytes each; block b is in slab b // slab_blocks; unnamed blocks mean nothing
    DIR/catalog/        this LMDB environment, with two databases:

    objects:    digest of the object key, 64 bytes  ->  record
    namespaces: namespace, 1 to 64 bytes            ->  msgpack [id, identity without its salt, or nil]

    record = u64 length     payload bytes
             u64 stored_at  nanoseconds since 1970; also the recency after a restart
             u32 depth      pages up to the object's end
             u32 namespace  id
             u16 extents    how many
             u8  flags      1: parent is known, 2: depth is known
             u8  reserved   0
             16 bytes       checksum (storage.checksum)
             32 bytes       parent, or zeros
             extents times  u64 first block, u32 number of blocks: in payload order, each inside one slab
             rest           pool name, ASCII

A record is written when the bytes are, and removed before its blocks are used again. Payload checksums guard what a power cut breaks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from errno import EIO, ENOSPC
from threading import Lock
from typing import Any, Final, NamedTuple

import lmdb
import msgpack
import numpy as np
import numpy.typing as npt

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.base import DIGEST_BYTES, NamespaceRecord
from tiercache.storage.env import Env
from tiercache_backends.file.space import Extent

_HEADER: Final = struct.Struct("<QQIIHBB16s32s")
_HEADER_DTYPE: Final = np.dtype([
    ("length", "<u8"), ("stored_at", "<u8"), ("depth", "<u4"), ("namespace", "<u4"),
    ("extents", "<u2"), ("flags", "u1"), ("reserved", "u1"), ("checksum", "V16"), ("parent", "V32"),
])  # fmt: skip
_EXTENT: Final = struct.Struct("<QI")
_EXTENT_DTYPE: Final = np.dtype([("start", "<u8"), ("count", "<u4")])
_PARENT_KNOWN: Final = 1
_DEPTH_KNOWN: Final = 2
_BRIEF: Final = struct.Struct("<Q16xH2x16s")
_POOLS: Final = frozenset(pool.encode() for pool in PoolName)
MAX_EXTENTS: Final = 2**16 - 1


class Placement(NamedTuple):
    """What reading an object takes."""

    length: int
    checksum: bytes
    extents: tuple[Extent, ...]


def placement(record: bytes) -> Placement:
    """Where a record's object lies."""
    length, count, checksum = _BRIEF.unpack_from(record)
    end = _HEADER.size + count * _EXTENT.size
    return Placement(length, checksum, tuple(map(Extent._make, _EXTENT.iter_unpack(record[_HEADER.size : end]))))


class Loaded(NamedTuple):
    """Every record of a catalog as columns: `order` sorts them by age, `owner[i]` is the record that extent i belongs to."""

    digests: list[bytes]
    records: list[bytes]
    parents: list[bytes]
    lengths: npt.NDArray[np.uint64]
    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    damaged: list[bytes]


class Catalog:
    """The records, with one writer at a time. Every failure is an OSError.

    Thread rule: any thread may call; `apply` takes the writer's lock for the length of one transaction, which readers never wait for.
    """

    def __init__(self, env: Env, path: str, map_bytes: int) -> None:
        self._env = env
        self._map_bytes = map_bytes
        self._writer = Lock()
        self._ids: dict[bytes, int] = {}
        self._by_id: dict[int, bytes] = {}
        self._records: dict[bytes, NamespaceRecord] = {}
        self._unsaved: set[bytes] = set()
        self._pages = 0
        try:
            self._lmdb = lmdb.open(path, map_size=map_bytes, max_dbs=8, mode=0o600, max_spare_txns=4)
            self._objects = self._lmdb.open_db(b"objects")
            self._names = self._lmdb.open_db(b"namespaces")
            self._page_bytes: int = self._lmdb.stat()["psize"]
            self._load_namespaces()
        except lmdb.Error as error:
            raise _os_error(error) from error

    def load(self) -> Loaded:
        """Every record. One pass of Python per object and the rest in columns: a million objects take about a second."""
        with self._lmdb.begin() as txn, txn.cursor(self._objects) as cursor:
            pairs = list(cursor)
        whole = [(k, v) for k, v in pairs if _whole(k, v)]
        digests = [k for k, _ in whole]
        records = [v for _, v in whole]
        heads = np.frombuffer(b"".join([v[: _HEADER.size] for v in records]), _HEADER_DTYPE)
        per_object = heads["extents"].astype(np.int64)
        ends = (_HEADER.size + per_object * _EXTENT.size).tolist()
        body = b"".join([v[_HEADER.size : end] for v, end in zip(records, ends, strict=True)])
        extents = np.frombuffer(body, _EXTENT_DTYPE)
        known = (heads["flags"] & _PARENT_KNOWN).tolist()
        parent_at = _HEADER.size - 32
        return Loaded(
            digests=digests,
            records=records,
            parents=[v[parent_at : _HEADER.size] if k else b"" for v, k in zip(records, known, strict=True)],
            lengths=heads["length"],
            order=np.argsort(heads["stored_at"], kind="stable"),
            starts=extents["start"].astype(np.int64),
            counts=extents["count"].astype(np.int64),
            owner=np.repeat(np.arange(len(records)), per_object),
            damaged=[k for k, v in pairs if not _whole(k, v)],
        )

    def pack(self, key: ObjectKey, meta: ObjectMeta, extents: Sequence[Extent], stored_at: int) -> bytes:
        """The record of an object."""
        flags = (meta.parent is not None) * _PARENT_KNOWN | (meta.depth is not None) * _DEPTH_KNOWN
        head = _HEADER.pack(
            meta.length, stored_at, meta.depth or 0, self._id(meta.namespace), len(extents), flags, 0, meta.checksum, meta.parent or b""
        )
        return head + b"".join(_EXTENT.pack(*e) for e in extents) + key.pool.encode()

    def unpack(self, digest: bytes, record: bytes) -> tuple[ObjectKey, ObjectMeta]:
        """What a record says about its object."""
        length, _, depth, namespace, count, flags, _, checksum, parent = _HEADER.unpack_from(record)
        pool = PoolName(record[_HEADER.size + count * _EXTENT.size :].decode())
        return ObjectKey(pool, digest), ObjectMeta(
            namespace=self._by_id.get(namespace, b""),
            length=length,
            checksum=checksum,
            parent=parent if flags & _PARENT_KNOWN else None,
            depth=depth if flags & _DEPTH_KNOWN else None,
        )

    def apply(self, puts: Mapping[bytes, bytes], removals: Iterable[bytes] = ()) -> None:
        """Change the catalog in one transaction: all of it is durable on return, or none of it and OSError is raised."""
        with self._writer:
            try:
                self._transact(puts, removals)
            except lmdb.Error as error:
                raise _os_error(error) from error

    def page(self, cursor: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Up to `count` records behind `cursor`, by digest. Raises OSError."""
        try:
            with self._lmdb.begin() as txn, txn.cursor(self._objects) as walk:
                if not walk.set_range(cursor + b"\0" if cursor else b"\0"):
                    return []
                return [pair for pair, _ in zip(walk, range(count), strict=False)]
        except lmdb.Error as error:
            raise _os_error(error) from error

    def register(self, record: NamespaceRecord) -> None:
        """Remember a namespace's identity; raises OSError."""
        self._id(record.namespace)
        with self._writer:
            if self._records.get(record.namespace) == record:
                return
            self._records[record.namespace] = record
            self._unsaved.add(record.namespace)
        self.apply({})

    def namespaces(self) -> list[NamespaceRecord]:
        """Every namespace whose identity is known."""
        with self._writer:
            return list(self._records.values())

    def namespace_id(self, namespace: bytes) -> int | None:
        """The number that records use for a namespace."""
        return self._ids.get(namespace)

    def crowded(self, changes: int) -> bool:
        """Should the store evict for the catalog's sake before it makes this many changes?

        A transaction copies the pages that it touches, and LMDB uses the old ones again only two transactions later; an eviction and a set
        make two of them, and a full map refuses even deletions. So there must be room for four copies of all that the changes can touch.
        """
        touched = min(self._pages, 2 * changes + 16)
        return (self._pages + 4 * touched) * self._page_bytes > self._map_bytes

    def nbytes(self) -> int:
        """Bytes of the catalog's file."""
        return int(self._lmdb.info()["last_pgno"] + 1) * self._page_bytes

    def sync(self) -> None:
        """Return once the catalog is on the medium; raises OSError."""
        try:
            self._lmdb.sync(True)
        except lmdb.Error as error:
            raise _os_error(error) from error

    def close(self) -> None:
        """Close the environment."""
        with self._writer:
            self._lmdb.close()

    def _transact(self, puts: Mapping[bytes, bytes], removals: Iterable[bytes]) -> None:
        txn = self._lmdb.begin(write=True)
        try:
            for digest in removals:
                txn.delete(digest, db=self._objects)
            for digest, record in puts.items():
                txn.put(digest, record, db=self._objects)
            for namespace in self._unsaved:
                named = self._records.get(namespace)
                txn.put(namespace, msgpack.packb([self._ids[namespace], dict(named.identity) if named else None]), db=self._names)
            pages = sum(_pages(txn.stat(db)) for db in (self._objects, self._names))
            self._env.commit(txn)
        except BaseException:
            txn.abort()
            raise
        self._unsaved.clear()
        self._pages = pages

    def _load_namespaces(self) -> None:
        with self._lmdb.begin() as txn:
            for namespace, value in txn.cursor(self._names):
                number, identity = msgpack.unpackb(value)
                self._ids[namespace] = number
                self._by_id[number] = namespace
                if identity is not None:
                    self._records[namespace] = NamespaceRecord(namespace, identity)
            self._pages = sum(_pages(txn.stat(db)) for db in (self._objects, self._names))

    def _id(self, namespace: bytes) -> int:
        found = self._ids.get(namespace)
        if found is not None:
            return found
        with self._writer:
            if namespace not in self._ids:
                number = max(self._by_id, default=0) + 1
                self._by_id[number] = namespace
                self._ids[namespace] = number
                self._unsaved.add(namespace)
            return self._ids[namespace]


def _whole(digest: bytes, record: bytes) -> bool:
    """Is a record as long as it says, and its pool known to this version?"""
    if len(digest) != DIGEST_BYTES or len(record) < _HEADER.size:
        return False
    _, count, _ = _BRIEF.unpack_from(record)
    return bool(count) and record[_HEADER.size + count * _EXTENT.size :] in _POOLS


def _pages(stat: Mapping[str, Any]) -> int:
    return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])


def _os_error(error: lmdb.Error) -> OSError:
    """LMDB's error as the OSError that it stands for."""
    full = isinstance(error, lmdb.MapFullError) or os.strerror(ENOSPC) in str(error)
    return OSError(ENOSPC if full else EIO, str(error))
