"""kill -9 while a store is opened that is damaged in one of many ways: at every call that it makes, and at
random moments.

After that it is opened whole, twice. What lay outside the damaged part must be there; where the damage is to
a part that says nothing of objects, as much as an opening saves that nobody disturbs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.campaign.actors import Part
from tests.campaign.damage import DAMAGES, EMPTYING, NAMES, UNSEEN, Damage, Spoiled, Template, template
from tests.campaign.model import Verdict, Version
from tests.campaign.report import Row, Run
from tests.campaign.stores import Subject
from tests.campaign.victims import Nursery, spread

CASES = 4
"""Instances of each damage; the calls of an opening are tried with the first."""
MOST_CALLS = 100
SMALL = 20


@dataclass(frozen=True)
class Kill:
    """When the opener dies: before a call, or after some of its time; `again`: and so does the next one."""

    call: int = 0
    moment: float = 0.0
    case: int = 0
    again: int = 0


@dataclass(frozen=True)
class Undisturbed:
    """Calls and seconds of an opening that was not killed; `found` is None if nothing could be read."""

    calls: int
    seconds: float
    found: dict[int, int] | None


def campaign(run: Run) -> Iterator[Row]:
    """One row for each damage."""
    fitting = {name: damage for name, (damage, kinds) in DAMAGES.items() if run.kind in kinds}
    with TemporaryDirectory(dir=run.base) as directory, Nursery() as nursery:
        made = template(run.kind, Path(directory))
        for name, damage in fitting.items():
            row = Row("open", f"{run.kind}, {name}")
            openings = Openings(nursery, made, damage, run.seed, row)
            yield run.row(row, openings.run, list(openings.plan(-(-run.trials // len(fitting)))))


class Openings:
    """One kind of damage, many kills, one thread."""

    def __init__(self, nursery: Nursery, made: Template, damage: Damage, seed: int, row: Row) -> None:
        self._nursery, self._template, self._damage, self._seed = nursery, made, damage, seed
        self._known: dict[int, Undisturbed] = {}
        names = ("killed", "twice", "ended before", "crashed", "calls")
        self._figures = row.figures = dict.fromkeys(names, 0) | {"saved undisturbed, least": NAMES}

    def plan(self, budget: int) -> Iterator[Kill]:
        """Every call of an opening, or of a small budget half; then random moments."""
        random = Random(self._seed)
        calls = self._undisturbed(0).calls
        self._figures["calls"] = calls
        chosen = min(calls, MOST_CALLS if budget > SMALL else budget // 2 + 1)
        for n, call in enumerate(spread(calls, chosen, random)):
            yield Kill(call=call, again=random.randint(1, calls) if n % 3 == 2 else 0)
        for n in range(max(budget // 3, budget - chosen)):
            yield Kill(
                moment=random.uniform(0.01, 1.05),
                case=n % CASES,
                again=random.randint(1, calls) if n % 3 == 2 else 0,
            )

    def run(self, kill: Kill, directory: Path) -> Verdict:
        """Spoil a copy, kill who opens it, look at it."""
        undisturbed = self._undisturbed(kill.case)
        subject, spoiled = self._spoil(kill.case, directory)
        self._kill(subject, kill, undisturbed)
        if kill.again:
            self._figures["twice"] += self._open(subject, kill.again) == -signal.SIGKILL
        spoiled.undo()
        verdict = self._look(subject, self._must(spoiled, undisturbed))
        if not spoiled.kept():
            verdict.count("lost", "what was put aside is gone")
        return verdict

    def _must(self, spoiled: Spoiled, undisturbed: Undisturbed) -> set[Version]:
        stored = self._template.model.certain()
        if self._template.kind == "lmdb" and self._damage in EMPTYING:
            return set()
        if spoiled.loses is None:
            found = undisturbed.found or {}
            return {version for version in stored if found.get(version.name) == version.turn}
        return {version for version in stored if version.name not in spoiled.loses}

    def _spoil(self, case: int, directory: Path) -> tuple[Subject, Spoiled]:
        subject = self._template.copy(directory / "store", closed=case % 2 == 1)
        return subject, self._damage(self._template, subject.path, Random(self._seed * 1009 + case))

    def _undisturbed(self, case: int) -> Undisturbed:
        """Open a spoiled copy whole, and look at it."""
        if case not in self._known:
            with TemporaryDirectory(dir=self._template.running.parent) as directory:
                subject, spoiled = self._spoil(case, Path(directory))
                status = self._open(subject, 0)
                words = self._nursery.words
                spoiled.undo()
                # who crashes says nothing
                calls, seconds = (int(words.get("calls", 1)), float(words.get("seconds", 0.02)))
                self._crashed(status)
                try:
                    found: dict[int, int] | None = self._look(subject, set()).found
                except RuntimeError:
                    found = None
            self._known[case] = Undisturbed(calls, seconds, found)
            least = "saved undisturbed, least"
            self._figures[least] = min(self._figures[least], len(found or ()))
        return self._known[case]

    def _kill(self, subject: Subject, kill: Kill, undisturbed: Undisturbed) -> None:
        if kill.call:
            status = self._open(subject, kill.call)
        else:
            self._nursery.start(Part("open_and_close", subject.fields))
            time.sleep(kill.moment * undisturbed.seconds)
            status = self._nursery.end()
        self._figures["killed"] += status == -signal.SIGKILL
        self._figures["ended before"] += status >= 0
        self._crashed(status)

    def _crashed(self, status: int) -> None:
        self._figures["crashed"] += status < 0 and status != -signal.SIGKILL

    def _open(self, subject: Subject, kill_at: int) -> int:
        return self._nursery.played(Part("open_and_close", subject.fields, kill_at=kill_at))

    def _look(self, subject: Subject, must: set[Version]) -> Verdict:
        checks = not (subject.kind == "lmdb" and self._damage in UNSEEN)
        model = self._template.model.to_json()
        look = Part("look", subject.fields, NAMES, model, must=sorted(must), checks=checks)
        return self._nursery.looked(look)
