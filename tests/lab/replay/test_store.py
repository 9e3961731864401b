"""The null store beside a plain model: what it may give up, in which order, and what its books say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.examples import example_count, slow_after
from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import ConfigError
from tiercache.policy import POLICIES, Costs, Policy, Units, policy_named, profile_named
from tiercache.policy.base import Ranks
from tiercache.storage import StoreContext
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem
from tiercache.storage.env import Env
from tiercache.testing.objects import NAMESPACE, key, page_key
from tiercache_lab.policies import RIVALS
from tiercache_lab.replay.store import NullStore

CAPACITY = 1000
COSTS = Costs(profile_named("qwen3-next-80b-a3b"))
SEQUENCES, DEPTH = 5, 8
LENGTHS = {PoolName.KV: 90, PoolName.MAMBA: 210}

Name = tuple[int, int, PoolName]
NAMES = st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, DEPTH), st.sampled_from(list(LENGTHS)))


def path(sequence: int, depth: int) -> tuple[int, int]:
    """Page `depth` of a sequence; sequences 0 and 1 share their first three pages."""
    return (0 if sequence == 1 and depth <= 3 else sequence, depth)


def object_of(name: Name) -> ObjectKey:
    sequence, depth, pool = name
    return key(path(sequence, depth), pool)


def parent_of(name: Name) -> bytes | None:
    sequence, depth, pool = name
    if pool is PoolName.MAMBA:
        return page_key(path(sequence, depth))
    return page_key(path(sequence, depth - 1)) if depth > 1 else None


def item(name: Name, length: int = 0) -> SetItem:
    return SetItem(
        object_of(name), [], ObjectMeta(NAMESPACE, length or LENGTHS[name[2]], b"", parent_of(name), name[1])
    )


def asked(names: Sequence[Name]) -> list[GetItem]:
    return [GetItem(object_of(name), [], LENGTHS[name[2]]) for name in names]


class ReplayMachine(RuleBasedStateMachine):
    """Every rule compares; what vanished is learned from `exists`, and was allowed to."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.store = NullStore(CAPACITY, policy_named(self.policy, COSTS), 64)
        self.held: dict[ObjectKey, ObjectMeta] = {}
        self.everything = {
            object_of((s, d, p)) for s in range(SEQUENCES) for d in range(1, DEPTH + 1) for p in LENGTHS
        }
        self.evicted = self.written = self.read = self.most = 0

    @rule(names=st.lists(NAMES, min_size=1, max_size=6, unique_by=object_of))
    def set(self, names: list[Name]) -> None:
        self._set([item(name) for name in names])

    @rule(sequence=st.integers(0, SEQUENCES - 1), depth=st.integers(1, DEPTH), with_state=st.booleans())
    def set_path(self, sequence: int, depth: int, with_state: bool) -> None:
        """Write a path in the order of a commit: pages from the start, then the state at the end."""
        self._set([item((sequence, at, PoolName.KV)) for at in range(1, depth + 1)])
        if with_state:
            self._set([item((sequence, depth, PoolName.MAMBA))])

    @rule(name=NAMES, length=st.sampled_from([CAPACITY, CAPACITY + 1, 10 * CAPACITY]))
    def set_large(self, name: Name, length: int) -> None:
        self._set([item(name, length)])

    @rule(names=st.lists(NAMES, max_size=6, unique_by=object_of))
    def get(self, names: list[Name]) -> None:
        there = [object_of(name) in self.held for name in names]
        assert self.store.get(asked(names)) == [Outcome.HIT if one else Outcome.MISS for one in there]
        self.read += sum(
            self.held[object_of(name)].length for name, one in zip(names, there, strict=True) if one
        )

    @rule(names=st.lists(NAMES, max_size=4, unique_by=object_of))
    def delete(self, names: list[Name]) -> None:
        assert self.store.delete([object_of(name) for name in names]) == [
            object_of(name) in self.held for name in names
        ]
        for name in names:
            self.held.pop(object_of(name), None)

    @invariant()
    def books_agree(self) -> None:
        keys = sorted(self.everything, key=lambda one: one.digest)
        assert self.store.exists(keys) == [one in self.held for one in keys]
        described = self.store.describe(keys)
        assert [found and found.meta for found in described] == [self.held.get(one) for one in keys]
        assert {entry.key: entry.meta for entry in self.store.scan(NAMESPACE).entries} == self.held
        used, usage = sum(meta.length for meta in self.held.values()), self.store.usage()
        assert (usage.objects, usage.payload_bytes, usage.capacity_bytes) == (len(self.held), used, CAPACITY)
        assert used <= self.store.peak <= CAPACITY
        assert (self.store.evicted, self.store.written_bytes, self.store.read_bytes) == (
            self.evicted,
            self.written,
            self.read,
        )

    def _set(self, items: list[SetItem]) -> None:
        before = dict(self.held)
        outcomes = self.store.set(items)
        for one, outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.STORED:
                assert one.key not in before
                before[one.key] = one.meta
                self.written += one.meta.length
            else:
                assert outcome is (Outcome.HIT if one.key in before else Outcome.THROTTLED)
        after = {one: meta for one, meta in before.items() if self.store.exists([one])[0]}
        own = {one.key for one in items}
        gone = before.keys() - after.keys()
        assert not gone & own, "a batch does not evict its own"
        for one in gone:
            # What hung on it went first.
            assert one.pool is PoolName.MAMBA or not [
                k for k, meta in after.items() if meta.parent == one.page_key
            ]
        if gone:
            refused = [
                one.meta.length
                for one, outcome in zip(items, outcomes, strict=True)
                if outcome is Outcome.THROTTLED
            ]
            assert sum((*refused, *(meta.length for meta in before.values()))) > CAPACITY, (
                "nothing goes where there is room"
            )
        self.evicted += len(gone)
        self.held = after


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy", slow_after(len(POLICIES), (*POLICIES, *RIVALS)))
def test_a_null_store_is_a_plain_model(policy: str) -> None:
    machine: Any = type(f"Machine_{policy}", (ReplayMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=example_count(25), stateful_step_count=25, deadline=None)
    )


def filled(policy: Policy, *names: Name) -> NullStore:
    store = NullStore(CAPACITY, policy, 64)
    assert set(store.set([item(name) for name in names])) == {Outcome.STORED}
    return store


def there(store: NullStore, *names: Name) -> list[bool]:
    return store.exists([object_of(name) for name in names])


def test_the_oldest_that_nothing_depends_on_goes_first() -> None:
    old, young, state = (2, 1, PoolName.KV), (3, 1, PoolName.KV), (3, 1, PoolName.MAMBA)
    chain = [(4, depth, PoolName.KV) for depth in range(1, 5)]
    store = filled(policy_named("lru"), old, *chain, young, state)  # 6 x 90 + 210 = 750 bytes
    store.get(asked([old]))
    assert store.set([item((0, 1, PoolName.MAMBA))]) == [Outcome.STORED]
    # `old` was asked for, and the chain's end keeps its front in place: of what no state makes use of that
    # end is the oldest.
    assert there(store, old, young, state, *chain) == [True] * 7
    assert store.set([item((0, 1, PoolName.KV))]) == [Outcome.STORED]
    assert there(store, old, young, state, *chain) == [True, True, True, True, True, True, False]


def test_what_does_not_fit_at_all_drives_nothing_out() -> None:
    held = [(4, depth, PoolName.KV) for depth in range(1, 9)]
    store = filled(policy_named("lru"), *held)
    assert store.set([item((0, 1, PoolName.KV), CAPACITY + 1)]) == [Outcome.THROTTLED]
    assert all(there(store, *held))
    assert store.evicted == 0


def test_a_batch_that_is_too_large_keeps_its_beginning() -> None:
    store = filled(policy_named("lru"), (4, 1, PoolName.KV))
    batch = [(0, depth, PoolName.KV) for depth in range(1, 9)] + [
        (2, depth, PoolName.KV) for depth in range(1, 9)
    ]
    outcomes = store.set([item(name) for name in batch])
    assert outcomes == [Outcome.STORED] * 11 + [Outcome.THROTTLED] * 5
    assert there(store, (4, 1, PoolName.KV)) == [False]
    assert store.peak == 11 * 90


class Asked(Policy):
    """Keeps what it was shown and told."""

    name = "asked"

    def __init__(self) -> None:
        self.shown: list[dict[str, list[int]]] = []
        self.told: list[float] = []

    def rank(self, units: Units) -> Ranks:
        columns = ("kind", "last_access", "hits", "depth", "children", "replay", "nbytes")
        self.shown.append({name: getattr(units, name).tolist() for name in columns})
        assert units.page_tokens == 64
        assert units.now >= max(units.last_access)
        assert all(
            len(getattr(units, name)) == len(units)
            for name in ("checkpoint", "lineage", "digest", "covered", "grown")
        )
        return np.arange(len(units), 0, -1).astype(np.float64)

    def evicted(self, rank: float) -> None:
        self.told.append(rank)


def test_a_policy_sees_what_may_go_and_hears_what_went() -> None:
    policy = Asked()
    pages = [(0, depth, PoolName.KV) for depth in range(1, 6)]
    # A state in the middle of a path, and one at its end.
    store = filled(policy, *pages, (0, 3, PoolName.MAMBA), (0, 5, PoolName.MAMBA))
    store.get(asked([(0, 3, PoolName.MAMBA)]))
    assert store.set([item((2, 1, PoolName.KV), 300)]) == [Outcome.STORED]
    [shown] = policy.shown
    assert shown == {
        "kind": [2, 1],
        "last_access": [8, 7],
        "hits": [1, 0],
        "depth": [3, 5],
        "children": [1, 0],
        "replay": [3, 2],
        "nbytes": [210, 210 + 2 * 90],
    }
    assert policy.told == [1.0]
    assert there(store, (0, 3, PoolName.MAMBA), (0, 5, PoolName.MAMBA), *pages) == [
        True,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_nobody_configures_a_null_store() -> None:
    with pytest.raises(ConfigError, match="made by a replay"):
        NullStore.from_config({}, StoreContext(Env()))


def test_a_null_store_remembers_which_namespaces_have_states() -> None:
    store = NullStore(CAPACITY, policy_named("lru", COSTS), 16)
    for states in (False, True, False):
        store.register_namespace(NamespaceRecord(NAMESPACE, {}, states))
    assert store.namespaces() == [NamespaceRecord(NAMESPACE, {}, states=True)]
