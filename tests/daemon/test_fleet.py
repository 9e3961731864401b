"""`Fleet` against a brute force over sets, and a follower of publishers that come and go."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiercache_backends.memory import MemoryBackend

from tests.events.rig import NAMESPACE, item, page, published, store_pages
from tests.waiting import until
from tiercache.config.models import EventsSettings, ScoreSettings
from tiercache.core import PoolName
from tiercache.daemon.fleet import STORE, Fleet
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.encoding import namespace_label
from tiercache.keys import page_keys
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.store_events import StoreEvents

LABEL = bytes.fromhex(namespace_label(NAMESPACE))
KEYS = [page(n) for n in range(1, 7)]
WORKERS = {"a": ["a/0", "a/1"], "b": ["b/0"], "c": ["c/0"]}
RANKS = [*(rank for ranks in WORKERS.values() for rank in ranks), STORE]
SHARING = ("b",)
MEDIA = list(Medium)
GROUPS = [
    ObjectGroup(pool, LABEL, layout * 32, 16)
    for pool, layout in (
        (PoolName.KV, b"k"),
        (PoolName.KV, b"l"),
        (PoolName.MAMBA, b"m"),
        (PoolName.INDEXER, b"i"),
    )
]
PLACES = [Place(Medium.GPU), Place(Medium.CPU), Place(Medium.STORAGE, "ram"), Place(Medium.STORAGE, "ssd")]
EVENTS = st.tuples(
    st.sampled_from(RANKS),
    st.one_of(
        st.builds(
            KVEvent, st.sampled_from((EventKind.STORED,) * 4 + (EventKind.REMOVED,)), st.sampled_from(PLACES),
            st.sampled_from(GROUPS),
            st.one_of(st.integers(0, 6).map(lambda n: KEYS[:n]), st.lists(st.sampled_from(KEYS), max_size=3)),
        ),
        st.builds(KVEvent, st.just(EventKind.CLEARED), st.sampled_from([None, *PLACES])),
    ),
)  # fmt: skip


def fleet_of(workers, sharing=(), limit=1000):
    ranks = {name: (EventsSettings(),) * len(each) for name, each in workers.items()}
    return Fleet(ScoreSettings(workers=ranks, apart=tuple(workers.keys() - set(sharing)), objects=limit))


class Truth:
    """The same, by sets of all that was told."""

    def __init__(self):
        self.held: set[tuple[str, Place, ObjectGroup, bytes]] = set()
        self.told: set[tuple[str, ObjectGroup]] = set()
        self.known: set[ObjectGroup] = set()

    def apply(self, rank, event):
        if event.group is None:
            self.held = {h for h in self.held if h[0] != rank or event.place not in (None, h[1])}
            if event.place is None:
                self.told = {t for t in self.told if t[0] != rank}
            return
        named = {(rank, event.place, event.group, key) for key in event.keys}
        if event.kind is EventKind.REMOVED:
            self.held -= named
        else:
            self.held |= named
            self.told.add((rank, event.group))
            self.known.add(event.group)

    def has(self, worker, rank, group, key, media):
        return any(
            (who, place, group, key) in self.held
            for who in (rank, *((STORE,) if worker in SHARING and Medium.STORAGE in media else ()))
            for place in PLACES
            if place.medium in media
        )

    def restorable(self, worker, rank, depth, media):
        own = {g for g in self.known if (rank, g) in self.told}
        needed = own | {g for g in self.known if g.pool not in {o.pool for o in own}}
        return bool(needed) and all(
            self.has(worker, rank, group, key, media)
            for group in needed
            for key in (KEYS[depth - 1 : depth] if group.pool is PoolName.MAMBA else KEYS[:depth])
        )

    def depths(self):
        return {
            worker: {
                medium: max(
                    (
                        16 * depth
                        for depth in range(1, len(KEYS) + 1)
                        if all(self.restorable(worker, rank, depth, MEDIA[: level + 1]) for rank in ranks)
                    ),
                    default=0,
                )
                for level, medium in enumerate(MEDIA)
            }
            for worker, ranks in WORKERS.items()
        }


@given(st.lists(EVENTS, max_size=40))
def test_depths_equal_the_brute_force(events):
    fleet, truth = fleet_of(WORKERS, SHARING), Truth()
    for rank, event in events:
        fleet.apply(rank, [event])
        truth.apply(rank, event)
    assert fleet.score(NAMESPACE, KEYS) == truth.depths()
    assert fleet.objects == len({(group, key) for _, _, group, key in truth.held})


def test_tokens_are_scored_as_their_keys_but_for_the_last_one():
    fleet = fleet_of({"a": ["a/0"]}, limit=150)
    tokens = np.arange(3200, dtype=np.uint64)
    keys = page_keys(NAMESPACE, tokens, 16)
    assert fleet.score(NAMESPACE, tokens) == {"a": dict.fromkeys(MEDIA, 0)}
    for group in GROUPS[0], GROUPS[2]:
        stored = keys[:100] if group.pool is PoolName.KV else keys[69:100]
        fleet.apply("a/0", [KVEvent(EventKind.STORED, PLACES[1], group, stored)])
    assert fleet.objects == 131
    for prompt, depth in ((tokens, 1600), (tokens[:1601], 1600), (tokens[:1600], 1584), (keys[:100], 1600)):
        assert fleet.score(NAMESPACE, prompt)["a"] == {"GPU": 0, "CPU": depth, "STORAGE": depth}
    assert fleet.score(NAMESPACE, tokens[:1104])["a"]["CPU"] == 0, "pages without a state"
    fleet.apply("a/0", [KVEvent(EventKind.STORED, PLACES[1], GROUPS[0], keys)])
    assert fleet.objects == 150, "more are not known"


def test_a_worker_that_lies_takes_no_more_than_its_share_of_memory_and_time():
    fleet = fleet_of({"liar": ["liar/0"], "other": ["other/0"]}, limit=100)
    fleet.apply("other/0", [KVEvent(EventKind.STORED, PLACES[1], GROUPS[n], KEYS) for n in (0, 2)])
    right = fleet.score(NAMESPACE, KEYS)["other"]
    assert right["CPU"] == 96
    for n in range(6000):
        group = ObjectGroup(PoolName.KV, n.to_bytes(8), n.to_bytes(32), 16)
        place = Place(Medium.STORAGE, f"tier {n}")
        fleet.apply(
            "liar/0",
            [KVEvent(EventKind.STORED, place, each, [bytes(n), b"x" * 32]) for each in (group, GROUPS[0])],
        )
    for size in (-1, 1 << 63, 0):
        lie = ObjectGroup(PoolName.KV, LABEL, b"k" * 32, size)
        fleet.apply("liar/0", [KVEvent(EventKind.STORED, PLACES[1], lie, [page(9)])])
        fleet.score(NAMESPACE, np.arange(100, dtype=np.uint64))
    assert fleet.score(NAMESPACE, KEYS)["other"] == right
    fleet.apply("liar/0", [KVEvent(EventKind.CLEARED, None)])
    assert fleet.objects == 12
    assert len(fleet._told) <= 1 << 10  # private: nothing tells how many namespaces are known


def test_a_fleet_follows_workers_that_come_and_go_and_the_store():
    worker, own = MemoryBackend(), MemoryBackend()
    for store in (worker, own):
        store.register_namespace(NamespaceRecord(NAMESPACE, {"page_size": 16}))
    store_pages(worker, 2)
    worker.set([item(2, pool=PoolName.MAMBA)])
    store_pages(own, 1)
    keys = [page(n) for n in range(1, 5)]
    with published(worker) as publisher:
        rank = EventsSettings(endpoint=publisher.endpoint, replay=publisher.replay_endpoint)
        workers = {"beside": (rank,), "apart": (rank,)}
        fleet = Fleet(ScoreSettings(workers=workers, apart=("apart",)))
        fleet.start(StoreEvents(own, "own"))

        def depth(name):
            return fleet.score(NAMESPACE, keys)[name][Medium.STORAGE] // 16

        try:
            until(lambda: depth("beside") == depth("apart") == 2)
            store_pages(own, 3)
            own.set([item(3, pool=PoolName.MAMBA)])
            until(lambda: depth("beside") == 3)
            assert depth("apart") == 2
            assert publisher.close()
            until(lambda: depth("apart") == 0)  # nobody answers, so nothing counts
            assert depth("beside") == 3
        finally:
            fleet.close()
