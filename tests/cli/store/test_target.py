"""The store that `-s` names, and the sentence for each of at least twenty wrong uses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import KINDS, PROMPT, call, keys_of, make_store, store_sequence
from tests.faulty import Outage
from tiercache.cli.store import target as targets
from tiercache.cli.terminal import clean
from tiercache.errors import RefusedError


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_s_directory_stands_for_the_store_in_it(kind, tmp_path):
    make_store(kind, tmp_path / "d" / "store")
    found = call("status", "-s", tmp_path / "d", "-o", "json").document
    assert (found["kind"], found["live"], found["directory"]) == (kind, False, str(tmp_path / "d" / "store"))
    # Sockets that nobody listens on are of a daemon that was killed.
    (tmp_path / "d" / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "d" / "run" / "attach.sock"))
    assert not call("status", "-s", tmp_path / "d", "-o", "json").document["live"]


def test_the_environment_and_the_default_name_a_store(tmp_path, monkeypatch):
    make_store("file", tmp_path / "s")
    monkeypatch.setenv("TIERCACHE_STORE", str(tmp_path / "s"))
    assert call("status", "-o", "json").document["objects"] > 0
    monkeypatch.delenv("TIERCACHE_STORE")
    monkeypatch.setattr(targets, "DEFAULT_DIRECTORY", str(tmp_path / "s"))
    assert call("status", "-o", "json").document["objects"] > 0
    monkeypatch.setattr(targets, "DEFAULT_DIRECTORY", str(tmp_path / "none"))
    assert "no store is named" in call("status", ok=2).error


def test_a_killed_owner_leaves_a_store_to_look_at_and_a_living_one_is_named(tmp_path):
    path = tmp_path / "s"
    command = [sys.executable, "-m", "tests.storage.owner", str(path), "put"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "ready\n"
        said = call("ls", "-s", path, ok=1).error
        assert f"in use by process {owner.pid}" in said
        assert f"kill {owner.pid}" in said
        owner.send_signal(signal.SIGKILL)
    [found] = call("ls", "-s", path, "-o", "jsonl").lines
    assert found["bytes"] == 70_000
    call("verify", "-s", path)


def test_a_shared_store_is_looked_at_while_others_use_it(tmp_path):
    path = make_store("lmdb", tmp_path / "s")
    code = (
        f"from tiercache.storage import open_backend; s = open_backend('lmdb://{path}?capacity=16MiB');"
        " print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        assert call("status", "-s", path, "-o", "json").document["capacity_bytes"] == 16 << 20
        call("verify", "-s", path)
        other.communicate("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_a_mac_key_asks_for_it(kind, tmp_path):
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    for file, byte in ((key, b"k"), (wrong, b"w")):
        file.write_bytes(byte * 32)
        file.chmod(0o600)
    path = make_store(kind, tmp_path / "s", mac_key=str(key))
    assert "with --mac-key" in call("ls", "-s", path, ok=2).error
    assert "another MAC key" in call("ls", "-s", path, "--mac-key", wrong, ok=2).error
    call("verify", "-s", path, "--mac-key", key)
    call("verify", "-s", f"{kind}://{path}?capacity=kept&mac_key={key}")
    plain = make_store(kind, tmp_path / "plain")
    assert "omit --mac-key" in call("ls", "-s", plain, "--mac-key", key, ok=2).error
    assert "cannot be read" in call("ls", "-s", path, "--mac-key", tmp_path / "none", ok=2).error


class Pong:
    seconds, version, instance, principal, tenant, verbs, transport, store = (
        0.001, "9.9", "i1", "root", "", ("read",), "unix", "file",
    )  # fmt: skip


class Daemon(Outage):
    """Double of the `grpc` backend with the part of it that the command uses."""

    def ping(self) -> Pong:
        return self._perform("ping", Pong)

    def status(self):
        raise RefusedError("no document here")


@pytest.fixture
def daemon(monkeypatch):
    """A daemon behind every grpc URL; it says which sections it was opened with."""
    made = Daemon(MemoryBackend())
    made.sections = []
    made.close = lambda: None
    store_sequence(made, PROMPT)
    monkeypatch.setattr(targets, "open_backend", lambda section: made.sections.append(dict(section)) or made)
    return made


def test_a_socket_that_answers_makes_a_directory_a_daemon_s(daemon, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    (deep / "run").mkdir(parents=True)
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        os.chdir(deep / "run")  # the path itself is too long for a socket's name
        try:
            listening.bind("attach.sock")
        finally:
            os.chdir(here)
        listening.listen()
        found = call("status", "-s", deep, "-o", "json").document
        assert (found["live"], found["owner"], found["version"]) == (True, os.getpid(), "9.9")
        assert found["daemon"]["principal"] == "root"
        assert daemon.sections == [{"type": "grpc", "path": str(deep / "run")}]
        table = call("status", "-s", deep).out
        assert f"process {os.getpid()}" in table
        assert "omit --mac-key" in call("ls", "-s", deep, "--mac-key", "x", ok=2).error


def test_ping_measures_and_names_the_daemon(daemon):
    found = call("ping", "-s", "grpc://host:1", "--count", 3, "-o", "json").document
    assert (found["count"], found["median_seconds"], found["instance"], found["verbs"]) == (
        3, 0.001, "i1", ["read"],
    )  # fmt: skip
    assert len(call("ping", "-s", "grpc://host:1", "--count", 3, "-o", "jsonl").lines) == 3
    assert (
        "3 round trips: min 1.00 ms, median 1.00 ms" in call("ping", "-s", "grpc://host:1", "--count", 3).out
    )


@pytest.mark.parametrize(
    "verb",
    [
        ["status"], ["ping"], ["ls"], ["inspect", "ab"], ["verify"], ["flush", "--all", "--yes"],
        ["flush", "--all", "--dry-run"],
    ],
)  # fmt: skip
def test_a_daemon_that_does_not_answer_is_exit_code_3(daemon, verb):
    daemon.begin()
    done = call(*verb, "-s", "grpc://host:1?token=secret", ok=3)
    assert "grpc://host:1 does not answer" in done.error
    assert "secret" not in done.err
    assert done.out == ""


def test_a_daemon_that_goes_away_meanwhile_is_exit_code_3(daemon, monkeypatch):
    def gone(store: Daemon, keys):
        store.begin()
        store.exists(keys)

    monkeypatch.setattr(Daemon, "delete", gone)
    monkeypatch.setattr(Pong, "verbs", ("admin", "read", "write"))
    assert "does not answer" in call("flush", "--all", "--yes", "-s", "grpc://host:1", ok=3).error


def test_an_ambiguous_prefix_lists_its_candidates(tmp_path):
    path = make_store("file", tmp_path / "s")
    pages = {page.hex() for page in keys_of(PROMPT)}
    first = next(digit for digit in "0123456789abcdef" if sum(page.startswith(digit) for page in pages) > 1)
    said = call("inspect", first, "-s", path, ok=2).error
    assert "give more digits of one" in said
    assert sum(page[:16] in said for page in pages) > 1


def test_what_a_store_says_cannot_steer_a_terminal(tmp_path):
    from tests.cli.store.test_samples import identity, open_store
    from tiercache.keys import namespace_of
    from tiercache.storage.base import NamespaceRecord

    path = tmp_path / "s\x1b[31m"
    evil = identity(tenant="\x1b]0;owned\x07[red]bold\u202e", model="m\x9b2J\nnext")
    with open_store("lmdb", path) as store:
        store.register_namespace(NamespaceRecord(namespace_of(evil), evil.public_record()))
        store_sequence(store, PROMPT[:8], namespace=namespace_of(evil))
    page = call("ls", "-s", path, "-o", "jsonl").lines[0]["page_key"]
    for verb in (
        ["status"],
        ["ls"],
        ["ls", "--namespaces"],
        ["inspect", page],
        ["verify"],
        ["flush", "--all", "--dry-run"],
    ):
        done = call(*verb, "-s", path)
        assert not set("\x1b\x07\x9b\u202e") & set(done.out + done.err)
    assert "[red]bold" in call("ls", "--namespaces", "-s", path).out
    assert not set("\x1b\x07") & set(call("ls", "-s", f"{path}x", ok=2).err)
    assert clean("a\x1bb") == "a\\x1bb"
