"""A controller over a chain of tiers: what one tier has lost or does not answer comes from the next one, byte
for byte, or is a miss.

The engine of the harness checks every byte that it restores.
"""

import shutil

import pytest
from tiercache_backends.chain import TierChain
from tiercache_backends.chain.settings import WritePolicy
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, P, evict_checked, prompt
from tests.controller.test_hung_store import Hanging, free_blocks, until
from tests.storage_backends.chain.hooks import tier_of
from tiercache.controller import ControllerOptions
from tiercache.core import Outcome, Tier
from tiercache.storage.base import SetItem
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import fetch

CHAT = [*prompt(1, 2, 3), 5]
OBJECTS = 4
"""Objects of `CHAT`: three pages, and the state behind them."""


def chain_of(*stores, deadlines=(), **lower):
    """A chain over open stores, of which `lower` has the settings of the last."""
    deadlines = deadlines or [30.0] * len(stores)
    settings = [{"name": f"tier-{n}", "deadline": deadline} for n, deadline in enumerate(deadlines)]
    settings[-1] |= lower
    return TierChain(
        [
            tier_of(lambda store=store: store, store.capabilities, **of)
            for store, of in zip(stores, settings, strict=True)
        ]
    )


def served_and_flushed(engine, *conversations):
    for conversation in conversations or (CHAT,):
        engine.keep(conversation, Tier.DEVICE, Tier.HOST)


def contents(store):
    """The payloads of a store by key, each checked."""
    found = {}
    for entry in store.scan_all():
        found[entry.key] = fetch(store, entry.key, entry.meta.length)
        assert isinstance(found[entry.key], bytes)
    return found


@pytest.mark.parametrize("kinds", [("memory", "file"), ("file", "file"), ("file", "lmdb")])
def test_a_deleted_tier_costs_nothing_that_the_next_one_has(tmp_path, kinds):
    """Write-through lands in both tiers; the second restores what the first lost, and fills it again."""
    urls = [
        "memory://" if kind == "memory" else f"{kind}://{tmp_path}/{n}?capacity=16MiB"
        for n, kind in enumerate(kinds)
    ]
    chain = open_backend(urls)
    engine = Engine(chain)
    served_and_flushed(engine)
    assert [tier.objects for tier in chain.usage().tiers] == [OBJECTS, OBJECTS]
    assert engine.serve(CHAT) == 3 * P
    assert [tier.read_objects for tier in chain.usage().tiers] == [OBJECTS, 0]
    engine.settle()
    engine.controller.close()
    with open_backend(urls[1]) as second:
        assert len(contents(second)) == OBJECTS
    shutil.rmtree(tmp_path / "0", ignore_errors=True)

    chain = open_backend(urls)
    engine = Engine(chain)
    for _ in range(2):
        assert chain.usage().tiers[0].objects == 0
        assert engine.serve(CHAT) == 3 * P
        engine.settle()
        evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert [tier.objects for tier in chain.usage().tiers] == [OBJECTS, OBJECTS], "the second read promotes"
    assert engine.serve(CHAT) == 3 * P
    assert [tier.read_objects for tier in chain.usage().tiers] == [OBJECTS, 2 * OBJECTS]
    engine.settle()
    engine.check()


@pytest.mark.parametrize("upper_pool", [KV, MAMBA])
def test_a_hybrid_hit_is_put_together_from_two_tiers_or_is_none(upper_pool):
    """Pages come from one tier and their states from the other; without the states, nothing is restored."""
    whole = MemoryBackend()
    served_and_flushed(Engine(whole), [*prompt(1, 2), 5], CHAT)
    parts = [MemoryBackend(), MemoryBackend()]
    entries = list(whole.scan_all())
    for part, is_upper in zip(parts, (True, False), strict=True):
        own = [entry for entry in entries if (entry.key.pool is upper_pool) == is_upper]
        payloads = [memoryview(fetch(whole, entry.key, entry.meta.length)) for entry in own]
        items = [SetItem(e.key, [data], e.meta) for e, data in zip(own, payloads, strict=True)]
        assert set(part.set(items)) == {Outcome.STORED}
    assert {entry.key.pool for entry in entries} == {KV, MAMBA}
    chain = chain_of(*parts, write=WritePolicy.SELECTIVE, write_after=255)
    assert restored(chain) == 3 * P
    assert all(tier.read_objects for tier in chain.usage().tiers)

    states = {entry.meta.depth: entry.key for entry in chain.scan_all() if entry.key.pool is MAMBA}
    assert chain.delete([states[3]]) == [True]
    assert restored(chain) == 2 * P, "the state before it is the deepest that is whole"
    assert chain.delete(list(states.values())) == [True] * len(states)
    assert restored(chain) == 0


def restored(chain):
    """Serve `CHAT` in another process, as far as the cache can tell; returns the restored depth."""
    engine = Engine(chain)
    depth = engine.serve(CHAT)
    engine.settle()
    engine.check()
    return depth


OTHER = [*prompt(7, 8, 9), 5]
SHORT, LONG = 0.5, 60.0
"""Deadlines of a tier, in seconds."""
PATIENT = ControllerOptions(restore_deadline=20.0)
"""Options with which the chain gives a call up, if the tier's deadline is `SHORT`, and not the controller."""


@pytest.fixture
def hanging():
    store = Hanging()
    yield store
    store.release()


def test_a_read_that_a_tier_gives_up_is_a_miss_and_the_next_one_comes_from_the_tier_below(hanging):
    """Blocks that the late read may still fill are withheld until it has returned."""
    chain = chain_of(hanging, MemoryBackend(), deadlines=(SHORT, LONG))
    engine = Engine(chain, options=PATIENT, blocks=64)
    served_and_flushed(engine, CHAT, OTHER)
    hanging.hangs = {"get"}
    assert engine.serve(CHAT) == 0
    assert engine.serve(OTHER) == 3 * P, "the tier is out by now"
    assert engine.metrics.total("storage_hangs_total") == 0, "for the controller, the store answers"
    engine.settle()
    evict_checked(engine, Tier.DEVICE, Tier.HOST)
    assert engine.arena.withheld > 0
    assert engine.arena.available + engine.arena.withheld == engine.arena.blocks
    assert engine.serve(CHAT) == 3 * P
    engine.settle()
    hanging.release()
    until(engine, lambda: engine.arena.withheld == 0)
    assert free_blocks(engine) == engine.arena.blocks
    until(engine, lambda: chain.usage().tiers[0].health == "serving")
    before = chain.usage().tiers[0].read_objects
    assert engine.serve(OTHER) == 3 * P
    assert chain.usage().tiers[0].read_objects > before
    engine.settle()
    engine.check()
