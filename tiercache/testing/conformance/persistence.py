"""Tests of what outlives a process, and of two processes that open one store.

What was acknowledged is there when the store is opened again, after a close and after a kill.
"""

# ruff: noqa: D102 (a test is named for what it checks)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import pytest

from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, SIZES, STORED, BackendHooks
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import (
    NAMESPACE,
    OTHER_NAMESPACE,
    chain,
    content,
    fetch,
    key,
    payload,
    put,
    to_get,
    to_set,
)

_CONTEXT = get_context("spawn")  # a fork would have the store of this process open
ENDS = ("closed", "killed")
SIZE = 9000


class Persistence(BackendHooks):
    """Tests of reopened stores, and of shared ones.

    Thread safety: as `BackendHooks`.
    """

    def reopened(
        self, store: StorageBackend, path: Path, how: str, capacity: int | None = None
    ) -> StorageBackend:
        """Close the store or kill its process, as `how` says; open the store again and return it."""
        if how == "killed":
            return self.kill(store, path, capacity)
        store.close()
        return self.open_store(path, capacity)

    @pytest.mark.parametrize("how", ENDS)
    def test_what_was_acknowledged_is_there_afterwards(
        self, store: StorageBackend, tmp_path: Path, how: str
    ) -> None:
        self.need(store, "persistent")
        records = [
            NamespaceRecord(NAMESPACE, {"model": "m", "page_size": 64}, states=True),
            NamespaceRecord(OTHER_NAMESPACE, {}),
        ]
        for record in records:
            store.register_namespace(record)
        for n, size in enumerate(SIZES):
            put(store, key(n), payload(n, size))
        store.set(
            [
                to_set(k, payload(k, 5000), parent=parent, depth=n)
                for n, (k, parent) in enumerate(chain("s", 5), 9)
            ]
        )
        store.delete([key(1)])
        put(store, key("spoiled"), payload("spoiled", 5000))
        self.corrupt(store, key("spoiled"))
        assert fetch(store, key("spoiled"), 5000) is CORRUPT
        before = {entry.key: entry.meta for entry in store.scan_all()}
        with self.reopened(store, tmp_path / "store", how) as again:
            assert {entry.key: entry.meta for entry in again.scan_all()} == before
            for n, size in enumerate(SIZES):
                assert fetch(again, key(n), size) == (MISS if n == 1 else payload(n, size))
            assert all(fetch(again, k, 5000) == payload(k, 5000) for k, _ in chain("s", 5))
            assert fetch(again, key("spoiled"), 5000) is MISS
            known = {r.namespace: (dict(r.identity), r.states) for r in again.namespaces()}
            assert known == {r.namespace: (dict(r.identity), r.states) for r in records}
            assert self.usage(again).payload_bytes == sum(SIZES) - SIZES[1] + 5 * 5000
            assert put(again, key("new"), payload("new", 5000)) is STORED
            assert put(again, key(1), payload("anew", 70_000)) is STORED
            self.check(again)

    @pytest.mark.parametrize("how", ENDS)
    def test_damage_done_while_it_was_closed_is_found(
        self, store: StorageBackend, tmp_path: Path, how: str
    ) -> None:
        self.need(store, "persistent")
        for name in ("a", "b", "c"):
            put(store, key(name), payload(name, 8192))
        self.corrupt(store, key("a"))
        self.swap(store, key("b"), key("c"))
        with self.reopened(store, tmp_path / "store", how) as again:
            assert [fetch(again, key(name), 8192) for name in ("a", "b", "c")] == [CORRUPT] * 3
            assert self.usage(again).objects == 0
            assert put(again, key("a"), payload("a", 8192)) is STORED
            assert fetch(again, key("a"), 8192) == payload("a", 8192)
            self.check(again)

    @pytest.mark.parametrize("how", ENDS)
    def test_eviction_goes_on_where_it_was(self, bounded: StorageBackend, tmp_path: Path, how: str) -> None:
        self.need(bounded, "persistent")
        size = 60_000
        for k, parent in [pair for sequence in range(4) for pair in chain(sequence, 12)]:
            put(bounded, k, payload(k, size), parent)
        held = {entry.key: entry.meta for entry in bounded.scan_all()}
        with self.reopened(bounded, tmp_path / "store", how, self.small) as again:
            assert {entry.key: entry.meta for entry in again.scan_all()} == held
            for n in range(150):
                assert put(again, key(n), payload(n, size)) is STORED
                assert self.usage(again).used_bytes <= self.small
                left = held.keys() & {entry.key for entry in again.scan_all()}
                pages = {k.page_key for k in left}
                assert all(held[k].parent is None or held[k].parent in pages for k in left), (
                    "a page was evicted before a page that follows it"
                )
            assert len(left) < len(held)
            self.check(again)

    def test_two_processes_see_one_store(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        put(store, key("mine"), payload("mine", SIZE))
        store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        with Peer(type(self), tmp_path / "store") as peer:
            assert peer.ask("exists", ["mine", "theirs"]) == [True, False]
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
            assert [self.usage(store).objects] == peer.ask("objects") == [2]
            assert store.delete([key("theirs")]) == [True]
            assert peer.ask("exists", ["theirs"]) == [False]
            assert peer.ask("delete", ["mine"]) == [True]
            assert fetch(store, key("mine"), SIZE) is MISS
            assert [self.usage(store).objects] == peer.ask("objects") == [0]
            assert peer.ask("namespaces") == [1]
            assert peer.set(["a"], SIZE) == [STORED]
            self.corrupt(store, key("a"))
            assert peer.get(["a"], SIZE) == [CORRUPT]
            assert fetch(store, key("a"), SIZE) is MISS, "what one finds corrupt is gone for both"
            assert put(store, key("a"), payload("a", SIZE)) is STORED
            assert peer.get(["a"], SIZE) == [HIT]
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

    def test_the_death_of_one_costs_the_other_nothing(self, store: StorageBackend, tmp_path: Path) -> None:
        self.need(store, "shared")
        acknowledged: list[str] = []
        for turn in range(2):
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


class Peer:
    """Handle of a second process that opens the same store through the hooks of the suite.

    Objects are named by text. The name of an object gives its key and its payload (see `testing.objects`).

    Thread safety: one thread at a time.
    """

    def __init__(self, hooks: type[BackendHooks], path: Path) -> None:
        """Start the process, and wait until it has opened the store; raise EOFError if it ends instead."""
        supplier = next(cls for cls in hooks.__mro__ if "open_store" in vars(cls))
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(supplier, path, theirs))
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def ask(self, do: str, names: Sequence[str] = (), size: int = 0) -> list[Any]:
        """Return the answers of `exists`, `get`, `set` or `delete`; a count for `objects` or `namespaces`."""
        self._pipe.send((do, names, size))
        answers: list[Any] = self._pipe.recv()
        return answers

    def get(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `get`.

        The second process ends if it gets a HIT with bytes other than the payload of the name.
        """
        return self.ask("get", names, size)

    def set(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `set`."""
        return self.ask("set", names, size)

    def begin_set(self, names: Sequence[str], size: int) -> None:
        """Start a set without waiting for its answers; only `kill` may follow."""
        self._pipe.send(("set", names, size))

    def kill(self) -> None:
        """Kill the process, without a chance to clean up."""
        self._process.kill()
        self._process.join(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()  # the process then closes the store and ends
        self._process.join(60)
        assert self._process.exitcode in (0, -9), f"the other process ended with {self._process.exitcode}"


def _serve(supplier: type[BackendHooks], path: Path, pipe: Connection) -> None:
    """Open the store, and answer orders until the parent closes its end."""
    hooks = supplier()
    with hooks.open_store(path) as store:
        pipe.send("ready")
        while True:
            try:
                do, names, size = pipe.recv()
            except EOFError:
                return
            keys = [key(n) for n in names]
            if do == "set":
                answers: list[Any] = store.set([to_set(key(n), payload(n, size)) for n in names])
            elif do == "get":
                items = [to_get(k, size) for k in keys]
                answers = store.get(items)
                for n, item, answer in zip(names, items, answers, strict=True):
                    assert answer is not Outcome.HIT or content(item) == payload(n, size), (
                        f"wrong bytes of {n}"
                    )
            elif do == "objects":
                answers = [hooks.usage(store).objects]
            elif do == "namespaces":
                answers = [len(store.namespaces())]
            else:
                answers = getattr(store, do)(keys)
            pipe.send(answers)
