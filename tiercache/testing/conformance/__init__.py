"""What every store must do: `StorageBackend`'s contract, line by line.

    class TestMyBackend(BackendConformance):
        def open_store(self, path, capacity=None): ...
        def corrupt(self, store, key): ...          # behind the store's back
        def swap(self, store, a, b): ...

A test of something that a backend does not declare in its `Capabilities` is skipped. Sizes are small; nothing here waits on a clock.
`hooks` has all hooks; the other modules are the suite by theme.
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
    """Subclass it, supply the hooks (see `BackendHooks`), and pytest runs the contract over your store.

    Thread safety: pytest makes one instance per test.
    """
