"""KV events of the tier, as vLLM's manager, tracker and publisher take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingKVEventsConfig,
    OffloadKey,
    get_offload_block_hash,
)

from tests.engines.vllm.rig import ROW, WINDOW, Engine, job, key, keys, outcome, store_of
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch
from tests.waiting import until
from tiercache.core import ObjectKey
from tiercache.errors import ConfigError
from tiercache.integrations.vllm import tier as tier_module
from tiercache.storage.registry import open_backend


def engine_on(*urls: str, row: int = ROW, **settings: Any) -> Engine:
    """An engine whose KV events are on, over a store or a chain."""
    tier = {"storage": list(urls), "revision": "r1", "enable_kv_events": True} | settings
    return Engine(tier, enable_kv_cache_events=True, worker_kv_bytes_per_block=row)


def taken(engine: Engine) -> list[tuple[bool, OffloadKey]]:
    """Take what vLLM would now be told of this tier: whether it is removed, and the key."""
    found = [event for event in engine.manager.take_events() if event.ownership == tier_module.OWNER]
    assert all(event.medium is Medium.STORAGE and event.removal_expected for event in found)
    return [(event.removed, each) for event in found for each in event.keys]


def objects(engine: Engine, *names: object) -> list[ObjectKey]:
    """Object keys of blocks of the full group."""
    # private: vLLM knows its own hashes of blocks only
    return [engine.tier._jobs._keys.of(each) for each in keys(*names)]


class Router:
    """Subscriber that keeps what it was told, and finds fault with an event that changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.holds: set[OffloadKey] = set()

    def listen(self) -> set[OffloadKey]:
        for removed, each in taken(self.engine):
            assert (each in self.holds) == removed, "told twice, or removed without having been stored"
            (self.holds.remove if removed else self.holds.add)(each)
        return self.holds

    def until(self, holds: Callable[[set[OffloadKey]], bool]) -> None:
        until(lambda: holds(self.listen()))


def test_vllm_is_told_once_of_what_was_stored(tmp_path: Path) -> None:
    with engine_on(f"file://{tmp_path}/store?capacity=64MiB", locality="LOCAL") as engine:
        engine.store("a", "b")
        context = engine.request()
        context.set_offload_key_position(key("b", WINDOW), 32)
        engine.offer([key("b", WINDOW)], ["b"], context)
        engine.settle()
        [event] = [e for e in engine.manager.take_events() if e.ownership == tier_module.OWNER]
        assert event.keys == [*keys("a", "b"), key("b", WINDOW)]
        assert (event.medium, event.removed, event.locality) == (Medium.STORAGE, False, Locality.LOCAL)
        assert taken(engine) == []
        engine.store("a", "c")  # the primary tier has a already, and so has the router
        assert taken(engine) == [(False, key("c"))]


def test_without_vllms_events_the_tier_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = {"storage": f"file://{tmp_path}/store?capacity=64MiB", "revision": "r1"}
    with Engine(tier, enable_kv_cache_events=True) as engine:
        engine.store("a")
        assert taken(engine) == []
    assert "enable_kv_events" not in caplog.text
    with Engine(tier | {"enable_kv_events": True}) as engine:
        engine.store("b")
        assert taken(engine) == []
    assert caplog.text.count("enable_kv_cache_events in --kv-events-config") == 1
    with pytest.raises(ConfigError, match="setting 'enable_kv_events': 'perhaps' is neither true nor false"):
        Engine(tier | {"enable_kv_events": "perhaps"})


def test_what_the_store_evicts_is_told_as_removed(tmp_path: Path) -> None:
    prompts = 40
    with engine_on(f"file://{tmp_path}/store?capacity=4MiB", row=200_000) as engine:
        router = Router(engine)
        for i in range(prompts):
            engine.store(f"prompt {i}")
            router.listen()
        store = store_of(engine)
        assert 0 < store.usage().objects < prompts
        router.until(lambda holds: len(holds) == store.usage().objects)
        engine.evict()
        router.holds.clear()  # vLLM told it that all blocks are cleared
        found = [i for i in range(prompts) if engine.found(f"prompt {i}") == [True]]
        assert len(found) == store.usage().objects
        router.until(lambda holds: holds == {key(f"prompt {i}") for i in found})


def test_a_chunk_that_moves_down_a_chain_is_removed_when_the_last_copy_goes(tmp_path: Path) -> None:
    upper, lower = f"memory://?capacity={4 * ROW}", f"file://{tmp_path}/store?capacity=64MiB"
    with engine_on(upper, lower) as engine:
        router = Router(engine)
        store = store_of(engine)
        for i in range(12):
            engine.store(f"prompt {i}")
            # The next chunk may push this one out of the upper tier before it was copied: then it is gone.
            until(lambda i=i: store.usage().tiers[1].objects > i)  # type: ignore[misc]
        assert store.usage().tiers[0].objects <= 4
        router.until(lambda holds: len(holds) == 12)
        sleep(0.5)  # the watch looks four times a second, also at what it is not told of
        assert len(router.listen()) == 12
        assert store.delete(objects(engine, "prompt 3")) == [True]
        router.until(lambda holds: holds == {key(f"prompt {i}") for i in range(12) if i != 3})


@pytest.mark.parametrize("how", ["lookup", "load"])
def test_what_another_process_removed_shows_at_the_next_question(how: str) -> None:
    with Daemon("unix", scratch()) as daemon:
        url = f"grpc://{daemon.where}"
        with engine_on(url) as engine, open_backend(url) as other:
            router = Router(engine)
            engine.store("a", "b", "c")
            assert len(router.listen()) == 3
            assert other.delete(objects(engine, "c")) == [True]
            engine.evict()
            router.holds.clear()
            assert engine.found("a", "b") == [True, True]
            assert router.listen() == {key("a"), key("b")}
            assert other.delete(objects(engine, "b")) == [True]
            if how == "lookup":
                engine.evict()
                router.holds.clear()
                assert engine.found("a") == [True]
                assert engine.found("b") == [False]
            else:
                engine.tier.submit_load(job(77, [key("b")], [0], load=True))
                assert not outcome(engine.tier, 77).success
            router.until(lambda holds: holds == {key("a")})
            engine.evict()
            router.holds.clear()
            engine.store("b")
            router.until(lambda holds: holds == {key("b")})


def test_an_outage_removes_nothing() -> None:
    with Daemon("unix", scratch()) as daemon, engine_on(f"grpc://{daemon.where}?timeout=1s") as engine:
        router = Router(engine)
        engine.store("a", "b")
        assert len(router.listen()) == 2
        daemon.kill()
        assert engine.found("x") == [False]
        engine.tier.submit_load(job(77, [key("a")], [0], load=True))
        assert not outcome(engine.tier, 77).success
        assert len(router.listen()) == 2


def test_a_step_is_told_of_a_bounded_number_and_nothing_is_lost(tmp_path, monkeypatch):
    # private: the limit is no setting
    monkeypatch.setattr(tier_module, "_EVENTS_PER_STEP", 3)
    with engine_on(f"file://{tmp_path}/store?capacity=64MiB") as engine:
        engine.store(*range(7))
        said = [taken(engine) for _ in range(4)]
        assert [len(each) for each in said] == [3, 3, 1, 0]
        assert [name for each in said for _, name in each] == keys(*range(7))


def test_vllms_tracker_gives_tokens_to_stored_chunks_and_forgets_removed_ones(tmp_path: Path) -> None:
    """vLLM's own payload: the tokens of a chunk are kept as long as the tier has told of it."""
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    group: Any = SimpleNamespace(
        sliding_window_size_in_chunks=None, tokens_per_chunk=16, tokens_per_block=16, hashes_per_chunk=1,
        group_idx=0,
        kv_event_group_spec=SimpleNamespace(
            kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=None
        ),
    )  # fmt: skip
    wanted = keys("a", "b")
    request: Any = SimpleNamespace(
        block_hashes=[get_offload_block_hash(each) for each in wanted],
        all_token_ids=list(range(32)),
        lora_request=None,
    )
    with engine_on(f"file://{tmp_path}/store?capacity=64MiB") as engine:
        for i, each in enumerate(wanted):
            tracker.record_store(request, group, i, each)
        engine.store("a", "b")
        said = list(tracker.take_events(engine.manager.take_events()))
        stored = [e for e in said if isinstance(e, BlockStored) and e.medium == "STORAGE"]
        assert [(e.token_ids, e.block_size, e.ownership) for e in stored] == [
            (list(range(16)), 16, "tiercache"),
            (list(range(16, 32)), 16, "tiercache"),
        ]
        assert stored[1].parent_block_hash == stored[0].block_hashes[0]
        batch = KVEventBatch(ts=1.0, events=said)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events == said
        engine.evict()  # vLLM's primary tier lets go first
        list(tracker.take_events(engine.manager.take_events()))
        assert engine.found("a") == [True]
        list(tracker.take_events(engine.manager.take_events()))
        store = store_of(engine)
        assert store.delete(objects(engine, "a", "b")) == [True, True]
        told: list[Any] = []
        until(lambda: told.extend(tracker.take_events(engine.manager.take_events())) or told)
        removed = [e for e in told if isinstance(e, BlockRemoved) and e.medium == "STORAGE"]
        assert [e.block_hashes for e in removed] == [stored[0].block_hashes]
