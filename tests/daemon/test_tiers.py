"""Changes of the tiers of a real daemon by its file: `config apply` and SIGHUP, good lists and bad ones."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.cli.store.test_samples import call
from tests.daemon.hosts import GUARD, Daemon, secret, serving, until
from tests.examples import slow_after
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.cli.terminal import Exit
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError
from tiercache.storage.registry import open_backend
from tiercache.storage.tiers import LEAVING
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import fetch, key, payload, put

SIZE = 20_000
ALONE = "&tier_write=write_through_selective&tier_promote=never"
"""Settings of a tier to which nothing is copied by itself."""


def url(path: Path, name: str, capacity: str = "64MiB", more: str = "") -> str:
    return f"file://{path / name}?capacity={capacity}&tier_name={name}{more}"


def fill(store: Any, names: Sequence[object]) -> None:
    for name in names:
        assert put(store, key(name), payload(name, SIZE)) is Outcome.STORED


def has_all(store: Any, names: Sequence[object]) -> bool:
    return all(fetch(store, key(name), SIZE) == payload(name, SIZE) for name in names)


class Node:
    """A daemon, its file, and a client of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path / "tiercache.toml"
        secret(path / "acme.salt", "s" * 32)
        secret(path / "token", "t" * 32)
        secret(path / "acme", "a" * 32)
        self.where = f"grpc://{path}/run?timeout=20s"

    def body(self, *storage: str, quota: str = "", more: str = "") -> str:
        limit = f'quota = "{quota}"\n' if quota else ""
        return (
            f'directory = "{self.path}"\nhost_bytes = "48MiB"\nlisten = ["127.0.0.1:0"]\n{more}'
            f"storage = {json.dumps(storage)}\n"
            f'[tenants.acme]\nsalt_file = "{self.path}/acme.salt"\n{limit}'
            f'[[principals]]\nname = "worker"\ntoken_file = "{self.path}/token"\nverbs = ["read", "write"]\n'
            f'[[principals]]\nname = "acme"\ntenant = "acme"\ntoken_file = "{self.path}/acme"\n'
            'verbs = ["read", "write", "admin"]\n'
        )

    def write(self, *storage: str, **more: str) -> None:
        self.file.write_text(self.body(*storage, **more))

    def apply(self, *words: object, ok: int | None = 0) -> Any:
        return call("config", "apply", self.file, *words, ok=ok)

    def tiers(self) -> list[Any]:
        with open_backend(self.where) as store:
            return list(store.usage().tiers)

    def names(self) -> list[str]:
        return [tier.name for tier in self.tiers()]

    def shape(self) -> list[tuple[str, str]]:
        return [(tier.name, tier.health) for tier in self.tiers()]

    def records(self) -> list[dict[str, Any]]:
        audit = (self.path / "audit.jsonl").read_text()
        return [record for record in map(json.loads, audit.splitlines()) if record["event"] == "reload"]


@contextmanager
def running(path: Path, *storage: str, **more: str) -> Iterator[tuple[Node, Any, Daemon]]:
    node = Node(path)
    with serving(path, node.body(*storage, **more)) as daemon, open_backend(node.where) as store:
        yield node, store, daemon


def test_tiers_join_move_change_and_leave_and_the_next_daemon_has_them(tmp_path: Path) -> None:
    a, b, c, d = (url(tmp_path, name, more=ALONE) for name in "abcd")
    with running(tmp_path, a, b, quota="40MiB") as (node, store, daemon):
        fill(store, range(10))
        node.write(c, a, b, quota="40MiB")
        assert node.apply("-o", "json").document == {"changed": ["tier c joins"], "at_next_start": []}
        assert node.names() == ["c", "a", "b"]
        eager = url(tmp_path, "c", more=ALONE.replace("never", "always"))
        node.write(d, eager, b, quota="30MiB", more='drain = "9s"\n')
        done = node.apply()
        assert done.out.startswith("applied: tier d joins, tier a leaves, tier c has other settings, q")
        assert "changed, but only from the next start on: drain" in done.err
        assert node.names() == ["d", "c", "b"]
        assert has_all(store, range(10))
        node.write(b, d)
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: node.names() == ["b", "d"])
        assert has_all(store, range(10))
        assert node.apply().out.startswith("applied: no tier and no quota has changed")
        [first, *_] = node.records()
        assert (first["outcome"], first["principal"], first["peer"]) == (
            "asked", "owner", f"pid {os.getpid()}, uid {os.getuid()}",
        )  # fmt: skip
        told = [record["changed"] for record in node.records() if record.get("changed")]
        assert told[0] == "tier c joins"
        assert "file://" not in json.dumps(node.records())
        for told in ("tier d joins, tier a leaves", "tier a has left the chain"):
            until(lambda told=told: any(told in row["text"] for row in store.status()["journal"]))
    with serving(tmp_path, node.file.read_text()), open_backend(node.where) as store:
        assert node.names() == ["b", "d"]
        assert has_all(store, range(10))


A = "file://{0}/a?capacity=64MiB&tier_name=a"
B = "file://{0}/b?capacity=64MiB&tier_name=b"
BAD = {
    "bad URL": ([A, B, "nothing://x"], {}, 2, "'nothing' is unknown"),
    "not there": ([A, B, "grpc://127.0.0.1:1?timeout=100ms"], {}, 1, "'grpc' cannot be opened, so"),
    "it hangs": ([A, B, "grpc://127.0.0.1:{1}?tier_deadline=1s"], {}, 1, "'grpc' cannot be opened, so"),
    "itself": ([A, B, "grpc://{0}/run"], {}, 2, "this tier would be the daemon itself; name another daemon"),
    "no such drop": ([A, B], {"drop": "x"}, 2, "tier 'x' cannot be dropped, because it is not there"),
    "no quota": ([A, "lmdb://{0}/new?capacity=64MiB"], {"guarantee": "900MiB"}, 2, "guarantees of"),
    "no rights": ([A], {"store": "grpc://{2}?token_file={0}/token"}, 5, "worker may read and write, not"),
    "no daemon": ([A], {"store": "grpc://127.0.0.1:1?timeout=100ms"}, 3, "does not answer"),
    "no file": (None, {}, 2, "does not exist; create it"),
}  # fmt: skip


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Any, Daemon]]:
    """A daemon that none of these tests changes."""
    path = tmp_path_factory.mktemp("tiers")
    with running(path, A.format(path), B.format(path)) as found:
        yield found


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_gets_one_sentence_and_changes_nothing(settled, what):
    listed, words, code, sentence = BAD[what]
    node, store, daemon = settled
    before = node.shape()
    with ExitStack() as stack:
        hangs = stack.enter_context(_hanging())
        places = (node.path, hangs, f"127.0.0.1:{daemon.ports[0]}")
        if listed is None:
            node.file.unlink()
        else:
            body = node.body(*(one.format(*places) for one in listed))
            if "guarantee" in words:
                body = body.replace(
                    "[[principals]]", f'guarantee = "{words["guarantee"]}"\n[[principals]]', 1
                )
            node.file.write_text(body)
        options = [word for name in ("drop", "store") if name in words for word in (f"--{name}", words[name])]
        done = call("config", "apply", node.file, *(word.format(*places) for word in options), ok=code)
        assert sentence in done.error
        assert len(done.error.strip().splitlines()) == 1
        if not options and "new" not in str(listed):
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: sentence in daemon.log.read_text().split("configuration:")[-1])
    assert node.shape() == before
    assert put(store, key(what), payload(what, SIZE)) is Outcome.STORED


@contextmanager
def _hanging() -> Iterator[int]:
    """The port of a peer that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_tier_that_cannot_be_emptied_is_kept_or_dropped(tmp_path: Path) -> None:
    """The other tier takes no objects. The tier that is to leave is read on, and says why it is there."""
    open_backend(url(tmp_path, "b").partition("&")[0]).close()
    a, b = url(tmp_path, "a"), url(tmp_path, "b", more="&tier_read_only=yes")
    with running(tmp_path, a, b) as (node, store, _):
        fill(store, range(10))
        node.write(b)
        said = node.apply(ok=Exit.REFUSED).error
        assert "10 objects (195.3 KiB) would be lost: the others have room for 0 B; make room, or" in said
        assert "--drop a leaves it out at once" in said
        assert [tier.health for tier in node.tiers()] == ["read-only", "read-only"]
        why = "tier a is read-only: it cannot leave the chain: 10 objects"
        until(lambda: why in call("status", "-s", tmp_path).out)  # its figures are a moment old
        assert has_all(store, range(10))
        node.write(a, b)
        assert node.apply("-o", "json").document["changed"] == ["tier a stays"]
        fill(store, ["more"])
        node.write(b)
        assert json.loads(node.apply("--drop", "a", "-o", "jsonl").out) == {"changed": "tier a is dropped"}
        assert node.names() == ["b"]
        assert not has_all(store, [0])
    assert any(record.get("dropped") == "a" for record in node.records())


def test_files_that_are_applied_at_once_wait_for_each_other(tmp_path: Path) -> None:
    a, b, c = (url(tmp_path, name) for name in "abc")
    with running(tmp_path, a, b) as (node, store, _):
        fill(store, range(10))
        node.write(c, b)

        def apply() -> None:
            with open_backend(node.where) as client:
                client.reload()  # type: ignore[attr-defined]

        run_all(*[apply] * 6)
        until(lambda: node.names() == ["c", "b"])
        assert has_all(store, range(10))


@pytest.mark.parametrize("moment", slow_after(1, ["leaves", "begins", "at once"]))
def test_a_daemon_that_is_killed_while_a_tier_leaves_has_the_list_of_its_file(tmp_path, moment):
    """A tier that was to leave keeps what was not yet copied in its files, and the others have theirs."""
    a, b = url(tmp_path, "a", "256MiB"), url(tmp_path, "b", "256MiB", ALONE)
    node, last, count = Node(tmp_path), range(9000, 9010), 600
    with _killed(tmp_path, node.body(b)) as daemon, open_backend(node.where) as store:
        fill(store, last)
        node.write(a, b)
        node.apply()
        fill(store, range(count))
        node.write(b)
        daemon.process.send_signal(signal.SIGHUP)
        if moment != "at once":
            sign = "only it has are left" if moment == "leaves" else LEAVING

            def has_come() -> bool:
                first = store.usage().tiers[0]
                return first.name == "b" or sign in first.why  # a fast machine is through

            until(has_come, every=0)
    with serving(tmp_path, node.body(b)), open_backend(node.where) as store:
        assert node.names() == ["b"]
        assert has_all(store, last)
        held = store.usage().objects
        node.write(a, b)
        node.apply()
        assert has_all(store, range(count))
        node.write(b)
        node.apply()
        assert store.usage().objects == count + len(last) >= held
        assert has_all(store, [*range(count), *last])


@contextmanager
def _killed(path: Path, body: str) -> Iterator[Daemon]:
    """A daemon that is killed at the end."""

    class KilledError(Exception):
        pass

    with suppress(KilledError), serving(path, body) as daemon:
        yield daemon
        os.kill(daemon.pid, signal.SIGKILL)
        assert daemon.process.wait(GUARD) == -signal.SIGKILL
        raise KilledError


# -- daemons of this process


def client_of(node: StorageServer) -> GrpcBackend:
    return GrpcBackend(read_settings({"path": str(node.settings.socket_directory), "timeout": "20s"}))


def test_a_daemon_of_one_store_gets_tiers_at_its_next_start(tmp_path: Path) -> None:
    with StorageServer(daemon_settings("unix", storage="memory://")) as node:
        more = node.settings.model_copy(update={"storage": ("memory://", url(tmp_path, "a"))})
        assert node.reload(more).at_next_start == ["storage"]
        with pytest.raises(ConfigError, match="serves one store without tiers, so none can be dropped"):
            node.reload(more, ["a"])
        with client_of(node) as client, pytest.raises(Exception, match="not started from a file"):
            client.reload()
