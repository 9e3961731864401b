"""Helpers for tests of the `lmdb` store: conformance hooks, opening it, damage to its file, a full disk."""

from __future__ import annotations

import os
import resource
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import Record, part_key, ticks_from

from tests.faults import FaultEnv
from tests.storage.backends import AgingEnv, LocalHooks
from tiercache.core import ObjectKey
from tiercache.storage.base import StorageBackend
from tiercache.storage.env import Env
from tiercache.storage.wrappers import unwrap

CAPACITY = 16 << 20


class LmdbHooks(LocalHooks):
    """There is no `truncate`: who reads a mapped file behind its end is ended by the system."""

    obeys_values = False

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        self.env = AgingEnv()
        return LmdbBackend(str(path), capacity or self.large, env=self.env)

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        self.flip(store, k, 0)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        for offset, size in locate(store, k):
            if bit < size * 8:
                flip(data_file(store), offset + bit // 8, 1 << bit % 8)
                return
            bit -= size * 8

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        fd = os.open(data_file(store), os.O_RDWR)
        for (x, size), (y, other) in zip(locate(store, a), locate(store, b), strict=True):
            assert size == other
            one, two = os.pread(fd, size, x), os.pread(fd, size, y)
            os.pwrite(fd, two, x)
            os.pwrite(fd, one, y)
        os.close(fd)

    def check(self, store: StorageBackend) -> None:
        check_integrity(store)

    def fill_disk(self, store: StorageBackend) -> None:
        self.env.fail("commit", times=1_000_000, error=ENOSPC)

    def free_disk(self, store: StorageBackend) -> None:
        self.env.clear()


def lmdb_of(store: StorageBackend) -> LmdbBackend:
    inner = unwrap(store)
    assert isinstance(inner, LmdbBackend)
    return inner


def check_integrity(store: StorageBackend) -> None:
    """Raise AssertionError unless all databases agree; no other thread is inside the store."""
    environment = environment_of(lmdb_of(store))
    environment.read(lambda txn: _check(environment, txn))


def _check(environment: Environment, txn: Any) -> None:
    facts = environment.facts_in(txn)
    records = {bytes(digest): Record.unpack(value) for digest, value in txn.cursor(environment.objects)}
    sizes: Counter[int] = Counter()
    for raw, value in txn.cursor(environment.parts):
        sizes[int.from_bytes(raw[:8])] += len(value)
    assert sizes == {record.number: record.length for record in records.values()}, (
        "every object has its parts, and every part its object"
    )
    ages, gone = (dict(ticks_from(txn, db, 0)) for db in (environment.ages, environment.gone))
    assert ages == {record.tick: digest for digest, record in records.items()}, "every object has an age"
    assert max([*sizes, *ages, *gone], default=0) < facts.next_tick, "every tick is below the next one"
    assert len(gone) <= environment.logged, "the log of removals is bounded"


def environment_of(store: LmdbBackend) -> Environment:
    """LMDB's environment of a store."""
    # private: what lies behind a store's calls is read, and damaged, there
    return store._environment


def flip(path: str, offset: int, mask: int) -> None:
    """Change bits of a byte of a file."""
    fd = os.open(path, os.O_RDWR)
    [value] = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([value ^ mask]), offset)
    os.close(fd)


def data_file(store: StorageBackend) -> str:
    """LMDB's file."""
    return os.path.join(environment_of(lmdb_of(store)).path, "data.mdb")


def locate(store: StorageBackend, k: ObjectKey) -> list[tuple[int, int]]:
    """Locate the pieces of an object in LMDB's file, as (offset, bytes), by its mapped address."""
    environment = environment_of(lmdb_of(store))
    name = os.path.realpath(data_file(store))
    with open("/proc/self/maps") as maps:
        ours = [line.split()[0] for line in maps if line.rstrip().endswith(name)]
    bases = [int(bounds.split("-")[0], 16) for bounds in ours]

    def pieces(txn: Any) -> list[tuple[int, int]]:
        record = Record.unpack(txn.get(k.digest, db=environment.objects))
        assert record is not None
        found = []
        part = 0
        while (value := txn.get(part_key(record.number, part), db=environment.parts)) is not None:
            address = np.frombuffer(value, np.uint8).ctypes.data
            found.append((address - max(base for base in bases if base <= address), len(value)))
            part += 1
        return found

    return environment.read(pieces)


def page_kinds(path: str) -> dict[str, list[int]]:
    """The numbers of the pages in LMDB's file by kind: "objects leaf", "parts overflow", "free leaf", ..."""
    with open(path, "rb") as file:
        return _Pages(file.read()).kinds


class _Pages:
    """The trees of an LMDB file with pages of 4 KiB, as its newest meta page has them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.kinds: dict[str, list[int]] = {}
        meta = max((16, 4096 + 16), key=lambda at: struct.unpack_from("<Q", data, at + 24 + 2 * 48 + 8)[0])
        self._walk("free", self._root(meta + 24))
        self._walk("main", self._root(meta + 24 + 48))

    def _root(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self.data, at + 40)[0])

    def _walk(self, name: str, page: int) -> None:
        if page == 2**64 - 1:
            return
        begin = page * 4096
        flags, lower = struct.unpack_from("<HH", self.data, begin + 10)
        self.kinds.setdefault(f"{name} {'branch' if flags & 1 else 'leaf'}", []).append(page)
        for node in struct.unpack_from(f"<{(lower - 16) // 2}H", self.data, begin + 16):
            low, high, bits, size = struct.unpack_from("<HHHH", self.data, begin + node)
            key = self.data[begin + node + 8 : begin + node + 8 + size]
            value = begin + node + 8 + size
            if flags & 1:
                self._walk(name, low | high << 16 | bits << 32)
            elif bits & 1:
                self.kinds.setdefault(f"{name} overflow", []).append(
                    *struct.unpack_from("<Q", self.data, value)
                )
            elif bits & 2:
                self._walk(key.decode(), self._root(value))


def zero(path: str, page: int) -> None:
    """Overwrite a page of LMDB's file with zeros."""
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes(4096), page * 4096)
    os.close(fd)


def opened(path: Path, capacity: int = CAPACITY, env: Env | None = None, **settings: str) -> LmdbBackend:
    return LmdbBackend(str(path), capacity, env=env, **settings)


class LaterEnv(FaultEnv):
    """Whatever was put off is due."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 100.0
        return self.now


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`: a disk that is full, for LMDB itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
