"""Hooks of the conformance suite: they open a store, and change its medium without the store's knowledge."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import ClassVar

import pytest

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ClosedError
from tiercache.storage.base import StorageBackend, Usage

HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR

SIZES = (1, 4095, 4096, 4097, 10_000, 65_536)


class BackendHooks:
    """The hooks of the suite; a subclass must supply `open_store`, `corrupt` and `swap`.

    While a hook runs, no call is inside the store.

    Thread safety: one instance per test, on one thread.
    """

    large = 1 << 30
    """Capacity in bytes of a store that is opened without `capacity`. No such test needs more."""

    small = 8 << 20
    """Smallest capacity in bytes with which a bounded store works well; not below 4 MiB."""

    copies: int = 1
    """Largest number of copies of an object that the store keeps, each of which takes capacity."""

    faults: ClassVar[AbstractSet[Outcome]] = frozenset()
    """Outcomes that any item may get at any time without a reason that a test could see.

    The tests allow no such outcomes; only the state machines do (`testing.stateful`).
    """

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        """Open a store with a capacity in bytes; None means enough for all tests (see `large`).

        A persistent store keeps its data in `path`.
        """
        raise NotImplementedError

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        """Change a bit of the stored payload without the store's knowledge."""
        raise NotImplementedError

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        """Exchange the stored payloads of two objects of equal length without the store's knowledge."""
        raise NotImplementedError

    @property
    def third(self) -> int:
        """Bytes of different objects that a full store of the small capacity has at least: a third."""
        return self.small // self.copies // 3

    def usage(self, store: StorageBackend) -> Usage:
        """Return the usage of a store, with every object counted once.

        Default: the store's own usage. A store that keeps several copies counts every copy, so it needs this
        hook.
        """
        return store.usage()

    def check(self, store: StorageBackend) -> None:
        """Raise AssertionError unless the store's own counts agree with each other."""

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        """Change bit number `bit` of the stored payload without the store's knowledge.

        Default: change the bit that `corrupt` changes.
        """
        self.corrupt(store, k)

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        """Cut off the medium in the middle of an object's payload.

        Objects that were stored later may be lost too. Without this hook, the tests of a cut medium are
        skipped.
        """

    def kill(self, store: StorageBackend, path: Path, capacity: int | None = None) -> StorageBackend:
        """Open the data in `path` that the process of `store` would leave if that process was killed now.

        Default: close `store` normally, and open the data again.
        """
        store.close()
        return self.open_store(path, capacity)

    def fill_disk(self, store: StorageBackend) -> None:
        """Make the medium take no more bytes. Without this hook, no test fills the disk."""

    def free_disk(self, store: StorageBackend) -> None:
        """Undo `fill_disk`."""

    def scanned(self, meta: ObjectMeta) -> ObjectMeta:
        """Return the part of an object's `meta` that a scan returns. Default: all of it."""
        return meta

    def has(self, hook: str) -> bool:
        """Return whether this hook differs from its default."""
        return getattr(type(self), hook) is not getattr(BackendHooks, hook)

    def need(self, store: StorageBackend, capability: str) -> None:
        """Skip the test unless the store declares the capability."""
        if not getattr(store.capabilities, capability):
            store.close()
            pytest.skip(f"the store does not declare {capability}")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[StorageBackend]:
        """Provide a store with enough room; check and close the store at the end, if it is still open."""
        opened = self.open_store(tmp_path / "store")
        yield opened
        self._finish(opened)

    @pytest.fixture
    def bounded(self, tmp_path: Path) -> Iterator[StorageBackend]:
        """Provide a store of the small capacity; check and close it at the end, if it is still open."""
        opened = self.open_store(tmp_path / "store", self.small)
        self.need(opened, "bounded")
        self.need(opened, "ordered")
        yield opened
        self._finish(opened)

    def _finish(self, store: StorageBackend) -> None:
        try:
            store.usage()
        except ClosedError:
            return
        self.check(store)
        store.close()
