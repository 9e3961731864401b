"""Worth of all tiers of a chain together: that of one store with everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_backends.chain import TierChain
from tiercache_backends.chain.scans import UnionWorth
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import until
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, chain, payload, state_of, to_set

NAMES = ("restorable_bytes", "dead_bytes", "orphans")
PAGES = 5


def items() -> list[SetItem]:
    """Two conversations with states behind some pages, and one of a model without states."""
    made = []
    for name, namespace in (("a", NAMESPACE), ("b", NAMESPACE), ("plain", OTHER_NAMESPACE)):
        for depth, (page, parent) in enumerate(chain(name, PAGES), 1):
            made.append(to_set(page, payload(page, 100 + depth), parent=parent, namespace=namespace))
            if namespace == NAMESPACE and depth in (2, PAGES):
                state = state_of((name, depth - 1))
                made.append(to_set(state, payload(state, 1000), parent=state.page_key))
    return made


ITEMS = items()


def figures(store: StorageBackend) -> tuple[int, ...]:
    until(lambda: bool(store.usage().details))  # a chain may still be at its first count
    details = store.usage().details
    return tuple(int(details[name]) for name in NAMES)


def union(store: StorageBackend) -> tuple[int, ...]:
    """A fresh count of the chain."""
    assert isinstance(store, TierChain)
    counted = UnionWorth(lambda: store.tiers)
    until(lambda: bool(counted.latest()))
    return tuple(int(counted.latest()[name]) for name in NAMES)


def place(store: StorageBackend, wanted: Sequence[SetItem]) -> None:
    """Store everything in its order, and keep `wanted`: orphans come about by what goes."""
    store.set(ITEMS)
    keys = {item.key for item in wanted}
    store.delete([item.key for item in ITEMS if item.key not in keys])


def tier(chain: StorageBackend, number: int) -> StorageBackend:
    assert isinstance(chain, TierChain)
    store = chain.tiers[number].opened
    assert store is not None
    return store


TWO = ["memory://?tier_name=a&capacity=64MiB", "memory://?tier_name=b&tier_write=write_back"]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=len(ITEMS), max_size=len(ITEMS)))
def test_the_union_is_what_one_store_with_everything_would_have(where: list[int]) -> None:
    """An object is nowhere (0), in one tier (1, 2), or in both (3)."""
    with closing(open_backend(TWO)) as store, closing(MemoryBackend()) as alone:
        place(tier(store, 0), [item for item, n in zip(ITEMS, where, strict=True) if n & 1])
        place(tier(store, 1), [item for item, n in zip(ITEMS, where, strict=True) if n & 2])
        place(alone, [item for item, n in zip(ITEMS, where, strict=True) if n])
        record = NamespaceRecord(NAMESPACE, {}, states=True)
        for one in (store, alone):
            one.register_namespace(record)
        assert union(store) == figures(alone)


def test_pages_in_a_circle_are_orphans(tmp_path: Path) -> None:
    keys = [page for page, _ in chain("circle", 2)]
    with closing(open_backend(TWO)) as store:
        for n in (0, 1):
            behind = to_set(keys[n], payload(keys[n], 100), parent=keys[1 - n].page_key)
            first = to_set(keys[1 - n], payload(keys[1 - n], 100), parent=None)
            tier(store, n).set([first, behind])
            tier(store, n).delete([first.key])
        assert union(store) == (0, 0, 2)


def test_a_tier_that_is_out_does_not_count(tmp_path: Path) -> None:
    plain = [item for item in ITEMS if item.meta.namespace == OTHER_NAMESPACE]
    urls = [
        "memory://?tier_name=a&capacity=64MiB",
        f"file://{tmp_path}/b?tier_name=b&tier_write=write_back&capacity=64MiB",
    ]
    with closing(open_backend(urls)) as store:
        assert isinstance(store, TierChain)
        place(tier(store, 0), plain[:3])
        place(tier(store, 1), plain)
        assert union(store)[0] == sum(item.meta.length for item in plain)
        store.tiers[1].leave_out("it was unplugged")
        assert union(store)[0] == sum(item.meta.length for item in plain[:3])


def test_a_chain_counts_again_after_a_while_and_ends_at_once() -> None:
    with closing(open_backend(TWO)) as store:
        assert isinstance(store, TierChain)
        counted = UnionWorth(lambda: store.tiers, every=0.0)
        until(lambda: bool(counted.latest()))
        assert counted.latest()["restorable_bytes"] == 0
        place(tier(store, 0), ITEMS)
        until(lambda: counted.latest()["restorable_bytes"] != 0)
        counted.close()
    rare = UnionWorth(lambda: pytest.fail("it was closed"), every=0.0)
    rare.close()
    assert rare.latest() == {}
