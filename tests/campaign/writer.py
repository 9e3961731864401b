"""The process that is killed: it writes to a store and keeps a ledger, until it is no more.

`python -m tests.campaign.writer` is a nursery: it imports everything once, and forks one writer for each line
of JSON on its stdin, before any of them opens a store. So a cycle costs milliseconds where a start of Python
costs a good part of a second. On its stdout it and its writers say: "pid N", then "open SECONDS", with
`judge` then "verdict JSON", and when the writer has ended "ended STATUS".
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.campaign.model import History, Ledger, Model, Verdict, judge, perform
from tests.campaign.stores import Subject, available, check_integrity, load
from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend

LIFE_SECONDS = 60
"""A writer that nobody kills ends by itself."""


@dataclass(frozen=True)
class Order:
    """Order to one writer. `store`: a Subject's fields. `model`: what the store may hold.

    `evicts`: the store may evict objects. `judges`: read everything first.
    """

    store: tuple[str, str, int, str]
    names: int
    seed: int
    ledger: str
    model: str
    evicts: bool = False
    judges: bool = False
    flushes: bool = True

    @property
    def subject(self) -> Subject:
        kind, path, capacity, durability = self.store
        return Subject(kind, Path(path), capacity, durability)

    def must(self, model: Model) -> set[Any]:
        """Return the versions that have to be there after a kill."""
        return model.newest() if self.evicts else model.certain()


def write(order: Order) -> None:
    """Open, perhaps judge, then work for ever."""
    model = Model.from_json(order.model)
    ledger = Ledger(order.ledger)
    verdict = Verdict()
    store = order.subject.recover(order.names, verdict)
    say("open", f"{verdict.recovery[0]:.6f}")
    if order.judges:
        verdict.add(judged := judge(store, model, order.must(model), order.names))
        verdict.found = judged.found
        check_integrity(store)
        model.settle(verdict.found)
        say("verdict", json.dumps(asdict(verdict)))
    work(
        store,
        model,
        ledger,
        History(order.seed, order.names, flushes=order.flushes),
        count(),
        evicts=order.evicts,
    )


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


def nursery(live: Callable[[dict[str, Any]], None]) -> None:
    """Fork a process for each order, which lives by it, and wait for its end."""
    logging.disable(logging.CRITICAL)
    for kind in available():
        load(kind)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.alarm(LIFE_SECONDS)
            try:
                live(json.loads(line))
            except BaseException:  # noqa: BLE001
                # the reader of this process's stdout is to know, and nothing of the nursery's may run here
                say("died", json.dumps(traceback.format_exc(limit=-4)))
            os._exit(1)
        # The first words are the nursery's, so that nobody kills a process that is not known yet.
        say("pid", str(pid))
        _, status = os.waitpid(pid, 0)
        say("ended", str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    nursery(lambda words: write(Order(**words)))
    sys.exit(0)
