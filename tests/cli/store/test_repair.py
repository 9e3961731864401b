"""`verify` and `flush`: what is read, dropped and deleted, in which order, also when interrupted."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.store.test_samples import (
    ACME,
    FORK,
    KINDS,
    PROMPT,
    call,
    content_of,
    identity,
    keys_of,
    kv,
    make_store,
    open_store,
    spoil,
    state,
    store_sequence,
)
from tests.examples import slow_after
from tiercache.cli.store import verify
from tiercache.cli.store.flush import remove as remove_in_order
from tiercache.cli.store.forest import Forest
from tiercache.core import Outcome
from tiercache.keys import namespace_of
from tiercache.storage.env import Env
from tiercache.storage.registry import open_backend

TIERCACHE = str(Path(sys.executable).parent / "tiercache")
EVERYTHING = 23


def orphans_of(kind: str, path: Path) -> int:
    with open_store(kind, path) as store:
        return store.usage().details["orphans"]


@pytest.mark.parametrize("kind", KINDS)
def test_verify_reads_everything(kind, tmp_path, monkeypatch):
    path = make_store(kind, tmp_path / "s")
    found = call("verify", "-s", path, "-o", "json").document
    assert found["found"] == []
    assert (found["summary"]["objects"], found["summary"]["ok"]) == (EVERYTHING, EVERYTHING)
    assert found["summary"]["bytes"] == 19 * 1500 + 4 * 9000
    assert "23 objects, 63.0 KiB" in call("verify", "-s", path).out
    assert call("verify", "-s", path, "--pool", "mamba", "-o", "json").document["summary"]["ok"] == 4
    assert call("verify", "-s", path, "--namespace", "other", "-o", "json").document["summary"]["ok"] == 3
    # Batches of a few objects, and objects larger than a batch.
    monkeypatch.setattr(verify, "BATCH_BYTES", 8192)
    assert call("verify", "-s", path, "-o", "json").document["summary"]["ok"] == EVERYTHING


def test_verify_says_what_happened_to_each_corrupt_object(tmp_path):
    path = make_store("file", tmp_path / "s")
    pages = keys_of(PROMPT)
    for key in (kv(pages[6]), state(pages[4])):
        spoil(path, key)
    said = call("verify", "-s", path, ok=4).out
    assert f"corrupt, still listed: page {pages[6].hex()[:12]} kv" in said
    assert "2 corrupt" in said
    *found, last = call("verify", "-s", path, "-o", "jsonl", ok=4).lines
    assert {(o["result"], o["action"], o["page_key"]) for o in found} == {
        ("corrupt", "listed", pages[6].hex()),
        ("corrupt", "listed", pages[4].hex()),
    }, "the first run changed nothing"
    assert (last["summary"]["corrupt"], last["summary"]["ok"]) == (2, EVERYTHING - 2)
    said = call("verify", "-s", path, "--repair", ok=4).out
    assert all(
        f"corrupt, dropped: page {pages[n].hex()[:12]} {pool}" in said
        for n, pool in ((6, "kv"), (4, "mamba"))
    )
    assert call("verify", "-s", path, "-o", "json").document["summary"]["ok"] == EVERYTHING - 2


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_slab_that_is_missing_or_cut_is_told_until_it_is_repaired(tmp_path, how):
    path = make_store("file", tmp_path / "s")
    slab = path / "slabs" / "000000.slab"
    if how == "missing":
        slab.unlink()
    else:
        os.truncate(slab, 0)
    for _ in range(2):
        found = call("verify", "-s", path, "-o", "json", ok=4).document["summary"]
        assert (found["catalog"], found["ok"]) == ("damaged", 0)
    call("verify", "--repair", "-s", path, ok=4)
    assert call("verify", "-s", path, "-o", "json").document["summary"]["objects"] == 0


def test_a_damaged_catalog_is_told_until_it_is_repaired(tmp_path):
    path = make_store("file", tmp_path / "s")
    with open(path / "catalog" / "000001.log", "r+b") as file:
        file.write(bytes(192))
    for _ in range(2):
        done = call("verify", "-s", path, "-o", "json", ok=4).document["summary"]
        assert (done["ok"], done["catalog"]) == (EVERYTHING, "damaged")
        assert len(call("ls", "-s", path, "-o", "jsonl").lines) == EVERYTHING
    assert "the catalog was damaged" in call("verify", "--repair", "-s", path, ok=4).out
    assert call("verify", "-s", path, "-o", "json").document["summary"]["ok"] == EVERYTHING


def test_a_damaged_environment_is_told_until_it_is_repaired(tmp_path):
    path = make_store("lmdb", tmp_path / "s")
    with open(path / "database" / "data.mdb", "r+b") as file:
        file.write(bytes(4096))
    for _ in range(2):
        assert "is damaged" in call("verify", "-s", path, ok=4).error
    assert "is damaged" in call("ls", "-s", path, ok=1).error
    done = call("verify", "--repair", "-s", path, "-o", "json", ok=4).document["summary"]
    assert (done["ok"], done["catalog"]) == (0, "damaged")
    assert (path / "database.damaged").exists()
    assert call("verify", "-s", path, "-o", "json").document["summary"]["ok"] == 0


def test_what_cannot_be_read_is_exit_code_1(tmp_path, monkeypatch):
    path = make_store("file", tmp_path / "s")
    tries = []

    def peek(self, items):
        tries.append(len(items))
        return [Outcome.THROTTLED if len(tries) < 3 else Outcome.ERROR for _ in items]

    monkeypatch.setattr("tiercache_backends.file.FileBackend.peek", peek)
    done = call("verify", "-s", path, "-o", "json", ok=1)
    assert done.document["summary"]["unreadable"] == EVERYTHING
    assert tries == [EVERYTHING] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--all"], 0), (["--namespace", "other"], 20), (["--namespace", ACME.hex()], 3),
        (["--tenant", "acme"], 3), (["--pool", "mamba"], 19), (["--pool", "kv"], 23 - 3 - 5),
        (["--older", "1h"], 23), (["--older", "0s"], 0),
        (["--tenant", "acme", "--pool", "mamba", "--older", "0s"], 19),
    ],
)  # fmt: skip
def test_flush_deletes_what_all_options_name(kind, tmp_path, options, left):
    path = make_store(kind, tmp_path / "s")
    before = content_of(kind, path)
    if "--older" in options and any(entry.stored_at is None for entry, _ in before.values()):
        pytest.skip("this store keeps no times")
    planned = call("flush", *options, "--dry-run", "-s", path, "-o", "json").document
    assert (planned["dry_run"], planned["objects"], planned["deleted"]) == (True, EVERYTHING - left, 0)
    assert sum(group["objects"] for group in planned["groups"]) == EVERYTHING - left
    assert content_of(kind, path) == before
    done = call("flush", *options, "--yes", "-s", path, "-o", "json").document
    assert (done["dry_run"], done["deleted"], done["failed"]) == (False, EVERYTHING - left, 0)
    after = content_of(kind, path)
    assert len(after) == left
    assert all(before[digest] == found for digest, found in after.items())
    assert orphans_of(kind, path) == 0


def test_flush_of_a_prefix_takes_everything_below(tmp_path):
    path = make_store("file", tmp_path / "s")
    pages, fork = keys_of(PROMPT), keys_of(FORK)
    lines = call("flush", "--prefix", pages[4].hex()[:16], "--dry-run", "-s", path, "-o", "jsonl").lines
    assert {line["page_key"] for line in lines[:-1]} == {page.hex() for page in [*pages[4:], *fork[5:]]}
    assert not any(line["deleted"] for line in lines[:-1])
    done = call("flush", "--prefix", pages[4].hex()[:16], "-y", "-s", path, "-o", "jsonl").lines
    assert all(line["deleted"] for line in done[:-1])
    assert done[-1]["summary"]["deleted"] == len(done) - 1
    assert {row["depth"] for row in call("ls", "-s", path, "--namespace", "acme", "-o", "jsonl").lines} == {
        1, 2, 3, 4,
    }  # fmt: skip


class AnHourAgo(Env):
    """The world with a clock that is an hour late."""

    def time_ns(self) -> int:
        return super().time_ns() - 3600 * 10**9


def test_an_old_page_in_front_of_a_new_one_stays(tmp_path):
    section = {"type": "file", "path": str(tmp_path / "s"), "capacity": "16MiB"}
    with open_backend(section, env=AnHourAgo()) as store:
        store_sequence(store, PROMPT[:20], states=())
    with open_backend(section) as store:
        store_sequence(store, FORK, states=())
    done = call("flush", "--older", "1800s", "--yes", "-s", tmp_path / "s")
    assert "nothing to delete" in done.out
    assert "5 objects, 7.3 KiB are kept" in done.out


def test_deletion_that_stops_anywhere_leaves_no_orphans(tmp_path):
    path = make_store("file", tmp_path / "s")
    with open_store("file", path) as store:
        forest = Forest(store.scan_all())
        entries = [entry for page in forest.pages.values() for entry in page.entries]
        for _ in remove_in_order(store, forest.removal_order(entries), 1):
            assert store.usage().details["orphans"] == 0
        assert store.usage().objects == 0


def test_what_cannot_be_deleted_is_exit_code_1(tmp_path, monkeypatch):
    path = make_store("file", tmp_path / "s")
    monkeypatch.setattr("tiercache_backends.file.FileBackend.delete", lambda self, keys: [False] * len(keys))
    done = call("flush", "--all", "--yes", "-s", path, "-o", "json", ok=1)
    assert done.document["failed"] == EVERYTHING
    assert "23 objects could not be deleted" in done.error


def test_flush_asks_on_a_terminal(tmp_path):
    path = make_store("file", tmp_path / "s")
    for answer, code, left in (("n", 6, EVERYTHING), ("", 6, EVERYTHING), ("y", 0, 0)):
        said = call("flush", "--all", "-s", path, ok=code, text=f"{answer}\n", terminal=True).err
        assert "23 objects, 63.0 KiB will be deleted" in said
        assert "qwen3-next@r1, acme mamba: 4" in said
        assert call("status", "-s", path, "-o", "json").document["objects"] == left


@pytest.mark.parametrize("sent", slow_after(1, [signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_flush_leaves_no_orphans(tmp_path, sent):
    path = tmp_path / "s"
    with open_store("lmdb", path, capacity="256MiB") as store:
        for start in range(0, 8000, 1000):
            store_sequence(store, range(start * 4, start * 4 + 4000), states=(100, 900), size=64)
    command = [TIERCACHE, "flush", "--all", "--yes", "-s", str(path), "-o", "jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        first = run.stdout.readline()
        run.send_signal(sent)
        rest, said = run.stdout.read(), run.stderr.read()
        assert run.wait(60) == 128 + sent
    assert said == ("tiercache: ended by Ctrl-C\n" if sent is signal.SIGINT else "")
    assert all(json.loads(line) for line in (first + rest).splitlines())
    found = call("verify", "-s", path, "-o", "json").document["summary"]
    assert orphans_of("lmdb", path) == 0
    assert 0 < found["ok"] < 8016
    assert namespace_of(identity()) == ACME


def test_verify_shows_that_it_lists_what_is_there(tmp_path):
    path = make_store("file", tmp_path / "s")
    here, there = pty.openpty()
    with subprocess.Popen([TIERCACHE, "verify", "-s", path], stdout=subprocess.PIPE, stderr=there) as run:
        os.close(there)
        said = b""
        while part := _read(here):
            said += part
        assert run.wait(60) == 0
    os.close(here)
    assert b"listing the objects of" in said


def _read(fd):
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # how a terminal ends
        return b""
