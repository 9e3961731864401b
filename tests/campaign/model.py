"""Model of what a store must hold after its process or its power died.

It knows what an observer knows that saw the acknowledgements. Objects have small numbers as names, and every
set of a name has a turn of its own, so that the bytes of an older version can be told from the newest. A name
whose set or delete was never answered may be found in either state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple, Self

from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import content, key, payload, to_get, to_set


class Version(NamedTuple):
    """One set of one name."""

    name: int
    turn: int

    @property
    def data(self) -> bytes:
        """Its bytes: mostly some 20 KB, from 1 byte to 110 KB."""
        return _data(self.name, self.turn)


@lru_cache(maxsize=512)
def _data(name: int, turn: int) -> bytes:
    random = Random(name * 1_000_003 + turn)
    low, high = random.choice(((1, 4000), (4096, 40_000), (4096, 40_000), (40_000, 110_000)))
    return payload((name, turn), random.randint(low, high))


KINDS = ("set", "delete", "get", "flush")


class Op(NamedTuple):
    """One call, of one of `KINDS`, and what it is about."""

    kind: str
    versions: Sequence[Version] = ()


@dataclass
class Verdict:
    """Findings in a store that was opened again; `wrong`, `lost` and `failed` must be 0.

    `torn`: damaged objects that the store detected and did not serve. `failed`: calls with an answer that is
    not allowed, and trials that raised.
    """

    wrong: int = 0
    lost: int = 0
    torn: int = 0
    failed: int = 0
    present: int = 0
    recovery: list[float] = field(default_factory=list)
    found: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        """Take in another's counts."""
        for name in ("wrong", "lost", "torn", "failed", "present"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.recovery += other.recovery
        self.notes += other.notes

    def count(self, name: str, *notes: str) -> None:
        """Count what these notes say as `wrong`, `lost` or `failed`."""
        setattr(self, name, getattr(self, name) + len(notes))
        self.notes += notes


class Model:
    """`stored`: acknowledged and not deleted since, the newest last.

    `unsure`: the call that would tell was never answered.
    """

    def __init__(self) -> None:
        self.stored: dict[int, int] = {}
        self.unsure: dict[int, set[int]] = {}
        self.flushed: set[Version] = set()
        self.recent: set[int] = set()
        self.turn = 0

    def begin(self, op: Op) -> None:
        """A call was made."""
        if op.kind in ("set", "delete"):
            for name, turn in op.versions:
                self.unsure.setdefault(name, set()).add(turn)
                self.turn = max(self.turn, turn)

    def end(self, op: Op, answers: Sequence[Outcome | bool]) -> None:
        """Record the answers to a call; raise ValueError for one that is impossible."""
        for version, answer in zip(op.versions, answers, strict=op.kind != "flush"):
            name, turn = version
            known = self.stored.get(name)
            if op.kind == "set" and answer is Outcome.STORED:
                self.stored.pop(name, None)
                self.stored[name] = turn
                self.recent.add(name)
            elif (
                op.kind == "set"
                and answer is Outcome.HIT
                and known is None
                and self.unsure.get(name) == {turn}
            ):
                raise ValueError(f"{name} is deleted, or was never stored, and yet a set of it is a hit")
            elif op.kind == "delete" and answer:
                self.stored.pop(name, None)
            if op.kind in ("set", "delete"):
                self.unsure[name].discard(turn)
                if not self.unsure[name] or answer is Outcome.STORED or answer is True:
                    del self.unsure[name]
        if op.kind == "flush" and all(answers):
            self.flushed = {Version(*pair) for pair in self.stored.items()}

    def allowed(self, name: int) -> list[Version]:
        """The versions that may be found under a name."""
        turns = self.unsure.get(name, set()) | ({self.stored[name]} if name in self.stored else set())
        return [Version(name, turn) for turn in sorted(turns)]

    def certain(self) -> set[Version]:
        """Acknowledged, and no unanswered call is about them."""
        return {Version(*pair) for pair in self.stored.items() if pair[0] not in self.unsure}

    def durable(self) -> set[Version]:
        """Those of them that a flush covers."""
        return self.certain() & self.flushed

    def newest(self, count: int = 3) -> set[Version]:
        """The newest of them, which an eviction takes last; none for a while after all were read anew."""
        return {
            Version(*pair)
            for pair in list(self.stored.items())[-count:]
            if pair[0] in self.recent - self.unsure.keys()
        }

    def settle(self, found: dict[int, int]) -> None:
        """The store was read from end to end."""
        order = [name for name in self.stored if name in found] + [
            name for name in found if name not in self.stored
        ]
        self.stored = {name: found[name] for name in order}
        self.unsure = {}
        self.recent = set()

    def to_json(self) -> str:
        """Return the model as text for another process."""
        unsure = [(name, sorted(turns)) for name, turns in self.unsure.items()]
        return json.dumps(
            [list(self.stored.items()), unsure, sorted(self.flushed), sorted(self.recent), self.turn]
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Back from that."""
        model = cls()
        stored, unsure, flushed, recent, model.turn = json.loads(text)
        model.recent = set(recent)
        model.stored = dict(map(tuple, stored))
        model.unsure = {name: set(turns) for name, turns in unsure}
        model.flushed = {Version(*pair) for pair in flushed}
        return model


class History:
    """Draws one call after the other. `names` bounds how many objects there are."""

    def __init__(self, seed: int, names: int, *, flushes: bool = True) -> None:
        self.random = Random(seed)
        self.names = names
        self.flushes = flushes

    def draw(self, model: Model) -> Op:
        kind = self.random.choices(("set", "delete", "get", "flush"), (60, 18, 18, 4 * self.flushes))[0]
        if kind == "flush":
            return Op(kind)
        if kind == "set":
            names = self.random.sample(range(self.names), self.random.randint(1, 4))
            return Op(kind, [Version(name, model.turn + 1) for name in names])
        known = sorted(model.stored)
        names = self.random.sample(known, min(len(known), self.random.randint(1, 3)))
        return Op(kind, [Version(name, model.stored[name]) for name in names])


def perform(store: StorageBackend, op: Op) -> list[Outcome | bool]:
    """Make a call; a get's HIT with other bytes is told as ERROR."""
    if op.kind == "set":
        return list(store.set([to_set(key(v.name), v.data) for v in op.versions]))
    if op.kind == "delete":
        return list(store.delete([key(v.name) for v in op.versions]))
    if op.kind == "flush":
        store.flush()
        return [True]
    items = [to_get(key(v.name), len(v.data)) for v in op.versions]
    answers = zip(op.versions, items, store.get(items), strict=True)
    return [Outcome.ERROR if o is Outcome.HIT and content(item) != v.data else o for v, item, o in answers]


def judge(
    store: StorageBackend, model: Model, must: Iterable[Version], names: int, *,
    damaged: bool = False, reverts: bool = False,
) -> Verdict:  # fmt: skip
    """Read everything, and compare.

    `must`: what has to be there; of a `damaged` store the rest may be unreadable, and counts as torn. If it
    `reverts`, a removal that was not synced may be lost, which brings back what a flush covered before it.
    """
    verdict = Verdict()
    known = {key(n).digest: n for n in range(names)}
    entries = list(store.scan_all())
    for entry in entries:
        name = known.get(entry.key.digest, -1)
        item = to_get(entry.key, entry.meta.length)
        [outcome] = store.get([item])
        if outcome is Outcome.CORRUPT or (damaged and outcome is Outcome.ERROR):
            verdict.torn += 1
        elif outcome is Outcome.HIT:
            flushed = [v for v in model.flushed if reverts and v.name == name]
            allowed = [*flushed, *model.allowed(name)]
            same = [v for v in allowed if v.data == content(item)]
            verdict.present += 1
            if same:
                verdict.found[name] = same[-1].turn
            else:
                verdict.count("wrong", f"{name} has bytes that nobody stored last; {allowed} were allowed")
        elif outcome is not Outcome.MISS:
            verdict.count("wrong", f"{name} was listed and its get said {outcome}")
    listed = {entry.key.digest for entry in entries}
    hidden = [n for n in range(names) if key(n).digest not in listed]
    if any(store.exists([key(n) for n in hidden])):
        verdict.count("wrong", "a scan left out what exists")
    for version in sorted(set(must)):
        if verdict.found.get(version.name) != version.turn:
            verdict.count("lost", f"{version.name} (set {version.turn}) was acknowledged and is lost")
    return verdict


class Ledger:
    """A file with a line before and after every call, by one os.write each, which outlives the process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: Any) -> None:
        """Add a line."""
        os.write(self._fd, json.dumps(words).encode() + b"\n")

    @staticmethod
    def replay(path: str, model: Model) -> list[str]:
        """Bring a model up to date by the lines of calls; return what the writer complained about."""
        complaints: list[str] = []
        op = Op("flush")
        with open(path, "a+", encoding="ascii") as file:
            file.seek(0)
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        for kind, *rest in lines:
            if kind == "done":
                answers = [Outcome(a) if isinstance(a, str) else a for a in rest[0]]
                try:
                    model.end(op, answers)
                except ValueError as error:
                    complaints.append(str(error))
            elif kind == "bad":
                complaints.append(rest[0])
            elif kind in KINDS:
                op = Op(kind, [Version(*pair) for pair in rest[0]])
                model.begin(op)
        return complaints
