"""Fuzzing of every decoder of bytes from outside, guided by coverage; see `tests.fuzz`."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.campaign.report import Row, Run
from tests.fuzz.table import TARGETS

START_SECONDS = 600
"""Time that a process may take beside its fuzzing; a quiet machine needs 10 s, to instrument the modules."""
SHOWN_BYTES = 6144
"""Longest input that is shown as base64."""


def campaign(run: Run) -> Iterator[Row]:
    """Fuzz each target for as many seconds as there would be trials; a row for each."""
    if find_spec("atheris") is None:
        yield Row("fuzz", "all", skipped="atheris is not installed")
        return
    for name in run.over(list(TARGETS), "fuzz"):
        yield _target(name, run.trials, run.seed, run.base / "fuzz")


def _target(name: str, seconds: int, seed: int, corpus: Path) -> Row:
    row, began = Row("fuzz", name), time.perf_counter()
    command = [sys.executable, "-m", "tests.fuzz.guided", name, "--seconds", str(seconds)]
    command += ["--seed", str(seed + 1), "--corpus", str(corpus)]  # 0 would be a random seed
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              timeout=seconds + START_SECONDS)  # fmt: skip
        said, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        said, status = str(error), -1
    row.seconds = time.perf_counter() - began
    row.trials = int(
        (re.findall(r"number_of_executed_units: (\d+)", said) or re.findall(r"#(\d+)", said))[-1]
    )
    row.figures = {
        "edges": max(map(int, re.findall(r"cov: (\d+)", said)), default=0),
        "MiB": max(map(int, re.findall(r"rss: (\d+)Mb", said)), default=0),
    }
    if status:
        row.verdict.failed = 1
        row.verdict.notes = [said[-3000:]]
        for file in sorted(corpus.glob("[cot]*-*")):
            shown = base64.b64encode(file.read_bytes()[:SHOWN_BYTES]).decode()
            row.verdict.notes.append(f"{file.name} in base64: {shown}")
            file.unlink()
    return row
