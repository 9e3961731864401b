"""Simulated lives of controllers, as many seeds as are asked for; see `tests.simulation`."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.campaign.report import Row, Run

BATCH = 50
"""Seeds of one job."""


def campaign(run: Run) -> Iterator[Row]:
    """Run seeds on all cores: rows of processes, and of ranks and of lent slots with a tenth of them."""
    os.environ["PYTHONHASHSEED"] = "0"  # the order of a set of strings would differ between processes
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for who, live, ends in (
            ("processes", lives, run.trials),
            ("ranks", crews, run.trials // 10),
            ("slots lent", lenders, run.trials // 10),
        ):
            row, began, counts = Row("simulate", who, ends), time.perf_counter(), Counter[str]()
            seeds = range(run.seed, run.seed + ends)
            jobs = [seeds[n : n + BATCH] for n in range(0, ends, BATCH)]
            results = pool.map(live, jobs)
            for _ in run.over(jobs, f"{row.campaign} {row.backend}"):
                found, notes = next(results)
                counts.update(found)
                row.verdict.count("failed", *notes)
            row.seconds, row.figures = time.perf_counter() - began, dict(sorted(counts.items()))
            yield row


def lives(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run lives of processes; return what happened in them, and a note for each that broke a promise."""
    from tests.simulation.lives import live

    return _run(lambda seed: live(seed).counts, seeds)


def crews(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run lives of ranks; return as `lives` does."""
    from tests.simulation.ranks import live_in_ranks

    return _run(live_in_ranks, seeds)


def lenders(seeds: range) -> tuple[dict[str, int], list[str]]:
    """Run lives of engines that lend their slots; return as `lives` does."""
    from tests.simulation.lending import live_lending

    return _run(live_lending, seeds)


def _run(live: Callable[[int], dict[str, int]], seeds: range) -> tuple[dict[str, int], list[str]]:
    logging.disable(logging.CRITICAL)
    counts, notes = Counter[str](), []
    for seed in seeds:
        try:
            counts.update(live(seed))
        except Exception:  # noqa: BLE001 (a campaign goes on, and says at the end what it met)
            notes.append(f"seed {seed}: {traceback.format_exc(limit=-4)}")
    return dict(counts), notes
