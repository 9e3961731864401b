"""kill -9 at any call while a store grows, evicts, opens with less capacity, or gets damaged objects anew."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.campaign.actors import Part
from tests.campaign.damage import CAPACITY, NAMES, Template, template
from tests.campaign.model import Ledger, Model, Verdict, Version
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery, spread

ROOMY, TIGHT, SMALLER = 32 << 20, 6 << 20, 4 << 20
MANY = 400
"""Names of twice what fits into TIGHT."""


@dataclass
class Scene:
    """A store at work: where it begins, the part that is played and killed, and who looks afterwards.

    `model`: what is known before. `must`: what has to be there in the end, given what is known after the
    kill.
    """

    start: Path | None
    part: Part
    model: Model
    look: Part
    must: Callable[[Model], set[Version]]


def campaign(run: Run) -> Iterator[Row]:
    """One row for each scene; the kills are spread over all calls that it makes."""
    with TemporaryDirectory(dir=run.base) as directory, Nursery() as nursery:
        made = template(run.kind, Path(directory))
        for scene_of in (growing, evicting, shrinking, mending):
            row = Row("grow", f"{run.kind}, {scene_of.__name__}")
            runs = Runs(nursery, scene_of(nursery, made, Path(directory), run.seed), row)
            with TemporaryDirectory(dir=run.base) as first:
                calls = runs.plan(Path(first), run.trials, run.seed)
            yield run.row(row, runs.run, calls)


class Runs:
    """One scene, played again and again by one thread."""

    def __init__(self, nursery: Nursery, scene: Scene, row: Row) -> None:
        self._nursery, self._scene = nursery, scene
        self._figures = row.figures = {"calls": 0, "killed": 0, "unanswered": 0}

    def plan(self, directory: Path, trials: int, seed: int) -> list[int]:
        """The calls before which to kill: all, or as many as are wanted, evenly spread."""
        self._nursery.played(self._begin(0, directory))
        self._figures["calls"] = calls = int(self._nursery.words["calls"])
        return spread(calls, trials, Random(seed))

    def run(self, call: int, directory: Path) -> Verdict:
        """Play up to a call, and look."""
        part = self._begin(call, directory)
        self._figures["killed"] += self._nursery.played(part) == -signal.SIGKILL
        model = Model.from_json(self._scene.model.to_json())
        complaints = Ledger.replay(part.ledger, model)
        self._figures["unanswered"] += bool(model.unsure)
        must, look = sorted(self._scene.must(model)), self._scene.look
        verdict = self._nursery.looked(
            replace(look, store=_at(look, directory), model=model.to_json(), must=must)
        )
        verdict.count("wrong", *complaints)
        return verdict

    def _begin(self, call: int, directory: Path) -> Part:
        if self._scene.start is not None:
            shutil.copytree(self._scene.start, directory / "store")
        store, ledger = _at(self._scene.part, directory), str(directory / "ledger")
        return replace(self._scene.part, store=store, kill_at=call, ledger=ledger)


def _at(part: Part, directory: Path) -> tuple[str, str, int, str]:
    return part.subject.at(directory / "store").fields


def growing(_nursery: Nursery, made: Template, directory: Path, seed: int) -> Scene:
    """From nothing to some megabytes, with deletes in between."""
    subject = Subject(made.kind, directory, ROOMY)
    part = Part("churn", subject.fields, NAMES, Model().to_json(), seed=seed, calls=40)
    return Scene(None, part, Model(), Part("look", subject.fields, NAMES), Model.certain)


def evicting(nursery: Nursery, made: Template, directory: Path, seed: int) -> Scene:
    """A store that was full before."""
    subject = Subject(made.kind, directory / "full", TIGHT)
    model, ledger = Model(), str(directory / "ledger.full")
    full = Part(
        "churn", subject.fields, MANY, model.to_json(), ledger=ledger, seed=seed, calls=300, evicts=True
    )
    status = nursery.played(full)
    assert status == 0, nursery.died
    Ledger.replay(ledger, model)
    model.recent = set()
    part = Part("churn", subject.fields, MANY, model.to_json(), seed=seed + 1, calls=25, evicts=True)
    return Scene(subject.path, part, model, Part("look", subject.fields, MANY, evicts=True), Model.newest)


def shrinking(nursery: Nursery, made: Template, directory: Path, _seed: int) -> Scene:
    """An opening with a quarter of the capacity: it keeps what it would keep unkilled, or is refused."""
    small = replace(made.subject, capacity=SMALLER)
    trial = replace(small, path=made.copy(directory / "small", closed=False).path)
    refused = nursery.played(Part("open_and_close", trial.fields)) != 0
    seen = replace(made.subject if refused else small, path=trial.path)
    found = nursery.looked(Part("look", seen.fields, NAMES, made.model.to_json())).found
    part = Part("open_and_close", small.fields)

    def must(model: Model) -> set[Version]:
        return {version for version in model.certain() if refused or version.name in found}

    # The object that is stored by who looks may take the place of others.
    return Scene(made.running, part, made.model, Part("look", seen.fields, NAMES, evicts=not refused), must)


def mending(_nursery: Nursery, made: Template, directory: Path, seed: int) -> Scene:
    """A quarter of the objects is damaged on the disk, found by reading, and stored anew."""
    spoiled = directory / "spoiled"
    made.copy(spoiled, closed=False)
    known = {version.name: version for version in made.model.certain() if len(version.data) >= 4096}
    bad = spoil(spoiled, Random(seed).sample(sorted(known.values()), NAMES // 4))
    part = Part("mend", made.subject.fields, NAMES, made.model.to_json())
    before = Model.from_json(made.model.to_json())
    for version in bad:
        before.unsure[version.name] = {before.stored.pop(version.name)}
    look = Part("look", replace(made.subject, capacity=CAPACITY).fields, NAMES)
    return Scene(spoiled, part, before, look, Model.certain)


def spoil(path: Path, versions: list[Version]) -> list[Version]:
    """Flip a bit in the payloads of these where they lie on the disk: those that were found."""
    bad = []
    for file in sorted([*path.rglob("*.slab"), *path.rglob("data.mdb")]):
        content = file.read_bytes()
        with file.open("r+b") as out:
            for version in versions:
                at = content.find(version.data[:1024])
                if at >= 0:
                    out.seek(at + 512)
                    out.write(bytes([content[at + 512] ^ 1]))
                    bad.append(version)
    assert len(bad) == len(versions), "every payload is found once"
    return bad
