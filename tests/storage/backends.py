"""The conformance hooks of the stores in this repository: how to open them, and how to write behind their backs."""

from __future__ import annotations

import os
from pathlib import Path

from tiercache_backends.file import FileBackend
from tiercache_backends.memory import MemoryBackend

from tiercache.core import ObjectKey
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance import BackendConformance


class MemoryHooks(BackendConformance):
    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return MemoryBackend(capacity or 0)

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        assert isinstance(store, MemoryBackend)
        found = store._objects.get(k.digest)
        assert found is not None
        found.payload = bytes([found.payload[0] ^ 1]) + found.payload[1:]

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        assert isinstance(store, MemoryBackend)
        x, y = store._objects.get(a.digest), store._objects.get(b.digest)
        assert x is not None
        assert y is not None
        x.payload, y.payload = y.payload, x.payload


class FileHooks(BackendConformance):
    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return FileBackend(str(path), capacity or self.large)

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        data = bytearray(self.bytes_of(store, k))
        data[0] ^= 1
        self.overwrite(store, k, bytes(data))

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        x, y = self.bytes_of(store, a), self.bytes_of(store, b)
        self.overwrite(store, a, y)
        self.overwrite(store, b, x)

    def check(self, store: StorageBackend) -> None:
        assert isinstance(store, FileBackend)
        store.check_integrity()

    def bytes_of(self, store: StorageBackend, k: ObjectKey) -> bytes:
        assert isinstance(store, FileBackend)
        found = b""
        for path, offset, size in store.locate(k):
            fd = os.open(path, os.O_RDONLY)
            found += os.pread(fd, size, offset)
            os.close(fd)
        return found

    def overwrite(self, store: StorageBackend, k: ObjectKey, data: bytes) -> None:
        assert isinstance(store, FileBackend)
        for path, offset, size in store.locate(k):
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, data[:size], offset)
            os.close(fd)
            data = data[size:]
