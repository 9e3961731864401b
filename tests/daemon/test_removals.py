"""The memory of a daemon for objects that went: bounded, with the cause, and never of other tenants."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.hosts import secret, until
from tests.storage.backends import locate
from tests.storage_backends.chain.hooks import add, remove
from tests.storage_backends.grpc.nodes import daemon_settings, section
from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.daemon import StorageServer
from tiercache.daemon.removals import DaemonStore, RemovalMemory
from tiercache.storage.history import Cause, History, PastRemoval, TierHistory
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import begin_watch, end_watch
from tiercache.testing.objects import payload, to_get, to_set

LAYOUT, OTHER = b"l" * 32, b"o" * 32
NAMESPACE = b"n" * 32
SIZE = 20_000


def page(number: int) -> bytes:
    return f"{number}".encode().ljust(32, b"p")


def key(number: int, layout: bytes = LAYOUT) -> ObjectKey:
    return ObjectKey(PoolName.KV, layout + page(number))


def put(store: Any, *numbers: int) -> None:
    for number in numbers:
        item = to_set(key(number), payload(number, SIZE), namespace=NAMESPACE)
        assert store.set([item]) == [Outcome.STORED]


def put_down(store: Any, number: int) -> None:
    """Store an object and wait until the last tier of the chain has it."""
    put(store, number)
    until(lambda: store.history([key(number)], []).tiers[-1].present == [True])


def causes(history: History) -> dict[int, Cause]:
    return {removal.page: removal.cause for removal in reversed(history.removals)}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestMemory:
    def test_the_latest_removal_of_each_layout_and_tier_is_found(self) -> None:
        clock = Clock()
        memory = RemovalMemory(8, clock)
        memory.note("ram", [key(1).digest, key(2).digest])
        clock.now += 100
        memory.note("ssd", [key(1).digest, key(1, OTHER).digest])
        clock.now += 100
        memory.note("ram", [key(1).digest])
        assert memory.find([page(9), page(1)]) == [
            PastRemoval(1, LAYOUT, "ram", Cause.EVICTED, 1200),
            PastRemoval(1, OTHER, "ssd", Cause.EVICTED, 1100),
            PastRemoval(1, LAYOUT, "ssd", Cause.EVICTED, 1100),
        ]
        assert memory.find([page(9)]) == memory.find([]) == memory.find([b"short"]) == []
        assert memory.forgotten is None

    def test_it_is_bounded_and_says_up_to_when_it_has_forgotten(self) -> None:
        clock = Clock()
        memory = RemovalMemory(100, clock)
        for number in range(250):
            clock.now = number
            memory.note("", [key(number).digest])
        found = memory.find([page(number) for number in range(250)])
        assert [removal.page for removal in found] == list(range(249, 149, -1))
        assert [removal.at for removal in found] == [removal.page for removal in found]
        assert memory.forgotten == 149
        memory.note("", [key(number).digest for number in range(1000)])  # more than fit, at once
        assert [r.page for r in memory.find([page(n) for n in range(1000)])] == list(range(999, 899, -1))
        assert memory.forgotten == 249, "the time of those that did not fit"

    def test_digests_of_a_wrong_length_do_no_harm(self) -> None:
        memory = RemovalMemory(8)
        memory.note("", [b"", b"x" * 63, key(1).digest])
        assert [removal.layout for removal in memory.find([page(1)])] == [LAYOUT]

    @pytest.mark.parametrize("order", [("store", "call"), ("call", "store")])
    def test_a_call_says_why_the_store_lost_an_object(self, order: tuple[str, str]) -> None:
        clock = Clock()
        memory = RemovalMemory(8, clock)
        for who in order:
            clock.now += 1
            if who == "store":
                memory.note("ram", [key(1).digest])
            else:
                memory.note("", [key(1).digest], Cause.DELETED)
        assert [(r.tier, r.cause) for r in memory.find([page(1)])] == [("ram", Cause.DELETED)]
        clock.now += 100
        memory.note("ram", [key(1).digest])  # stored again meanwhile
        [latest] = memory.find([page(1)])
        assert latest.cause is Cause.EVICTED

    def test_a_deletion_that_no_store_tells_of_is_kept(self) -> None:
        memory = RemovalMemory(8)
        memory.note("", [key(1).digest], Cause.CORRUPT)
        assert [(r.tier, r.cause) for r in memory.find([page(1)])] == [("", Cause.CORRUPT)]


def test_a_history_without_tiers_has_the_latest_removal_and_any_presence() -> None:
    removals = [
        PastRemoval(0, LAYOUT, "ssd", Cause.DELETED, 9.0),
        PastRemoval(0, LAYOUT, "ram", Cause.EVICTED, 5.0),
    ]
    tiers = [TierHistory("ram", [True, False, False], 1.0), TierHistory("ssd", [False, True, False], 2.0)]
    found = History(tiers, removals, 3.0).without_tiers()
    assert found == History([TierHistory("", [True, True, False], 2.0)], [removals[0]._replace(tier="")])
    out = TierHistory("disk", [], why="out")
    assert History([*tiers, out]).without_tiers().tiers == [TierHistory("", [True, True, False])]
    silent = TierHistory("s3", [False, False, False])
    assert History([*tiers, silent]).without_tiers().tiers[0].since is None


def test_what_is_asked_in_parts_is_one_answer() -> None:
    limits = {"keys_per_batch": 16}
    store = open_backend("memory://")
    with StorageServer(daemon_settings("unix", limits=limits), store) as node, worker(node) as grpc:
        put(grpc, *range(40))
        grpc.delete([key(1), key(17), key(39)])
        found = grpc.history([key(n) for n in range(40)], [page(n) for n in range(40)])
        assert [n for n, there in enumerate(found.tiers[0].present) if not there] == [1, 17, 39]
        assert causes(found) == dict.fromkeys((1, 17, 39), Cause.DELETED)
        assert [removal.at for removal in found.removals] == sorted(
            (r.at for r in found.removals), reverse=True
        )
        assert grpc.history([], [page(39)] * 20).removals[0].page == 0


@pytest.mark.parametrize("kind", ["memory", "file", "lmdb"])
def test_a_store_s_evictions_deletions_and_damage_are_told_apart(kind: str, tmp_path: Path) -> None:
    where = "" if kind == "memory" else tmp_path / "s"
    url = f"{kind}://{where}?capacity={'300KiB' if kind == 'memory' else '4MiB'}"
    with DaemonStore(open_backend(url)) as store:
        store.look()
        put(store, 1, 2, 3)
        assert store.delete([key(2), key(7)]) == [True, False]
        if kind == "file":
            [(name, offset, _), *_] = locate(store.inner, key(3))
            with open(name, "r+b") as file:
                file.seek(offset)
                file.write(b"\x5a" * 64)
            assert store.get([to_get(key(3), SIZE)]) == [Outcome.CORRUPT]
        put(store, *range(100, 400))
        pages = [page(number) for number in (1, 2, 3, 7, 399)]
        found = store.history([key(399), key(1)], pages)
        assert [list(tier.present) for tier in found.tiers] == [[True, False]]
        assert found.tiers[0].since is not None
        expected = {0: Cause.EVICTED, 1: Cause.DELETED, 2: Cause.CORRUPT if kind == "file" else Cause.EVICTED}
        until(lambda: causes(store.history([], pages)) == expected)
        assert all(removal.layout == LAYOUT for removal in store.history([], pages).removals)


def test_a_chain_says_which_tier_lost_what_and_follows_its_changes(tmp_path: Path) -> None:
    def url(name: str) -> str:
        return f"file://{tmp_path / name}?capacity=8MiB&tier_name={name}"

    chain = open_backend([f"memory://?capacity={4 * SIZE}&tier_name=ram", url("ssd")])
    with DaemonStore(chain) as store:
        store.look()
        for number in range(10):
            put_down(store, number)
        found = {tier.name: tier for tier in store.history([key(n) for n in range(10)], []).tiers}
        assert sum(found["ssd"].present) == 10
        assert sum(found["ram"].present) < 10
        assert not found["ram"].present[0]
        assert [(r.tier, r.cause) for r in store.history([], [page(0)]).removals] == [("ram", Cause.EVICTED)]
        add(chain, url("third"))
        put(store, 11)
        until(lambda: [list(tier.present) for tier in store.history([key(11)], []).tiers[1:]] == [[True]] * 2)
        assert store.history([], []).tiers[-1].since is not None
        store.delete([key(11)])
        told = store.history([key(11)], [page(11)])
        assert {(r.tier, r.cause) for r in told.removals} >= {
            ("ssd", Cause.DELETED),
            ("third", Cause.DELETED),
        }
        left = time.time()
        remove(chain, "third", drop=True)
        assert all((tier.since or 0) >= left for tier in store.history([], []).tiers), "nobody knows before"
        assert [tier.name for tier in store.history([], []).tiers] == ["ram", "ssd"]


def test_several_watch_one_store_and_each_may_leave() -> None:
    store = open_backend("memory://")
    first, second = list[bytes](), list[bytes]()
    one, other = (lambda digests, _, seen=seen: seen.extend(digests) for seen in (first, second))
    assert begin_watch(store, one)
    assert begin_watch(store, other)
    put(store, 1)
    end_watch(store, one)
    put(store, 2)
    end_watch(store, other)
    put(store, 3)
    assert (len(first), len(second)) == (1, 2)
    end_watch(store, other)  # once more is harmless


def server(tmp_path: Path, url: str, **more: Any) -> StorageServer:
    """A daemon on TCP with the tenants red and blue, a fenced principal and an operator."""
    salts = {name: {"salt_file": secret(tmp_path / f"{name}.salt", name * 20)} for name in ("red", "blue")}
    rights: dict[str, dict[str, Any]] = {
        "red": {"tenant": "red"}, "blue": {"tenant": "blue"}, "plain": {},
        "chief": {"verbs": ("read", "write", "admin")}, "fenced": {"namespaces": (OTHER.hex(),)},
    }  # fmt: skip
    principals = [
        {
            "name": name,
            "token_file": secret(tmp_path / f"{name}.token", name.ljust(32, "t")),
            "verbs": ("read", "write"),
            **what,
        }
        for name, what in rights.items()
    ]
    settings = daemon_settings("tcp", tenants=salts, principals=principals, **more)
    return StorageServer(settings, open_backend(url))


def client(node: StorageServer, tmp_path: Path, name: str) -> Any:
    where = section("tcp", node.addresses[0]) | {
        "token_file": str(tmp_path / f"{name}.token"),
        "timeout": "60s",
    }
    return open_backend({"type": "grpc", **where})


def worker(node: StorageServer) -> Any:
    return open_backend(
        {"type": "grpc", **section("unix", str(node.settings.socket_directory), timeout="60s")}
    )


def test_a_tenant_learns_nothing_of_what_others_lost(tmp_path: Path) -> None:
    with (
        server(tmp_path, f"memory://?capacity={6 * SIZE}") as node,
        client(node, tmp_path, "red") as red,
        client(node, tmp_path, "blue") as blue,
    ):
        until(lambda: red.history([], []).tiers[0].since is not None)
        put(red, 1, 2)
        assert causes(red.history([key(1)], [page(1), page(2)])) == {}
        put(blue, *range(10, 30))
        until(
            lambda: causes(red.history([key(1)], [page(1), page(2)])) == dict.fromkeys((0, 1), Cause.EVICTED)
        )
        asked = [key(1), key(2)], [page(1), page(2)]
        absent = [key(91), key(92)], [page(91), page(92)]
        assert blue.history(*asked) == blue.history(*absent)
        assert red.history([key(11)], [page(11)]) == red.history([key(93)], [page(93)])
        with client(node, tmp_path, "plain") as plain, client(node, tmp_path, "fenced") as fenced:
            assert plain.history(*asked) == plain.history(*absent)
            put(plain, 50)
            put(blue, *range(60, 80))
            until(lambda: causes(plain.history([], [page(50)])) == {0: Cause.EVICTED})
            assert fenced.history([key(50)], [page(50)]) == fenced.history([key(94)], [page(94)])
            assert fenced.history([key(50)], [page(50)]).tiers[0].since is None
            with client(node, tmp_path, "chief") as chief:
                assert causes(chief.history([], [page(50), page(1)])) == {0: Cause.EVICTED}


def test_an_object_that_another_tier_still_has_is_not_told_as_removed(tmp_path: Path) -> None:
    tiers = [
        f"memory://?capacity={4 * SIZE}&tier_name=ram",
        f"file://{tmp_path}/s?capacity=8MiB&tier_name=ssd",
    ]
    with (
        server(tmp_path, tiers) as node,  # type: ignore[arg-type]
        client(node, tmp_path, "red") as red,
        client(node, tmp_path, "chief") as chief,
    ):
        until(lambda: red.history([], []).tiers[0].since is not None)
        for number in range(10):
            put(red, number)
            until(lambda: node.store.usage().tiers[-1].objects > number)  # noqa: B023
        for number in range(20, 30):
            put_down(chief, number)
        until(lambda: len(chief.history([], [page(20)]).removals) == 1)
        asked = [key(number) for number in range(10)], [page(number) for number in range(10)]
        until(lambda: list(red.history(*asked).tiers[0].present) == [True] * 10)
        told = red.history(*asked)
        assert [tier.name for tier in told.tiers] == [""]
        assert (told.removals, told.forgotten) == ([], None)
        operator = chief.history([key(20)], [page(20)])
        assert [tier.name for tier in operator.tiers] == ["ram", "ssd"]
        assert [(r.tier, r.cause) for r in operator.removals] == [("ram", Cause.EVICTED)]


def test_a_store_that_tells_nothing_is_said_to_tell_nothing() -> None:
    with (
        StorageServer(daemon_settings("unix"), open_backend("memory://")) as inner,
        StorageServer(daemon_settings("unix"), worker(inner)) as outer,
        worker(outer) as store,
    ):
        put(store, 1, 2)
        store.delete([key(1)])
        found = store.history([key(2)], [page(1)])
        assert causes(found) == {0: Cause.DELETED}
        assert found.tiers[0].present == [True]
