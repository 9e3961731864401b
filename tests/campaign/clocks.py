"""Clocks that are wrong: at zero, before 1970, and jumping back and forth."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from random import Random

from tests.campaign.clones import step
from tests.campaign.model import History, Model, Verdict, judge
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject, check_integrity
from tiercache.storage.env import Env

YEAR = 365 * 86400 * 10**9
MOMENTS = {"at zero": (0,), "before 1970": (-1, -30 * YEAR, -200 * YEAR), "far off": (200 * YEAR, 2**63 - 1)}
CAPACITY, NAMES = 16 << 20, 60


class WrongClock(Env):
    """An Env whose clock says one of a few moments, another one each time; none: any of all, and the right
    one.

    Thread safety: any thread may ask.
    """

    def __init__(self, seed: int, moments: tuple[int, ...] = ()) -> None:
        self._random = Random(seed)
        self._moments = moments or (*(moment for some in MOMENTS.values() for moment in some), time.time_ns())

    def time_ns(self) -> int:
        return self._random.choice(self._moments)


def campaign(run: Run) -> Iterator[Row]:
    """One row for each clock."""
    for name, moments in {**MOMENTS, "jumping": ()}.items():
        yield run.row(
            Row("clock", f"{run.kind}, {name}"),
            lambda seed, at, moments=moments: life(Subject(run.kind, at / "store", CAPACITY), seed, moments),
        )


def life(subject: Subject, seed: int, moments: tuple[int, ...]) -> Verdict:
    """A random history with reopenings; nothing is evicted, so nothing may be lost."""
    verdict, model, history, env = Verdict(), Model(), History(seed, NAMES), WrongClock(seed, moments)
    for _ in range(3):
        with subject.recover(NAMES, verdict, env) as store:
            for _ in range(20):
                step(store, model, history.draw(model))
            verdict.add(found := judge(store, model, model.certain(), NAMES))
            assert all(
                entry.stored_at is None or math.isfinite(entry.stored_at) for entry in store.scan_all()
            )
            check_integrity(store)
        model.settle(found.found)
    return verdict
