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
from tiercache.storage import GetItem, SetItem, StorageBackend, Usage, open_backend
from tiercache.storage.checksum import checksum
from tiercache_lab.bench.machine import drop
from tiercache_lab.bench.timing import Crew, split

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

    The store computes the checksums, as in calls of the controller. Each thread of the crew calls the store
    with consecutive objects of the batch.

    Thread safety: one thread; the threads of the crew call the store.
    """

    def __init__(self, url: str, path: Path, buffers: Buffers, callers: Crew) -> None:
        self.path: Final = path
        self.size: Final = buffers.size
        self._url = url
        self._buffers = buffers
        self._callers = callers
        self._spans = split(range(buffers.count), callers.threads)
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
        """Set a batch. Raises StorageError unless all objects are stored."""

        def put_span(span: Sequence[int]) -> None:
            # A page must be stored after its parent, and threads do not wait for each other. Therefore each
            # thread's pages are a sequence of their own.
            parents = [None, *(keys[i].page_key for i in span)]
            items = [
                self._set_item(keys[i], self._buffers.views[i], parents[n], n) for n, i in enumerate(span)
            ]
            _expect("set", self.store.set(items), Outcome.STORED)

        self._callers.each(put_span, self._spans)

    def get(self, keys: Sequence[ObjectKey]) -> None:
        """Get a batch into the buffers. Raises StorageError unless all objects are hits."""
        views, size = self._buffers.views, self._buffers.size

        def get_span(span: Sequence[int]) -> None:
            _expect("get", self.store.get([GetItem(keys[i], (views[i],), size) for i in span]), Outcome.HIT)

        self._callers.each(get_span, self._spans)

    def first_hit(self, key: ObjectKey) -> None:
        """Get one object into the first buffer. Raises StorageError unless the object is a hit."""
        _expect(
            "get", self.store.get([GetItem(key, (self._buffers.views[0],), self._buffers.size)]), Outcome.HIT
        )

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Delete objects. Objects that are not stored are ignored."""
        self.store.delete(keys)

    def fill(self, nbytes: int) -> None:
        """Store about `nbytes` bytes and delete the objects, so that all blocks have been written once."""
        written: list[ObjectKey] = []
        for _ in range(-(-nbytes // self._buffers.nbytes)):
            keys = batch_keys(self._buffers.count)
            with suppress(StorageError):  # a full store may refuse the rest
                self.put(keys)
            written += keys
        self.delete(written)
        self.store.flush()

    def usage(self) -> Usage:
        """Return the usage that the store reports."""
        return self.store.usage()

    def _set_item(self, key: ObjectKey, view: memoryview, parent: bytes | None, index: int) -> SetItem:
        size = self._buffers.size
        return SetItem(key, (view,), ObjectMeta(_NAMESPACE, size, b"", parent, index + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def batch_keys(count: int) -> list[ObjectKey]:
    """Return new keys of pages. `Subject.put` sets them as one sequence per thread."""
    return [object_key(PoolName.KV, _LAYOUT, os.urandom(32)) for _ in range(count)]


def _expect(call: str, outcomes: Sequence[Outcome], wanted: Outcome) -> None:
    if other := next((outcome for outcome in outcomes if outcome is not wanted), None):
        raise StorageError(
            f"the store answered a {call} with {other} instead of {wanted}, so its speed was not measured"
        )
