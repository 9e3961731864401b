"""The rows of the report, and the project's targets for them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Case(enum.StrEnum):
    """The cases of `bench disk`, in the order in which they run."""

    SET_CACHED = "set-cached"
    """Sets into blocks that were written before and are in the page cache: a full store that goes on taking objects."""
    SET_UNCACHED = "set-uncached"
    """Sets into blocks that were written before and are not in the page cache."""
    SET_FRESH = "set-fresh"
    """Sets into blocks that were never written: a store that still grows."""
    GET_WARM = "get-warm"
    GET_COLD = "get-cold"
    """Gets with the page cache dropped; each reads objects that the opened store has not read before."""
    EXISTS = "exists"
    OPEN = "open"
    """Opening a store, up to the first hit."""

    @property
    def words(self) -> str:
        """The name of the case in a row."""
        return self.value.replace("-", " ")


class Unit(enum.StrEnum):
    """The unit of a target. A ratio is bounded from below, times and losses from above."""

    RATIO = "x"
    MICROSECONDS = "us"
    SECONDS = "s"
    PERCENT = "%"


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that the project sets for a row."""

    bound: float
    unit: Unit

    def __str__(self) -> str:
        return f"{'>=' if self.unit is Unit.RATIO else '<='} {self.bound:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one case: `seconds` of a batch of `objects`, beside `limit_seconds` of the way to move the same bytes named `limit`.

    `payload`: bytes moved by a batch; 0 if nothing is moved, and only the time per object counts. `size`: bytes of an object.
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
        """Payload in 10**9 bytes per second; None if nothing is moved."""
        return self.payload / self.seconds / 1e9 if self.payload else None

    @property
    def limit_gbps(self) -> float | None:
        """Payload of the limit in 10**9 bytes per second; None if there is no limit."""
        return self.payload / self.limit_seconds / 1e9 if self.limit else None

    @property
    def ratio(self) -> float | None:
        """Speed as a multiple of the limit's speed; None if there is no limit."""
        return self.limit_seconds / self.seconds if self.limit else None

    @property
    def us_per_object(self) -> float:
        """Microseconds per object of a batch."""
        return self.seconds / self.objects * 1e6

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
        if self.target is None:
            return None
        if self.target.unit is Unit.RATIO:
            return (self.ratio or 0.0) >= self.target.bound
        return (self.seconds if self.target.unit is Unit.SECONDS else self.us_per_object) <= self.target.bound

    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object; null for a figure that has no meaning here."""
        return {
            "name": self.name, "size": self.size, "objects": self.objects, "seconds": digits(self.seconds),
            "gbps": digits(self.gbps), "limit_gbps": digits(self.limit_gbps), "ratio": digits(self.ratio),
            "us_per_object": digits(self.us_per_object), "limit": self.limit or None,
            "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence to be shown below the rows."""

    text: str


def size_text(nbytes: int) -> str:
    """Return bytes as text, in the largest of GiB, MiB, KiB and B that divides them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def digits(value: float | None) -> float | None:
    """Round to four significant digits, because no run can repeat more; None stays None."""
    return None if value is None else float(f"{value:.4g}")


# Case to (least object size in bytes, ratio wanted): below that size, the time per object decides and not the bytes.
_RATIOS: Final = {
    ("file", Case.SET_CACHED): (MIB, 0.7),
    ("file", Case.SET_UNCACHED): (MIB, 0.7),
    ("file", Case.SET_FRESH): (MIB, 0.7),
    ("file", Case.GET_WARM): (MIB, 0.75),
    ("file", Case.GET_COLD): (MIB, 0.9),
    ("lmdb", Case.GET_WARM): (256 * KIB, 0.65),
}
_MICROSECONDS: Final = {("file", Case.SET_CACHED): 20.0, ("file", Case.GET_WARM): 10.0}
"""Microseconds wanted per object, for objects of 16 KiB in a batch of 128."""
_EXISTS: Final = {"file": 1.0, "lmdb": 4.0}
"""Microseconds wanted per key, for a call with 1,600 keys."""
_MANY: Final = 1_000_000
"""Objects from which on the time of opening a store has a target."""
_OPEN_SECONDS: Final = 2.0
"""Seconds wanted from opening a store with a million objects to its first hit."""


def target_of(backend: str, case: Case, size: int, objects: int) -> Target | None:
    """Return the target for a store beside its raw limit, with durability `process`; None if there is none."""
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
    """Return the target for a store beside one file per page; None if there is none."""
    if backend != "file":
        return None
    return Target(1.2 if case in (Case.GET_WARM, Case.GET_COLD) else 2.0, Unit.RATIO)
