"""The store that is measured, and the buffers that all sides of a comparison share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from tiercache.cli.bench.machine import drop
from tiercache.cli.bench.timing import Crew, split
from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import StorageError
from tiercache.keys import Shard, layout_digest, object_key
from tiercache.pools import HostArena
from tiercache.storage import GetItem, SetItem, StorageBackend, Usage, open_backend
from tiercache.storage.checksum import checksum

_LAYOUT: Final = layout_digest(PoolName.KV, bytes(32), Shard())
_NAMESPACE: Final = bytes(32)
_STRIDE: Final = 1 << 20
"""Bytes of the pieces in which buffers are filled."""


class Buffers:
    """The objects of a batch in an arena of their own, one block each, written before anything is timed.

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
        """Bytes of the whole batch."""
        return self._whole.nbytes

    def wipe(self) -> None:
        """Overwrite the buffers with zeros, so that `check` passes only if everything was read again."""
        zeros = bytes(_STRIDE)
        for part in self._parts():
            part[:] = zeros[: part.nbytes]

    def check(self) -> None:
        """Raise StorageError unless the buffers hold the bytes that they were created with."""
        if self._sum() != self._digest:
            raise StorageError("a read came back with other bytes than were written; no figure of this run means anything")

    def _parts(self) -> list[memoryview]:
        return [self._whole[at : at + _STRIDE] for at in range(0, self.nbytes, _STRIDE)]

    def _sum(self) -> bytes:
        return checksum(ObjectKey(PoolName.KV, b""), [self._whole], self.nbytes)


class Subject:
    """One store, called with whole batches as HybridStorage calls it; the store computes the checksums.

    With a crew of several threads, each takes consecutive objects of the batch.

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
        """Open the store, also after `close`."""
        self._store = open_backend(self._url)
        self._store.attach(self._buffers.arena)

    def close(self) -> None:
        """Close the store if it is open."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def reopen_cold(self, used: ObjectKey | None = None) -> None:
        """Reopen the store with none of its files in the page cache, and make a first call, so that first-call work is not timed later.

        That call is a get of `used`, an object that is not timed later; without it, a set, a get and a delete of a new object, which may
        bring more of the store's own pages into the page cache.
        """
        # Closed meanwhile, because pages that a store has mapped cannot be dropped.
        self.close()
        drop(self.path)
        self.open()
        if used is not None:
            self.first_hit(used)
        else:
            self._stir()

    def put(self, keys: Sequence[ObjectKey]) -> None:
        """Set a batch, checksums included; raises StorageError unless all objects are stored."""

        def put_span(span: Sequence[int]) -> None:
            # Each thread writes a sequence of its own, because a page is stored only after its parent.
            parents = [None, *(keys[i].page_key for i in span)]
            items = [self._set_item(keys[i], self._buffers.views[i], parents[n], n) for n, i in enumerate(span)]
            _expect("set", self.store.set(items), Outcome.STORED)

        self._callers.each(put_span, self._spans)

    def get(self, keys: Sequence[ObjectKey]) -> None:
        """Get a batch into the buffers; raises StorageError unless all objects are hits."""
        views, size = self._buffers.views, self._buffers.size

        def get_span(span: Sequence[int]) -> None:
            _expect("get", self.store.get([GetItem(keys[i], (views[i],), size) for i in span]), Outcome.HIT)

        self._callers.each(get_span, self._spans)

    def first_hit(self, key: ObjectKey) -> None:
        """Get one object into the first buffer; raises StorageError unless it is a hit."""
        _expect("get", self.store.get([GetItem(key, (self._buffers.views[0],), self._buffers.size)]), Outcome.HIT)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Delete objects; those that were evicted before are ignored."""
        self.store.delete(keys)

    def fill(self, nbytes: int) -> None:
        """Store about `nbytes` and delete them again, so that every block that the store can have has been written."""
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

    def _stir(self) -> None:
        key = batch_keys(1)[0]
        _expect("set", self.store.set([self._set_item(key, self._buffers.views[0], None, 0)]), Outcome.STORED)
        self.first_hit(key)
        self.delete([key])

    def _set_item(self, key: ObjectKey, view: memoryview, parent: bytes | None, index: int) -> SetItem:
        size = self._buffers.size
        return SetItem(key, (view,), ObjectMeta(_NAMESPACE, size, b"", parent, index + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def batch_keys(count: int) -> list[ObjectKey]:
    """Return keys of pages, which no store has seen; `Subject.put` chains them to one sequence per thread."""
    return [object_key(PoolName.KV, _LAYOUT, os.urandom(32)) for _ in range(count)]


def _expect(call: str, outcomes: Sequence[Outcome], wanted: Outcome) -> None:
    if other := next((outcome for outcome in outcomes if outcome is not wanted), None):
        raise StorageError(f"the store answered a {call} with {other} where {wanted} was expected, so nothing can be said about its speed")
