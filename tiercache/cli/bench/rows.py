"""One row of the report, and the project's targets for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Case(enum.StrEnum):
    """What is measured, in the order in which it runs."""

    SET_CACHED = "set-cached"
    """Into blocks that were written before and are in the page cache: a full store that goes on taking objects."""
    SET_UNCACHED = "set-uncached"
    """Into blocks that were written before and are not in the page cache."""
    SET_FRESH = "set-fresh"
    """Into blocks that were never written: a store that still grows."""
    GET_WARM = "get-warm"
    GET_COLD = "get-cold"
    """With the page cache dropped; every get reads objects that the opened store has not read before."""
    EXISTS = "exists"
    OPEN = "open"
    """Until the first hit."""

    @property
    def words(self) -> str:
        """As a row names it."""
        return self.value.replace("-", " ")


class Unit(enum.StrEnum):
    """What a target bounds: a ratio from below, times and losses from above."""

    RATIO = "x"
    MICROSECONDS = "us"
    SECONDS = "s"
    PERCENT = "%"


@dataclass(frozen=True, slots=True)
class Target:
    """What the project wants of a row.

    Thread safety: immutable.
    """

    bound: float
    unit: Unit

    def __str__(self) -> str:
        return f"{'>=' if self.unit is Unit.RATIO else '<='} {self.bound:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one case: `seconds` of a batch of `objects`, beside those of the fastest way to move the same `payload` bytes.

    `payload` 0: nothing is moved, and only the time per object counts. `limit` names the way that was fastest.

    Thread safety: immutable.
    """

    name: str
    size: int
    objects: int
    seconds: float
    payload: int = 0
    limit: str = ""
    limit_seconds: float = 0.0
    target: Target | None = None

    @property
    def gbps(self) -> float | None:
        """Payload in 10**9 bytes a second; None where nothing is moved."""
        return self.payload / self.seconds / 1e9 if self.payload else None

    @property
    def limit_gbps(self) -> float | None:
        """The same of the limit; None where there is none."""
        return self.payload / self.limit_seconds / 1e9 if self.limit else None

    @property
    def ratio(self) -> float | None:
        """Of the limit's speed; None where there is none."""
        return self.limit_seconds / self.seconds if self.limit else None

    @property
    def us_per_object(self) -> float:
        """Microseconds of a batch, per object in it."""
        return self.seconds / self.objects * 1e6

    @property
    def met(self) -> bool | None:
        """Is the target met? None where there is none."""
        if self.target is None:
            return None
        if self.target.unit is Unit.RATIO:
            return (self.ratio or 0.0) >= self.target.bound
        return (self.seconds if self.target.unit is Unit.SECONDS else self.us_per_object) <= self.target.bound

    def record(self) -> dict[str, Any]:
        """The row as JSON has it; null where a figure has no meaning."""
        return {
            "name": self.name, "size": self.size, "objects": self.objects, "seconds": digits(self.seconds),
            "gbps": digits(self.gbps), "limit_gbps": digits(self.limit_gbps), "ratio": digits(self.ratio),
            "us_per_object": digits(self.us_per_object), "limit": self.limit or None,
            "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that belongs under the rows.

    Thread safety: immutable.
    """

    text: str


def size_text(nbytes: int) -> str:
    """Bytes with the largest unit that divides them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def digits(value: float | None) -> float | None:
    """Four significant digits: more would claim what no run can repeat."""
    return None if value is None else float(f"{value:.4g}")


# Ratios are wanted where bytes decide, from the size on that is given here; below it the time per object does.
_RATIOS: Final = {
    ("file", Case.SET_CACHED): (MIB, 0.7),
    ("file", Case.SET_UNCACHED): (MIB, 0.7),
    ("file", Case.SET_FRESH): (MIB, 0.7),
    ("file", Case.GET_WARM): (MIB, 0.75),
    ("file", Case.GET_COLD): (MIB, 0.9),
    ("lmdb", Case.GET_WARM): (256 * KIB, 0.65),
}
_MICROSECONDS: Final = {("file", Case.SET_CACHED): 20.0, ("file", Case.GET_WARM): 10.0}
"""Per object of 16 KiB in a batch of 128."""
_EXISTS: Final = {"file": 1.0, "lmdb": 4.0}
"""Microseconds a key, of 1,600."""
_MANY: Final = 1_000_000
_OPEN_SECONDS: Final = 2.0
"""From opening a store with a million objects to its first hit."""


def target_of(backend: str, case: Case, size: int, objects: int) -> Target | None:
    """What is wanted of a store beside its raw limit, with durability `process`; None where nothing is."""
    if case is Case.EXISTS:
        return Target(_EXISTS[backend], Unit.MICROSECONDS) if backend in _EXISTS else None
    if case is Case.OPEN:
        return Target(_OPEN_SECONDS, Unit.SECONDS) if backend == "file" and objects >= _MANY else None
    wanted = _MICROSECONDS.get((backend, case))
    if wanted is not None and size == 16 * KIB and objects == 128:
        return Target(wanted, Unit.MICROSECONDS)
    least, ratio = _RATIOS.get((backend, case), (0, 0.0))
    return Target(ratio, Unit.RATIO) if ratio and size >= least else None


def peer_target_of(backend: str, case: Case) -> Target | None:
    """What is wanted of a store beside one file per page."""
    if backend != "file":
        return None
    return Target(1.2 if case in (Case.GET_WARM, Case.GET_COLD) else 2.0, Unit.RATIO)
