"""`tiercache replay` as a user runs it: rows, tables, reports, and one sentence for each mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.store.test_samples import Done, call
from tests.examples import slow_after
from tiercache.controller import WRITE_BACK, WRITE_CHANCE
from tiercache.policy import PROFILES, profile_named
from tiercache_lab.policies import MAIN, RIVALS, VARIANTS
from tiercache_lab.replay.machines import MACHINES
from tiercache_lab.replay.sources import SOURCES, open_source
from tiercache_lab.replay.study import Question
from tiercache_lab.replay.verb.asking import notes

FIRST = [
    "source", "policy", "capacity", "capacity_bytes", "token_hit_rate", "flops_saved", "ttft_ms_mean",
    "ttft_ms_p95", "peak_bytes",
]  # fmt: skip
THEN = [
    "requests", "seconds", "seed", "profile", "write", "write_chance", "is_bound", "working_bytes",
    "cuts", "ttft_ms_p50", "serving", "tiers", "published",
]  # fmt: skip
QUICK = ("--limit", "40", "--no-bounds")


def replay(*arguments: object) -> Done:
    """The console script, in this process."""
    return call("replay", *arguments, ok=None)


def process(*arguments: object, columns: int = 80) -> Done:
    """The console script, as a process of its own."""
    command = [sys.executable, "-m", "tiercache.cli", "replay", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ | {"COLUMNS": str(columns)}
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six requests: two documents, each asked about three times, and the first questions again."""
    path = tmp_path / "little.jsonl"
    rows = []
    for number in range(6):
        document = [100 * (number % 2) + block for block in range(4)]
        ids = [*document, 900 + number]
        rows.append({"timestamp": 1000 * number, "input_length": 2248, "output_length": 20, "hash_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_rows_have_these_keys_and_nothing_else_is_on_stdout(trace: Path) -> None:
    done = process(trace, "-o", "jsonl", "--policy", "lru,hvd", "--capacity", "0.3,0.6")
    assert done.err == ""
    names = [(row["policy"], row["capacity"]) for row in done.lines]
    assert names == [
        ("infinite", 1.0), ("lru", 0.3), ("lru", 0.6), ("hvd", 0.3), ("hvd", 0.6),
        ("clairvoyant", 0.3), ("clairvoyant", 0.6),
    ]  # fmt: skip
    for row in done.lines:
        assert list(row) == FIRST + THEN
        assert row["source"] == "little"
        assert row["peak_bytes"] <= row["capacity_bytes"]
        assert all(use["peak"] <= use["capacity"] for use in row["tiers"].values())
        assert row["is_bound"] == (row["policy"] not in MAIN)
    # The first question about each document computes it, the others find a state at its end, where a page
    # ends too.
    assert done.lines[0]["token_hit_rate"] == pytest.approx(4 * 2048 / (6 * 2248))


SERVED = ("multi-turn?conversations=6&rounds=4&live=3&pause=2", "--policy", "lru,hvd", "--capacity", "0.2")


@pytest.mark.slow
def test_requests_queue_at_a_machine(tmp_path: Path) -> None:
    machine = tmp_path / "small.toml"
    machine.write_text("[prefill]\nflops = 20e12\n[serving]\nbatch = 2\n")
    options = ("--machine", machine, "--rate", "3", "--slo-ttft", "500ms", "--slo-tpot", "1s")
    rows = {row["policy"]: row for row in replay(*SERVED, *options, "-o", "jsonl").lines}
    assert list(rows) == ["infinite", "lru", "hvd", "no cache"]
    for row in rows.values():
        queue = row["serving"]
        assert queue["objective"] == {"ttft": 0.5, "tpot": 1.0}
        assert queue["goodput"] == pytest.approx(queue["within"] * queue["served_per_second"])
        assert queue["busy"].keys() == {"engine", "host"}
        parts = queue["wait_ms_mean"] + queue["load_ms_mean"] + queue["prefill_ms_mean"]
        assert row["ttft_ms_mean"] == pytest.approx(parts)
        assert row["ttft_ms_p50"] <= row["ttft_ms_p95"]
    assert rows["no cache"]["is_bound"]
    assert rows["no cache"]["token_hit_rate"] == 0
    assert rows["no cache"]["serving"]["within"] < rows["infinite"]["serving"]["within"]
    report = tmp_path / "queue.html"
    shown = replay(*SERVED, *options, "--report", report).out
    for word in ("without a cache", "goodput", "in time", "p50"):
        assert word in shown
    page = report.read_text()
    for words in ("In the queue", "2 places, 3 per second", "at most 500ms to the first token"):
        assert words in page
    plain = replay(*SERVED, "--machine", "h100", "--no-bounds").out
    assert "goodput" not in plain.partition("* saves")[0].partition("p50, p95:")[0]
    assert "engine" in plain


def test_pages_of_another_size() -> None:
    rows = replay(*SERVED, "--page", "32", "--no-bounds", "-o", "jsonl").lines
    plain = replay(*SERVED, "--no-bounds", "-o", "jsonl").lines
    assert rows[0]["token_hit_rate"] > plain[0]["token_hit_rate"], "less is lost at the ends of pages"


def test_the_same_again_but_for_the_seconds(trace: Path) -> None:
    def text(*arguments: object) -> str:
        done = replay(*arguments, "-o", "jsonl")
        assert done.code == 0, done.err
        return re.sub(r'"seconds": [^,]*', "", done.out)

    generator = ("shared-prefix?groups=4&prompts=4&system=200-500", "--policy", "hvd", "--capacity", "0.2")
    assert text(*generator) == text(*generator)
    assert text(*generator) != text(*generator, "--seed", "1")
    once = (trace, "--policy", "hvd", "--capacity", "0.3")
    assert text(*once).replace('"seed": 0', '"seed": 1') == text(*once, "--seed", "1"), "a trace has no seed"


@pytest.mark.slow
def test_a_benchmark_stands_beside_what_was_published() -> None:
    done = replay("seed-20457", "--no-bounds", "--policy", "lru")
    assert done.code == 0, done.err
    assert done.out.startswith("seed-20457: 120 requests, qwen3-next-80b-a3b, seed 0\n")
    for policy in ("lru", "lru without offload", "infinite"):
        assert re.search(rf"^[ *]+{policy} +89\.8 % +89\.5 % ", done.out, re.MULTILINE), policy
    assert "Published, on other machines: token hit rate 0.898, " in done.out
    # Figures that are no rates are said in a sentence.
    done = replay("seed-11214", *QUICK, "--policy", "lru", "--capacity", "0.5")
    assert "requests per second 3.54, requests per second without cache 2.64" in " ".join(done.out.split())


def test_a_table_marks_the_best_and_names_every_tier() -> None:
    chats = "multi-turn?conversations=10&rounds=4"
    done = replay(chats, *QUICK, "--policy", "lru,marconi,hvd", "--capacity", "0.1,0.5")
    assert done.code == 0, done.err
    head = next(line for line in done.out.splitlines() if "hit rate" in line)
    columns = "policy hit rate FLOPs TTFT p95 read written per read evicted peak"
    assert head.split() == columns.split()
    groups = re.split(r"^(?:without a limit|\d+ % of that), [\d.]+ [KMGT]iB$", done.out, flags=re.MULTILINE)
    assert len(groups) == 4
    for group in groups[2:]:
        saved = {
            m[2]: (m[1], float(m[3]))
            for m in re.finditer(r"^(.)  (\w+) +[\d.]+ % +([\d.]+) % ", group, re.MULTILINE)
        }
        assert saved.keys() == {"lru", "marconi", "hvd"}
        best = max(rate for _, rate in saved.values())
        assert {name for name, (mark, _) in saved.items() if mark == "*"} <= {
            name for name, (_, rate) in saved.items() if best - rate < 0.11
        }
    assert re.findall(r"^hvd at .*$", done.err, re.MULTILINE) == ["hvd at 10 %", "hvd at 50 %"], "each stage"
    sizes = ("--host-bytes", "3GiB", "--disk-bytes", "20GiB", "--device-bytes", "3GiB")
    done = replay(chats, *QUICK, "--policy", "lru,hvd", *sizes)
    assert "device 3.00 GiB, host 3.00 GiB, disk 20.0 GiB" in done.out
    for tier in ("device", "host", "disk"):
        assert len(re.findall(rf"^(?:lru|hvd)? +{tier} +[\d.]+ % +", done.out, re.MULTILINE)) == 2


TIERS = ("--tier", "nvme?capacity=1GiB&bandwidth=6GB/s", "--tier", "far?capacity=8GiB&write=write_back")


@pytest.mark.slow
def test_storage_tiers_are_compared_with_one_pool_and_with_lru(tmp_path: Path) -> None:
    chats, path = "multi-turn?conversations=10&rounds=4", tmp_path / "replay.html"
    asked = (chats, "--limit", 40, "--policy", "hvd", "--host-bytes", "1GiB", *TIERS)
    done = replay(*asked, "--report", path)
    assert done.code == 0, done.err
    assert "host 1.00 GiB, nvme 1.00 GiB, far 8.00 GiB" in done.out
    for name in ("hvd", "lru in every tier", "clairvoyant"):
        assert re.search(rf"^{name} +host .*\n +nvme .*\n +far ", done.out, re.MULTILINE), name
    assert "hvd in one pool" in done.out
    page = path.read_text()
    assert "nvme: 1GiB at 6 GB/s; far: 8GiB at 6 GB/s, write write_back" in page
    assert "per read" in page
    rows = {row["policy"]: row for row in replay(*asked, "-o", "jsonl").lines}
    assert [*rows] == ["infinite", "hvd", "lru in every tier", "hvd in one pool", "clairvoyant"]
    assert {row["capacity_bytes"] for name, row in rows.items() if name != "infinite"} == {10 << 30}
    bounds = [name for name, row in rows.items() if row["is_bound"]]
    assert bounds == ["infinite", "hvd in one pool", "clairvoyant"]
    assert rows["hvd in one pool"]["tiers"].keys() == {"host"}
    assert rows["hvd"]["tiers"].keys() == {"host", "nvme", "far"}
    for use in rows["hvd"]["tiers"].values():
        written, read = use["written_bytes"], use["read_bytes"]
        assert use["written_per_read"] == (pytest.approx(written / read) if read else None)


@pytest.mark.parametrize("columns", slow_after(1, [80, 140]))
def test_a_table_fits_its_terminal(columns: int) -> None:
    pty = pytest.importorskip("pty")
    command = [sys.executable, "-m", "tiercache.cli", "replay", "sharegpt", *QUICK, "--policy", "lru"]
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LINES")}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"COLUMNS": str(columns), "TERM": "xterm"},
    ) as run:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # the other end is closed
            pass
        assert run.wait(60) == 0
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line for line in lines if "hit rate" in line)
    assert ("written" in head) == (columns == 140)
    assert "\x1b[2m" in shown.decode(), "bounds are dim"


def test_a_report_names_every_policy(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "replay.html"
    done = replay(trace, "--report", path, "--capacity", "0.3", "--checkpoints", "every:512")
    assert done.code == 0, done.err
    assert f"report: {path}" in done.err
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    for policy in (*MAIN, "infinite", "clairvoyant"):
        assert policy in page
    assert "States are taken by the policy every:512." in page
    assert sorted(tmp_path.iterdir()) == sorted([path, trace])


def test_options_change_what_is_found() -> None:
    source = "agent?sessions=2&live=2&turns=12&system=300-400&observation=300"

    def row(*arguments: object) -> dict[str, Any]:
        rows = replay(
            source, "--limit", 16, "--no-bounds", "--policy", "lru", "-o", "jsonl", *arguments
        ).lines
        assert len(rows) == 2
        return rows[1]

    host = ("--host-bytes", "500MiB")
    base = row(*host)
    assert base["capacity"] is None
    assert base["capacity_bytes"] == 500 << 20
    assert row(*host, "--checkpoints", "none")["token_hit_rate"] == 0
    assert row(*host, "--checkpoints", "branch,prompt")["token_hit_rate"] != base["token_hit_rate"]
    assert row(*host, "--checkpoints", "every:64")["cuts"] > base["cuts"]
    tiers = (*host, "--disk-bytes", "50GiB")
    more = row(*tiers)
    assert more["token_hit_rate"] > base["token_hit_rate"]
    assert more["tiers"]["disk"]["tokens"] > 0
    slow = row(*host, "--tier", "disk?capacity=50GiB&bandwidth=100MB")
    assert slow["tiers"] == more["tiers"]
    assert slow["ttft_ms_mean"] > more["ttft_ms_mean"]
    device = row("--device-bytes", "8GiB")["tiers"]["device"]
    assert device["capacity"] == 8 << 30
    assert device["tokens"] > 0


@pytest.mark.slow
def test_the_host_writes_at_once_or_what_it_is_about_to_evict(tmp_path: Path) -> None:
    chats = ("multi-turn?conversations=10&rounds=4", *QUICK, "--policy", "hvd", "--host-bytes", "1GiB")
    disk = ("--disk-bytes", "8GiB")

    def written(*arguments: object) -> int:
        row = replay(*chats, *disk, "-o", "jsonl", *arguments).lines[1]
        assert row["write"] == ("write_back" if "write_back" in arguments else "write_through")
        assert row["write_chance"] == (float(str(arguments[-1])) if len(arguments) > 2 else WRITE_CHANCE)
        return int(row["tiers"]["disk"]["written_bytes"])

    back = ("--write", "write_back")
    through = written("--write", "write_through")
    assert written() == through, "write_through is the default"
    evicted = written(*back)
    assert 0 < evicted < through
    assert written(*back, "--write-chance", "0") >= evicted
    assert written(*back, "--write-chance", "1") == 0, "no hit is certain"

    # The notes of a report say what differs from the default.
    path = tmp_path / "replay.html"
    done = replay(*chats, *disk, *back, "--report", path)
    assert done.code == 0, done.err
    said = "what it evicts next and what is hit again with a chance of at least"
    assert f"{said} {WRITE_CHANCE:g}." in path.read_text()
    question = Question(open_source("agent"), ["lru"], profile_named("llama-3.1-8b"))
    assert said not in " ".join(notes(question))
    assert f"{said} 0.3." in " ".join(notes(replace(question, write=WRITE_BACK, write_chance=0.3)))


def test_a_model_without_states_gets_the_policies_that_it_has_a_use_for(trace: Path, tmp_path: Path) -> None:
    rows = replay(trace, "--profile", "llama-3.1-8b", "--capacity", "0.5", "--no-bounds", "-o", "jsonl").lines
    assert {row["policy"] for row in rows} == {"infinite", "lru", "hvd"}
    # Without states, pages alone decide, from the second question on.
    assert rows[0]["token_hit_rate"] == pytest.approx(4 * 2048 / (6 * 2248))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }))  # fmt: skip
    rows = replay(trace, "--profile", config, "--policy", "lru", "--no-bounds", "-o", "jsonl").lines
    assert {row["profile"] for row in rows} == {tmp_path.name}


QUEUE_MISTAKES: list[tuple[Sequence[str], str]] = [
    (("--rate", "2"), "--rate is for requests that queue at a machine; add --machine"),
    (("--open",), "--open is for requests that queue"),
    (("--slo-ttft", "2s"), "--slo-ttft is for requests that queue"),
    (("--slo-tpot", "2s"), "--slo-tpot is for requests that queue"),
    (("--machine", "h100", "--rate", "0"), "--rate 0 is not possible"),
    (("--machine", "h100", "--slo-ttft", "0"), "a time to the first token of 0 s is no objective"),
    (("--machine", "h100", "--slo-tpot", "soon"), "--slo-tpot: 'soon' is not a duration"),
    (("--machine", "h1000"), "there is no machine and no file 'h1000'; give the path of a TOML file, or one"),
]
TIER_MISTAKES: list[tuple[Sequence[str], str]] = [
    (("--tier", "a"), "--tier 'a' has no capacity; write it like"),
    (("--tier", "?capacity=1GiB"), "has no name; write it like"),
    (("--tier", "a?capacity=0"), "tier 'a' has no bytes"),
    (("--tier", "a?capacity=1GiB&bandwidth=0"), "a bandwidth of 0 bytes per second is not possible"),
    (("--tier", "a?capacity=1GiB&speed=1"), "--tier a has no setting 'speed'; it has bandwidth,"),
    (("--tier", "a?capacity=1GiB&write=never"), "tier 'a', setting 'tier_write': 'never' is not possible"),
    (("--tier", "a?capacity=1GiB", "--disk-bytes", "1GiB"), "--disk-bytes is short for --tier"),
    (("--tier", "a?capacity=1GiB", "--capacity", "0.1"), "give only one of them"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no source is named; give a trace file or a generator"),
        (["agent?bogus=1"], "agent has no parameter 'bogus'"),
        (["agent", "extra"], "unexpected extra argument"),
        (["agent", "--policy", "bogus"], "there is no eviction policy 'bogus'; use lru"),
        (["agent", "--policy", ","], "no policy is named"),
        (["agent", "--policy", "seglen:much"], "has no parameter"),
        (
            ["agent", "--policy", "lru,marconi", "--profile", "llama-3.1-8b"],
            "'marconi' ranks recurrent states, and llama-3.1-8b has none; use",
        ),
        (["agent", "--profile", "bogus"], "there is no model profile and no file 'bogus'"),
        (["agent", "--profile", "{trace}"], "is not JSON"),
        (["agent", "--write", "write_back"], "needs a storage tier to write to; add --disk-bytes or --tier"),
        (["agent", "--write-chance", "2"], "--write-chance 2 is not a probability; use a number from 0 to 1"),
        (["agent", "--write-chance", "nan"], "--write-chance nan is not a probability"),
        (
            ["agent", "--capacity", "0.1,10"],
            "a capacity of 10 is out of range; use a fraction, such as 0.1, of the bytes",
        ),
        (["agent", "--capacity", "5%"], "--capacity '5%' is not a list of numbers"),
        (["agent", "--capacity", "nan"], "a capacity of nan is out of range"),
        (["agent", "--capacity", ","], "--capacity ',' is not a list of numbers"),
        (["agent", "--capacity", "0.1", "--host-bytes", "1GiB"], "give only one of them"),
        (["agent", "--host-bytes", "1GiG"], "--host-bytes: '1GiG' is not a size"),
        (["agent", "--disk-bytes", "1GiB"], "through the host, which has 0 bytes"),
        (["agent", "--host-bytes", "0"], "tiers of 0 bytes cannot cache anything"),
        (
            ["agent", "--limit", "9", "--device-bytes", "1MiB"],
            "a device of 1048576 bytes does not hold the requests that run at once",
        ),
        (["agent", "--limit", "-1"], "the limit must be a whole number of requests, at least 1, not -1"),
        (["agent", "--seed", "-1"], "the seed must be"),
        (
            ["agent", "--checkpoints", "branch,middle"],
            "--checkpoints 'middle' is not known; use branch, prompt, end, ghost or none, or a policy:"
            " rules, every",
        ),
        (
            ["agent", "--checkpoints", "every"],
            "--checkpoints: checkpoint policy 'every' needs a number of tokens from 1 to 1073741824",
        ),
        (
            ["agent", "--report", "/nowhere/x.html"],
            "--report /nowhere/x.html: its directory does not exist; create it first",
        ),
        (["agent", "--report", "/proc/x.html"], "--report /proc/x.html: its directory cannot be written to"),
        (["agent", "--report", "/tmp"], "--report /tmp is a directory"),
        (["{broken}"], "broken.jsonl, line 2: not JSON"),
        (["multi-turn", *TIERS], "through the host, which has 0 bytes"),
        *(((SERVED[0], *options), sentence) for options, sentence in QUEUE_MISTAKES),
        *((("multi-turn", "--host-bytes", "1GiB", *tier), sentence) for tier, sentence in TIER_MISTAKES),
    ],
)
def test_a_mistake_gets_one_sentence(trace, tmp_path, arguments, sentence):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace.read_text().splitlines()[0] + "\n{broken\n")
    done = replay(*(one.format(trace=trace, broken=broken) for one in arguments))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tiercache: ")
    assert done.err.count("\n") == 1
    assert sentence in done.err


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    report = tmp_path / "replay.html"
    command = [sys.executable, "-m", "tiercache.cli", "replay", "sharegpt?chats=250"]
    command += ["--policy", "lru,hvd", "--report", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        while not run.stderr.readline().startswith("lru at 10 %"):
            assert run.poll() is None
        time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert "interrupted after 2 runs" in err
    assert re.search(r"^ +infinite +[\d.]+ %", out, re.MULTILINE)
    assert re.search(r"^ +lru +[\d.]+ %", out, re.MULTILINE)
    assert "hvd" not in out
    assert "The replay was interrupted, so results are missing." in report.read_text()


def test_a_list_of_the_generators_and_policies() -> None:
    said = replay("--list").out
    for name in (*MAIN, *RIVALS, *VARIANTS, *PROFILES, *MACHINES):
        assert name in said
    for name, kind in SOURCES.items():
        assert re.search(rf"^ {name} ", said, re.MULTILINE)
        for option in kind.options:
            assert re.search(rf"^ +{option.name} +{option.default} ", said, re.MULTILINE), (name, option.name)
