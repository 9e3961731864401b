"""The verbs on a chain of tiers: stopped, and served by a daemon; well, and with a tier that is out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.store.test_samples import (
    ACME,
    KV,
    PROMPT,
    call,
    content_of,
    identity,
    keys_of,
    open_store,
    spoil,
    store_sequence,
)
from tests.daemon.hosts import until
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.config.loading import load
from tiercache.core import Outcome, PoolName
from tiercache.daemon import StorageServer
from tiercache.keys import object_key
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord
from tiercache.testing.objects import key, payload, put

PAGES = len(keys_of(PROMPT))
UPPER, LOWER = 4, PAGES
"""Pages in the upper and in the lower tier; the upper ones are in both."""


@pytest.fixture
def chain(tmp_path: Path) -> list[str]:
    """The options of a stopped chain: the upper tier has the first pages of a sequence, the lower one all."""
    for name, kind, tokens in (("a", "file", PROMPT[: UPPER * 4]), ("b", "lmdb", PROMPT)):
        with open_store(kind, tmp_path / name) as store:
            store.register_namespace(NamespaceRecord(ACME, identity().public_record()))
            store_sequence(store, tokens, states=())
    return ["-s", f"file://{tmp_path}/a?tier_name=fast", "-s", str(tmp_path / "b")]


@contextmanager
def owned(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a file store open, with one object."""
    command = [sys.executable, "-m", "tests.storage.owner", str(path), "put"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        try:
            yield owner
        finally:
            owner.send_signal(signal.SIGKILL)


def test_status_has_a_row_for_each_tier(chain: list[str]) -> None:
    found = call("status", *chain, "-o", "json").document
    assert (found["kind"], found["live"], found["objects"]) == ("chain", False, UPPER + LOWER)
    assert [(t["name"], t["kind"], t["health"], t["objects"]) for t in found["tiers"]] == [
        ("fast", "file", "read-only", UPPER),
        ("lmdb", "lmdb", "read-only", LOWER),
    ]
    spaces = call("ls", "--namespaces", *chain, "-o", "json").document
    assert sum(space["objects"] for space in spaces) == LOWER, "an object counts once there"
    table = call("status", *chain)
    assert [line.split()[:4] for line in table.out.splitlines() if "read-only" in line] == [
        ["fast", "file", "read-only", str(UPPER)],
        ["lmdb", "lmdb", "read-only", str(LOWER)],
    ]
    assert table.err == ""
    assert call("status", "-s", chain[-1], "-o", "json").document["tiers"] == [], "one store is no chain"


def test_ls_and_inspect_name_the_tier_of_an_object(chain: list[str]) -> None:
    tiers = {row["page_key"]: row["tier"] for row in call("ls", *chain, "-o", "jsonl").lines}
    pages = [page.hex() for page in keys_of(PROMPT)]
    assert tiers == {page: "fast" if n < UPPER else "lmdb" for n, page in enumerate(pages)}
    rows = call("ls", *chain, "--sort", "depth").out.splitlines()
    assert [row.split()[-1] for row in rows] == ["tier", *["fast"] * UPPER, *["lmdb"] * (LOWER - UPPER)]
    page = call("inspect", pages[-1], *chain, "-o", "json").document
    assert [found["tier"] for found in page["objects"]] == ["lmdb"]
    assert (page["chain_ends"], len(page["chain"])) == ("root", PAGES - 1), "ancestors may be in other tiers"
    assert call("inspect", pages[-1], *chain).out.splitlines()[-1].endswith("lmdb")


def test_verify_checks_every_copy_and_says_in_which_tier_it_is(chain: list[str], tmp_path: Path) -> None:
    page = keys_of(PROMPT)[1]
    spoil(tmp_path / "a", object_key(PoolName.KV, KV, page))
    found = call("verify", *chain, "-o", "json", ok=4).document
    assert [(bad["result"], bad["tier"], bad["page_key"]) for bad in found["found"]] == [
        ("corrupt", "fast", page.hex())
    ]
    assert found["summary"]["ok"] == UPPER + LOWER - 1
    assert f"in tier fast: page {page.hex()[:12]}" in call("verify", *chain, ok=4).out
    assert call("verify", *chain, "--repair", "-o", "json", ok=4).document["found"][0]["action"] == "dropped"
    assert call("verify", *chain, "-o", "json").document["summary"]["objects"] == UPPER + LOWER - 1


def test_verify_says_how_many_copies_of_a_daemon_it_has_not_read(tmp_path: Path) -> None:
    near, far = (f"file://{tmp_path}/{name}?capacity=64MiB&tier_name={name}" for name in ("near", "far"))
    settings = load(None, {"directory": str(tmp_path), "storage": [near, far], "host_bytes": "32MiB"})
    with StorageServer(settings) as node:
        for n in range(10):
            assert put(node.store, key(n), payload(n, 900)) is Outcome.STORED
        node.store.flush()
        until(lambda: [tier.objects for tier in node.store.usage().tiers] == [10, 10])
        done = call("verify", "-s", tmp_path, "-o", "json")
        assert (done.document["summary"]["objects"], done.document["summary"]["unread_copies"]) == (10, 10)
        assert "10 other copies are not checked" in done.err
    with StorageServer(load(None, {"directory": str(tmp_path), "storage": [far], "host_bytes": "32MiB"})):
        assert call("verify", "-s", tmp_path, "-o", "json").document["summary"]["unread_copies"] == 0


def test_flush_deletes_every_copy_and_copies_nothing(chain: list[str], tmp_path: Path) -> None:
    before = set(content_of("lmdb", tmp_path / "b"))
    with open_store("file", tmp_path / "a") as store:
        assert put(store, key("above"), payload("above", 900)) is Outcome.STORED
    prefix = keys_of(PROMPT)[2].hex()
    lines = call("flush", "--prefix", prefix, "--yes", *chain, "-o", "jsonl").lines
    assert sorted(row["tier"] for row in lines[:-1]) == ["fast"] * (UPPER - 2) + ["lmdb"] * (LOWER - UPPER)
    assert lines[-1]["summary"]["tiers"] == {"fast": UPPER - 2, "lmdb": LOWER - UPPER}
    assert len(content_of("file", tmp_path / "a")) == 2 + 1
    after = set(content_of("lmdb", tmp_path / "b"))
    assert len(after) == 2
    assert after < before, "the upper tier's objects are not written through by a flush"


def test_what_is_deleted_counts_as_deleted_though_copies_of_other_objects_wait(tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/near?capacity=16MiB", f"file://{tmp_path}/far?capacity=16MiB"]
    urls[1] += "&tier_name=far&tier_write_per_day=24KiB"
    settings = daemon_settings("unix")
    with open_backend(urls) as store, StorageServer(settings, store):
        for n in range(20):
            put(store, key(n), payload(n, 5000))
        until(lambda: store.usage().tiers[1].dropped > 0)
        done = call("flush", "--all", "--yes", "-s", f"grpc://{settings.sockets}", "-o", "json")
        assert (done.document["deleted"], done.document["failed"]) == (20, 0)
        assert "a power cut could undo it" in done.err
        assert "tier 'far' lacks" in done.err
        assert not list(store.scan_all())


def test_a_tier_that_is_never_changed_stays(chain: list[str], tmp_path: Path) -> None:
    kept = [*chain[:-1], f"lmdb://{tmp_path}/b?tier_read_only=yes"]
    before = content_of("lmdb", tmp_path / "b")
    assert "read-only" in call("flush", "--all", "--yes", *kept, ok=5).error
    assert content_of("lmdb", tmp_path / "b") == before


def test_a_tier_that_is_out_is_said_aloud(chain: list[str], tmp_path: Path) -> None:
    with owned(tmp_path / "c") as owner:
        all_three = [*chain, "-s", f"file://{tmp_path}/c?tier_name=other"]
        status = call("status", *all_three, "-o", "json").document
        assert [tier["health"] for tier in status["tiers"]] == ["read-only", "read-only", "out"]
        assert str(owner.pid) in status["tiers"][2]["why"]
        assert f"tier other is out: {status['tiers'][2]['why']}" in call("status", *all_three).out
        done = call("ls", *all_three, "-o", "jsonl")
        assert len(done.lines) == LOWER
        assert "tier other is out, and its objects are not seen" in done.err
        done = call("verify", *all_three, "-o", "json", ok=1)
        assert done.document["summary"]["ok"] == UPPER + LOWER
        assert "tier other is out, and its objects are not checked" in done.err
        before = content_of("lmdb", tmp_path / "b")
        assert "tier other is out" in call("flush", "--all", "--yes", *all_three, ok=1).error
        assert content_of("lmdb", tmp_path / "b") == before, "it would come back with the other tier"


def test_the_variable_names_one_store_or_a_list(chain, tmp_path, monkeypatch):
    spaced = tmp_path / "a b"
    (tmp_path / "a").rename(spaced)
    monkeypatch.setenv("TIERCACHE_STORE", str(spaced))
    assert call("status", "-o", "json").document["objects"] == UPPER
    monkeypatch.setenv("TIERCACHE_STORE", json.dumps([str(spaced), chain[-1]]))
    assert call("status", "-o", "json").document["objects"] == UPPER + LOWER
    monkeypatch.setenv("TIERCACHE_STORE", "[")
    assert "TIERCACHE_STORE is not JSON" in call("status", ok=2).error


def test_what_is_no_chain(chain: list[str]) -> None:
    assert "are both at" in call("ls", *chain, *chain[-2:], ok=2).error
    assert "name it alone" in call("ls", *chain, "-s", "grpc://127.0.0.1:1", ok=2).error
    assert "memory:// is empty" in call("ls", "-s", "memory://", *chain, ok=2).error
