"""Simulated lives of controllers, as many seeds as are asked for; see `tests.simulation`."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.campaign.report import Row, Steps

BATCH = 50
"""Seeds of one job."""


def campaign(kind: str, trials: int, seed: int, base: Path, steps: Steps) -> list[Row]:
    """Run `trials` seeds from `seed` on, on all cores: a row of processes, and one of ranks with a tenth."""
    rows = []
    os.environ["PYTHONHASHSEED"] = "0"  # the order of a set of strings would differ between processes
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for who, run, ends in (("processes", lives, seed + trials), ("ranks", crews, seed + trials // 10)):
            row, began, counts = Row("simulate", who, ends - seed), time.perf_counter(), Counter[str]()
            jobs = [range(n, min(n + BATCH, ends)) for n in range(seed, ends, BATCH)]
            results = pool.map(run, jobs)
            for _ in steps.over(jobs, f"{row.campaign} {row.backend}"):
                found, notes = next(results)
                counts.update(found)
                row.verdict.failed += len(notes)
                row.verdict.notes += notes
            row.seconds, row.figures = time.perf_counter() - began, dict(sorted(counts.items()))
            rows.append(row)
    return rows


def lives(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run lives of processes; return what happened in them, and a note for each that broke a promise."""
    from tests.simulation.lives import live

    return _run(lambda seed: live(seed).counts, seeds)


def crews(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run lives of ranks; return as `lives` does."""
    from tests.simulation.ranks import live_in_ranks

    return _run(live_in_ranks, seeds)


def _run(live: Callable[[int], dict[str, int]], seeds: range) -> tuple[dict[str, int], list[str]]:
    logging.disable(logging.CRITICAL)
    counts, notes = Counter[str](), []
    for seed in seeds:
        try:
            counts.update(live(seed))
        except Exception:  # noqa: BLE001 (a campaign goes on, and says at the end what it met)
            notes.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return dict(counts), notes
