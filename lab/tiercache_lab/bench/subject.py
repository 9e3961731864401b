"""The store that is measured, and the buffers that the store and its baselines share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import StorageError
from tiercache.keys import Shard, layout_digest, object_key
from tiercache.pools import HostArena
from tiercache.storage import GetItem, SetItem, StorageBackend, open_backend
from tiercache.storage.checksum import checksum
from tiercache_lab.bench.machine import drop

_LAYOUT: Final = layout_digest(PoolName.KV, bytes(32), Shard())
_NAMESPACE: Final = bytes(32)
_STRIDE: Final = 1 << 20
"""Bytes of the pieces in which buffers are filled and wiped."""


class Buffers:
    """Objects of a batch, each in one block of an arena, filled before anything is timed.

    Thread safety: any thread may use `views`; one thread at a time may call the methods.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size: Final = size
        self.count: Final = count
        self.arena: Final = HostArena(size * count, size, huge_pages=False)
        self._whole = self.arena.hold()
        for part in self._parts():
            part[:] = os.urandom(part.nbytes)  # random, so that no layer below can compress it
        self.views: Final = [self._whole[at : at + size] for at in range(0, size * count, size)]
        self._digest = self._sum()

    @property
    def nbytes(self) -> int:
        """Bytes of all objects of the batch."""
        return self._whole.nbytes

    def wipe(self) -> None:
        """Overwrite the buffers with zeros, so that `check` fails until all objects have been read again."""
        zeros = bytes(_STRIDE)
        for part in self._parts():
            part[:] = zeros[: part.nbytes]

    def check(self) -> None:
        """Raise StorageError unless the buffers hold their original bytes."""
        if self._sum() != self._digest:
            raise StorageError(
                "a read returned bytes that differ from those written; the figures of this run are not valid"
            )

    def _parts(self) -> list[memoryview]:
        return [self._whole[at : at + _STRIDE] for at in range(0, self.nbytes, _STRIDE)]

    def _sum(self) -> bytes:
        return checksum(ObjectKey(PoolName.KV, b""), [self._whole], self.nbytes)


class Subject:
    """Store that is measured, and the calls that set, get and delete batches.

    The store computes the checksums, as in calls of the controller. Thread safety: one thread.
    """

    def __init__(self, url: str, path: Path, buffers: Buffers) -> None:
        self.path: Final = path
        self.size: Final = buffers.size
        self._url = url
        self._buffers = buffers
        self._store: StorageBackend | None = None
        self.open()

    @property
    def store(self) -> StorageBackend:
        """The open store."""
        assert self._store is not None, "the store is open"
        return self._store

    def open(self) -> None:
        """Open the store, for the first time or again."""
        self._store = open_backend(self._url)
        self._store.attach(self._buffers.arena)

    def close(self) -> None:
        """Close the store if it is open."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def reopen_cold(self, used: ObjectKey) -> None:
        """Reopen the store with none of its files in the page cache, and get the object `used`.

        The first get after opening does work that later ones do not need, and that must not be timed. The
        blocks of `used` are then in the page cache, so a later get of it must not be timed either.
        """
        # Pages that the store has mapped cannot be dropped, so the store must be closed.
        self.close()
        drop(self.path)
        self.open()
        self.first_hit(used)

    def put(self, keys: Sequence[ObjectKey]) -> None:
        """Set a batch, whose pages follow each other. Raises StorageError unless all objects are stored."""
        parents = [None, *(key.page_key for key in keys)]
        items = [
            SetItem(key, (view,), ObjectMeta(_NAMESPACE, self.size, b"", parents[n], n + 1))
            for n, (key, view) in enumerate(zip(keys, self._buffers.views, strict=True))
        ]
        _expect("set", self.store.set(items), Outcome.STORED)

    def get(self, keys: Sequence[ObjectKey]) -> None:
        """Get a batch into the buffers. Raises StorageError unless all objects are hits."""
        items = [
            GetItem(key, (view,), self.size) for key, view in zip(keys, self._buffers.views, strict=True)
        ]
        _expect("get", self.store.get(items), Outcome.HIT)

    def first_hit(self, key: ObjectKey) -> None:
        """Get one object into the first buffer. Raises StorageError unless the object is a hit."""
        _expect("get", self.store.get([GetItem(key, (self._buffers.views[0],), self.size)]), Outcome.HIT)

    def fill(self, nbytes: int) -> None:
        """Store about `nbytes` bytes and delete the objects, so that all blocks have been written once."""
        written: list[ObjectKey] = []
        for _ in range(-(-nbytes // self._buffers.nbytes)):
            keys = batch_keys(self._buffers.count)
            with suppress(StorageError):  # a full store may refuse the rest
                self.put(keys)
            written += keys
        self.store.delete(written)
        self.store.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def batch_keys(count: int) -> list[ObjectKey]:
    """Return new keys of pages."""
    return [object_key(PoolName.KV, _LAYOUT, os.urandom(32)) for _ in range(count)]


def _expect(call: str, outcomes: Sequence[Outcome], wanted: Outcome) -> None:
    if other := next((outcome for outcome in outcomes if outcome is not wanted), None):
        raise StorageError(
            f"the store answered a {call} with {other} instead of {wanted}, so its speed was not measured"
        )
