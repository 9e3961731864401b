"""A store that may grow larger than its file system, and a stranger who fills the rest: a tmpfs of 16 MiB, in
a process of its own.

`python -m tests.campaign.full_disk KIND DIR SEED`: a page that cannot be had on a full disk may end a process
that maps it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

from tests.campaign.model import History, Model, Op, Verdict, Version, judge, perform
from tests.campaign.power import unmount
from tests.campaign.report import Row, Run, apart
from tests.campaign.stores import Subject, check_integrity
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import key

DISK_BYTES = 16 << 20
CAPACITY = 64 << 20
NAMES = 1500
LIFE_SECONDS = 120
FIGURES = ("stored", "throttled", "refused deletes", "refused flushes", "evicted", "reopened full")


def campaign(run: Run) -> Iterator[Row]:
    """Each trial on a disk of its own."""
    row = Row("enospc", run.kind, figures=dict.fromkeys(FIGURES, 0))

    def trial(seed: int, directory: Path) -> Verdict:
        _mount(directory)
        try:
            verdict, figures = apart("tests.campaign.full_disk", run.kind, directory, seed)
        finally:
            unmount(directory)
        row.count(figures)
        return verdict

    with tempfile.TemporaryDirectory(dir=run.base) as directory:
        try:
            _mount(Path(directory))
        except (OSError, subprocess.CalledProcessError) as error:
            yield Row("enospc", run.kind, skipped=f"skipped: no tmpfs can be mounted ({error})")
            return
        unmount(Path(directory))
    yield run.row(row, trial)


def _mount(directory: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    subprocess.run(command, check=True, capture_output=True)


class FullDisk:
    """A store, its model, and a stranger's file beside it, for one thread."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.random = subject, Random(seed)
        self.history = History(seed, NAMES)
        self.stranger = subject.path.parent / "stranger"
        self.model, self.verdict = Model(), Verdict()
        self.figures = dict.fromkeys(FIGURES, 0)
        self.evicted_before = 0

    def run(self) -> None:
        """Fill the disk, let it be full for a while, give room again; each time with a reopening."""
        store = self.subject.open()
        for turn in range(6):
            calls = 150 if turn == 0 else 60
            for _ in range(calls):
                if turn and self.random.random() < 0.08:
                    self._meddle()
                self._call(store, self.history.draw(self.model))
            if turn in (1, 3):
                self._fill()
                self.figures["reopened full"] += 1
            self._judge(store)
            self._delete(store)
            store.close()
            store = self.subject.recover(NAMES, self.verdict)
            self.evicted_before = 0
            self._judge(store)
        self.stranger.unlink(missing_ok=True)
        answers = [self._call(store, Op("set", [Version(n, self.model.turn + 1)])) for n in range(5)]
        if not all(answer in (Outcome.STORED, Outcome.HIT) for [answer] in answers):
            self.verdict.count("failed", f"with room again, sets were answered with {answers}")
        store.close()

    def _call(self, store: StorageBackend, op: Op) -> list[Outcome | bool]:
        self.model.begin(op)
        try:
            answers = perform(store, op)
        except StorageError:
            if op.kind != "flush":
                raise
            self.figures["refused flushes"] += 1
            return []
        with suppress(ValueError):
            self.model.end(op, answers)
        self.figures["stored"] += answers.count(Outcome.STORED)
        self.figures["throttled"] += answers.count(Outcome.THROTTLED)
        if Outcome.ERROR in answers or Outcome.CORRUPT in answers:
            self.verdict.count("failed", f"{op} was answered with {answers}")
        if op.kind == "delete":
            there = store.exists([key(v.name) for v in op.versions])
            self.figures["refused deletes"] += sum(there)
            if any(t and a for t, a in zip(there, answers, strict=True)):
                self.verdict.count("wrong", "a deleted object is there")
        return answers

    def _judge(self, store: StorageBackend) -> None:
        """Judge the store: no more objects may be missing than were evicted."""
        found = judge(store, self.model, set(), NAMES)
        missing = len(self.model.certain()) - sum(
            1 for v in self.model.certain() if found.found.get(v.name) == v.turn
        )
        evicted = int(store.usage().details.get("evicted", 0))
        found.lost = max(0, missing - (evicted - self.evicted_before)) + found.torn
        self.figures["evicted"] += evicted - self.evicted_before
        self.evicted_before = evicted
        self.verdict.add(found)
        self.model.settle(found.found)
        check_integrity(store)

    def _delete(self, store: StorageBackend) -> None:
        """Deletes work on a full disk: of ten objects at least one goes."""
        known = sorted(self.model.certain())[:10]
        answers = [self._call(store, Op("delete", [version]))[0] for version in known]
        if known and not any(answers):
            self.verdict.count("failed", "nothing can be deleted")

    def _meddle(self) -> None:
        if self.stranger.exists():
            self.stranger.unlink()
        else:
            self._fill()

    def _fill(self) -> None:
        """The stranger takes what is left, to the last byte."""
        with suppress(OSError), self.stranger.open("ab", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    signal.alarm(LIFE_SECONDS)
    disk = FullDisk(Subject(sys.argv[1], Path(sys.argv[2]) / "store", CAPACITY), int(sys.argv[3]))
    disk.run()
    os.write(1, json.dumps([asdict(disk.verdict), disk.figures]).encode())
