"""The conformance hooks of this repository's stores: how to open them, and write behind their backs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC, ENXIO
from pathlib import Path
from typing import Any

from tiercache_backends.file import FileBackend
from tiercache_backends.memory import MemoryBackend

from tests.faults import FaultEnv
from tests.storage.integrity import check_tables
from tests.storage.restorable import Restorable
from tests.storage.valued import Valued
from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta
from tiercache.storage.base import SharedMemory, StorageBackend
from tiercache.storage.wrappers import unwrap
from tiercache.testing.conformance import BackendConformance
from tiercache.testing.conformance.eviction import Coldest, Eviction


class Watching(MemoryBackend):
    """A store that notes which memories were attached to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[SharedMemory] = []

    def attach(self, memory: SharedMemory) -> None:
        self.attached.append(memory)


class AgingEnv(FaultEnv):
    """A clock that is `later` seconds ahead."""

    later = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.later


class OwnConformance(BackendConformance, Restorable, Valued):
    """The suite, and the themes of the stores that evict by `EvictionOrder`."""


def without_themes(suite: type[BackendConformance], *themes: type) -> type[BackendConformance]:
    """Take themes out of a suite."""
    for theme in themes:
        for name in vars(theme):
            if name.startswith("test_"):
                setattr(suite, name, None)
    return suite


def another_way(suite: type[BackendConformance]) -> type[BackendConformance]:
    """Take the themes of the store alone out of the suite of another way to it."""
    return without_themes(suite, Coldest, Eviction, Restorable, Valued)


class MemoryHooks(OwnConformance):
    small = 2 << 20
    obeys_values = True

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        self.memory_env = AgingEnv()
        return MemoryBackend(capacity or 0, self.memory_env)

    def pass_time(self, store: StorageBackend, seconds: float) -> None:
        self.memory_env.later += seconds

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        self.flip(store, k, 0)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        found = self.object_of(store, k)
        data = bytearray(found.payload)
        data[bit // 8] ^= 1 << bit % 8
        found.payload = bytes(data)

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        found = self.object_of(store, k)
        found.payload = found.payload[: len(found.payload) // 2]

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        x, y = self.object_of(store, a), self.object_of(store, b)
        x.payload, y.payload = y.payload, x.payload

    def check(self, store: StorageBackend) -> None:
        check_tables(store)

    def object_of(self, store: StorageBackend, k: ObjectKey) -> Any:
        memory = unwrap(store)
        assert isinstance(memory, MemoryBackend)
        found = memory._objects.get(k.digest)  # private: no call damages an object
        assert found is not None
        return found


class LocalHooks(OwnConformance):
    """Conformance hooks of a store in a directory, opened with the faults in `env`."""

    env: AgingEnv
    obeys_values = True

    def pass_time(self, store: StorageBackend, seconds: float) -> None:
        self.env.later += seconds

    def kill(self, store: StorageBackend, path: Path, capacity: int | None = None) -> StorageBackend:
        left = path.with_name(path.name + ".left")
        copy_tree(path, left)
        store.close()
        shutil.rmtree(path)
        left.rename(path)
        return self.open_store(path, capacity)


class FileHooks(LocalHooks):
    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        self.env = AgingEnv()
        return FileBackend(str(path), capacity or self.large, env=self.env)

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        self.flip(store, k, 0)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        data = bytearray(self.bytes_of(store, k))
        data[bit // 8] ^= 1 << bit % 8
        self.overwrite(store, k, bytes(data))

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        places = locate(store, k)
        path, offset, size = places[len(places) // 2]
        os.truncate(path, offset + size // 4)

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        x, y = self.bytes_of(store, a), self.bytes_of(store, b)
        self.overwrite(store, a, y)
        self.overwrite(store, b, x)

    def check(self, store: StorageBackend) -> None:
        check_tables(store)

    def fill_disk(self, store: StorageBackend) -> None:
        for call in ("fallocate", "pwritev", "commit"):
            self.env.fail(call, times=1_000_000, error=ENOSPC)

    def free_disk(self, store: StorageBackend) -> None:
        self.env.clear()

    def bytes_of(self, store: StorageBackend, k: ObjectKey) -> bytes:
        found = b""
        for path, offset, size in locate(store, k):
            fd = os.open(path, os.O_RDONLY)
            found += os.pread(fd, size, offset)
            os.close(fd)
        return found

    def overwrite(self, store: StorageBackend, k: ObjectKey, data: bytes) -> None:
        for path, offset, size in locate(store, k):
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, data[:size], offset)
            os.close(fd)
            data = data[size:]


def locate(store: StorageBackend, k: ObjectKey) -> list[tuple[str, int, int]]:
    """Return where an object of a `file` store lies, as (file, offset, bytes) in payload order."""
    slabs, objects = file_of(store)._slabs, file_of(store)._state._objects  # private: no call says it
    row = objects.find(k.digest)
    extents = objects.extents(row) if row >= 0 else ()
    return [
        (
            slabs.path(extent.start // slabs.slab_blocks),
            slabs.at(extent.start)[1],
            extent.blocks * BLOCK_ALIGN,
        )
        for extent in extents
    ]


def file_of(store: StorageBackend) -> FileBackend:
    inner = unwrap(store)
    assert isinstance(inner, FileBackend)
    return inner


def wrapped(
    hooks: type[BackendConformance], wrap: Callable[[StorageBackend], StorageBackend], **more: Any
) -> type[BackendConformance]:
    """The hooks of a store inside a wrapper: what lies behind the store's back is the same."""

    def open_store(self: BackendConformance, path: Path, capacity: int | None = None) -> StorageBackend:
        return wrap(hooks.open_store(self, path, capacity))

    return type(f"Wrapped{hooks.__name__}", (hooks,), {"open_store": open_store, **more})


def without_checksum(_self: BackendConformance, meta: ObjectMeta) -> ObjectMeta:
    """Return what a scan says where the checksum is that of an inner object: all but the checksum."""
    return replace(meta, checksum=b"")


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory with the holes in its files: preallocated slabs and map files are mostly that."""
    shutil.copytree(source, target, copy_function=_copy_file)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        end, at = os.fstat(old.fileno()).st_size, 0
        while (at := _next_data(old.fileno(), at, end)) < end:
            stop = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.lseek(new.fileno(), at, os.SEEK_SET)
            while at < stop:
                at += os.sendfile(new.fileno(), old.fileno(), at, stop - at)
        os.truncate(new.fileno(), end)
    shutil.copystat(source, target)


def _next_data(fd: int, at: int, end: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == ENXIO:
            return end
        raise
