"""Conformance suite for stores: tests of `StorageBackend`'s contract, line by line.

    class TestMyBackend(BackendConformance):
        def open_store(self, path, capacity=None): ...
        def corrupt(self, store, key): ...          # without the store's knowledge
        def swap(self, store, a, b): ...

The tests of a capability are skipped if the backend does not declare the capability (`Capabilities`). Sizes
are small, and no test sleeps. `hooks` has all hooks; each of the other modules has the tests of one theme.
"""

# ruff: noqa: E402 (pytest rewrites the assertions of a module only if it is registered before its import)

import pytest

_THEMES = (
    "damage", "eviction", "figures", "objects", "persistence", "shares", "threads", "watching",
)  # fmt: skip
pytest.register_assert_rewrite(*(f"{__name__}.{theme}" for theme in _THEMES))

from tiercache.testing.conformance.damage import Damage
from tiercache.testing.conformance.eviction import Coldest, Eviction
from tiercache.testing.conformance.figures import Figures, Watching
from tiercache.testing.conformance.hooks import BackendHooks
from tiercache.testing.conformance.objects import Objects
from tiercache.testing.conformance.persistence import Persistence
from tiercache.testing.conformance.shares import SharesTests
from tiercache.testing.conformance.threads import Threads

__all__ = ["BackendConformance", "BackendHooks"]


class BackendConformance(
    Objects,
    Damage,
    Figures,
    Coldest,
    Threads,
    Eviction,
    SharesTests,
    Persistence,
    Watching,
):  # fmt: skip
    """Conformance tests of a store, as a base class for a test class.

    A subclass supplies the hooks (see `BackendHooks`). pytest then runs all tests of the contract on the
    store that the hooks open.

    Thread safety: pytest makes one instance per test.
    """
