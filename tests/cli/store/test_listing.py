"""`status` and `ls`: what is printed, in which order, and which objects a filter lets through."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import (
    ACME,
    KINDS,
    PROMPT,
    call,
    keys_of,
    make_store,
    open_store,
    store_sequence,
)
from tests.examples import slow_after
from tiercache.cli.store.selection import make_filter
from tiercache.cli.terminal import count_text, ranges_text
from tiercache.config.models import Settings
from tiercache.core import ObjectMeta
from tiercache.daemon import StorageServer
from tiercache.storage.base import ScanEntry, Usage
from tiercache.storage.wrappers import Wrapper
from tiercache.testing.objects import key
from tiercache.text import readable_age, readable_size

TIERCACHE = str(Path(sys.executable).parent / "tiercache")
FIELDS = [
    "page_key", "pool", "namespace", "depth", "bytes", "stored_at", "parent", "layout", "checksum", "tier",
]  # fmt: skip
KV_OBJECTS, STATES_STORED, OTHERS = 16, 4, 3
EVERYTHING = KV_OBJECTS + STATES_STORED + OTHERS


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_counted_by_namespace_and_pool(kind, tmp_path):
    path = make_store(kind, tmp_path / "s")
    found = call("status", "-s", path, "-o", "json").document
    assert (found["kind"], found["objects"], found["daemon"]) == (kind, EVERYTHING, None)
    assert found["details"]["corrupt"] == found["details"]["evicted"] == 0
    pools = {
        (space["label"], pool["pool"]): (pool["objects"], pool["bytes"])
        for space in call("ls", "--namespaces", "-s", path, "-o", "json").document
        for pool in space["pools"]
    }
    assert pools == {
        ("qwen3-next@r1, acme", "kv"): (KV_OBJECTS, KV_OBJECTS * 1500),
        ("qwen3-next@r1, acme", "mamba"): (STATES_STORED, STATES_STORED * 9000),
        ("qwen3-next@r1, other", "kv"): (OTHERS, OTHERS * 1500),
    }
    assert sum(nbytes for _, nbytes in pools.values()) == found["payload_bytes"]
    table = call("ls", "--namespaces", "-s", path).out
    assert all(word in table for word in ("qwen3-next@r1, acme", "mamba"))
    table = call("status", "-s", path).out
    assert all(word in table for word in ("16.0 MiB", "evicted"))


WORTH = {"restorable_bytes": 9 << 20, "dead_bytes": 1 << 20, "orphans": 12}


class Telling(Wrapper):
    """A store that says what its objects are worth."""

    def usage(self):
        return Usage(3, 10 << 20, 11 << 20, 64 << 20, {"evicted": 4, **WORTH})


def test_status_says_what_can_be_restored_where_the_store_does(tmp_path):
    tmp_path.chmod(0o700)
    settings = Settings(directory=tmp_path, host_bytes="64MiB", drain=2).check()
    with StorageServer(settings, Telling(MemoryBackend())):
        where = f"grpc://{tmp_path}/run"
        found = call("status", "-s", where, "-o", "json").document
        assert {name: found[name] for name in WORTH} == WORTH
        assert found["details"] == {"evicted": 4, **WORTH}
        shown = " ".join(call("status", "-s", where).out.split())
        assert shown.count("orphans") == 1
        assert "restorable 9.0 MiB (90%), dead 1.0 MiB, 12 orphans" in shown
    with StorageServer(settings, MemoryBackend()):
        found = call("status", "-s", where, "-o", "json").document
        if found["restorable_bytes"] is None:
            assert "restorable" not in call("status", "-s", where).out


@pytest.mark.parametrize("kind", KINDS)
def test_ls_lists_every_object_once(kind, tmp_path):
    path = make_store(kind, tmp_path / "s")
    rows = call("ls", "-s", path, "-o", "jsonl").lines
    assert all(list(row) == FIELDS for row in rows)
    assert len({(row["page_key"], row["layout"]) for row in rows}) == len(rows) == EVERYTHING
    assert rows == call("ls", "-s", path, "-o", "json").document
    pages = {page.hex(): n for n, page in enumerate(keys_of(PROMPT), 1)}
    for row in rows:
        if row["pool"] == "mamba":
            assert row["parent"] == row["page_key"]
        elif row["page_key"] in pages:
            assert row["depth"] == pages[row["page_key"]]
    table = call("ls", "-s", path).out.splitlines()
    assert table[0].split() == [
        "page", "key", "pool", "namespace", "depth", "size", "stored", "parent", "layout",
    ]  # fmt: skip
    assert len(table) == EVERYTHING + 1
    assert len({line.index(" kv ") for line in table if " kv " in line}) == 1, "columns stay where they are"


def test_filters_and_orders(tmp_path):
    path = make_store("file", tmp_path / "s")

    def listed(*options):
        return call("ls", "-s", path, "-o", "jsonl", *options).lines

    assert len(listed("--namespace", "ACME")) == KV_OBJECTS + STATES_STORED
    assert len(listed("--namespace", ACME.hex()[:10])) == KV_OBJECTS + STATES_STORED
    assert len(listed("--namespace", "qwen3")) == EVERYTHING
    assert {row["pool"] for row in listed("--pool", "MAMBA")} == {"mamba"}
    assert len(listed("--newer", "1h")) == EVERYTHING
    assert listed("--older", "1h") == []
    assert len(listed("--limit", "2")) == 2
    keys = [row["page_key"] for row in listed("--sort", "key")]
    assert keys == sorted(keys)
    depths = [row["depth"] for row in listed("--sort", "depth")]
    assert depths == sorted(depths)
    sizes = [row["bytes"] for row in listed("--sort", "size", "--limit", "5")]
    assert sizes == [9000] * STATES_STORED + [1500]
    ages = [row["stored_at"] for row in listed("--sort", "age")]
    assert ages == sorted(ages)
    spaces = call("ls", "-s", path, "--namespaces", "-o", "json").document
    assert [(space["identity"]["tenant"], space["objects"]) for space in spaces] == [
        ("acme", 20),
        ("other", 3),
    ]
    assert len(call("ls", "-s", path, "--namespaces", "--namespace", "other", "-o", "jsonl").lines) == 1


def test_an_object_without_a_time_is_neither_old_nor_new():
    entry = ScanEntry(key(1), ObjectMeta(b"n", 1, b""), None)
    old, new = make_filter(1000.0, older="1s"), make_filter(1000.0, newer="1h")
    assert not old.admits(entry)
    assert not new.admits(entry)
    entry = entry._replace(stored_at=500.0)
    assert old.admits(entry)
    assert new.admits(entry)
    assert not make_filter(1000.0, older="10min").admits(entry)


def test_a_namespace_that_nobody_registered_is_found_by_its_digits(tmp_path):
    with open_store("file", tmp_path / "s") as store:
        store_sequence(store, PROMPT)
    assert len(call("ls", "-s", tmp_path / "s", "--namespace", ACME.hex()[:6], "-o", "jsonl").lines) == 10 + 3
    assert call("ls", "-s", tmp_path / "s", "--namespaces", "-o", "json").document[0]["label"] == "unnamed"
    assert "unnamed" in call("ls", "--namespaces", "--namespace", ACME.hex()[:6], "-s", tmp_path / "s").out


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_store_is_no_error(kind, tmp_path):
    open_store(kind, tmp_path / "s").close()
    assert call("status", "-s", tmp_path / "s", "-o", "json").document["objects"] == 0
    assert call("ls", "-s", tmp_path / "s", "-o", "json").document == []
    assert "0 objects" in call("ls", "-s", tmp_path / "s").err
    assert "0 objects" in call("verify", "-s", tmp_path / "s").out
    assert "nothing to delete" in call("flush", "--all", "--yes", "-s", tmp_path / "s").out
    explain = ("explain", "--tokens", "-", "-s", tmp_path / "s")
    assert "3 tokens: no namespace" in call(*explain, text="1 2 3", ok=6).out
    assert "0 tokens: no namespace" in call(*explain, ok=6).out


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A store of 8,000 objects."""
    path = tmp_path_factory.mktemp("many") / "s"
    with open_store("file", path, capacity="256MiB") as store:
        store_sequence(store, range(32_000), states=(), size=64)
    return path


@pytest.mark.parametrize("output", slow_after(1, ["jsonl", "table", "json"]))
def test_ctrl_c_ends_cleanly_and_leaves_whole_lines(many, output):
    # A reader that does not read holds the writer up in the middle of its lines.
    with subprocess.Popen(
        [TIERCACHE, "ls", "-s", str(many), "-o", output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        head = run.stdout.read(1)
        time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        rest, said = run.stdout.read(), run.stderr.read()
        assert run.wait(30) == 130
    assert "Traceback" not in said
    assert rest.endswith("\n") or output == "json"
    if output == "jsonl":
        assert all(json.loads(line)["pool"] == "kv" for line in (head + rest).splitlines())
    call("ls", "-s", many, "--limit", 1)


def test_words_for_people():
    assert [readable_size(n) for n in (0, 1023, 1024, 1536, 5 << 30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB",
    ]  # fmt: skip
    assert [readable_age(s) for s in (None, 0.4, -5, 59, 119, 120, 7200, 86400 * 3)] == [
        "-", "0 s", "0 s", "59 s", "119 s", "2 min", "2 h", "3 d",
    ]  # fmt: skip
    assert ranges_text([1, 2, 3, 7, 9, 10]) == "1..3, 7, 9..10"
    assert ranges_text(list(range(0, 100, 2)), max_runs=3) == "0, 2, 4, ... 98"
    assert [count_text(n, "page") for n in (0, 1, 2000)] == ["0 pages", "1 page", "2,000 pages"]
