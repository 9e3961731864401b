"""Orders to the processes of `actors`, and an Env in which a process kills itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.model import Verdict
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery
from tests.campaign.writer import nursery, say
from tiercache.testing.faults import Call, FaultEnv


@dataclass(frozen=True)
class Part:
    """Order to one process: a job, with a store (a Subject's fields), names and a model as in an `Order`.

    `kill_at`: number of the call of its Env before which the process kills itself; 0: never. `must`: the
    (name, turn) pairs that a job which reads the store has to find. `checks`: the store's own check must
    pass, and everything listed must be readable. `how`: further arguments of the job.
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
    must: Sequence[tuple[int, int]] = ()
    checks: bool = True
    how: Sequence[str] = field(default=())

    @property
    def subject(self) -> Subject:
        kind, path, capacity, durability = self.store
        return Subject(kind, Path(path), capacity, durability)


class Killer(FaultEnv):
    """Counts all calls, and kills this process before one of them.

    Thread safety: as FaultEnv; what other threads do at that moment is cut off with it.
    """

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


def act() -> None:
    """Be a nursery whose processes play parts."""

    def play(words: dict[str, Any]) -> None:
        part = Part(**words)
        env = Killer(part.kill_at)
        try:
            JOBS[part.job](part, env)
        finally:
            say("calls", str(env.seen))
        os._exit(0)

    nursery(play)


def played(nursery: Nursery, part: Part) -> int:
    """Let a part be played to its end: the exit status, or the negative number of the signal."""
    nursery.start(part)
    return nursery.wait()


def looked(nursery: Nursery, part: Part) -> Verdict:
    """Let a process read the store, and return its verdict; raise RuntimeError if it reports none."""
    status = played(nursery, part)
    if "verdict" not in nursery.words:
        raise RuntimeError(died(nursery) or f"who looked ended with status {status}")
    verdict = Verdict(**json.loads(nursery.words["verdict"]))
    verdict.found = {int(name): turn for name, turn in verdict.found.items()}
    return verdict


def died(nursery: Nursery) -> str:
    """The last line of what a process raised; empty where it raised nothing."""
    return json.loads(nursery.words.get("died", '""')).strip().rpartition("\n")[2]


def spread(calls: int, count: int, random: Random) -> list[int]:
    """Pick numbers from 1 to `calls`, spread evenly; all of them, where there are not enough."""
    if count >= calls:
        return list(range(1, calls + 1))
    return [random.randint(calls * n // count + 1, calls * (n + 1) // count) for n in range(count)]
