"""Tiers that fail, forget, fill up or are read-only, and the copies between them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from errno import EIO, ENOSPC

import pytest
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.chain.tier import Tier
from tiercache_backends.file import FileBackend
from tiercache_backends.memory import MemoryBackend

from tests.faults import FaultEnv
from tests.faulty import Outage
from tests.storage_backends.chain.stores import Broken, Forgetful, Hanging, Hiccup, health, held, lose
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import RefusedError, StorageError, UnavailableError
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord
from tiercache.testing.objects import NAMESPACE, fetch, key, payload, put, to_get

HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 5000


def test_a_store_that_breaks_its_contract_is_left_out(chain_over):
    broken, below = Broken(), MemoryBackend()
    chain = chain_over(broken, below)
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    broken.broken = True
    for _ in range(3):
        assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)
    [first, _] = chain.usage().tiers
    assert (first.health, "a bug in a plug-in" in first.why) == ("out", True)
    broken.broken = False
    until(lambda: health(chain) == ["serving", "serving"])


def test_a_store_that_forgets_is_never_served(chain_over):
    chain = chain_over(Forgetful(), MemoryBackend())
    [first, second] = chain.usage().tiers
    assert (first.health, second.health) == ("out", "serving")
    assert "does not return what it has just stored" in first.why
    assert put(chain, key("a"), payload("a", SIZE)) is STORED
    assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)


def test_wrong_lengths_of_one_caller_do_not_take_a_tier_from_the_others(chain_over):
    chain = chain_over(MemoryBackend(), MemoryBackend())
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    for _ in range(20):
        assert chain.get([to_get(key("a"), SIZE - 1)]) == [Outcome.ERROR]
    assert health(chain) == ["serving", "serving"]


def test_a_disk_that_fails_costs_no_object_of_the_tier_below(chain_over, tmp_path):
    env = FaultEnv()
    disk, below = FileBackend(str(tmp_path / "disk"), 16 << 20, env=env), MemoryBackend()
    chain = chain_over(disk, below)
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    env.fail("preadv", times=1_000_000, error=EIO)
    assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)
    env.clear()
    until(lambda: health(chain) == ["serving", "serving"])
    env.fail("pwritev", times=1_000_000, error=ENOSPC)
    assert put(chain, key("b"), payload("b", SIZE)) is STORED, "a full disk is skipped"
    env.clear()
    env.fail("pwritev", times=1_000_000, error=EIO)
    until(lambda: put(chain, key("c"), payload("c", SIZE)) is STORED)
    assert health(chain)[0] != "serving", "the canary has found out what is wrong"
    assert held(below, "a", "b", "c") == [True] * 3
    env.clear()
    until(lambda: health(chain) == ["serving", "serving"])
    assert put(chain, key("d"), payload("d", SIZE)) is STORED
    assert held(disk, "d") == [True]


@pytest.mark.parametrize(("promote", "reads"), [("second", 2), ("always", 1), ("never", None)])
def test_an_object_of_a_lower_tier_comes_up_as_the_policy_says(chain_over, promote, reads):
    upper, lower = MemoryBackend(), MemoryBackend()
    put(lower, key("a"), payload("a", SIZE))
    chain = chain_over(upper, lower, settings={1: {"promote": Promotion(promote)}})
    for n in range(1, 4):
        assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)
        chain.flush()
        assert held(upper, "a") == [reads is not None and n >= reads]


def test_write_through_selective_waits_for_reads(chain_over):
    upper, lower = MemoryBackend(), MemoryBackend()
    chain = chain_over(upper, lower, settings={1: {"write": WritePolicy.SELECTIVE, "write_after": 2}})
    for name in ("a", "b"):
        put(chain, key(name), payload(name, SIZE))
    for expected in (False, True):
        assert fetch(chain, key("a"), SIZE) == payload("a", SIZE)
        chain.flush()
        assert held(lower, "a", "b") == [expected, False]
    assert chain.usage().tiers[1].written_bytes == SIZE


def test_a_read_only_tier_is_read_and_never_written(chain_over):
    upper, archive = MemoryBackend(), MemoryBackend()
    put(archive, key("old"), payload("old", SIZE))
    chain = chain_over(upper, archive, settings={1: {"read_only": True}})
    assert health(chain) == ["serving", "read-only"]
    assert fetch(chain, key("old"), SIZE) == payload("old", SIZE)
    assert put(chain, key("new"), payload("new", SIZE)) is STORED
    assert put(chain, key("old"), payload("old", SIZE)) is HIT
    chain.flush()
    assert held(archive, "old", "new") == [True, False]
    with pytest.raises(RefusedError, match="read-only and has 1 of these objects"):
        chain.delete([key("old")])
    assert chain.delete([key("new")]) == [True]


def test_a_budget_of_bytes_a_day_ends_copies(chain_over):
    upper, lower = MemoryBackend(), MemoryBackend()
    # An hour's share of this budget is two objects.
    chain = chain_over(upper, lower, settings={1: {"write_per_day": 48 * SIZE}})
    for n in range(20):
        put(chain, key(n), payload(n, SIZE))
        chain.flush()
    assert lower.usage().objects <= 3
    assert upper.usage().objects == 20
    assert all(fetch(chain, key(n), SIZE) == payload(n, SIZE) for n in range(20))


def test_a_tier_that_comes_back_gets_what_it_missed_and_loses_what_was_deleted(chain_over):
    upper, kept = MemoryBackend(), MemoryBackend()
    away = Outage(kept)
    chain = chain_over(upper, away)
    put(chain, key("deleted"), payload("deleted", SIZE))
    chain.flush()
    away.begin()
    for n in range(5):
        put(chain, key(n), payload(n, SIZE))
        with suppress(StorageError):
            chain.flush()
    until(lambda: health(chain) == ["serving", "out"])
    assert chain.delete([key("deleted")]) == [True]
    chain.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}, states=True))
    assert held(kept, "deleted", 0) == [True, False]
    away.end()
    until(lambda: held(kept, *range(5)) == [True] * 5)
    assert held(kept, "deleted") == [False]
    assert [record.states for record in kept.namespaces()] == [True]
    assert chain.usage().tiers[1].dropped > 0


def test_a_copy_whose_source_fails_for_a_moment_is_made_later(chain_over):
    upper, lower = Hiccup(), MemoryBackend()
    chain = chain_over(upper, lower)
    upper.fails = 1
    put(chain, key("a"), payload("a", SIZE))
    until(lambda: held(lower, "a") == [True])


def test_a_tier_that_is_busy_is_not_left_out(chain_over):
    """A call that finds no thread says nothing of the store, and an examination waits for another time."""
    slow = Hanging(MemoryBackend(), "get")
    settings = {0: {"deadline": 0.1, "threads": 1}}
    chain = chain_over(slow, settings=settings)
    large = 32 << 20  # bytes for which a call gets one second more
    put(chain, key("a"), payload("a", large))
    item = to_get(key("a"), large)
    slow.hang()
    reader = threading.Thread(target=chain.get, args=[[item]])
    reader.start()
    assert slow.entered.wait(30)
    [tier] = chain.tiers
    tier.suspect()
    with pytest.raises(UnavailableError, match="has not begun"):
        tier.exists([key("a")])
    with pytest.raises(UnavailableError, match="has not begun"):
        chain.delete([key("a")])
    assert health(chain) == ["serving"]
    slow.release()
    reader.join()
    # On a busy machine the examination that follows may take longer than the deadline of 0.1 s at first.
    until(lambda: fetch(chain, key("a"), large) == payload("a", large))


def test_what_only_a_tier_that_was_out_has_reaches_the_tier_below(chain_over):
    outages = [Outage(MemoryBackend()) for _ in range(3)]
    chain = chain_over(*outages)
    top, middle, bottom = outages
    for each in (top, bottom):
        each.begin()
    for n in range(5):
        put(chain, key(n), payload(n, SIZE))
    assert held(middle, *range(5)) == [True] * 5
    until(lambda: health(chain) == ["out", "serving", "out"])
    lose(chain, middle)
    bottom.end()
    until(lambda: health(chain) == ["out", "out", "serving"])
    middle.end()
    until(lambda: held(bottom, *range(5)) == [True] * 5)
    top.end()


def test_a_namespace_that_comes_during_an_examination_is_registered(chain_over):
    medium = MemoryBackend()
    away = Outage(medium)
    slow = Hanging(away, "set")
    chain = chain_over(slow, MemoryBackend())
    lose(chain, away)
    assert health(chain) == ["out", "serving"]
    slow.hang()
    away.end()
    assert slow.entered.wait(30), "the canary is on its way"
    chain.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
    slow.release()
    until(lambda: health(chain) == ["serving", "serving"])
    assert [record.namespace for record in medium.namespaces()] == [NAMESPACE]


def test_an_idle_chain_sleeps(monkeypatch):
    """Each look at a tier that wakes the others would make them all look again at once."""
    looks = []
    monkeypatch.setattr(Tier, "tick", lambda tier: looks.append(tier.name) and False)
    with open_backend(["memory://?capacity=1MiB", "memory://?capacity=1MiB"]):
        time.sleep(1.0)
    assert len(looks) <= 40, "one look per 0.2 s and tier is enough; a loop makes thousands"
