"""KV events of a controller over real sockets, and what following them costs nothing of."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
import zmq
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import IDENTITY, KV, MAMBA, PAGES, Engine, P, prompt
from tests.events.rig import ANY, Follower, truth
from tests.waiting import until
from tiercache.controller import ControllerOptions
from tiercache.core import Tier, as_tokens
from tiercache.errors import ConfigError
from tiercache.events import EventKind, Medium, Place
from tiercache.events.settings import EventSettings
from tiercache.events.subscriber import EventSubscriber
from tiercache.keys import Shard, layout_digest, namespace_of, page_keys

OPTIONS = ControllerOptions(restore_deadline=10.0, events=ANY)
NAMESPACE = namespace_of(IDENTITY)


def keys_of(*ids) -> list[bytes]:
    return page_keys(NAMESPACE, as_tokens(prompt(*ids)), P)


def test_a_router_sees_a_prompt_on_every_tier_under_the_keys_that_it_computes():
    with MemoryBackend() as store:
        engine = Engine(store, options=OPTIONS)
        with Follower(engine.controller.publisher) as follower:
            follower.read()
            engine.keep(prompt(1, 2, 3))
            engine.controller.tick()
            keys = keys_of(1, 2, 3)
            places = {Place(Medium.GPU), Place(Medium.CPU), Place(Medium.STORAGE, "store")}
            follower.until(
                lambda: (
                    all(follower.where(key, KV) == places for key in keys)
                    and follower.where(keys[2], MAMBA) == places
                )
            )
            assert not follower.where(keys[0], MAMBA)
            stored = [
                event
                for batch in follower.batches
                for event in batch.events
                if event.kind is EventKind.STORED and event.group.pool is KV and event.place.medium == "GPU"
            ]
            assert [key for event in stored for key in event.keys] == keys
            assert (stored[0].parent, stored[0].depth, stored[0].group.page_size) == (None, 1, P)
            assert stored[0].group.layout == layout_digest(KV, PAGES.fingerprint, Shard())
            engine.controller.evict(Tier.DEVICE)
            engine.controller.tick()
            follower.until(lambda: follower.where(keys[0], KV) == places - {Place(Medium.GPU)})
            assert follower.held("store") == truth(store)
            assert not any(event.tokens for batch in follower.batches for event in batch.events)
            assert engine.controller.close()


def test_routers_that_index_tokens_get_them_and_numbers_for_keys():
    topic = "kv@pod-1@toy"
    settings = replace(ANY, topic=topic, token_ids=True)
    with MemoryBackend() as store, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        engine = Engine(store, options=replace(OPTIONS, events=settings))
        socket.connect(engine.controller.publisher.endpoint)
        socket.subscribe("kv@")
        follower = EventSubscriber(
            engine.controller.publisher.endpoint, engine.controller.publisher.replay_endpoint, topic
        )
        # A subscription takes its time to arrive, so the first prompts may not be heard of.
        until(lambda: engine.serve(prompt(9, 9)) is None or engine.controller.tick() or socket.poll(50))
        engine.serve(prompt(1, 2, 3))
        engine.serve(prompt(1, 2, 4, 5), extra=b"adapter")
        assert engine.controller.close()
        known, told = {None}, {}
        while socket.poll(200):
            heard, _, payload = socket.recv_multipart()
            assert heard.decode() == topic
            for event in msgpack.unpackb(payload)[1]:
                if event["type"] != "BlockStored":
                    continue
                # llm-d takes a span of whole blocks whose parent it knows; Dynamo numbers of 64 bits.
                assert event["block_hashes"] == [
                    int.from_bytes(key[:8] if event["group_idx"] else key[-8:]) for key in event["keys"]
                ]
                assert len(event["token_ids"]) in (0, P * len(event["keys"]))
                if event["token_ids"]:
                    assert (event["kv_cache_spec_kind"], event["block_size"]) == ("full_attention", P)
                    assert event["parent_block_hash"] in known
                    known |= {*event["block_hashes"]}
                    keys = page_keys(NAMESPACE, as_tokens(event["token_ids"]), P, event.get("parent", b""))
                    assert keys == event["keys"]
                    told |= dict.fromkeys(keys, event["medium"])
        assert {*keys_of(1, 2, 3)} <= told.keys()
        assert not told.keys() & {*page_keys(NAMESPACE, as_tokens(prompt(1, 2, 4, 5)), P, extra=b"adapter")}
        # Our own readers have the whole keys.
        stored = {key for batch in follower.read(0.2) for event in batch.events for key in event.keys}
        assert stored >= told.keys()
        follower.close()


def test_a_controller_publishes_what_is_left_when_it_closes_and_frees_its_addresses():
    engine = Engine(options=OPTIONS)
    publisher = engine.controller.publisher
    follower = Follower(publisher)
    with follower:
        follower.read()
        engine.serve(prompt(1, 2))
        assert engine.controller.close()
        follower.until(lambda: {found.key for found in follower.held("", Medium.GPU)} == {*keys_of(1, 2)})
        again = EventSettings(endpoint=publisher.endpoint, replay=publisher.replay_endpoint)
        other = Engine(options=ControllerOptions(restore_deadline=10.0, events=again))
        other.serve(prompt(5))
        other.controller.tick()
        follower.until(lambda: {found.key for found in follower.held("", Medium.GPU)} == {*keys_of(5)})
        assert other.controller.close()


def test_changes_behind_the_bound_clear_device_and_host(monkeypatch):
    monkeypatch.setattr("tiercache.controller.residency_events.MAX_POSTED", 2)
    engine = Engine(told=True)
    for number in range(1, 5):
        engine.serve(prompt(number))
    events = engine.told.source.collect()
    assert [(event.kind, event.place.medium) for event in events] == [
        (EventKind.CLEARED, Medium.GPU),
        (EventKind.CLEARED, Medium.CPU),
    ]
    engine.told.map.apply(events)
    monkeypatch.undo()
    engine.serve(prompt(9))
    engine.told.read()
    told = engine.told.map.places()[Place(Medium.GPU)]
    known = {found.key for found in told if found.pool is KV}
    # Late copies to the host may have changed the other nodes too.
    assert {*keys_of(9)} <= known <= {key for n in (1, 2, 3, 4, 9) for key in keys_of(n)}
    engine.controller.close()


def test_without_settings_nothing_is_followed_and_others_are_refused():
    engine = Engine()
    assert engine.controller.publisher is engine.context.residency is None
    engine.controller.close()
    with pytest.raises(ConfigError, match="EventSettings"):
        ControllerOptions(events="tcp://127.0.0.1:5557")
