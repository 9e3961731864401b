"""KV events of a controller over real sockets, and what following them costs nothing of."""

from __future__ import annotations

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import IDENTITY, KV, MAMBA, PAGES, Engine, P, prompt
from tests.events.rig import ANY, Follower, truth
from tiercache.controller import ControllerOptions
from tiercache.core import Tier, as_tokens
from tiercache.errors import ConfigError
from tiercache.events import EventKind, Medium, Place
from tiercache.events.settings import EventSettings
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
