"""The verbs against a daemon of its own, through its unix sockets, until it is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.serving import serving
from tests.cli.store.test_samples import (
    ACME,
    FORK,
    KINDS,
    PROMPT,
    call,
    identity,
    keys_of,
    make_store,
    store_sequence,
)  # fmt: skip
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.daemon import StorageServer
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend


@pytest.fixture
def served(tmp_path):
    """The directory of a daemon that has two sequences, and its process."""
    path = tmp_path / "d"
    path.mkdir(mode=0o700)
    with serving("--directory", path, "--disk-bytes", "64MiB", "--host-bytes", "64MiB") as (daemon, _):
        with open_backend(f"grpc://{path}/run") as store:
            store.register_namespace(NamespaceRecord(ACME, identity().public_record()))
            store_sequence(store, PROMPT)
            store_sequence(store, FORK)
        yield path, daemon


def test_every_verb_asks_the_daemon_and_the_store_that_it_leaves_when_it_is_killed(served, tmp_path):
    path, daemon = served
    for named in (path, f"grpc://{path}/run"):
        status = call("status", "-s", named, "-o", "json").document
        assert (status["live"], status["objects"]) == (True, 20)
        [space] = call("ls", "--namespaces", "-s", named, "-o", "json").document
        assert (space["label"], space["objects"]) == ("qwen3-next@r1, acme", 20)
        assert call("ping", "-s", named, "--count", 2, "-o", "json").document["transport"] == "unix"
    assert call("status", "-s", path, "-o", "json").document["owner"] == daemon.pid
    assert len(call("ls", "-s", path, "-o", "jsonl").lines) == 20
    page = keys_of(PROMPT)[4].hex()
    inspected = call("inspect", page, "-s", path, "-o", "json").document
    assert [found["pool"] for found in inspected["objects"]] == ["kv", "mamba"]
    (tmp_path / "t").write_text(" ".join(map(str, [*PROMPT, 1])))
    [prompt] = call("explain", "--tokens", tmp_path / "t", "-s", path, "-o", "jsonl").lines
    assert prompt["restorable_depths"] == [[4, 5], [8, 8]]
    assert call("verify", "-s", path, "-o", "json").document["summary"]["ok"] == 20
    assert call("flush", "--prefix", page, "--yes", "-s", path, "-o", "json").document["deleted"] == 15
    assert call("status", "-s", path, "-o", "json").document["objects"] == 5
    assert f"give --store {path} to use that daemon" in call("ls", "-s", path / "store", ok=1).error
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait(120)
    for verb in (["status"], ["ping"], ["ls"], ["verify"], ["flush", "--all", "--yes"]):
        done = call(*verb, "-s", f"grpc://{path}/run", ok=3)
        assert "does not answer" in done.error
        assert len(done.err.splitlines()) == 1
    found = call("status", "-s", path, "-o", "json").document
    assert (found["live"], found["objects"], found["capacity_bytes"]) == (False, 5, 64 << 20)
    call("verify", "-s", path)


def test_ports_that_are_not_for_calls_are_named():
    with StorageServer(daemon_settings("tcp", principals=(), insecure_bind=True)) as node:
        [payload] = [line.rpartition(" ")[2] for line in node.describe() if line.startswith("payload at ")]
        said = call("ping", "-s", f"grpc://{payload}", ok=3).error
        assert "if this is its port for payload, give its port for calls" in said
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        said = call("ping", "-s", f"grpc://127.0.0.1:{server.server_port}", ok=3).error
        server.shutdown()
        thread.join()
    assert said.endswith(
        "; another service listens there, such as that of http.listen or of payload; give the port for calls"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_s_own_figures_have_the_names_that_the_documents_explain(kind, tmp_path):
    shown = call("status", "-s", make_store(kind, tmp_path / "s")).out
    details = call("status", "-s", tmp_path / "s", "-o", "json").document["details"]
    documented = (Path(__file__).parents[3] / "docs/stores.md").read_text()
    for name in details.keys() - {"restorable_bytes", "dead_bytes", "orphans"}:
        assert re.search(rf"(?m)^ {name} ", shown) or not details[name]
        assert f"`{name}`" in documented, name
