"""A mixed load on one store for a while, in a process of its own: first with reopenings, then in one long
session, whose memory is sampled and its slope fitted.

`python -m tests.campaign.soak KIND DIR SECONDS SEED`. Every object always has the same bytes, so that any
thread can tell a wrong one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from tests.campaign.model import Verdict, Version
from tests.campaign.report import Row, Run, apart
from tests.campaign.stores import Subject, check_integrity, descriptors
from tests.storage_backends.local.files import disk_bytes
from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import content, fetch, key, to_get, to_set

CAPACITY = 8 << 20
THREADS, NAMES = 4, 480
SAMPLE_SECONDS = 0.5
SESSION_SECONDS = 4.0
SHORT = 0.4
"""The part of the time that goes into short sessions; the rest is one long one."""
WARM_UP = 0.5
"""The samples of the first half do not count: caches fill, and the allocator finds its size."""


def campaign(run: Run) -> Iterator[Row]:
    """One soak, of as many seconds as there would be trials."""
    row = Row("soak", run.kind)

    def trial(seed: int, directory: Path) -> Verdict:
        verdict, row.figures = apart("tests.campaign.soak", run.kind, directory, run.trials, seed)
        return verdict

    yield run.row(row, trial, run.seeds[:1])


class Sample(NamedTuple):
    """Resources at one moment; `anonymous` memory is the process's own, the rest of `resident` files."""

    seconds: float
    anonymous: int
    resident: int
    descriptors: int
    threads: int


class Soak:
    """Threads that set, get and delete; each deletes and misses only its own names.

    Between sessions the store is closed and opened.

    Thread safety: `work` runs in several threads; the rest in one.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self._subject, self._seed = subject, seed
        self._data = [Version(name, 0).data for name in range(NAMES)]
        self._mutex = threading.Lock()
        self.verdict = Verdict()
        self.samples: list[Sample] = []
        self.calls = self.sessions = 0

    def run(self, seconds: float) -> None:
        """Sessions until the time is over."""
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds:
            until = start + (
                min(now + SESSION_SECONDS, SHORT * seconds) if now < SHORT * seconds else seconds
            )
            store = self._subject.recover(NAMES, self.verdict)
            threads = [
                threading.Thread(target=self.work, args=(store, turn, until)) for turn in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(SAMPLE_SECONDS)
                if time.monotonic() < until:
                    self.samples.append(sample(time.monotonic() - start))
            self._end_of_session(store)

    def work(self, store: StorageBackend, turn: int, until: float) -> None:
        """One thread's part of a session."""
        random = Random(self._seed * 1009 + self.sessions * 17 + turn)
        calls = 0
        while time.monotonic() < until:
            own = random.randrange(NAMES // THREADS) * THREADS + turn
            self._turn(store, own, random)
            calls += 1
        with self._mutex:
            self.calls += calls

    def _turn(self, store: StorageBackend, own: int, random: Random) -> None:
        if random.random() < 0.2:
            store.delete([key(own)])
            if fetch(store, key(own), len(self._data[own])) is not Outcome.MISS:
                self._note("wrong", f"{own} is there after its delete")
            return
        answers = store.set([to_set(key(own), self._data[own])])
        if answers[0] not in (Outcome.STORED, Outcome.HIT):
            self._note("wrong", f"a set was answered with {answers}")
        names = [own, *(random.randrange(NAMES) for _ in range(3))]
        items = [to_get(key(name), len(self._data[name])) for name in names]
        outcomes = store.get(items)
        for name, item, outcome in zip(names, items, outcomes, strict=True):
            if outcome not in (Outcome.HIT, Outcome.MISS) or (
                outcome is Outcome.HIT and content(item) != self._data[name]
            ):
                self._note("wrong", f"a get of {name} was answered with {outcome}")
        # One that was a hit may have been the next to be evicted, and may be gone by now.
        if outcomes[0] is Outcome.MISS and answers[0] is Outcome.STORED:
            self._note("lost", f"{own} was stored last, and is gone")

    def _end_of_session(self, store: StorageBackend) -> None:
        check_integrity(store)
        if disk_bytes(self._subject.path) > CAPACITY:
            self._note("wrong", "the cap is exceeded")
        self.verdict.present += store.usage().objects
        store.close()
        self.sessions += 1

    def _note(self, what: str, note: str) -> None:
        with self._mutex:
            self.verdict.count(what, note)


def sample(seconds: float) -> Sample:
    """This process now, after the allocator gave back what it only keeps."""
    _trim()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS")}
    return Sample(seconds, kib["RssAnon"] << 10, kib["VmRSS"] << 10, descriptors(), int(fields["Threads"]))


def _trim() -> None:
    """Free memory that glibc holds on to looks like a leak for hours; other allocators are left alone."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def slope(samples: list[Sample], field: str) -> tuple[float, float]:
    """Per hour, by least squares, and its standard error."""
    x = np.array([s.seconds for s in samples]) / 3600
    y = np.array([getattr(s, field) for s in samples], np.float64)
    if len(samples) < 8:
        return 0.0, 0.0
    a, b = np.polyfit(x, y, 1)
    error = np.sqrt(((y - a * x - b) ** 2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return float(a), float(error)


def figures(soak: Soak, seconds: float) -> dict[str, str | int]:
    """Return figures of the samples after the warm-up; the error, as if they were independent, is a bound."""
    kept = [s for s in soak.samples if s.seconds >= WARM_UP * seconds]
    found: dict[str, str | int] = {
        "calls": soak.calls,
        "sessions": soak.sessions,
        "window s": round(kept[-1].seconds - kept[0].seconds),
    }
    for field in ("anonymous", "resident"):
        per_hour, error = slope(kept, field)
        found[f"{field} MB/h"] = f"{per_hour / 1e6:.2f} +- {error / 1e6:.2f}"
        found[f"{field} MB"] = (
            f"{kept[0]._asdict()[field] / 1e6:.1f} to {kept[-1]._asdict()[field] / 1e6:.1f}"
        )
    for field in ("descriptors", "threads"):
        counts = [getattr(s, field) for s in kept]
        found[field] = f"{min(counts)} to {max(counts)}"
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kind, directory, seconds, seed = sys.argv[1:]
    soak = Soak(Subject(kind, Path(directory) / "store", CAPACITY), int(seed))
    soak.run(float(seconds))
    os.write(1, json.dumps([asdict(soak.verdict), figures(soak, float(seconds))]).encode())
