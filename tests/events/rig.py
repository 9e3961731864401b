"""Stores, publishers and subscribers on loopback, and the truth that subscribers are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.waiting import until
from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.events import Medium, Place
from tiercache.events.base import ResidencyMap, Resident
from tiercache.events.publisher import EventPublisher
from tiercache.events.settings import EventSettings
from tiercache.events.subscriber import SNAPSHOT, BatchOrigin, EventSubscriber, ReceivedBatch
from tiercache.storage.base import SetItem, StorageBackend
from tiercache.storage.store_events import StoreEvents

NAMESPACE = b"n" * 32
LAYOUTS = {PoolName.KV: b"k" * 32, PoolName.MAMBA: b"m" * 32}
ANY = EventSettings(endpoint="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0")


def page(number: int, chain: int = 0) -> bytes:
    return chain.to_bytes(16, "big") + number.to_bytes(16, "big")


def item(number: int, chain: int = 0, pool: PoolName = PoolName.KV, nbytes: int = 64) -> SetItem:
    """Object of page `number` (from 1) of a sequence, or the state at its end."""
    own = page(number, chain)
    parent = own if pool is PoolName.MAMBA else page(number - 1, chain) if number > 1 else None
    payload = bytes([number % 256]) * nbytes
    meta = ObjectMeta(NAMESPACE, nbytes, b"", parent, number)
    return SetItem(ObjectKey(pool, LAYOUTS[pool] + own), [memoryview(payload)], meta)


def store_pages(store: StorageBackend, count: int, chain: int = 0, first: int = 1) -> None:
    outcomes = store.set([item(n, chain) for n in range(first, first + count)])
    assert set(outcomes) <= {Outcome.STORED, Outcome.HIT}


def truth(store: StorageBackend) -> set[Resident]:
    return {Resident(e.key.pool, e.key.layout, e.key.page_key) for e in store.scan_all()}


@contextmanager
def published(
    store: StorageBackend, settings: EventSettings = ANY, name: str = "memory"
) -> Iterator[EventPublisher]:
    publisher = EventPublisher(settings, [StoreEvents(store, name)])
    try:
        yield publisher
    finally:
        assert publisher.close()


class Follower:
    """A subscriber and what it knows."""

    def __init__(
        self, publisher: EventPublisher, *, heals: bool = True, start: int | None = SNAPSHOT
    ) -> None:
        replay = publisher.replay_endpoint if heals else ""
        self.subscriber = EventSubscriber(publisher.endpoint, replay, start=start, idle=0.3)
        self.map = ResidencyMap()
        self.batches: list[ReceivedBatch] = []

    def read(self, seconds: float = 0.1) -> None:
        for batch in self.subscriber.read(seconds):
            self.batches.append(batch)
            self.map.apply(batch.events)

    def until(self, reached: Callable[[], object]) -> None:
        """Read until something is so; fail if that takes too long."""
        until(lambda: reached() or self.read(), every=0)

    def where(self, key: bytes, pool: PoolName) -> set[Place]:
        places = self.map.places().items()
        return {place for place, held in places if any((f.key, f.pool) == (key, pool) for f in held)}

    def held(self, tier: str = "memory", medium: Medium = Medium.STORAGE) -> set[Resident]:
        return set(self.map.places().get(Place(medium, tier), ()))

    def count(self, origin: BatchOrigin) -> int:
        return sum(batch.origin is origin for batch in self.batches)

    def lose(self, *, every: bool = True) -> None:
        """Take batches from the network that the subscriber has not read: all that come, or one."""
        # private: a network that loses messages, between the publisher and the subscriber's socket
        socket = self.subscriber._sub
        assert socket.poll(5000)
        socket.recv_multipart()
        while every and socket.poll(200):
            socket.recv_multipart()

    def close(self) -> None:
        self.subscriber.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
