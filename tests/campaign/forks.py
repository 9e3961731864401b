"""Children of a process with an open store: whatever they do, parent and later openings lose nothing.

A child's call is to be refused with ClosedError; what it answers otherwise is held to its word.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.actors import Killer, Part, job, work
from tests.campaign.model import History, Ledger, Model, Op, Verdict, Version, perform
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery
from tiercache.core import Outcome
from tiercache.errors import ClosedError, StorageError
from tiercache.storage.base import StorageBackend
from tiercache.storage.env import Env
from tiercache.testing.objects import key

CAPACITY, NAMES = 16 << 20, 80
OWN = 8
"""Names that only children set."""
ACTS = ("set", "get", "exists", "delete", "flush", "scan", "close", "collect", "exit", "open", "kill")
HUNG_SECONDS = 10


def campaign(run: Run) -> Iterator[Row]:
    """The parent closes its store in the end, or is killed."""
    with Nursery() as nursery:
        for end in ("close", "kill"):
            row = Row("fork", f"{run.kind}, then {end}", figures={"children": 0, "refused": 0, "answered": 0})
            yield run.row(row, partial(family, nursery, row, end, run.kind))


def family(nursery: Nursery, row: Row, end: str, kind: str, seed: int, directory: Path) -> Verdict:
    """A parent, some children, and a look at what they left."""
    subject = Subject(kind, directory / "store", CAPACITY)
    acts = Random(seed).sample(ACTS, 4)
    ledger = str(directory / "ledger")
    part = Part(
        "parent", subject.fields, NAMES, Model().to_json(), ledger=ledger, seed=seed, how=[*acts, end]
    )
    status = nursery.played(part)
    model, verdict = Model(), Verdict()
    complaints = Ledger.replay(ledger, model)
    if status != (-signal.SIGKILL if end == "kill" else 0):
        complaints.append(f"the parent ended with status {status} after {acts}: {nursery.died}")
    for line in Path(ledger + ".children").read_text().splitlines():
        _tell(json.loads(line), model, row, complaints)
    look = Part("look", subject.fields, NAMES, model.to_json(), must=sorted(model.certain()))
    verdict.add(nursery.looked(look))
    verdict.failed += len(complaints)
    verdict.notes += [f"{acts}: {complaint}" for complaint in complaints]
    return verdict


def _tell(told: dict[str, str], model: Model, row: Row, complaints: list[str]) -> None:
    """Enter a child's report into the figures, the complaints and the model."""
    row.figures["children"] += 1
    row.figures["refused"] += told["answer"] == "refused"
    row.figures["answered"] += told["answer"] == "answered"
    if told["answer"] not in ("refused", "answered"):
        complaints.append(f"a child's {told['act']} ended with {told['answer']}")
    for name in told.get("stored", ()):
        model.stored[int(name)] = 1
        model.unsure.pop(int(name), None)


@job
def parent(part: Part, env: Killer) -> None:
    """Work, and have a child now and then, which does one thing."""
    store = part.subject.open(env)
    model, ledger, history = (
        Model.from_json(part.model),
        Ledger(part.ledger),
        History(part.seed, part.names - OWN),
    )
    *acts, end = part.how
    work(store, model, ledger, history, range(10), evicts=False)
    with open(part.ledger + ".children", "a", buffering=1, encoding="ascii") as out:
        for n, act in enumerate(acts):
            told = _child(store, act, part, part.names - OWN + n)
            out.write(json.dumps(told) + "\n")
            work(store, model, ledger, history, range(10), evicts=False)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


def _child(store: StorageBackend, act: str, part: Part, name: int) -> dict[str, object]:
    """Fork one, wait for it, and tell what came of it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(HUNG_SECONDS)
        try:
            told = _do(store, act, part, Version(name, 1))
        except ClosedError:
            told = {"answer": "refused"}
        except BaseException as error:  # noqa: BLE001 (whatever it is, the campaign is to know it)
            told = {"answer": repr(error)}
        os.write(write, json.dumps(told).encode())
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "exit":
            atexit._run_exitfuncs()
        del store
        gc.collect()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    fine = code == (-signal.SIGKILL if act == "kill" else 0)
    return {"act": act} | (
        json.loads(said)
        if said and fine
        else {"answer": "a hang" if code == -signal.SIGALRM else f"status {code}"}
    )


def _do(store: StorageBackend, act: str, part: Part, version: Version) -> dict[str, object]:
    """Perform a child's act and return its report; "stored": names whose sets were acknowledged."""
    answers: list[object] = []
    if act in ("set", "kill", "exit"):
        answers += perform(store, Op("set", [version]))
    elif act == "open":
        # By itself, as a child should: refused where the parent has the store alone.
        try:
            with part.subject.open(Env()) as own:
                answers += perform(own, Op("set", [version]))
        except StorageError:
            return {"answer": "refused"}
    elif act == "get":
        perform(store, Op("get", [version]))
    elif act == "delete":
        store.delete([key(version.name)])
    elif act == "exists":
        store.exists([key(version.name)])
    elif act == "scan":
        list(store.scan_all())
    elif act == "flush":
        store.flush()
    elif act == "close":
        store.close()
    return {"answer": "answered", "stored": [version.name] if Outcome.STORED in answers else []}
