"""Tiers that are written back: objects come down when the tier above is about to evict them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest
from tiercache_backends.chain import TierChain
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.file import FileBackend
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.memory import MemoryBackend

from tests.faulty import Outage
from tests.storage_backends.chain.hooks import is_ahead
from tests.storage_backends.chain.stores import Hanging
from tests.waiting import until
from tiercache.core import ObjectKey
from tiercache.errors import UnavailableError
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend, TierReport
from tiercache.testing.conformance.hooks import STORED
from tiercache.testing.objects import NAMESPACE, chain, fetch, key, payload, state_of, to_set

MIB = 1 << 20
UPPER, LOWER = 8 * MIB, 64 * MIB
PAGE, STATE, PAGES = 40_000, 60_000, 5
BACK = {"write": WritePolicy.BACK}

Make = Callable[..., TierChain]
Opener = Callable[[Path], StorageBackend]
UPPERS: dict[str, Opener] = {
    "memory": lambda path: MemoryBackend(UPPER),
    "file": lambda path: FileBackend(str(path / "upper"), UPPER),
    "lmdb": lambda path: LmdbBackend(str(path / "upper"), UPPER),
}


def lower_in(path: Path) -> StorageBackend:
    return FileBackend(str(path / "lower"), LOWER)


def turn(name: object) -> list[SetItem]:
    """A conversation: its pages, and the state at its end."""
    pages = [
        to_set(k, payload(k, PAGE), parent=parent, depth=n + 1)
        for n, (k, parent) in enumerate(chain(name, PAGES))
    ]
    state = state_of((name, PAGES - 1))
    return [*pages, to_set(state, payload(state, STATE), parent=state.page_key)]


def report(store: TierChain, n: int) -> TierReport:
    return store.usage().tiers[n]


def missing(store: StorageBackend, items: Sequence[SetItem]) -> list[ObjectKey]:
    keys = [item.key for item in items]
    return [k for k, there in zip(keys, store.exists(keys), strict=True) if not there]


@pytest.mark.parametrize(
    "kind",
    ["memory", pytest.param("file", marks=pytest.mark.slow), pytest.param("lmdb", marks=pytest.mark.slow)],
)
def test_nothing_that_can_be_restored_is_lost(chain_over: Make, tmp_path: Path, kind: str) -> None:
    upper, lower = UPPERS[kind](tmp_path), lower_in(tmp_path)
    store = chain_over(upper, lower, settings={1: BACK})
    store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
    stored: list[SetItem] = []
    for name in range(60):
        items = turn(name)
        assert set(store.set(items)) == {STORED}
        stored += items
        if name >= 3:  # an old conversation stays in use
            assert fetch(store, key((name % 3, 0)), PAGE) == payload(key((name % 3, 0)), PAGE)
        until(lambda: is_ahead(upper, lower))
        assert name % 10 or not missing(store, stored), f"turn {name}"
    assert len(missing(upper, stored)) > len(stored) // 3, "the upper tier evicted many of them"
    for item in stored:
        assert fetch(store, item.key, item.meta.length) == payload(item.key, item.meta.length)
    assert report(store, 1).dropped == 0


def test_nothing_is_copied_while_the_upper_tier_has_room(chain_over: Make) -> None:
    """States are written through by the same mover, so it has had its chance to copy pages."""
    upper, lower = MemoryBackend(UPPER), MemoryBackend(LOWER)
    pools = {"write": {"": WritePolicy.THROUGH, "kv": WritePolicy.BACK}}
    store = chain_over(upper, lower, settings={1: pools})
    items = [item for name in range(20) for item in turn(name)]
    for name in range(20):
        store.set(turn(name))
        until(lambda name=name: lower.exists([state_of((name, PAGES - 1))]) == [True])
    assert len(missing(lower, items)) == 20 * PAGES
    for name in range(20, 32):
        store.set(turn(name))
        until(lambda: is_ahead(upper, lower))
    until(lambda: not missing(lower, turn(0)))
    assert missing(lower, turn(31)), "what is warm stays above"


@pytest.mark.parametrize("write", [WritePolicy.BACK, WritePolicy.THROUGH])
def test_what_is_deleted_early_is_not_written(chain_over: Make, write: WritePolicy) -> None:
    upper, lower = MemoryBackend(UPPER), MemoryBackend(LOWER)
    store = chain_over(upper, lower, settings={1: {"write": write}})
    for name in range(60):
        store.set(turn(name))
        store.flush()
        if name >= 3:
            store.delete([item.key for item in turn(name - 3)])
    written = report(store, 1).written_bytes
    through = 60 * (PAGES * PAGE + STATE)
    assert written == (0 if write is WritePolicy.BACK else through)


def test_a_tier_that_comes_back_gets_what_is_cold_by_then(chain_over: Make) -> None:
    upper, inner = MemoryBackend(UPPER), MemoryBackend(LOWER)
    lower = Outage(inner)
    store = chain_over(upper, lower, settings={1: BACK})
    lower.begin()
    until(lambda: report(store, 1).health == "out")
    for name in range(40):
        assert STORED in store.set(turn(name))
    assert inner.usage().objects == 0
    lower.end()
    until(lambda: upper.usage().used_bytes > 0.8 * UPPER and is_ahead(upper, inner))
    assert inner.usage().objects < upper.usage().objects


def test_while_the_tier_above_is_out_the_next_one_is_watched(chain_over: Make) -> None:
    upper, between, lower = MemoryBackend(UPPER), Outage(MemoryBackend(LOWER)), MemoryBackend(LOWER)
    store = chain_over(upper, between, lower, settings={1: BACK, 2: BACK})
    between.begin()
    until(lambda: report(store, 1).health == "out")
    for name in range(60):
        store.set(turn(name))
        until(lambda: is_ahead(upper, lower))
    assert not missing(store, [item for name in range(60) for item in turn(name)])
    assert lower.usage().objects


def test_what_is_evicted_before_it_is_copied_counts_as_dropped(chain_over: Make) -> None:
    upper, inner = MemoryBackend(UPPER), MemoryBackend(LOWER)
    lower = Hanging(inner, "set")
    store = chain_over(upper, lower, settings={1: BACK})
    lower.hang()
    names: list[int] = []

    def store_more(objects: int) -> None:
        new = range(len(names), len(names) + objects)
        assert set(store.set([to_set(key(n), payload(n, 8000)) for n in new])) == {STORED}
        names.extend(new)

    while report(store, 1).waiting <= 64 and len(names) < 2000:  # more than one batch waits
        store_more(10)
    known = report(store, 1).waiting
    store_more(800)
    lower.release()
    until(lambda: report(store, 1).dropped > 0 and report(store, 1).waiting == 0)
    until(lambda: is_ahead(upper, inner))
    lost = store.exists([key(n) for n in names]).count(False)
    assert 0 < report(store, 1).dropped <= min(lost, known)


PROMOTING = {**BACK, "promote": Promotion.ALWAYS}
OLD = key(("old", 0))
"""Object that only the lower tier has, after `fill`."""


class Mute(MemoryBackend):
    """A store that cannot say what it evicts next while `fault` is set, which is called first."""

    fault: Callable[[], object] | None = None
    asked = 0

    def coldest(self, nbytes):
        self.asked += 1
        if self.fault is not None:
            self.fault()
            raise UnavailableError("not now")
        return super().coldest(nbytes)


def fill(store: TierChain, upper: StorageBackend, lower: StorageBackend, first: int = 0) -> None:
    """Store turns until the old one is in the lower tier alone, and everything is copied that must be."""
    store.set(turn("old"))
    for name in count(first):
        if len(missing(upper, turn("old"))) == len(turn("old")):
            break
        store.set(turn(name))
        until(lambda: is_ahead(upper, lower))
    until(lambda: report(store, 1).waiting == 0)


def promoted(store: TierChain, upper: StorageBackend) -> bool:
    """Read the old object, and return whether the upper tier has it by now."""
    assert fetch(store, OLD, PAGE) == payload(OLD, PAGE)
    return upper.exists([OLD]) == [True]


class Counting(MemoryBackend):
    """A store that counts how often each object is written to it."""

    writes: Counter[ObjectKey]

    def set(self, items):
        self.writes.update(item.key for item in items)
        return super().set(items)


def test_a_promoted_object_is_not_written_again(chain_over: Make) -> None:
    upper, lower = MemoryBackend(UPPER), Counting(LOWER)
    lower.writes = Counter()
    store = chain_over(upper, lower, settings={1: PROMOTING})
    old = turn("old")
    fill(store, upper, lower)
    for item in old:
        assert fetch(store, item.key, item.meta.length) == payload(item.key, item.meta.length)
    until(lambda: not missing(upper, old))
    fill(store, upper, lower, 1000)
    assert not missing(lower, old)
    assert set(lower.writes.values()) == {1}, "each object was written once"


def test_a_tier_that_cannot_say_what_it_evicts_gets_no_promotions_and_is_not_asked_in_a_loop(chain_over):
    upper, lower = Mute(UPPER), MemoryBackend(LOWER)
    store = chain_over(upper, lower, settings={1: PROMOTING})
    fill(store, upper, lower)
    last = turn("last")
    store.set(last)
    until(lambda: is_ahead(upper, lower))
    # A hit before each failure, so that the tier is not left out.
    upper.fault = lambda: fetch(store, last[0].key, PAGE)
    before, asked = report(store, 0).dropped, upper.asked
    for name in range(1000, 1010):  # enough for the next look to be due
        store.set(turn(name))
    assert not promoted(store, upper)
    until(lambda: report(store, 0).dropped > before)
    assert upper.asked - asked < 100
    assert [tier.health for tier in store.tiers] == ["serving", "serving"]
    upper.fault = None
    until(lambda: promoted(store, upper))


def test_nothing_is_promoted_while_copies_to_the_tier_below_do_not_end(chain_over: Make) -> None:
    upper, inner = MemoryBackend(UPPER), MemoryBackend(LOWER)
    lower = Hanging(inner, "set")
    store = chain_over(upper, lower, settings={1: PROMOTING})
    fill(store, upper, inner)
    lower.hang()
    behind = [turn(name) for name in range(1000, 1010)]
    for items in behind:
        store.set(items)
    assert lower.entered.wait(30)
    before = report(store, 0).dropped
    assert not promoted(store, upper)
    until(lambda: report(store, 0).dropped > before)
    assert not promoted(store, upper)
    lower.release()
    until(lambda: promoted(store, upper))
    until(lambda: is_ahead(upper, inner))
    assert not missing(store, [item for items in behind for item in items])
