"""A state machine that drives a store and a plain dict side by side."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance import BackendConformance
from tiercache.testing.objects import content, key, payload, to_get, to_set

NAMES = st.integers(0, 11)
BATCHES = st.lists(NAMES, max_size=6)


def size_of(name: int) -> int:
    """Every name has its own length."""
    return (1, 100, 4096, 4097, 9000, 70_000)[name % 6] + name // 6


class BackendMachine(RuleBasedStateMachine):
    """{set, get, exists, delete, corrupt, reopen} against a dict. `suite` opens the store, which must have room for everything.

    Thread rule: hypothesis runs one at a time.
    """

    suite: Callable[[], BackendConformance]

    def __init__(self) -> None:
        super().__init__()
        self.hooks = type(self).suite()
        self.path = Path(tempfile.mkdtemp(prefix="tiercache-"))
        self.store: StorageBackend = self.hooks.open_store(self.path / "store")
        self.model: dict[ObjectKey, bytes] = {}
        self.corrupted: set[ObjectKey] = set()
        self.version = 0

    @rule(names=BATCHES)
    def set(self, names: list[int]) -> None:
        """New objects are stored, known ones are hits."""
        self.version += 1
        items = [to_set(key(n), payload((n, self.version), size_of(n)), pieces=1 + n % 3, slack=n % 2 * 4096) for n in names]
        for n, answer in zip(names, self.store.set(items), strict=True):
            assert answer is (Outcome.HIT if key(n) in self.model else Outcome.STORED)
            self.model.setdefault(key(n), payload((n, self.version), size_of(n)))

    @rule(names=BATCHES)
    def get(self, names: list[int]) -> None:
        """What comes back is what was stored; a corrupted object is reported once and is gone."""
        items = [to_get(key(n), size_of(n), pieces=1 + n % 4) for n in names]
        answers = self.store.get(items)
        for n, item, answer in zip(names, items, answers, strict=True):
            if key(n) in self.corrupted:
                assert answer in (Outcome.CORRUPT, Outcome.MISS)
            elif key(n) in self.model:
                assert answer is Outcome.HIT
                assert content(item) == self.model[key(n)]
            else:
                assert answer is Outcome.MISS
        for k in self.corrupted & {key(n) for n in names}:
            assert Outcome.CORRUPT in [a for n, a in zip(names, answers, strict=True) if key(n) == k]
            self.corrupted.discard(k)
            del self.model[k]

    @rule(names=BATCHES)
    def exists(self, names: list[int]) -> None:
        """A corrupted object is still believed to be there."""
        assert self.store.exists([key(n) for n in names]) == [key(n) in self.model for n in names]

    @rule(names=BATCHES)
    def delete(self, names: list[int]) -> None:
        """The first mention of a stored key says True."""
        expected = [self.model.pop(key(n), None) is not None for n in names]
        self.corrupted -= {key(n) for n in names}
        assert self.store.delete([key(n) for n in names]) == expected

    @precondition(lambda self: set(self.model) - self.corrupted)
    @rule(data=st.data())
    def corrupt(self, data: Any) -> None:
        """A bit changes behind the store's back."""
        k = data.draw(st.sampled_from(sorted(set(self.model) - self.corrupted)))
        self.hooks.corrupt(self.store, k)
        self.corrupted.add(k)

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close, and open again."""
        self.store.close()
        self.store = self.hooks.open_store(self.path / "store")

    @invariant()
    def counts_add_up(self) -> None:
        """Usage and the store's own books agree with the dict."""
        usage = self.store.usage()
        assert (usage.objects, usage.payload_bytes) == (len(self.model), sum(map(len, self.model.values())))
        self.hooks.check(self.store)

    @invariant()
    def a_scan_sees_everything(self) -> None:
        """And nothing else."""
        assert {entry.key for entry in self.store.scan_all()} == set(self.model)

    def teardown(self) -> None:
        """Close the store and remove its files."""
        self.store.close()
        shutil.rmtree(self.path, ignore_errors=True)
