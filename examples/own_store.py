"""A store of one's own: objects in a table of SQLite, which pass the conformance suite of all stores.

A package offers it to every worker, daemon and chain by an entry point, and a URL then opens it:

    [project.entry-points."tiercache.storage_backends"]
    sqlite = "own_store:SqliteStore"                         # sqlite:///data/kv.db
"""

import sqlite3
import threading
import time

import msgpack

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import ConfigError
from tiercache.storage.base import (
    Capabilities,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    StorageBackend,
    Usage,
    checksum_of,
    first_of_each,
    storable,
)
from tiercache.storage.checksum import checksum
from tiercache.storage.gate import CallGate
from tiercache.storage.vectors import take, usable

COLUMNS = "digest, pool, namespace, length, checksum, parent, depth, stored_at"
SCHEMA = f"""
create table if not exists objects ({COLUMNS}, payload, primary key (digest)) without rowid;
create table if not exists namespaces (namespace primary key, identity, states);
pragma journal_mode = wal; pragma synchronous = full;
"""
PAGE = 1000  # entries of a part of a scan


class SqliteStore(StorageBackend):
    """Objects in one file of SQLite, without a capacity; each thread has a connection of its own."""

    capabilities = Capabilities(persistent=True)

    def __init__(self, path):
        self._path, self._local, self._gate = path, threading.local(), CallGate(f"the store {path}")
        self._db.executescript(SCHEMA)

    @classmethod
    def from_config(cls, section, context):
        if not section.get("path"):
            raise ConfigError("sqlite:// needs the path of its file, as in sqlite:///data/kv.db")
        return cls(section["path"])

    @property
    def _db(self):
        if not hasattr(self._local, "db"):
            self._local.db = sqlite3.connect(self._path, timeout=60, isolation_level=None)
        return self._local.db

    def exists(self, keys):
        return [entry is not None for entry in self.describe(keys)]

    def get(self, items):
        with self._gate:
            return [self._get(item) for item in items]

    def _get(self, item):
        query = "select length, checksum, payload from objects where digest = ?"
        found = self._db.execute(query, (item.key.digest,)).fetchone()
        if found is None:
            return Outcome.MISS
        length, expected, payload = found
        if length != item.length or not usable(item.buffers, length, writable=True):
            return Outcome.ERROR
        if len(payload) != length or checksum(item.key, [memoryview(payload)], length) != expected:
            self._db.execute(
                "delete from objects where digest = ? and payload = ?", (item.key.digest, payload)
            )
            return Outcome.CORRUPT
        at = 0
        for view in take(item.buffers, 0, length):
            view[:] = payload[at : at + view.nbytes]
            at += view.nbytes
        return Outcome.HIT

    def set(self, items):
        with self._gate:
            return [self._set(item) if storable(item) else Outcome.ERROR for item in items]

    def _set(self, item):
        meta, payload = item.meta, b"".join(take(item.buffers, 0, item.meta.length))
        row = (
            item.key.digest,
            item.key.pool,
            meta.namespace,
            meta.length,
            checksum_of(item),
            meta.parent,
            meta.depth,
        )
        insert = f"insert or ignore into objects ({COLUMNS}, payload) values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        return (
            Outcome.STORED if self._db.execute(insert, (*row, time.time(), payload)).rowcount else Outcome.HIT
        )

    def delete(self, keys):
        with self._gate:
            remove, gone = "delete from objects where digest = ?", set()
            for key in keys:
                if self._db.execute(remove, (key.digest,)).rowcount:
                    gone.add(key.digest)
            return first_of_each(keys, gone)

    def describe(self, keys):
        with self._gate:
            query = f"select {COLUMNS} from objects where digest = ?"
            rows = [self._db.execute(query, (key.digest,)).fetchone() for key in keys]
            return [None if row is None else _entry(row) for row in rows]

    def scan(self, namespace=None, cursor=b""):
        with self._gate:
            query = f"select {COLUMNS} from objects where digest > ? and (?2 is null or namespace = ?2)"
            rows = self._db.execute(f"{query} order by digest limit {PAGE}", (cursor, namespace)).fetchall()
            return ScanPage([_entry(row) for row in rows], rows[-1][0] if len(rows) == PAGE else b"")

    def register_namespace(self, record):
        with self._gate:
            known = {held.namespace: held for held in self.namespaces()}.get(record.namespace)
            kept = record.over(known)
            row = (kept.namespace, msgpack.packb(dict(kept.identity)), kept.states)
            self._db.execute("insert or replace into namespaces values (?, ?, ?)", row)

    def namespaces(self):
        with self._gate:
            rows = self._db.execute("select namespace, identity, states from namespaces").fetchall()
            return [
                NamespaceRecord(name, msgpack.unpackb(packed), bool(states)) for name, packed, states in rows
            ]

    def usage(self):
        with self._gate:
            count, nbytes = self._db.execute(
                "select count(*), coalesce(sum(length), 0) from objects"
            ).fetchone()
            return Usage(count, nbytes, nbytes, 0)

    def flush(self):
        with self._gate:  # every statement was a transaction of its own, and synced
            pass

    def advise(self, keys, values, worker=0):
        with self._gate:  # a store that evicts would keep what is worth more
            pass

    def close(self):
        self._gate.close()


def _entry(row):
    digest, pool, namespace, length, found, parent, depth, stored_at = row
    return ScanEntry(
        ObjectKey(PoolName(pool), digest), ObjectMeta(namespace, length, found, parent, depth), stored_at
    )
