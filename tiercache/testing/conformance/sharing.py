"""Tests of shared stores: two processes that open one store see the same objects."""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from functools import partial
from pathlib import Path

from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED, BackendHooks
from tiercache.testing.conformance.peer import Peer
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import NAMESPACE, fetch, key, payload, put, to_set

SIZE = 9000


class Sharing(BackendHooks):
    """Tests of two processes on one store.

    Thread safety: as `BackendHooks`.
    """

    def test_two_processes_see_one_store(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        put(store, key("mine"), payload("mine", SIZE))
        store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        with Peer(type(self), tmp_path / "store") as peer:
            assert peer.exists(["mine", "theirs"]) == [True, False]
            assert peer.get(["mine", "theirs"], SIZE) == [HIT, MISS]
            assert peer.set(["mine", "theirs"], SIZE) == [HIT, STORED]
            assert store.exists([key("mine"), key("theirs")]) == [True, True]
            assert fetch(store, key("theirs"), SIZE) == payload("theirs", SIZE)
            assert put(store, key("theirs"), payload("theirs", SIZE)) is HIT
            assert {entry.key for entry in store.scan_all()} == {key("mine"), key("theirs")}
            assert [entry is not None for entry in store.describe([key("theirs"), key("nobody's")])] == [
                True,
                False,
            ]
            assert self.usage(store).objects == peer.objects() == 2
            assert store.delete([key("theirs")]) == [True]
            assert peer.exists(["theirs"]) == [False]
            assert peer.delete(["mine"]) == [True]
            assert fetch(store, key("mine"), SIZE) is MISS
            assert self.usage(store).objects == peer.objects() == 0
            assert peer.namespaces() == 1
        assert put(store, key("after"), payload("after", SIZE)) is STORED, (
            "the end of one process does not affect the other"
        )
        self.check(store)

    def test_both_store_the_same_objects_at_once(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        with Peer(type(self), tmp_path / "store") as peer:
            for turn in range(5):
                names = [f"{turn}/{n}" for n in range(30)]
                batch = [to_set(key(n), payload(n, SIZE)) for n in names]
                ours, theirs = run_all(partial(store.set, batch), partial(peer.set, names[::-1], SIZE))
                answers = list(zip(ours, reversed(theirs), strict=True))
                assert {frozenset(pair) for pair in answers} == {frozenset((STORED, HIT))}
                assert peer.get(names, SIZE) == [HIT] * 30
                assert all(fetch(store, key(n), SIZE) == payload(n, SIZE) for n in names)
        self.check(store)

    def test_what_one_finds_corrupt_is_gone_for_both(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        with Peer(type(self), tmp_path / "store") as peer:
            assert peer.set(["a"], SIZE) == [STORED]
            self.corrupt(store, key("a"))
            assert peer.get(["a"], SIZE) == [CORRUPT]
            assert fetch(store, key("a"), SIZE) is MISS
            assert put(store, key("a"), payload("a", SIZE)) is STORED
            assert peer.get(["a"], SIZE) == [HIT]

    def test_the_death_of_one_costs_the_other_nothing(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        acknowledged: list[str] = []
        for turn in range(3):
            with Peer(type(self), tmp_path / "store") as peer:
                names = [f"{turn}/{n}" for n in range(10)]
                assert peer.set(names, SIZE) == [STORED] * 10
                acknowledged += names
                peer.begin_set([f"{turn}/late/{n}" for n in range(200)], SIZE)
                peer.kill()
            assert all(fetch(store, key(n), SIZE) == payload(n, SIZE) for n in acknowledged)
            assert put(store, key(turn), payload(turn, SIZE)) is STORED
        for entry in list(store.scan_all()):
            found: bytes | Outcome = fetch(store, entry.key, SIZE)
            assert isinstance(found, bytes), "an object left half written by a killed process is not visible"
        self.check(store)
