"""Storing and reading back: vLLM's manager, primary tier and shared region over tiercache's stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import Locality, Medium, TierFilter, TierMatcher
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.engines.vllm import rig
from tests.engines.vllm.rig import HIT, MISS, RETRY, ROW, WINDOW, Engine, content, key, keys
from tiercache.core import PoolName
from tiercache.storage.registry import open_backend


@pytest.fixture(params=["file", "lmdb"])
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, object]:
    return {"storage": f"{request.param}://{tmp_path}/store?capacity=64MiB", "revision": "r1"}


@pytest.fixture
def file_tier(tmp_path: Path) -> dict[str, object]:
    return {"storage": f"file://{tmp_path}/store?capacity=64MiB", "revision": "r1"}


def test_a_lookup_says_retry_then_pending_then_hit_and_the_bytes_are_right(tier: dict[str, object]) -> None:
    with Engine(tier) as engine:
        assert engine.row_bytes == ROW
        engine.store("a", "b", "c")
        engine.store(*range(rig.ROWS))  # their rows are needed: the primary tier evicts them
        said = engine.answers(keys("a", "b", "z", "c"))
        assert said[0] == [RETRY] * 4
        assert [rig.HIT_PENDING, rig.HIT_PENDING, MISS, rig.HIT_PENDING] in said
        assert said[-1] == [HIT, HIT, MISS, HIT]
        for name in "abc":
            assert engine.read(keys(name)[0]) == content(name)


def test_groups_do_not_meet(tier: dict[str, object]) -> None:
    """The same block hash in two groups is two objects, and a group that vLLM does not offload has none."""
    with Engine(tier) as engine:
        context = engine.request()
        both = [*keys("a"), *keys("a", group=WINDOW)]
        for each in both:
            context.set_offload_key_position(each, 16)
        engine.offer(both, ["full", "window"], context)
        engine.settle()
        engine.finish(context)
        engine.evict()
        assert engine.answers([*keys("a"), *keys("a", group=WINDOW), *keys("a", group=1)])[-1] == [
            HIT,
            HIT,
            MISS,
        ]
        assert engine.read(keys("a")[0]) == content("full")
        assert engine.read(keys("a", group=WINDOW)[0]) == content("window")


def test_objects_know_what_they_depend_on(file_tier: dict[str, object]) -> None:
    """A page on the page before it, and a window on its page, so that a full store keeps prefixes whole."""
    with Engine(file_tier) as engine:
        engine.store("a", "b", "c")
        context = engine.request()
        context.set_offload_key_position(key("c", WINDOW), 48)
        engine.offer([key("c", WINDOW)], ["c"], context)
        engine.settle()
    with open_backend(str(file_tier["storage"])) as store:
        entries = list(store.scan_all())
        [record] = store.namespaces()
    pages = {entry.meta.depth: entry for entry in entries if entry.key.pool is PoolName.KV}
    [window] = [entry for entry in entries if entry.key.pool is PoolName.SWA]
    assert [pages[depth].meta.parent for depth in (1, 2, 3)] == [
        None,
        pages[1].key.page_key,
        pages[2].key.page_key,
    ]
    assert window.meta.parent == window.key.page_key == pages[3].key.page_key
    assert window.meta.depth == 3
    assert {entry.meta.namespace for entry in entries} == {record.namespace}
    assert record.states
    assert (record.identity["model"], record.identity["revision"], record.identity["kv_dtype"]) == (
        "some/model",
        "r1",
        "bfloat16",
    )


def test_pages_of_a_later_job_hang_on_those_before_them(file_tier: dict[str, object]) -> None:
    """A request computes page after page, others between, and does not offer those that the GPU had."""
    with Engine(file_tier) as engine:
        engine.store("a", "b")
        one, other = engine.request(), engine.request()
        for context, names in ((one, "abcde"), (other, "axy")):
            for i, name in enumerate(names):
                context.set_offload_key_position(key(name), 16 * (i + 1))
        for context, name in ((one, "c"), (other, "x"), (one, "d"), (other, "y"), (one, "e")):
            engine.offer([key(name)], [name], context)
            engine.settle()
        # private: vLLM knows its own hashes of blocks only
        page = {name: engine.tier._jobs._keys.of(key(name)).page_key for name in "abcdexy"}
    with open_backend(str(file_tier["storage"])) as store:
        found = {entry.key.page_key: (entry.meta.parent, entry.meta.depth) for entry in store.scan_all()}
    expected = {
        "a": (None, 1), "b": ("a", 2), "c": ("b", 3), "d": ("c", 4), "e": ("d", 5), "x": ("a", 2),
        "y": ("x", 3),
    }  # fmt: skip
    assert found == {
        page[name]: (parent and page[parent], depth) for name, (parent, depth) in expected.items()
    }


def test_depths_count_what_is_stored(tmp_path: Path) -> None:
    """Chunks of two blocks, and a last one that is not full: each is one deeper than the one before it."""
    tier = {"storage": f"file://{tmp_path}/store?capacity=64MiB", "revision": "r1"}
    with Engine(tier, blocks_per_chunk=2) as engine:
        context = engine.request()
        for name, end in (("a", 32), ("b", 64), ("tail", 80)):
            context.set_offload_key_position(key(name), end)
        context.set_offload_key_position(key("b", WINDOW), 64)
        engine.offer([key("tail"), key("b"), key("a"), key("b", WINDOW)], ["tail", "b", "a", "b"], context)
        engine.settle()
    with open_backend(str(tier["storage"])) as store:
        entries = {
            entry.key.page_key: entry.meta for entry in store.scan_all() if entry.key.pool is PoolName.KV
        }
        [window] = [entry for entry in store.scan_all() if entry.key.pool is PoolName.SWA]
    depths = {meta.depth: (page, meta.parent) for page, meta in entries.items()}
    assert [depths[depth][1] for depth in (1, 2, 3)] == [None, depths[1][0], depths[2][0]]
    assert (window.meta.parent, window.meta.depth) == (depths[2][0], 2)


def test_what_was_only_hit_above_stays_in_a_full_store(tmp_path: Path) -> None:
    tier = {"storage": f"file://{tmp_path}/store?capacity=4MiB", "revision": "r1"}
    with Engine(tier) as engine:
        engine.store("hot", "cold")
        for n in range(600):
            above = engine.request()
            above.set_offload_key_position(key("hot"), 16)
            engine.finish(above)
            engine.store(n)
    with Engine(tier) as engine:
        assert engine.found("hot", "cold") == [True, False]


def test_what_the_tier_says_of_itself(file_tier: dict[str, object]) -> None:
    with Engine(file_tier | {"locality": "REMOTE"}) as engine:
        assert (engine.tier.medium, engine.tier.locality) == (Medium.STORAGE, Locality.REMOTE)
        assert engine.tier.cache_hit_source is CacheHitSource.DISK
        engine.store("a")
        engine.evict()
        here = engine.request()
        here.load_tier_filter = TierFilter((TierMatcher(locality=Locality.LOCAL),))
        assert engine.answers(keys("a"), here) == [[MISS]], "a request that wants local tiers only"
        assert engine.found("a") == [True]
