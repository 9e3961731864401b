"""Changes of the tiers of a daemon's store, by its clients."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.daemon.hosts import until
from tests.examples import slow_after
from tests.storage_backends.grpc.nodes import daemon_settings, scratch
from tiercache.config.loading import load
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.storage.registry import open_backend
from tiercache.storage.tiers import Progress
from tiercache.testing.objects import fetch, key, payload, put
from tiercache.wire.v1 import storage_pb2 as pb

SIZE = 20_000
ALONE = "&tier_write=write_through_selective&tier_promote=never"
"""Settings of a tier to which nothing is copied by itself."""
PRINCIPALS = {
    "operator": {"verbs": ("read", "write", "admin")},
    "worker": {"verbs": ("read", "write")},
    "tenant": {"verbs": ("read", "write", "admin"), "tenant": "acme"},
    "fenced": {"verbs": ("read", "write", "admin"), "namespaces": ("ab" * 32,)},
}


def url(path: Path, name: str, capacity: str = "64MiB", more: str = "") -> str:
    return f"file://{path / name}?capacity={capacity}&tier_name={name}{more}"


@pytest.fixture
def chain(tmp_path: Path) -> Any:
    return open_backend([url(tmp_path, "a"), url(tmp_path, "b", more=ALONE)])


@pytest.fixture
def node(chain: Any) -> Iterator[StorageServer]:
    with StorageServer(daemon_settings("unix"), chain) as served:
        yield served


def client_of(node: StorageServer) -> GrpcBackend:
    return GrpcBackend(read_settings({"path": str(node.settings.socket_directory), "timeout": "20s"}))


@pytest.fixture
def client(node: StorageServer) -> Iterator[GrpcBackend]:
    with client_of(node) as store:
        yield store


def fill(store: Any, count: int) -> None:
    for n in range(count):
        assert put(store, key(n), payload(n, SIZE)) is Outcome.STORED


def has_all(store: Any, count: int) -> bool:
    return all(fetch(store, key(n), SIZE) == payload(n, SIZE) for n in range(count))


def shape(store: Any) -> list[tuple[str, str, str]]:
    return [(tier.name, tier.url, tier.health) for tier in store.usage().tiers]


def ask_of(client: GrpcBackend) -> Callable[[str, Any], Any]:
    """The calls of which the changes are made."""
    # private: messages that no method sends, and an interruption in the middle of a call
    return client._ask_of_tiers


def names(store: Any) -> list[str]:
    return [tier.name for tier in store.usage().tiers]


# --- each change
# ------------------------------------------------------------------------------------------------------------


def test_tiers_join_move_change_and_leave(
    node: StorageServer, client: GrpcBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tiercache.daemon.tiers")
    fill(client, 10)
    client.add_tier(url(tmp_path, "c", more=ALONE), 0)
    client.add_tier(
        {"type": "file", "path": str(tmp_path / "d"), "capacity": "16MiB", "tier_read_only": False}
    )
    assert names(client) == ["c", "a", "b", "file"]
    client.reorder(["a", "file", "c", "b"])
    client.change_tier("c", capacity="128MiB", promote="always")
    client.replace_tier("file", url(tmp_path, "e"), keep_contents=False)
    assert names(client) == ["a", "e", "c", "b"]
    c = client.usage().tiers[2]
    assert c.capacity_bytes == 128 << 20
    assert c.url == url(tmp_path, "c", "128MiB", ALONE).replace("never", "always")
    told: list[Progress] = []
    client.remove_tier("e")
    client.remove_tier("a", progress=told.append)
    assert told[-1] == Progress(10, 10 * SIZE, 10, 10 * SIZE)
    assert names(client) == ["c", "b"]
    assert has_all(client, 10)
    node.stop()
    audit = node.settings.audit_file.read_text()
    told = [json.loads(line) for line in audit.splitlines()]
    changes = [(record["principal"], record["change"], record["outcome"]) for record in told]
    assert ("owner", f"add tier 'file://{tmp_path}/c' (at 0)", "asked") in changes
    assert ("owner", "remove tier 'a'", "done") in changes
    assert {record["peer"] for record in told} == {f"pid {os.getpid()}, uid {os.getuid()}"}
    assert "capacity=" not in audit
    assert "capacity=" not in caplog.text


# --- who may
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(chain: Any, tmp_path: Path) -> Iterator[Callable[[str], GrpcBackend]]:
    """Clients of a daemon with several principals, by name."""
    (tmp_path / "salt").touch(0o600)
    (tmp_path / "salt").write_bytes(bytes(range(32)))
    principals = []
    for name, rights in PRINCIPALS.items():
        file = scratch() / f"{name}.tiers"
        file.touch(0o600)
        file.write_text(name.ljust(32, "x"))
        principals.append({"name": name, "token_file": file, **rights})
    settings = daemon_settings(
        "tcp", principals=principals, tenants={"acme": {"salt_file": tmp_path / "salt"}}
    )
    clients: list[GrpcBackend] = []

    def client(name: str) -> GrpcBackend:
        section = {"address": node.addresses[0], "token_file": str(scratch() / f"{name}.tiers")}
        clients.append(GrpcBackend(read_settings({**section, "timeout": "20s"})))
        return clients[-1]

    with StorageServer(settings, chain) as node:
        yield client
        for one in clients:
            one.close()


@pytest.mark.parametrize("name", ["worker", "tenant", "fenced"])
def test_only_operators_of_the_whole_daemon_change_tiers(
    shared: Callable[[str], GrpcBackend], chain: Any, tmp_path: Path, name: str
) -> None:
    before = shape(chain)
    store = shared(name)
    for change in (
        lambda: store.add_tier(url(tmp_path, "c")),
        lambda: store.remove_tier("a", keep_contents=False),
        lambda: store.replace_tier("a", url(tmp_path, "c")),
        lambda: store.reorder(["b", "a"]),
        lambda: store.change_tier("a", capacity="4MiB"),
        store.give_up_change,
    ):
        with pytest.raises(RefusedError, match=f"{name} may "):
            change()
    assert shape(chain) == before
    assert not (tmp_path / "c").exists()


def test_only_operators_are_told_urls(shared: Callable[[str], GrpcBackend], chain: Any) -> None:
    assert [tier.url for tier in shared("operator").usage().tiers] == [
        tier.url for tier in chain.usage().tiers
    ]
    assert [tier.url for tier in shared("tenant").usage().tiers] == ["", ""]
    shared("operator").change_tier("a", promote="never")
    assert chain.tiers[0].settings.promote == "never"


# --- clients that go away, and changes that are given up
# ------------------------------------------------------------------------------------------------------------

REMOVE = """
import sys
from tiercache.storage.registry import open_backend
with open_backend(f"grpc://{sys.argv[1]}?timeout=20s") as store:
    store.remove_tier("a", progress=lambda _: print("copying", flush=True))
"""


class Gate:
    """Holds every copy to a tier up, until it is opened."""

    def __init__(self, chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        # private: a copy has to be held up while it is under way
        mover = chain._lineups.current.movers[chain.tiers[1]]
        settle = mover.settle

        def held(*arguments: Any) -> None:
            settle(*arguments)
            self.reached.set()
            self.opened.wait(60)

        monkeypatch.setattr(mover, "settle", held)


def test_a_change_goes_on_when_its_client_is_killed(
    node: StorageServer, client: GrpcBackend, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 10)
    gate = Gate(chain, monkeypatch)
    command = [sys.executable, "-c", REMOVE, str(node.settings.socket_directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert gate.reached.wait(60)
        os.kill(killed.pid, signal.SIGKILL)
    assert names(client) == ["a", "b"]
    with pytest.raises(
        RefusedError, match=r"another change is under way \(remove tier 'a'\); try again when"
    ):
        client.reorder(["b", "a"])
    assert has_all(client, 10)
    gate.opened.set()
    until(lambda: names(client) == ["b"])
    assert has_all(client, 10)


def test_a_change_is_given_up_by_another_client(
    node: StorageServer, client: GrpcBackend, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 10)
    gate = Gate(chain, monkeypatch)
    raised: list[Exception] = []

    def remove() -> None:
        with client_of(node) as other:
            try:
                other.remove_tier("a")
            except StorageError as error:
                raised.append(error)

    thread = threading.Thread(target=remove)
    thread.start()
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.opened.set).start()
    assert client.give_up_change() == "remove tier 'a'"
    thread.join()
    assert isinstance(raised[0], RefusedError)
    assert str(raised[0]) == "the change was given up, so the tiers are as before"
    assert [tier.health for tier in client.usage().tiers] == ["serving", "serving"]
    with pytest.raises(RefusedError, match="no change is under way"):
        client.give_up_change()


def test_a_client_that_is_interrupted_gives_its_change_up(
    client: GrpcBackend, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 10)
    asked = ask_of(client)
    gate = Gate(chain, monkeypatch)

    def interrupted(name: str, request: Any) -> Any:
        if name == "FollowTierChange" and not request.give_up:
            assert gate.reached.wait(60)
            threading.Timer(0.2, gate.opened.set).start()
            raise KeyboardInterrupt
        return asked(name, request)

    # private: see `ask_of`
    monkeypatch.setattr(client, "_ask_of_tiers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.remove_tier("a")
    assert [tier.health for tier in client.usage().tiers] == ["serving", "serving"]
    monkeypatch.undo()
    client.remove_tier("a")
    assert has_all(client, 10)


def test_the_end_of_the_daemon_ends_a_change(
    node: StorageServer, chain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(chain, monkeypatch)
    raised: list[Exception] = []
    with client_of(node) as client:
        fill(client, 10)

        def remove() -> None:
            try:
                client.remove_tier("a")
            except StorageError as error:
                raised.append(error)

        thread = threading.Thread(target=remove)
        thread.start()
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.opened.set).start()
        assert node.stop()
        thread.join()
    assert isinstance(raised[0], UnavailableError)
    assert str(raised[0]).endswith("the change goes on there (remove tier 'a')")
    with open_backend([url(tmp_path, "a"), url(tmp_path, "b", more=ALONE)]) as again:
        assert has_all(again, 10)


# --- bad input
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GrpcBackend, Path]]:
    """A client of a daemon that none of the tests changes, and the directory of its tiers."""
    path = tmp_path_factory.mktemp("tiers")
    (path / "key").touch(0o600)
    (path / "key").write_bytes(bytes(32))
    open_backend(f"lmdb://{path}/other?capacity=16MiB").close()
    open_backend(f"file://{path}/keyed?capacity=16MiB&mac_key={path}/key").close()
    chain = open_backend([url(path, "a"), url(path, "b", more=ALONE)])
    with (
        open_backend(f"file://{path}/taken?capacity=16MiB"),
        StorageServer(daemon_settings("unix"), chain) as node,
        client_of(node) as client,
    ):
        yield client, path


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda c, p: c.add_tier(url(p, "b")), ConfigError, "two tiers are named 'b'"),
        (
            lambda c, p: c.add_tier(f"file://{p}/b?capacity=8MiB"),
            ConfigError,
            "are both at .*/b; a directory",
        ),
        (
            lambda c, p: c.add_tier(f"file://{p}/x/../b?capacity=8MiB"),
            ConfigError,
            "are both at .*/b; a directory",
        ),
        (lambda c, p: c.add_tier(url(p, "c"), 9), ConfigError, "position 9 is not possible"),
        (lambda c, p: c.add_tier(url(p, "c"), -1), ConfigError, "position -1 is not possible"),
        (lambda c, p: c.add_tier({"path": str(p)}), ConfigError, "has no type"),
        (lambda c, p: c.add_tier("file:///data#1"), ConfigError, "has a #"),
        (lambda c, p: c.add_tier(f"file://{p}/\udcff"), ConfigError, "is not UTF-8, so a daemon cannot"),
        (lambda c, p: c.add_tier(url(p, "c", more="&tier_write=later")), ConfigError, "'later' is not"),
        (lambda c, p: c.add_tier(url(p, "c", more="&tier_write_per_day=0")), ConfigError, "a budget of 0"),
        (lambda c, p: c.add_tier(f"file://{p}/other?capacity=16MiB"), StorageError, "holds a store of kind"),
        (lambda c, p: c.add_tier(url(p, "keyed")), StorageError, "made with a MAC key"),
        (lambda c, p: c.add_tier(url(p, "taken")), StorageError, "is in use"),
        (
            lambda c, p: c.add_tier("grpc://127.0.0.1:1?timeout=100ms"),
            StorageError,
            "'grpc' cannot be opened, so the chain is as before",
        ),
        (lambda c, p: c.remove_tier("x"), ConfigError, "no tier is named 'x'; the chain has a, b"),
        (lambda c, p: c.reorder(["a"]), ConfigError, "name each once: a, b"),
        (lambda c, p: c.reorder([]), ConfigError, "nothing is no order"),
        (lambda c, p: c.change_tier("a", self="1"), ConfigError, "no setting 'self'"),
        (lambda c, p: c.change_tier("a", path="/"), ConfigError, "path of tier 'a' cannot change"),
        (
            lambda c, p: c.change_tier("b", write="write_back", read_only="yes"),
            ConfigError,
            "'b' is read-only",
        ),
    ],
)
def test_a_bad_change_gets_one_sentence_and_changes_nothing(
    settled: tuple[GrpcBackend, Path], change: Any, error: Any, sentence: str
) -> None:
    client, path = settled
    before = shape(client)
    with pytest.raises(error, match=sentence) as caught:
        change(client, path)
    assert "\n" not in str(caught.value)
    assert shape(client) == before
    name = secrets.token_hex(8)
    assert put(client, key(name), payload(name, SIZE)) is Outcome.STORED


def test_a_daemon_is_no_tier_of_itself(node: StorageServer, client: GrpcBackend) -> None:
    with pytest.raises(ConfigError, match="would be the daemon itself"):
        client.add_tier(f"grpc://{node.settings.socket_directory}")
    assert names(client) == ["a", "b"]


@pytest.mark.parametrize("count", slow_after(1, [2, 3]))
def test_daemons_are_no_tiers_of_each_other(count: int) -> None:
    """Each has the one before it as a tier, and the first may not have the last."""
    with ExitStack() as stack:
        chains = [open_backend(["memory://"]) for _ in range(count + 1)]
        nodes = [stack.enter_context(StorageServer(daemon_settings("unix"), chain)) for chain in chains]
        urls = [f"grpc://{node.settings.socket_directory}" for node in nodes]
        first, *others = [stack.enter_context(client_of(node)) for node in nodes[:-1]]
        for other, before in zip(others, urls, strict=False):
            other.add_tier(before)
        with pytest.raises(ConfigError, match="has this daemon as a tier") as caught:
            first.add_tier(urls[count - 1])
        assert "\n" not in str(caught.value)
        assert names(first) == ["memory"]
        first.add_tier(urls[-1])
        assert names(first) == ["memory", "grpc"], "a daemon apart is no ring"


def test_messages_without_sense(client: GrpcBackend) -> None:
    for request in (pb.ChangeTiersRequest(), pb.ChangeTiersRequest(add=pb.AddTier(tier={"x": "y" * 9000}))):
        with pytest.raises(
            StorageError, match=r"has no change that this daemon knows|has more than 64 entries"
        ):
            ask_of(client)("ChangeTiers", request)
    with pytest.raises(StorageError, match="knows nothing of change 7; it was restarted"):
        ask_of(client)("FollowTierChange", pb.FollowTierChangeRequest(number=7))


def test_a_store_without_tiers_says_how_it_gets_some(tmp_path: Path) -> None:
    with (
        StorageServer(daemon_settings("unix"), open_backend("memory://")) as node,
        client_of(node) as client,
        pytest.raises(ConfigError, match="serves one store without tiers; start it with chain = true"),
    ):
        client.add_tier(url(tmp_path, "c"))
    assert not (tmp_path / "c").exists()


def test_a_chain_of_one_tier_is_asked_for_with_a_flag(tmp_path: Path) -> None:
    settings = load(
        None, {"directory": str(tmp_path), "disk_bytes": "16MiB", "host_bytes": "32MiB", "chain": True}
    )
    assert settings.store_url == (f"file://{tmp_path}/store?capacity=16777216",)
    with StorageServer(settings) as node, client_of(node) as client:
        fill(client, 3)
        client.add_tier(url(tmp_path, "b"), 0)
        assert names(client) == ["b", "file"]
        assert has_all(client, 3)
