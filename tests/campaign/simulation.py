"""Simulated lives of controllers, as many seeds as are asked for; see `tests.simulation`."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.campaign.report import Row, Steps

BATCH = 50
"""Seeds of one job."""


def campaign(kind: str, trials: int, seed: int, base: Path, steps: Steps) -> list[Row]:
    """Run `trials` seeds from `seed` on, on all cores; one row, whatever the stores: it brings its own."""
    row, began, counts = Row("simulate", "memory"), time.perf_counter(), Counter[str]()
    ends = seed + trials
    jobs = [range(n, min(n + BATCH, ends)) for n in range(seed, ends, BATCH)]
    os.environ["PYTHONHASHSEED"] = "0"  # the order of a set of strings would differ between processes
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        results = pool.map(lives, jobs)
        for _ in steps.over(jobs, f"{row.campaign} {row.backend}"):
            found, notes = next(results)
            counts.update(found)
            row.verdict.failed += len(notes)
            row.verdict.notes += notes
    row.trials, row.seconds, row.figures = trials, time.perf_counter() - began, dict(sorted(counts.items()))
    return [row]


def lives(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run some seeds; return what happened in them, and a note for each that broke a promise."""
    from tests.simulation.lives import live

    logging.disable(logging.CRITICAL)
    counts, notes = Counter[str](), []
    for seed in seeds:
        try:
            counts.update(live(seed).counts)
        except Exception:  # noqa: BLE001 (a campaign goes on, and says at the end what it met)
            notes.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return dict(counts), notes
