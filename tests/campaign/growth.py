"""kill -9 at any call while a store grows, evicts, opens with a smaller capacity, or gets damaged objects
anew.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.damage import CAPACITY, NAMES, Template, template
from tests.campaign.model import Ledger, Model, Verdict, Version
from tests.campaign.parts import Part, died, looked, played, spread
from tests.campaign.report import Row, Steps
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery

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


def campaign(kind: str, trials: int, seed: int, base: Path, steps: Steps) -> list[Row]:
    """One row for each scene; the kills are spread over all calls that it makes."""
    directory = Path(tempfile.mkdtemp(dir=base))
    made = template(kind, directory)
    rows = []
    with Nursery("tests.campaign.actors") as nursery:
        for name, scene_of in (
            ("growing", growing),
            ("evicting", evicting),
            ("shrinking", shrinking),
            ("mending", mending),
        ):
            row = Row("grow", f"{kind}, {name}")
            scene = scene_of(nursery, made, directory, seed)
            runs = Runs(nursery, scene, directory, seed)
            for call in steps.over(runs.plan(trials), f"grow {row.backend}"):
                row.take(partial(runs.run, call), f"call {call}")
            row.figures = runs.figures
            rows.append(row)
    shutil.rmtree(directory)
    return rows


class Runs:
    """One scene, played again and again.

    Thread safety: one thread.
    """

    def __init__(self, nursery: Nursery, scene: Scene, base: Path, seed: int) -> None:
        self._nursery, self._scene, self._base, self._seed = nursery, scene, base, seed
        self.figures = {"calls": 0, "killed": 0, "unanswered": 0}

    def plan(self, trials: int) -> list[int]:
        """The calls before which to kill: all, or as many as are wanted, evenly spread."""
        directory, part = self._begin(0)
        played(self._nursery, part)
        self.figures["calls"] = calls = int(self._nursery.words["calls"])
        shutil.rmtree(directory)
        return spread(calls, trials, Random(self._seed))

    def run(self, call: int) -> Verdict:
        """Play up to a call, and look."""
        directory, part = self._begin(call)
        try:
            self.figures["killed"] += played(self._nursery, part) == -signal.SIGKILL
            model = Model.from_json(self._scene.model.to_json())
            complaints = Ledger.replay(part.ledger, model)
            self.figures["unanswered"] += bool(model.unsure)
            must = sorted(self._scene.must(model))
            look = replace(
                self._scene.look, store=_at(self._scene.look, directory), model=model.to_json(), must=must
            )
            verdict = looked(self._nursery, look)
            verdict.wrong += len(complaints)
            verdict.notes += complaints
            return verdict
        finally:
            shutil.rmtree(directory)

    def _begin(self, call: int) -> tuple[Path, Part]:
        directory = Path(tempfile.mkdtemp(dir=self._base))
        if self._scene.start is not None:
            shutil.copytree(self._scene.start, directory / "store")
        part = replace(
            self._scene.part,
            store=_at(self._scene.part, directory),
            kill_at=call,
            ledger=str(directory / "ledger"),
        )
        return directory, part


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
    status = played(
        nursery,
        Part(
            "churn", subject.fields, MANY, model.to_json(), ledger=ledger, seed=seed, calls=300, evicts=True
        ),
    )
    assert status == 0, died(nursery)
    Ledger.replay(ledger, model)
    model.recent = set()
    part = Part("churn", subject.fields, MANY, model.to_json(), seed=seed + 1, calls=25, evicts=True)
    return Scene(subject.path, part, model, Part("look", subject.fields, MANY, evicts=True), Model.newest)


def shrinking(nursery: Nursery, made: Template, directory: Path, _seed: int) -> Scene:
    """An opening with a quarter of the capacity: what one keeps that nobody kills must be kept; all, where
    that is refused.
    """
    small = replace(made.subject, capacity=SMALLER)
    trial = replace(small, path=made.copy(directory / "small", closed=False).path)
    refused = played(nursery, Part("open_and_close", trial.fields)) != 0
    seen = replace(made.subject if refused else small, path=trial.path)
    found = looked(nursery, Part("look", seen.fields, NAMES, made.model.to_json())).found
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
    return Scene(
        spoiled,
        part,
        before,
        Part("look", replace(made.subject, capacity=CAPACITY).fields, NAMES),
        Model.certain,
    )


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
