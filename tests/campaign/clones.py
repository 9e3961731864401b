"""Crash clones: a random history, a power cut in the middle of it that loses what was not synced as a seed
decides, and a look at the rest.

clone(Subject("file", directory / "store", 4 << 20, "power"), seed=7, target=directory / "left")
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.campaign.model import History, Model, Op, Verdict, Version, judge, perform
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject, check_integrity
from tests.crash import CrashEnv
from tests.storage_backends.local.files import disk_bytes
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import key

SMALL = 4 << 20
CALLS = ("pwritev", "commit", "fdatasync", "fallocate", "fsync", "rename", "open")
EVICTING, ROOMY = 250, 36
"""How many names there are: several times what 4 MiB hold, or a third of it."""


def campaign(run: Run) -> Iterator[Row]:
    """Crash clones with each durability."""
    for durability in ("process", "power"):
        yield run.row(
            Row("clones", f"{run.kind} {durability}"),
            lambda seed, at, how=durability: clone(
                Subject(run.kind, at / "store", SMALL, how), seed, at / "left"
            ),
        )


def clone(subject: Subject, seed: int, target: Path) -> Verdict:
    """One history with one power cut."""
    random = Random(seed)
    names = random.choice((EVICTING, ROOMY))
    cut = Cut(subject, target, seed)
    history = History(seed, names)
    with subject.open(cut.env) as store:
        for _ in range(random.randint(0, 120 if names == EVICTING else 40)):
            cut.call(store, history)
    if random.random() < 0.15:
        cut.arm(random)
    store = subject.open(cut.env)
    with store:
        for _ in range(random.randint(0, 20)):
            cut.call(store, history)
        if not cut.model_then:
            cut.env.clear()
            cut.arm(random)
        for _ in range(40):
            if not cut.model_then:
                cut.call(store, history)
        if not cut.model_then:
            cut.now()
        must = {v for v in cut.must if store.exists([key(v.name)])[0]}
    return examine(subject.at(target), cut.then, must, names, history)


class Cut:
    """Makes calls against a store and a model until the power goes; `must` is what a cut at that moment may
    not take.

    Thread safety: one thread.
    """

    def __init__(self, subject: Subject, target: Path, seed: int) -> None:
        self.env = CrashEnv(seed)
        self.model = Model()
        self.must: set[Version] = set()
        self.model_then = ""
        self._subject, self._target, self._seed = subject, target, seed

    @property
    def then(self) -> Model:
        """The model at the moment of the cut."""
        return Model.from_json(self.model_then)

    def arm(self, random: Random) -> None:
        """Let the power go at some call from now on."""
        self.env.at_call(random.choice(CALLS), random.randint(1, 8), self.now, after=random.random() < 0.5)

    def now(self) -> None:
        """The power goes."""
        if not self.model_then:
            self.model_then = self.model.to_json()
            self.must = self.model.certain() if self._subject.keeps_all else self.model.durable()
            self.env.clone(self._subject.path, self._target, self._seed)

    def call(self, store: StorageBackend, history: History) -> None:
        """One call, unless the power is gone."""
        if not self.model_then:
            step(store, self.model, history.draw(self.model))


def step(store: StorageBackend, model: Model, op: Op) -> None:
    """One call against a store that works."""
    model.begin(op)
    answers = perform(store, op)
    model.end(op, answers)
    assert Outcome.ERROR not in answers, (op, answers)
    assert Outcome.CORRUPT not in answers, (op, answers)


def examine(subject: Subject, model: Model, must: set[Version], names: int, history: History) -> Verdict:
    """Open what the cut left, compare, and go on working with it."""
    verdict = Verdict()
    try:
        store = subject.recover(names, verdict)
    except StorageError as error:
        return Verdict(lost=len(must) or 1, notes=[f"does not open: {error}"])
    with store:
        verdict.add(found := judge(store, model, must, names, reverts=not subject.keeps_all))
        check_integrity(store)
        model.settle(found.found)
        for _ in range(8):
            step(store, model, history.draw(model))
            assert disk_bytes(subject.path) <= subject.capacity, "the cap holds"
        check_integrity(store)
    return verdict
