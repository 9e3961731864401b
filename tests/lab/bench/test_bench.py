"""`tiercache bench disk` as a user runs it, on tiny sizes: what is printed, and what stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tiercache.errors import StorageError
from tiercache_lab.bench.baselines import Piece, RawFile, pieces
from tiercache_lab.bench.machine import machine
from tiercache_lab.bench.plan import Case, plan
from tiercache_lab.bench.rows import size_text, speed
from tiercache_lab.bench.subject import Buffers
from tiercache_lab.bench.timing import Crew, Side, medians

TIERCACHE = str(Path(sys.executable).parent / "tiercache")
ONE = ("--bytes", "2MiB", "--size", "64KiB", "--repeat", "1")
TINY = ("--bytes", "4MiB", "--size", "16KiB,64KiB", "--repeat", "1")
FIELDS = [
    "name", "size", "objects", "seconds", "gbps", "limit_gbps", "ratio", "us_per_object", "limit",
]  # fmt: skip
NAMES = {f"file {case.words}" for case in Case}


def bench(*arguments, cwd="."):
    with chdir(cwd):
        return call("bench", "disk", *arguments, ok=None)


def rows_of(done):
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


def test_json_has_every_case_of_every_size_and_leaves_nothing_behind(tmp_path):
    done = bench(*TINY, "--directory", tmp_path, "-o", "jsonl")
    rows = rows_of(done)
    assert all(list(row) == FIELDS for row in rows)
    for size, objects in ((16 << 10, 128), (64 << 10, 32)):
        mine = {row["name"]: row for row in rows if row["size"] == size}
        assert mine.keys() == NAMES
        assert {
            row["objects"] for name, row in mine.items() if "exists" not in name and "open" not in name
        } == {objects}
        assert (mine["file exists"]["objects"], mine["file open"]["objects"]) == (1600, 2 * objects)
    moved = [row for row in rows if row["gbps"] is not None]
    assert len(moved) == len(rows) - 4
    for row in moved:
        assert row["ratio"] == pytest.approx(row["gbps"] / row["limit_gbps"], rel=2e-3)
        assert row["gbps"] == pytest.approx(row["size"] / row["us_per_object"] / 1e3, rel=2e-3)
        assert row["limit"]
    assert "O_DIRECT" in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_the_same_rows_and_what_they_depend_on(tmp_path):
    done = bench(*ONE, cwd=tmp_path)
    assert done.code == 0, done.err
    shown = [line.strip() for line in done.out.splitlines()]
    for name in NAMES:
        assert any(line.startswith(f"{name} ") for line in shown), name
    said = " ".join(done.out.split())
    assert f"{len(os.sched_getaffinity(0))} cores, Linux" in said
    assert "Medians of 1 interleaved runs" in said
    assert "raise --repeat" in said
    assert done.err == ""
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_asked_for_runs(tmp_path):
    rows = rows_of(bench(*ONE, "--case", "get-warm, open", "--directory", tmp_path, "-o", "jsonl"))
    assert {row["name"] for row in rows} == {"file get warm", "file open"}
    many = ("--size", "4KiB", "--bytes", "1MiB", "--objects", 5000, "--case", "open")
    rows = rows_of(bench(*many, "--directory", tmp_path, "-o", "jsonl"))
    assert [(row["name"], row["objects"]) for row in rows] == [("file open", 6 * 42), ("file open", 2 * 4096)]


def test_lmdb_has_the_same_rows(tmp_path):
    rows = rows_of(bench(*ONE, "--backend", "lmdb", "--directory", tmp_path, "-o", "jsonl"))
    assert {row["name"] for row in rows} == {name.replace("file ", "lmdb ", 1) for name in NAMES}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--size", "5x"], "--size: '5x' is not a size"),
        (["--size", "16KiB,,1MiB"], "--size: '' is not a size"),
        (["--size", "5000"], "--size 5000 is not possible; use multiples of 4KiB"),
        (["--size", "1GiB"], "up to 256MiB"),
        (["--bytes", "lots"], "--bytes: 'lots' is not a size"),
        (["--bytes", "64KiB", "--size", "16KiB"], "give at least 98304"),
        (["--repeat", "0"], "--repeat"),
        (["--objects", "1000000000000"], "MiB free and the run needs"),
        (["--backend", "tape"], "--backend 'tape' is not known; use file, lmdb"),
        (["--case", "get-warm,get-hot"], "--case 'get-hot' is not known"),
        (["--directory", "/dev/null"], "--directory /dev/null is not a directory"),
        (["--directory", "nowhere"], "--directory nowhere is not a directory"),
    ],
)
def test_a_mistake_gets_one_sentence(tmp_path, arguments, sentence):
    done = bench(*arguments, cwd=tmp_path)
    assert done.code == 2
    assert sentence in done.err.replace("\n", " ")
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, sent, code):
    options = ("--size", "1MiB", "--bytes", "256MiB", "--repeat", "50", "--directory", str(tmp_path))
    command = [TIERCACHE, "bench", "disk", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        while not any(tmp_path.glob(".benchmark-*/*/store")):
            assert run.poll() is None
            time.sleep(0.02)
        run.send_signal(sent)
        assert run.wait(30) == code
        assert "Traceback" not in run.stderr.read()
    assert list(tmp_path.iterdir()) == []


def test_medians_leave_out_the_first_round_and_take_turns():
    order = []

    def side(name):
        return Side(
            name,
            lambda n: order.append((name, n)),
            before=lambda n: order.append("before"),
            after=lambda n: order.append("after"),
        )

    found = medians([side("a"), side("b")], repeats=2)
    assert found.keys() == {"a", "b"}
    steps = [step for step in order if isinstance(step, tuple)]
    assert steps == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert order[:3] == ["before", ("a", 0), "after"]


@pytest.mark.parametrize("threads", [1, 8])
def test_a_crew_does_every_job_once_and_passes_errors_on(threads):
    done = []
    with Crew(threads) as crew:
        crew.each(done.append, range(1000))
        assert sorted(done) == list(range(1000))
        with pytest.raises(ZeroDivisionError):
            crew.each(lambda n: 1 // n, [1, 0, 2])


def test_the_raw_ways_move_every_byte(tmp_path):
    buffers = Buffers(8192, 3)
    cut = pieces(buffers.views, 4096)
    assert [(piece.offset, piece.view.nbytes) for piece in cut] == [(n * 4096, 4096) for n in range(6)]
    with Crew(2) as crew, RawFile(tmp_path / "raw", 2 * buffers.nbytes) as file:
        file.write(cut, buffers.nbytes, crew)
        buffers.wipe()
        with pytest.raises(StorageError, match="bytes that differ"):
            buffers.check()
        file.read(pieces(buffers.views), buffers.nbytes, crew)
        buffers.check()
        with pytest.raises(StorageError, match="too few"):
            file.read([Piece(buffers.views[0], 2 * buffers.nbytes)], 0, crew)


def test_a_row_stands_beside_its_limit():
    figures = speed("x", 1 << 20, 128, 0.1, 10**9, "preadv", 0.08).figures
    assert (figures["gbps"], figures["limit_gbps"], figures["limit"]) == (10, 12.5, "preadv")
    assert figures["ratio"] == pytest.approx(0.8)
    assert speed("x", 4096, 10, 1.0).figures["ratio"] is None


def test_the_words_for_sizes_and_machines(tmp_path):
    assert [size_text(n) for n in (0, 4096, 3 << 20, 1 << 30, 5000)] == [
        "0 B", "4 KiB", "3 MiB", "1 GiB", "5000 B",
    ]  # fmt: skip
    here = machine(tmp_path, direct=False)
    assert "O_DIRECT not possible" in str(here)
    assert machine(Path("/proc"), direct=False).file_system == "proc"


def test_a_plan_fits_batches_into_what_may_be_stored(tmp_path):
    sizes = "16KiB,1MiB,16MiB"
    made = plan(backend="file", sizes=sizes, path=tmp_path, repeats=5, total="1536MiB", cases="", objects=0)
    assert [made.count(size) for size in made.sizes] == [128, 128, 16]
    assert made.cases == set(Case)


SHM = Path("/dev/shm")


@pytest.mark.skipif(
    not (SHM.is_dir() and os.access(SHM, os.W_OK)), reason="this machine has no memory file system"
)
def test_files_in_memory_are_called_that():
    done = bench(*TINY, "--case", "get-cold", "--directory", SHM)
    assert done.code == 0, done.err
    assert ("figures of memory" in " ".join(done.out.split())) == machine(SHM, direct=False).in_memory
    assert not list(SHM.glob(".benchmark-*"))


def test_a_daemon_is_measured_beside_its_limits(tmp_path):
    options = ("--size", "64KiB", "--batch", "1MiB", "--repeat", 1, "--directory", tmp_path, "-o", "jsonl")
    rows = rows_of(call("bench", "rpc", *options, ok=None))
    assert [(row["name"], row["limit"]) for row in rows] == [
        ("rpc data set", "plain sockets"), ("rpc shared set", "in process"),
        ("rpc data get warm", "plain sockets"), ("rpc shared get warm", "in process"),
        ("rpc data exists", None), ("rpc shared exists", None),
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and (row["ratio"] is None or row["ratio"] > 0) for row in rows)
    assert list(tmp_path.iterdir()) == []
