"""Conformance suite for stores: tests of `StorageBackend`'s contract, line by line.

    class TestMyBackend(BackendConformance):
        def open_store(self, path, capacity=None): ...
        def corrupt(self, store, key): ...          # behind the store's back
        def swap(self, store, a, b): ...

Tests of capabilities that a backend does not declare in its `Capabilities` are skipped. Sizes are small, and no test waits on a clock.
`hooks` has all hooks; the other modules are the suite, one for each theme.
"""

# ruff: noqa: E402 (pytest explains the assertions of a module only if it is named before its first import)

import pytest

_THEMES = (
    "attaching", "batches", "damage", "describing", "eviction", "figures", "full_disk", "objects", "persistence", "refusals",
    "restorable", "sharing", "threads",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"{__name__}.{theme}" for theme in _THEMES))

from tiercache.testing.conformance.attaching import Attaching
from tiercache.testing.conformance.batches import Batches
from tiercache.testing.conformance.damage import Damage
from tiercache.testing.conformance.describing import Describing
from tiercache.testing.conformance.eviction import Eviction
from tiercache.testing.conformance.figures import Figures
from tiercache.testing.conformance.full_disk import FullDisk
from tiercache.testing.conformance.hooks import BackendHooks
from tiercache.testing.conformance.objects import Objects
from tiercache.testing.conformance.persistence import Persistence
from tiercache.testing.conformance.refusals import Refusals
from tiercache.testing.conformance.restorable import Restorable
from tiercache.testing.conformance.sharing import Sharing
from tiercache.testing.conformance.threads import Threads

__all__ = ["BackendConformance", "BackendHooks"]


class BackendConformance(
    Objects, Batches, Refusals, Damage, FullDisk, Figures, Describing, Threads, Eviction, Restorable, Persistence, Sharing, Attaching
):
    """Conformance tests of a store: subclass it and supply the hooks (see `BackendHooks`), and pytest runs the contract over the store.

    Thread safety: pytest makes one instance per test.
    """
