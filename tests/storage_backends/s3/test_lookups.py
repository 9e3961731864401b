"""Lookups answer from what the process knows, whatever becomes of the listings behind them."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import obstore
import pytest
from tiercache_backends.s3 import directory, service
from tiercache_backends.s3.pack import make_name, tombstone

from tests.storage_backends.s3.hooks import know, open_s3, prefix_of
from tests.storage_backends.s3.integrity import check_directory
from tests.storage_backends.s3.proxy import Exchange, Proxy
from tests.storage_backends.s3.server import bucket, needs_weed
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import RefusedError, UnavailableError
from tiercache.storage.base import GetItem
from tiercache.testing.conformance.hooks import HIT, MISS, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_get

pytestmark = needs_weed

SIZE = 2000


def gets(*numbers: int) -> list[GetItem]:
    return [to_get(key(n), SIZE) for n in numbers]


def test_a_cold_start_misses_what_it_does_not_know_yet(tmp_path, proxy, caplog, monkeypatch):
    monkeypatch.setattr(service, "_LIST_CHUNK", 1)  # private: the real pages would need thousands of packs
    with open_s3(tmp_path) as writer:
        for n in range(20):
            put(writer, key(n), payload(n, SIZE))
    go_on = Event()

    def slow(exchange: Exchange) -> None:
        if exchange.is_head:
            go_on.wait(0.4)

    proxy.before = slow
    with open_s3(tmp_path, proxy.url, deadline="1s") as store:
        assert "still being listed" in caplog.text
        assert store.exists([key(0), key(19)]) == [True, False]
        assert store.get(gets(0, 19)) == [HIT, MISS]
        assert store.describe([key(19)]) == [None]
        assert put(store, key("new"), payload("new", SIZE)) is STORED
        assert fetch(store, key("new"), SIZE) == payload("new", SIZE)
        with pytest.raises(UnavailableError, match="still being listed"):
            store.scan()
        details = store.usage().details
        assert (details["listed"], details["missed_before_listed"]) == (0, 3)
        go_on.set()
        until(lambda: store.exists([key(19)]) == [True])
        until(lambda: store.usage().details["listed"] == 1)


def test_a_listing_under_way_holds_no_lookup_and_no_set(tmp_path: Path, proxy: Proxy) -> None:
    with open_s3(tmp_path) as writer, open_s3(tmp_path, proxy.url, refresh="0s", deadline="60s") as store:
        put(store, key(0), payload(0, SIZE))
        arrived, go_on = Event(), Event()

        def hold(exchange: Exchange) -> None:
            if exchange.is_list:
                arrived.set()
                go_on.wait(60)

        proxy.before = hold
        # A listing that began before may still be under way: the other writer waits for one that is held.
        until(lambda: store.exists([key(0), key(9)]) == [True, False] and arrived.is_set())
        put(writer, key(1), payload(1, SIZE))
        for _ in range(3):
            assert store.exists([key(0), key(1)]) == [True, False]
            assert store.get(gets(0, 1)) == [HIT, MISS]
            assert store.describe([key(1)]) == [None]
            assert store.usage().objects
        assert put(store, key(2), payload(2, SIZE)) is STORED
        go_on.set()
        until(lambda: store.get(gets(0, 1, 2)) == [HIT] * 3)


def test_what_was_missed_is_found_without_another_lookup(tmp_path: Path) -> None:
    with open_s3(tmp_path) as writer, open_s3(tmp_path, refresh="0.5s") as store:
        assert store.exists([key(0)]) == [False]
        put(writer, key(0), payload(0, SIZE))
        assert store.exists([key(0)]) == [False], "listed a moment ago"
        known = store._directory  # private: usage would cause a refresh
        until(lambda: known.figures()[0] == 1)
        assert fetch(store, key(0), SIZE) == payload(0, SIZE)


def test_listings_that_fail_are_an_answer_to_misses_only(tmp_path: Path, proxy: Proxy) -> None:
    with open_s3(tmp_path, proxy.url, refresh="0s") as store:
        put(store, key(0), payload(0, SIZE))

        def deny(exchange: Exchange) -> None:
            if exchange.is_list:
                exchange.refuse(503, "SlowDown")

        proxy.before = deny
        until(lambda: store.get(gets(0, 1)) == [HIT, Outcome.THROTTLED])
        assert put(store, key(2), payload(2, SIZE)) is STORED
        with pytest.raises(RefusedError):
            store.scan()
        proxy.well()
        until(lambda: store.get(gets(0, 1)) == [HIT, MISS])


def test_a_sweep_in_small_parts_finds_what_is_there_and_what_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_LIST_CHUNK", 2)  # private: the real pages would need thousands of packs
    everything = [key(n) for n in range(11)]
    with open_s3(tmp_path) as writer:
        for n in range(10):
            put(writer, key(n), payload(n, SIZE))
        with open_s3(tmp_path, refresh="1h") as store:
            listing = store._refresher._listing  # private: a part of a sweep that has no time left

            def swept() -> int:
                """Sweep in parts; return their number."""
                return next(n for n in range(1, 100) if listing.sweep(0.0))

            assert store.exists(everything) == [True] * 10 + [False]
            packs = sorted(
                entry["path"] for page in obstore.list(bucket(), folder(tmp_path)) for entry in page
            )
            obstore.delete(bucket(), [packs[n] for n in (0, 3, 4, 9)])
            put(writer, key(10), payload(10, SIZE))
            assert swept() >= 3
            assert store.exists(everything) == [n not in (0, 3, 4, 9) for n in range(11)]
            assert writer.delete([key(1), key(5)]) == [True, True]
            assert swept() >= 3
            assert store.exists(everything) == [n not in (0, 1, 3, 4, 5, 9) for n in range(11)]
            check_directory(store)


def test_garbage_is_remembered_up_to_a_bound_and_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(directory, "_MAX_USELESS", 3)  # private: the real bound would need thousands of names
    for n in range(8):
        data = bytes(100)
        obstore.put(bucket(), f"{folder(tmp_path)}/{make_name(n, '0' * 16, n, 60)}", data)
        obstore.put(bucket(), f"{folder(tmp_path)}/{make_name(n, '1' * 16, n, None)}", data)
        obstore.put(bucket(), f"{folder(tmp_path)}/no name of ours {n}", data)
    with open_s3(tmp_path) as store:
        put(store, key(0), payload(0, SIZE))
        know(store)
        assert store.usage().used_bytes < SIZE + 3 * 100 + 300
        assert fetch(store, key(0), SIZE) == payload(0, SIZE)
        check_directory(store)
    assert caplog.text.count("cannot be read") == 1


def test_what_tombstones_say_is_bounded(tmp_path: Path) -> None:
    with open_s3(tmp_path, objects=1000) as store:
        for n in range(6):
            put(store, key(n), payload(n, SIZE))
            dead = {make_name(n, "0" * 16, n, 60): set(range(400))}
            obstore.put(bucket(), f"{folder(tmp_path)}/{make_name(n, '1' * 16, n, None)}", tombstone(dead))
        know(store)
        assert store.usage().details["not_indexed"] == 4
        assert store.exists([key(n) for n in range(6)]) == [True] * 6
        check_directory(store)


def folder(path: Path) -> str:
    return f"{prefix_of(path)}/packs"
