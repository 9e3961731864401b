"""The conformance hooks of the `s3` store, over a real service, and helpers that go behind its back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import obstore
from tiercache_backends.s3 import S3Backend
from tiercache_backends.s3.directory import ObjectPlace
from tiercache_backends.s3.settings import read_settings

from tests.storage_backends.s3.integrity import check_directory
from tests.storage_backends.s3.server import BUCKET, bucket, endpoint
from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import GetItem, ScanEntry, SetItem, StorageBackend, Usage
from tiercache.storage.env import Env
from tiercache.storage.wrappers import unwrap
from tiercache.testing.conformance import BackendConformance


def prefix_of(path: Path) -> str:
    """The prefix of a store that a test names by a path of its own."""
    return "t" + "".join(c if c.isalnum() else "-" for c in str(path))[-150:]


def open_s3(
    path: Path, url: str | None = None, env: Env | None = None, kind: type[S3Backend] = S3Backend, **more: Any
) -> S3Backend:
    """A store under the prefix of a path."""
    section = {"address": BUCKET, "path": prefix_of(path), "endpoint": url or endpoint(), **more}
    return kind(read_settings(section), env)


def know(store: S3Backend) -> None:
    """Wait until a store knows what others have written and removed."""
    with store._gate:  # private: no call of a store waits for a sweep
        refresher = store._refresher  # private: as above
        refresher._until_sweep = 0  # private: as above
        while not refresher._until_sweep:  # private: a sweep that is under way ends first
            refresher.sync()


class PromptS3(S3Backend):
    """A store that knows at each call what other processes did before it."""

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        know(self)
        return super().exists(keys)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        know(self)
        return super().get(items)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        know(self)
        return super().set(items)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        know(self)
        return super().describe(keys)

    def usage(self) -> Usage:
        know(self)
        return super().usage()


class S3Hooks(BackendConformance):
    # Two processes that store an object at the same time do not know of each other, and both have stored it.
    test_both_store_the_same_objects_at_once = None

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return open_s3(path, kind=PromptS3, deadline="30s")

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        self.flip(store, k, 0)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        name, data = medium(store, k)
        at = place(store, k).entry.offset
        data[at + bit // 8] ^= 1 << bit % 8
        obstore.put(bucket(), name, bytes(data))

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        name, data = medium(store, k)
        entry = place(store, k).entry
        obstore.put(bucket(), name, bytes(data[: entry.offset + entry.stored // 2]))

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        (name, one), (other, two) = medium(store, a), medium(store, b)
        assert name != other
        x, y = place(store, a).entry, place(store, b).entry
        mine, theirs = one[x.offset : x.offset + x.stored], two[y.offset : y.offset + y.stored]
        one[x.offset : x.offset + x.stored], two[y.offset : y.offset + y.stored] = theirs, mine
        obstore.put(bucket(), name, bytes(one))
        obstore.put(bucket(), other, bytes(two))

    def check(self, store: StorageBackend) -> None:
        check_directory(s3_of(store))


def s3_of(store: StorageBackend) -> S3Backend:
    inner = unwrap(store)
    assert isinstance(inner, S3Backend)
    return inner


def place(store: StorageBackend, k: ObjectKey) -> ObjectPlace:
    """The place at which the store has an object."""
    [found] = s3_of(store)._directory.find([k])  # private: no call says where the bytes are
    if found is None:  # another process has stored it
        know(s3_of(store))
        assert store.exists([k]) == [True]
        return place(store, k)
    return found


def medium(store: StorageBackend, k: ObjectKey) -> tuple[str, bytearray]:
    """Name and bytes of the pack that has an object."""
    settings = s3_of(store)._settings  # private: no call says where the bytes are
    name = settings.place(f"packs/{place(store, k).pack.name}")
    return name, bytearray(obstore.get(bucket(), name).bytes())
