"""The jobs that several campaigns order: open a store, work in it, mend it, look at it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from tests.campaign.model import History, Ledger, Model, Op, Verdict, Version, judge, perform
from tests.campaign.parts import Killer, Part, job
from tests.campaign.stores import check_integrity
from tests.campaign.writer import say, work
from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import fetch, key


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
        model = Model.from_json(part.model)
        work(
            store,
            model,
            Ledger(part.ledger),
            History(part.seed, part.names),
            range(part.calls),
            evicts=part.evicts,
        )


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
        verdict.failed += 1
        verdict.notes.append(f"it opens and a set is answered with {answers}")
    store.flush()
