"""Processes that work in a store, look at it, or open a damaged one, and that are killed.

`python -c ACT` is a nursery: it imports everything once, and forks a process for each `Part`, a line of JSON
on its stdin, before any of them opens a store. So a trial costs milliseconds where a start of Python costs a
good part of a second. On its stdout it and its processes say "pid N", what the job has to tell, "calls N"
(how many calls the `Env` saw), "died TRACEBACK" for what it raised, and "ended STATUS".
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.campaign.model import History, Ledger, Model, Op, Verdict, Version, judge, perform
from tests.campaign.stores import Subject, available, check_integrity, load
from tests.faults import Call, FaultEnv
from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import fetch, key

LIFE_SECONDS = 60
"""A process that nobody kills ends by itself."""
ACT = "from tests.campaign import actors; actors.act()"
"""Code of a nursery."""


@dataclass(frozen=True)
class Part:
    """Order to one process: a job, with a store (a Subject's fields), names, and what the store may hold.

    `kill_at`: number of the call of its Env before which the process kills itself; 0: never. `evicts`: the
    store may evict objects. `judges`: read everything before the work. `must`: the (name, turn) pairs that a
    job which reads the store has to find. `checks`: the store's own check must pass, and everything listed
    must be readable. `how`: further arguments of the job.
    """

    job: str
    store: tuple[str, str, int, str]
    names: int = 0
    model: str = ""
    kill_at: int = 0
    ledger: str = ""
    seed: int = 0
    calls: int = 0
    evicts: bool = False
    judges: bool = False
    flushes: bool = True
    must: Sequence[tuple[int, int]] = ()
    checks: bool = True
    how: Sequence[str] = field(default=())

    @property
    def subject(self) -> Subject:
        kind, path, capacity, durability = self.store
        return Subject(kind, Path(path), capacity, durability)

    def must_after(self, model: Model) -> set[Version]:
        """Return the versions that have to be there after a kill."""
        return model.newest() if self.evicts else model.certain()


class Killer(FaultEnv):
    """Counts all calls, of whatever thread, and kills this process before one of them."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self._kill_at = kill_at
        self.seen = 0

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        self.seen += 1
        if self.seen == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().perform(name, call, arguments)


Job = Callable[[Part, Killer], None]
JOBS: dict[str, Job] = {}


def job(function: Job) -> Job:
    """A job of that function's name."""
    JOBS[function.__name__] = function
    return function


@job
def write(part: Part, _env: Killer) -> None:
    """Open, perhaps judge, then work for ever. Says "open SECONDS", and "verdict" where it judges."""
    model, ledger, verdict = Model.from_json(part.model), Ledger(part.ledger), Verdict()
    store = part.subject.recover(part.names, verdict)
    say("open", f"{verdict.recovery[0]:.6f}")
    if part.judges:
        verdict.add(judged := judge(store, model, part.must_after(model), part.names))
        verdict.found = judged.found
        check_integrity(store)
        model.settle(verdict.found)
        say("verdict", json.dumps(asdict(verdict)))
    history = History(part.seed, part.names, flushes=part.flushes)
    work(store, model, ledger, history, count(), evicts=part.evicts)


@job
def open_and_close(part: Part, env: Killer) -> None:
    """Open the store and close it again. Says "seconds"."""
    start = time.perf_counter()
    part.subject.open(env).close()
    say("seconds", f"{time.perf_counter() - start:.6f}")


@job
def churn(part: Part, env: Killer) -> None:
    """Make so many calls of a random history."""
    with part.subject.open(env) as store:
        model, history = Model.from_json(part.model), History(part.seed, part.names)
        work(store, model, Ledger(part.ledger), history, range(part.calls), evicts=part.evicts)


@job
def mend(part: Part, env: Killer) -> None:
    """Read everything, which finds what is damaged, and store that anew."""
    model, ledger = Model.from_json(part.model), Ledger(part.ledger)
    with part.subject.open(env) as store:
        for version in sorted(model.certain()):
            if fetch(store, key(version.name), len(version.data)) != version.data:
                ledger.note("set", [list(version)])
                ledger.note("done", perform(store, Op("set", [version])))


@job
def look(part: Part, _env: Killer) -> None:
    """Open the store whole, compare, use it, and look a second time. Says "verdict"."""
    model, verdict = Model.from_json(part.model), Verdict()
    must = {Version(*pair) for pair in part.must}
    fresh = Op("set", [Version(part.names, model.turn + 1)])
    for turn in range(2):
        with part.subject.recover(part.names + 1, verdict) as store:
            found = judge(store, model, must, part.names + 1, damaged=not part.checks)
            if part.checks:
                check_integrity(store)
            if turn == 0:
                verdict.found = dict(found.found)
                use(store, model, fresh, verdict)
        # What the first opening found, the second must find, unless the new object took its place.
        must = set() if part.evicts else {Version(*pair) for pair in found.found.items()}
        verdict.add(found)
    say("verdict", json.dumps(asdict(verdict)))


def use(store: StorageBackend, model: Model, op: Op, verdict: Verdict) -> None:
    """A store that opens takes an object, gives it back, and can be flushed."""
    model.begin(op)
    answers = perform(store, op)
    model.end(op, answers)
    [version] = op.versions
    if answers != [Outcome.STORED] or fetch(store, key(version.name), len(version.data)) != version.data:
        verdict.count("failed", f"it opens and a set is answered with {answers}")
    store.flush()


def work(
    store: StorageBackend,
    model: Model,
    ledger: Ledger,
    history: History,
    calls: Iterable[object],
    *,
    evicts: bool,
) -> None:
    """Make one call after the other, each with a line in the ledger before and after it."""
    for _ in calls:
        op = history.draw(model)
        ledger.note(op.kind, [list(v) for v in op.versions])
        model.begin(op)
        answers = perform(store, op)
        if op.kind != "get":
            ledger.note("done", answers)
        if set(answers) & {Outcome.ERROR, Outcome.CORRUPT}:
            ledger.note("bad", f"{op} was answered with {answers}")
        elif (
            op.kind == "get"
            and Outcome.MISS in answers
            and not evicts
            and {v.name for v in op.versions} - model.unsure.keys()
        ):
            ledger.note("bad", f"{op} was answered with {answers}, and nothing is evicted here")
        model.end(op, answers)


def say(*words: str) -> None:
    """A line on stdout by one os.write, whatever becomes of this process next."""
    os.write(1, (" ".join(words) + "\n").encode())


def act() -> None:
    """Be a nursery: fork a process for each part, which plays it, and wait for its end."""
    logging.disable(logging.CRITICAL)
    for kind in available():
        load(kind)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.alarm(LIFE_SECONDS)
            try:
                _play(Part(**json.loads(line)))
            except BaseException:  # noqa: BLE001
                # the reader of this process's stdout is to know, and nothing of the nursery's may run here
                say("died", json.dumps(traceback.format_exc(limit=-4)))
            os._exit(1)
        # The first words are the nursery's, so that nobody kills a process that is not known yet.
        say("pid", str(pid))
        _, status = os.waitpid(pid, 0)
        say("ended", str(os.waitstatus_to_exitcode(status)))


def _play(part: Part) -> None:
    env = Killer(part.kill_at)
    try:
        JOBS[part.job](part, env)
    finally:
        say("calls", str(env.seen))
    os._exit(0)
