"""Hooks that the suite needs from a store: how to open it, and how to change its medium behind its back."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import ClassVar

import pytest

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ClosedError
from tiercache.storage.base import StorageBackend

HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR

SIZES = (1, 4095, 4096, 4097, 10_000, 65_536)


class BackendHooks:
    """The hooks of the suite; a subclass must supply `open_store`, `corrupt` and `swap`. While a hook runs, no call is inside the store.

    Thread safety: one instance per test, on one thread.
    """

    large = 1 << 30
    """Capacity in bytes that holds everything that a test without `capacity` stores."""

    small = 8 << 20
    """Smallest capacity in bytes with which a bounded store works well; not below 4 MiB."""

    faults: ClassVar[AbstractSet[Outcome]] = frozenset()
    """Outcomes that any item may get at any time, without a reason that a test could see; only the state machines can handle them."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        """Open a store that keeps its data, if it keeps any, in `path`; `capacity` None means enough for everything (see `large`)."""
        raise NotImplementedError

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        """Change a bit of the stored payload behind the store's back."""
        raise NotImplementedError

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        """Exchange the stored payloads of two objects of equal length behind the store's back."""
        raise NotImplementedError

    def check(self, store: StorageBackend) -> None:
        """Raise AssertionError unless the store's own counts agree with each other; no call is inside the store."""

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        """Change bit number `bit` of the stored payload behind the store's back. Default: the bit that `corrupt` changes."""
        self.corrupt(store, k)

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        """Cut the medium in the middle of an object's payload; objects that were stored later may be lost with it.

        Without this hook, the tests that cut the medium are skipped.
        """

    def kill(self, store: StorageBackend, path: Path, capacity: int | None = None) -> StorageBackend:
        """Open, in `path`, the data that a process leaves if it is killed now. Default: close `store` normally, and open it again."""
        store.close()
        return self.open_store(path, capacity)

    def fill_disk(self, store: StorageBackend) -> None:
        """Make the medium take no more bytes from now on. Without this hook, no test fills the disk."""

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
        """Provide a store with room; it is checked and closed at the end, if it is still open."""
        opened = self.open_store(tmp_path / "store")
        yield opened
        self._finish(opened)

    @pytest.fixture
    def bounded(self, tmp_path: Path) -> Iterator[StorageBackend]:
        """Provide a store of the small capacity; it is checked and closed at the end, if it is still open."""
        opened = self.open_store(tmp_path / "store", self.small)
        self.need(opened, "bounded")
        yield opened
        self._finish(opened)

    def _finish(self, store: StorageBackend) -> None:
        try:
            store.usage()
        except ClosedError:
            return
        self.check(store)
        store.close()
