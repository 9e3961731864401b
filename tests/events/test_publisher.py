"""A publisher over real sockets: subscribers rebuild what a store has, whatever they miss."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import zmq
from tiercache_backends.memory import FOOTPRINT, MemoryBackend

from tests.events.rig import ANY, LAYOUTS, NAMESPACE, Follower, item, page, published, store_pages, truth
from tests.processes import works_in_a_child
from tests.waiting import until
from tiercache.core import PoolName
from tiercache.errors import ConfigError, StorageError
from tiercache.events import EventKind, EventLog, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.base import EventSource
from tiercache.events.publisher import END, EventPublisher
from tiercache.events.settings import EventSettings
from tiercache.events.subscriber import SNAPSHOT, BatchOrigin, EventSubscriber
from tiercache.storage.store_events import StoreEvents

TAKEN = FOOTPRINT.of(64)
"""Bytes that a page of these tests takes."""


def test_lost_messages_are_healed_by_a_replay():
    with MemoryBackend() as store, published(store) as publisher, Follower(publisher) as follower:
        follower.read()
        store_pages(store, 3)
        follower.until(lambda: follower.held() == truth(store))
        for chain in range(1, 5):  # each its own batch, all of which are lost
            before = publisher.published
            store_pages(store, 3, chain)
            until(lambda before=before: publisher.published > before)
        follower.lose()
        assert follower.held() != truth(store)
        store_pages(store, 3, 9)
        follower.until(lambda: follower.held() == truth(store))
        assert follower.subscriber.gaps == 1
        assert publisher.snapshots == 1  # that of the start


def test_the_last_messages_before_a_pause_are_healed_too():
    with MemoryBackend() as store, published(store) as publisher, Follower(publisher) as follower:
        follower.read()
        store_pages(store, 3)
        follower.until(lambda: follower.held() == truth(store))
        store_pages(store, 3, 1)
        follower.lose(every=False)
        follower.until(lambda: follower.held() == truth(store))


def test_a_gap_that_the_log_no_longer_has_is_healed_by_a_snapshot():
    settings = EventSettings(endpoint=ANY.endpoint, replay=ANY.replay, buffer=2)
    with MemoryBackend(TAKEN * 30) as store, published(store, settings) as p, Follower(p) as follower:
        follower.read()
        store_pages(store, 3)
        follower.until(lambda: follower.held() == truth(store))
        for chain in range(1, 9):
            before = p.published
            store_pages(store, 5, chain)
            until(lambda before=before: p.published > before)
        follower.lose()
        store_pages(store, 3, 9)
        follower.until(lambda: follower.held() == truth(store))
        assert p.snapshots == 2


def test_a_gap_without_a_replay_address_is_reported():
    chains = count(1000)
    with MemoryBackend() as store, published(store) as p, Follower(p, heals=False, start=None) as follower:
        follower.until(lambda: store_pages(store, 1, next(chains)) or bool(follower.batches))
        for _ in range(2):
            before = p.published
            store_pages(store, 1, next(chains))
            until(lambda before=before: p.published > before)
        follower.lose(every=False)
        follower.until(lambda: follower.count(BatchOrigin.LOST) == 1)


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """Makes sockets that ask a publisher for replays, or subscribe, with options."""
    context, made = zmq.Context(), []

    def connected(publisher: EventPublisher, *options: tuple[int, Any], kind: int = zmq.DEALER) -> Any:
        made.append(socket := context.socket(kind))
        for option, value in options:
            socket.setsockopt(option, value)
        socket.connect(publisher.replay_endpoint if kind == zmq.DEALER else publisher.endpoint)
        return socket

    yield connected
    context.destroy(linger=0)


def ask(client: Any, number: int = SNAPSHOT, flags: int = 0) -> None:
    client.send_multipart((b"", number.to_bytes(8, "big")), flags)


@pytest.mark.parametrize("clock_goes_back", [False, True])
def test_a_publisher_that_is_restarted_is_noticed(clock_goes_back):
    later = 0.0 if clock_goes_back else time.time() + 60
    with MemoryBackend() as first, MemoryBackend() as second:
        store_pages(first, 5)
        store_pages(second, 5, 1)
        publisher = EventPublisher(ANY, [StoreEvents(first, "memory")])
        with Follower(publisher) as follower:
            try:
                follower.until(lambda: follower.held() == truth(first))
            finally:
                assert publisher.close()
            again = EventSettings(endpoint=publisher.endpoint, replay=publisher.replay_endpoint)
            log = EventLog(clock=lambda: later)
            publisher = EventPublisher(again, [StoreEvents(second, "memory")], log)
            try:
                for n in range(6, 9):
                    store_pages(second, 1, 1, n)
                follower.until(lambda: follower.held() == truth(second))
            finally:
                assert publisher.close()


def test_subscribers_that_never_read_cost_no_batch_and_no_other_replay(connect, monkeypatch, tmp_path):
    """Memory is bounded, the publisher goes on, and a sound subscriber learns all."""
    monkeypatch.setattr("tiercache.events.publisher.SEND_MARK", 1)
    monkeypatch.setattr("tiercache.events.publisher.PATIENCE_S", 1000.0)
    settings = EventSettings(endpoint=f"ipc://{tmp_path}/events", replay=f"ipc://{tmp_path}/replay")
    with MemoryBackend() as store, published(store, settings) as publisher:
        store.set([item(1, chain) for chain in range(5000)])  # more than sockets take unread
        connect(publisher, (zmq.RCVHWM, 1), (zmq.SUBSCRIBE, b""), kind=zmq.SUB)
        for _ in range(20):  # each asks for all, and reads nothing
            ask(connect(publisher, (zmq.RCVHWM, 1)))
        until(lambda: publisher.replays >= 8)
        with Follower(publisher) as follower:
            follower.read()
            for chain in range(5000, 5030):
                store_pages(store, 4, chain)
            follower.until(lambda: follower.held() == truth(store))


class SlowSource(EventSource):
    """A source of many objects, on a disk that needs 2 ms for each part of a snapshot."""

    def __init__(self) -> None:
        self.drawn = 0
        self.between: list[int] = []
        """Number of parts that were drawn before each question for changes, since the one before."""
        self._wake: Callable[[], None] = lambda: None
        self._changes = 0

    def collect(self):
        self.between.append(self.drawn)
        self.drawn = 0
        self._changes += 1
        return [self._stored(0, self._changes)] if len(self.between) % 10 == 0 else []

    def snapshot(self):
        for number in range(100):
            time.sleep(0.002)
            self.drawn += 1
            yield [self._stored(number + 1, 0)]

    def follow(self, wake):
        self._wake = wake

    def _stored(self, chain: int, number: int) -> KVEvent:
        group = ObjectGroup(PoolName.KV, NAMESPACE, LAYOUTS[PoolName.KV], 64)
        keys = tuple(page(n, chain) for n in range(number, number + 1024))
        return KVEvent(EventKind.STORED, Place(Medium.STORAGE, "slow"), group, keys)


def test_readers_who_come_again_and_again_under_new_names_starve_no_replay(connect):
    """Four clients each take ten messages and connect anew; one that stays gets its turns."""
    source, over = SlowSource(), threading.Event()
    publisher = EventPublisher(ANY, [source])

    def come_and_go() -> None:
        while not over.is_set():
            with connect(publisher, (zmq.LINGER, 0)) as client:
                ask(client)
                for _ in range(10):
                    if client.poll(200):
                        client.recv_multipart()

    coming = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in coming:
        thread.start()
    try:
        until(lambda: publisher.replays > 8)
        client = connect(publisher)
        ask(client)
        until(lambda: client.poll(1_000) and client.recv_multipart()[2] == END, every=0)
    finally:
        over.set()
        for thread in coming:
            thread.join()
        assert publisher.close()


@pytest.mark.slow
def test_readers_that_ask_again_and_again_and_take_nothing_delay_neither_events_nor_replays(connect):
    """More than are answered at once ask for all, again and again, which earns them no more patience."""
    source, over = SlowSource(), threading.Event()
    publisher = EventPublisher(ANY, [source])

    def ask_and_ask() -> None:
        silent = [connect(publisher, (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)) for _ in range(80)]
        while not over.wait(0.05):
            for client in silent:
                with suppress(zmq.Again):
                    ask(client, flags=zmq.NOBLOCK)
        for client in silent:
            client.close(linger=0)

    asking = threading.Thread(target=ask_and_ask)
    asking.start()
    try:
        until(lambda: publisher.replays > 60)
        client, parts = connect(publisher), 0
        ask(client)
        while client.poll(60_000) and client.recv_multipart()[2] != END:
            parts += 1
        assert parts > 100
        assert max(source.between) < 30, "changes waited for replays"
        assert max(source.between) > 0
    finally:
        over.set()
        asking.join()
        assert publisher.close()


def test_requests_that_are_none_are_counted_and_not_answered(connect):
    number = (0).to_bytes(8, "big")
    wrong = [
        (b"",), (number,), (b"", b""), (b"", number[1:]), (b"", number + b"x"), (b"x", number),
        (b"", number, b""), (b"", b"", number),
    ]  # fmt: skip
    with MemoryBackend() as store, published(store) as publisher:
        store_pages(store, 1)
        hostile = connect(publisher)
        for frames in wrong:
            hostile.send_multipart(frames)
        until(lambda: publisher.malformed == len(wrong))
        hostile.send(b"x" * 100_000)  # too long: the connection is cut
        with Follower(publisher) as follower:
            follower.until(lambda: follower.held() == truth(store))
        assert not hostile.poll(0)
        assert publisher.malformed == len(wrong)


def test_a_replay_as_vllm_asks_for_it(connect):
    """Frames as documented: a REQ-like socket asks with eight bytes, and reads until -1."""
    with MemoryBackend() as store, published(store) as publisher:
        start, client = publisher.log.next, connect(publisher)
        for chain in range(3):
            store_pages(store, 1, chain)
            until(lambda chain=chain: publisher.published == chain + 1)

        def replay(number: int) -> list[list[bytes]]:
            ask(client, number)
            answer: list[list[bytes]] = []
            while not answer or answer[-1][2] != END:
                assert client.poll(10_000)
                answer.append(client.recv_multipart())
            return answer

        *some, end = replay(start + 1)
        assert [frames[:3] for frames in some] == [
            [b"", b"kv-events", (start + n).to_bytes(8, "big")] for n in (1, 2)
        ]
        assert end == [b"", b"", END, b""]
        assert replay(start + 3) == [end]
        number = (start + 2).to_bytes(8, "big")
        for unknown in (0, start - 1, start + 4, SNAPSHOT):
            *snapshot, end = replay(unknown)
            assert {frames[2] for frames in snapshot} == {number}


def test_close_while_stores_go_on_and_subscribers_come_and_go():
    with MemoryBackend(TAKEN * 100) as store:
        stopping = threading.Event()

        def write(seed: int) -> None:
            chain = seed * 10**6
            while not stopping.is_set():
                chain += 1
                store_pages(store, 5, chain)

        writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(5):
                publisher = EventPublisher(ANY, [StoreEvents(store, "memory")])
                with Follower(publisher) as follower:
                    follower.read(0.05)
                    assert publisher.close()
                    assert publisher.close()
        finally:
            stopping.set()
            for writer in writers:
                writer.join()
        with published(store) as publisher, Follower(publisher) as follower:
            follower.until(lambda: follower.held() == truth(store))


def test_changes_of_many_threads_are_told_in_their_order():
    with MemoryBackend(TAKEN * 50) as store, published(store) as publisher, Follower(publisher) as follower:
        follower.read()

        def work(seed: int) -> None:
            random_ = random.Random(seed)
            for _ in range(300):
                chain = random_.randrange(30)
                if random_.random() < 0.7:
                    store.set([item(n, chain) for n in range(1, random_.randrange(2, 6))])
                else:
                    store.delete([item(random_.randrange(1, 6), chain).key])

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            follower.read(0.02)
        follower.until(lambda: follower.held() == truth(store))


def test_a_fork_leaves_the_publisher_to_its_parent():
    with MemoryBackend() as store, published(store) as publisher, Follower(publisher) as follower:
        follower.read()

        def leave() -> None:
            publisher.wake()
            assert publisher.close()

        assert works_in_a_child(leave)
        store_pages(store, 3)
        follower.until(lambda: follower.held() == truth(store))


def test_notes_behind_the_bound_clear_the_tier_and_tell_it_anew(monkeypatch):
    monkeypatch.setattr("tiercache.storage.store_events.MAX_NOTES", 10)
    with MemoryBackend() as store:
        source = StoreEvents(store, "memory")
        log = EventLog()
        store_pages(store, 3)
        log.publish(source.collect())
        for chain in range(20):
            store_pages(store, 2, chain)
        publisher = EventPublisher(ANY, [source], log)
        try:
            with Follower(publisher, start=log.oldest) as follower:
                follower.until(lambda: follower.held() == truth(store))
                kinds = [str(event.kind) for batch in follower.batches for event in batch.events]
                assert "cleared" in kinds
        finally:
            assert publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("", "no address"), ("tcp://127.0.0.1", "no address"), ("tcp://127.0.0.1:99999", "no address"),
        ("udp://127.0.0.1:1", "no address"), ("ipc://relative", "no address"),
        ("tcp://*:5557", "no authentication"), ("tcp://0.0.0.0:5557", "no authentication"),
        ("tcp://example.org:5557", "no authentication"), ("tcp://[::]:5557", "no authentication"),
    ],
)  # fmt: skip
def test_an_endpoint_that_is_not_possible_or_not_private_is_refused(endpoint, text):
    with pytest.raises(ConfigError, match=text):
        EventSettings(endpoint=endpoint)
    with pytest.raises(ConfigError, match=text):
        EventSettings(endpoint="tcp://127.0.0.1:1", replay=endpoint or "x")


def test_other_settings_that_are_not_possible_are_refused():
    for wrong in ({"buffer": 0}, {"topic": "x" * 256}, {"replay": "tcp://127.0.0.1:5557"}):
        with pytest.raises(ConfigError):
            EventSettings(endpoint="tcp://127.0.0.1:5557", **wrong)
    EventSettings(endpoint="tcp://0.0.0.0:5557", public=True)


def test_an_address_in_use_is_refused_and_nothing_stays_open(tmp_path):
    with MemoryBackend() as store, published(store) as publisher, pytest.raises(StorageError, match="in use"):
        EventPublisher(EventSettings(endpoint=publisher.endpoint), [StoreEvents(store, "memory")])
    with pytest.raises(StorageError, match="no address"):
        EventSubscriber("tcp://", "")
