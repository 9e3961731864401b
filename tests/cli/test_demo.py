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

TIERCACHE = str(Path(sys.executable).parent / "tiercache")
ROW = {
    "turn", "conversation", "phase", "tier", "tokens_prompt", "tokens_restored", "bytes_restored", "ttft_ms", "ttft_recompute_ms",
    "max_logit_diff", "same_text",
}  # fmt: skip
GUARD = 1200
"""Seconds, ten times what the longest of these takes on a quiet machine."""
SUMMARY = {"wrong_outputs", "hits_by_tier", "speedup_disk", "speedup_host", "restore_gbps", "raw_read_gbps"}


def tiercache(*arguments):
    return subprocess.run([TIERCACHE, *map(str, arguments)], capture_output=True, text=True, timeout=GUARD)


@pytest.mark.slow
@pytest.mark.timeout(GUARD)
def test_the_demo_restores_from_every_tier_and_over_a_kill(tmp_path):
    report = tmp_path / "report.json"
    done = tiercache("demo", "--directory", tmp_path / "demo", "--turns", 1, "--conversations", 3, "--context", 256, "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "first process" in done.stdout
    data = json.loads(report.read_text())
    rows, summary = data["rows"], data["summary"]
    assert all(row.keys() >= ROW for row in rows)
    assert summary.keys() >= SUMMARY
    assert summary["wrong_outputs"] == 0
    assert all(summary["hits_by_tier"][tier] > 0 for tier in ("device", "host", "disk"))
    assert {row["max_logit_diff"] for row in rows} == {0.0}
    assert all(row["same_text"] for row in rows)
    restarted = [row for row in rows if row["phase"] == "restart"]
    assert [row["tier"] for row in restarted] == [*["disk"] * 3, "device"], "every conversation once, the last one once more"
    assert all(row["tokens_restored"] > 0 and row["bytes_restored"] > 0 for row in restarted)
    assert [row["tier"] for row in rows if row["phase"].startswith("speed")] == ["host", "disk", "disk"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--device-bytes", "5x"], 2, "'5x' is not a size"),
        pytest.param(["--disk-bytes", "1KiB"], 2, "set capacity to", marks=pytest.mark.slow),
        (["--model", "nowhere"], 2, "--model nowhere is not a directory"),
        (["--json", "nowhere/report.json"], 2, "its directory does not exist"),
        (["--directory", "/dev/null"], 2, "/dev/null is none; name another path"),
        (["--turns", "0"], 2, "--turns"),
        (["--directory", "/dev/null/x"], 2, "/dev/null is none; name another path"),
        (["--json", "/tmp"], 2, "--json /tmp is a directory"),
        (["--disk-bytes", "900PiB"], 2, "--disk-bytes 900PiB cannot be had: the disk of"),
        (["--disk-bytes", "200TiB"], 2, "--disk-bytes 200TiB cannot be had: the disk of"),
        (["--host-bytes", "800TiB"], 2, "--host-bytes 800TiB cannot be had: "),
        (["--disk-bytes", "-1"], 2, "is not a size"),
        (["--device", "tpu"], 2, "--device tpu is not known; use cpu, cuda, or cuda:N"),
        (["--device", "cuda:"], 2, "--device cuda: is not known"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments, code, sentence):
    done = tiercache("demo", *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert sentence in done.stderr.replace("\n", " ")


def test_a_device_that_is_not_there_gets_one_sentence():
    done = tiercache("demo", "--device", "cuda:99")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    sentences = ("pip install 'tiercache[cuda]'", "there is no device cuda:99")
    assert any(sentence in done.stderr.replace("\n", " ") for sentence in sentences)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path, sent, code):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([TIERCACHE, "demo"], stdout=subprocess.DEVNULL, env=environment, start_new_session=True) as demo:
        while not any(tmp_path.glob("tiercache-demo-*/store")):
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(sent)
        assert demo.wait(30) == code
    assert not list(tmp_path.glob("tiercache-demo-*"))
    with pytest.raises(ProcessLookupError):  # the group of the demo and of the server that it started is empty
        os.killpg(demo.pid, 0)


def test_help_and_version():
    shown = tiercache("demo", "--help").stdout
    assert "--context" in shown
    assert "--device" in shown
    assert tiercache("--version").stdout.startswith("tiercache ")
    assert tiercache("nonsense").returncode == 2
