"""kill -9 of a process that writes to the same store again and again, half of the time without evictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.campaign.actors import Part
from tests.campaign.model import Ledger, Model, Verdict, judge
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject, check_integrity
from tests.campaign.victims import Nursery

WORK_SECONDS = 0.08
ROOMY = (32 << 20, 120)
"""Capacity and names: some 3 MB of objects, so that nothing is ever evicted."""
TIGHT = (6 << 20, 400)
"""Names for twice what fits."""


def campaign(run: Run) -> Iterator[Row]:
    """Both halves; `file` with both durabilities in turn."""
    with Nursery() as nursery:
        for evicts, (capacity, names) in ((False, ROOMY), (True, TIGHT)):
            row = Row("kill", f"{run.kind}, {'full' if evicts else 'roomy'}")
            with TemporaryDirectory(dir=run.base) as directory:
                subject = Subject(run.kind, Path(directory) / "store", capacity)
                cycles = Cycles(nursery, subject, names, evicts, row)
                yield run.row(row, cycles.run, run.seeds[: run.trials // 2])


class Cycles:
    """One store that lives through many kills, and what is known about it, for one thread."""

    def __init__(self, nursery: Nursery, subject: Subject, names: int, evicts: bool, row: Row) -> None:
        self._nursery, self._subject, self._names, self._evicts = nursery, subject, names, evicts
        self._model = Model()
        self._figures = row.figures = {"calls": 0, "unanswered": 0, "while opening": 0}

    def run(self, n: int, _directory: Path) -> Verdict:
        """A writer lives and dies; then the store is read here, or every second time by the next writer."""
        random = Random(n)
        order = self._order(n, random.getrandbits(32))
        verdict = Verdict()
        self._nursery.judges = order.judges
        self._nursery.start(order)
        try:
            self._nursery.live(random, WORK_SECONDS)
        finally:
            self._nursery.kill()
        self._take_over(order, verdict)
        if n % 2 == 0:
            self._look(order, verdict)
        return verdict

    def _order(self, n: int, seed: int) -> Part:
        subject = replace(self._subject, durability="power" if n % 4 > 1 else "process")
        ledger, model = str(subject.path.parent / f"ledger{n}"), self._model.to_json()
        # After an even cycle the store is read here, so only the writers of even cycles find one that nobody
        # has looked at.
        return Part(
            "write", subject.fields, self._names, model, ledger=ledger, seed=seed,
            evicts=self._evicts, judges=n % 2 == 0,
        )  # fmt: skip

    def _take_over(self, order: Part, verdict: Verdict) -> None:
        """Take over a killed writer's reports: its verdict or opening time, and its ledger."""
        words = self._nursery.words
        if "verdict" in words:
            told = Verdict(**json.loads(words["verdict"]))
            verdict.add(told)
            self._model.settle({int(name): turn for name, turn in told.found.items()})
        elif "open" in words:
            verdict.recovery.append(float(words["open"]))
        else:
            self._figures["while opening"] += 1
        complaints = Ledger.replay(order.ledger, self._model)
        verdict.count("wrong", *complaints)
        self._figures["unanswered"] += bool(self._model.unsure)
        self._figures["calls"] += Path(order.ledger).read_bytes().count(b'"done"')
        Path(order.ledger).unlink()

    def _look(self, order: Part, verdict: Verdict) -> None:
        """Open it here, as the next owner."""
        with self._subject.recover(self._names, verdict) as store:
            found = judge(store, self._model, order.must_after(self._model), self._names)
            check_integrity(store)
            evicted = store.usage().details.get("evicted", 0)
        verdict.add(found)
        # Nothing tears when a process dies: its writes are in the page cache.
        verdict.lost += found.torn
        if evicted and not self._evicts:
            verdict.notes.append(f"{evicted} objects were evicted, where none had to be")
        self._model.settle(found.found)
