"""`tiercache demo` as a user runs it: real processes, a real kill, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.examples import slow_after
from tests.lab.demo.saved_models import save
from tiercache.storage.registry import open_backend

TIERCACHE = str(Path(sys.executable).parent / "tiercache")
ROW = {
    "turn", "conversation", "phase", "tier", "tokens_prompt", "tokens_restored", "bytes_restored", "ttft_ms",
    "ttft_recompute_ms",
    "max_logit_diff", "same_text",
}  # fmt: skip
GUARD = 1200
"""Seconds, ten times what the longest of these takes on a quiet machine."""
SUMMARY = {"wrong_outputs", "hits_by_tier", "speedup_disk", "speedup_host", "restore_gbps"}


def tiercache(*arguments):
    return subprocess.run([TIERCACHE, *map(str, arguments)], capture_output=True, text=True, timeout=GUARD)


@pytest.mark.slow
@pytest.mark.timeout(GUARD)
def test_the_demo_restores_from_every_tier_and_over_a_kill(tmp_path):
    small = ("--turns", 1, "--conversations", 2, "--context", 256)
    done = tiercache("demo", "--directory", tmp_path / "demo", *small, "-o", "jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = map(json.loads, done.stdout.splitlines())
    summary = last["summary"]
    assert all(row.keys() >= ROW for row in rows)
    assert summary.keys() >= SUMMARY
    assert summary["wrong_outputs"] == 0
    assert all(summary["hits_by_tier"][tier] > 0 for tier in ("device", "host", "disk"))
    assert {row["max_logit_diff"] for row in rows} == {0.0}
    assert all(row["same_text"] for row in rows)
    restarted = [row for row in rows if row["phase"] == "restart"]
    tiers = [row["tier"] for row in restarted]
    assert tiers == ["disk", "disk", "device"], "every conversation once, and the last one once more"
    assert all(row["tokens_restored"] > 0 and row["bytes_restored"] > 0 for row in restarted)
    assert [row["tier"] for row in rows if row["phase"].startswith("speed")] == ["host", "disk", "disk"]


@pytest.mark.slow
@pytest.mark.timeout(GUARD)
@pytest.mark.parametrize(
    ("upper", "title", "model"),
    [("lmdb", "second worker", "qwen3_next"), ("file", "serving, then kill -9", "falcon_h1")],
)
def test_two_workers_use_a_chain_of_tiers_one_after_the_other_if_they_cannot_share_it(
    tmp_path, upper, title, model
):
    urls = [f"{kind}://{tmp_path}/{kind}-{n}?capacity=64MiB" for n, kind in enumerate((upper, "lmdb"))]
    done = tiercache(
        *("demo", "--storage", urls[0], "--storage", urls[1], "--model", save(tmp_path / "model", model)),
        *("--turns", 1, "--conversations", 1, "--context", 256, "-o", "json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert title in done.stderr
    data = json.loads(done.stdout)
    assert data["summary"]["wrong_outputs"] == 0
    restarted = [row["tier"] for row in data["rows"] if row["phase"] == "restart"]
    assert restarted == [upper, "device"]
    for url in urls:
        with open_backend(url) as tier:
            assert tier.usage().objects > 0


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--disk-bytes", "1KiB"], 2, "set capacity to"),
        (["--model", "nowhere"], 2, "--model nowhere is not a directory"),
        (["--directory", "/dev/null"], 2, "/dev/null is not one; name another path"),
        (["--turns", "0"], 2, "--turns"),
        (["--directory", "/dev/null/x"], 2, "/dev/null is not one; name another path"),
        (["--disk-bytes", "900PiB"], 2, "--disk-bytes 900PiB does not fit: the disk of"),
        (["--disk-bytes", "200TiB"], 2, "--disk-bytes 200TiB does not fit: the disk of"),
        (["--disk-bytes", "-1"], 2, "is not a size"),
        (["--device", "tpu"], 2, "--device tpu is not known; use cpu, cuda, or cuda:N"),
        (["--device", "cuda:"], 2, "--device cuda: is not known"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments, code, sentence):
    assert sentence in call("demo", *arguments, ok=code).error


@pytest.mark.parametrize(("sent", "code"), slow_after(1, [(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path, sent, code):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [TIERCACHE, "demo"], stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    ) as demo:
        while not any(tmp_path.glob("tiercache-demo-*/store")):
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(sent)
        assert demo.wait(120) == code
    assert not list(tmp_path.glob("tiercache-demo-*"))
    # The group of the demo and of the server that it started is empty, once init has reaped the last of them.
    end = time.monotonic() + 60
    while group_lives(demo.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def group_lives(group):
    """Whether a process group has processes; those that have ended count until they are reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
