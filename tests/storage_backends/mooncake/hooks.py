"""The conformance hooks of a store in a pool, whose bytes another client of the pool changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from typing import Any

from tiercache_backends.mooncake.header import HEADER_BYTES, ObjectNames
from tiercache_backends.mooncake.library import ClientSpec, MooncakeClient, idle_client, release_client
from tiercache_backends.mooncake.memory import mapped
from tiercache_backends.mooncake.settings import MooncakeSettings, read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.storage_backends.mooncake.rig import Pool
from tiercache.core import ObjectKey, ObjectMeta
from tiercache.errors import ClosedError
from tiercache.storage.base import StorageBackend, Usage
from tiercache.testing.conformance import BackendConformance

ROOM = 8 << 20


class Vandal:
    """Another client of the pool, which knows names and no rules."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self.spec = ClientSpec(
            "127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", str(settings.address), "default"
        )
        kept = idle_client(self.spec)
        self.client, self.memory = kept or MooncakeClient(), mapped(mmap(-1, ROOM))
        self.names = ObjectNames(settings.prefix)
        assert kept or not self.client.setup(self.spec)
        assert not self.client.register(self.memory.address, ROOM)

    def read(self, k: ObjectKey) -> bytes:
        name = self.names.of(k.digest)
        size = self.client.size(name)
        assert self.client.get([name], [[self.memory.address]], [[size]]) == [size]
        return self.memory.memory[:size]

    def write(self, k: ObjectKey, data: bytes) -> None:
        """Put other bytes in the place of an object."""
        name = self.names.of(k.digest)
        self.client.remove([name])
        self.memory.memory[: len(data)] = data
        assert self.client.put([name], [[self.memory.address]], [[len(data)]], 1) == [0]

    def close(self) -> None:
        self.client.unregister(self.memory.address)
        release_client(self.spec, self.client)


class Vandalised(MooncakeBackend):
    """A store with a vandal beside it, once a hook needs one."""

    vandal: Vandal | None = None

    def close(self) -> None:
        super().close()
        vandal, self.vandal = self.vandal, None
        if vandal is not None:
            vandal.close()


class MooncakeHooks(BackendConformance):
    """The first who opens a store in a path clears what earlier tests left under its prefix."""

    pool: Pool

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        path.mkdir(parents=True, exist_ok=True)
        marker = path / "pool"
        if marker.exists():
            return Vandalised(read_settings(json.loads(marker.read_text())))
        section = self.section(blake2b(str(path).encode(), digest_size=8).hexdigest())
        marker.write_text(json.dumps(section))
        return Vandalised(read_settings(section))

    def section(self, prefix: str) -> Mapping[str, Any]:
        return self.pool.section(prefix, staging="8MiB", deadline="20s")

    def vandal(self, store: StorageBackend) -> Vandal:
        assert isinstance(store, Vandalised)
        store.vandal = store.vandal or Vandal(store._settings)  # private: another client of the same pool
        return store.vandal

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        self.flip(store, k, 0)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        vandal = self.vandal(store)
        data = bytearray(vandal.read(k))
        data[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        vandal.write(k, bytes(data))

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        vandal = self.vandal(store)
        data = vandal.read(k)
        vandal.write(k, data[: HEADER_BYTES + (len(data) - HEADER_BYTES) // 2])

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        vandal = self.vandal(store)
        x, y = vandal.read(a), vandal.read(b)
        vandal.write(a, x[:HEADER_BYTES] + y[HEADER_BYTES:])
        vandal.write(b, y[:HEADER_BYTES] + x[HEADER_BYTES:])

    def usage(self, store: StorageBackend) -> Usage:
        said = store.usage()
        lengths = [entry.meta.length for entry in store.scan_all()]
        return replace(said, objects=len(lengths), payload_bytes=sum(lengths))

    def scanned(self, meta: ObjectMeta) -> ObjectMeta:
        return replace(meta, value=None, worker=0)

    def _finish(self, store: StorageBackend) -> None:
        assert isinstance(store, MooncakeBackend)
        with suppress(ClosedError):
            store.clear()
        super()._finish(store)
