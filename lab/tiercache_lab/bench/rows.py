"""Rows of the report, and the targets that the project sets for their figures."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Case(enum.StrEnum):
    """Cases of `bench disk`, in the order in which they run."""

    SET_CACHED = "set-cached"
    """Sets into blocks that were written before and are in the page cache, as in a full store."""
    SET_UNCACHED = "set-uncached"
    """Sets into blocks that were written before and are not in the page cache."""
    SET_FRESH = "set-fresh"
    """Sets into blocks that were never written, as in a store that still grows."""
    GET_WARM = "get-warm"
    """Gets of objects whose files are in the page cache."""
    GET_COLD = "get-cold"
    """Gets after the page cache was dropped, of objects that the store has not read since it was opened."""
    EXISTS = "exists"
    OPEN = "open"
    """Opening a store, up to the first hit."""

    @property
    def words(self) -> str:
        """The case as it is named in rows."""
        return self.value.replace("-", " ")


class Unit(enum.StrEnum):
    """Units of a target. The target of a ratio is a minimum; all other targets are maximums."""

    RATIO = "x"
    MICROSECONDS = "us"
    SECONDS = "s"
    PERCENT = "%"


@dataclass(frozen=True, slots=True)
class Target:
    """Minimum or maximum that the project sets for a row."""

    bound: float
    unit: Unit

    def __str__(self) -> str:
        return f"{'>=' if self.unit is Unit.RATIO else '<='} {self.bound:g} {self.unit}"


@dataclass(frozen=True, slots=True)
class Row:
    """Median times of one case: for the store and, if there is one, for the limit.

    The limit is a way to move the same bytes without tiercache.
    """

    name: str
    size: int
    """Bytes of an object."""
    objects: int
    """Number of objects of a batch."""
    seconds: float
    """Seconds for a batch."""
    payload: int = 0
    """Bytes that a batch moves; 0 for cases in which only the time per object counts."""
    limit: str = ""
    """Name of the limit, such as `pwritev`; empty if there is none."""
    limit_seconds: float = 0.0
    """Seconds in which the limit moves a batch."""
    target: Target | None = None

    @property
    def gbps(self) -> float | None:
        """Payload in 10**9 bytes per second; None if there is no payload."""
        return self.payload / self.seconds / 1e9 if self.payload else None

    @property
    def limit_gbps(self) -> float | None:
        """Speed of the limit in 10**9 bytes per second; None if there is no limit or no payload."""
        return self.payload / self.limit_seconds / 1e9 if self.limit and self.payload else None

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
        """Return the row as a JSON object; figures that do not apply are null."""
        return {
            "name": self.name, "size": self.size, "objects": self.objects, "seconds": digits(self.seconds),
            "gbps": digits(self.gbps), "limit_gbps": digits(self.limit_gbps), "ratio": digits(self.ratio),
            "us_per_object": digits(self.us_per_object), "limit": self.limit or None,
            "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """Sentence to show below the rows."""

    text: str


def size_text(nbytes: int) -> str:
    """Return a number of bytes as a whole number of GiB, MiB, KiB or B, in the largest possible unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", KIB)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def digits(value: float | None) -> float | None:
    """Round to four significant digits, because further digits differ from run to run; None stays None."""
    return None if value is None else float(f"{value:.4g}")


# For each backend and case: the minimum object size in bytes, and the wanted ratio. For smaller objects the
# time per object counts, and not the throughput.
_RATIOS: Final = {
    ("file", Case.SET_CACHED): (MIB, 0.7),
    ("file", Case.SET_UNCACHED): (MIB, 0.7),
    ("file", Case.SET_FRESH): (MIB, 0.7),
    ("file", Case.GET_WARM): (MIB, 0.75),
    ("file", Case.GET_COLD): (MIB, 0.9),
    ("lmdb", Case.GET_WARM): (256 * KIB, 0.65),
}
# For each rival and case, the same two numbers of a `file` store.
_RIVAL_RATIOS: Final = {
    ("files", Case.SET_CACHED): (0, 2.0),
    ("files", Case.SET_FRESH): (0, 2.0),
    ("files", Case.GET_WARM): (0, 1.2),
    ("files", Case.GET_COLD): (0, 1.2),
    ("lmcache", Case.SET_FRESH): (256 * KIB, 1.1),
    ("lmcache", Case.GET_WARM): (256 * KIB, 1.1),
    ("lmcache", Case.GET_COLD): (256 * KIB, 1.1),
}
_MICROSECONDS: Final = {("file", Case.SET_CACHED): 20.0, ("file", Case.GET_WARM): 10.0}
"""Maximum microseconds per object, for batches of 128 objects of 16 KiB."""
_EXISTS: Final = {"file": 1.0, "lmdb": 4.0}
"""Maximum microseconds per key, for a call with 1,600 keys."""
_MANY: Final = 1_000_000
"""Minimum number of objects in a store whose opening has a target."""
_OPEN_SECONDS: Final = 2.0
"""Maximum seconds from the opening of a store with `_MANY` objects or more to the first hit."""


def target_of(backend: str, case: Case, size: int, objects: int) -> Target | None:
    """Return the target of a store compared with raw system calls, or None if there is no target.

    The targets of sets and gets are meant for stores with durability `process`.
    """
    if case is Case.EXISTS:
        return Target(_EXISTS[backend], Unit.MICROSECONDS) if backend in _EXISTS else None
    if case is Case.OPEN:
        return Target(_OPEN_SECONDS, Unit.SECONDS) if backend == "file" and objects >= _MANY else None
    wanted = _MICROSECONDS.get((backend, case))
    if wanted is not None and size == 16 * KIB and objects == 128:
        return Target(wanted, Unit.MICROSECONDS)
    min_bytes, ratio = _RATIOS.get((backend, case), (0, 0.0))
    return Target(ratio, Unit.RATIO) if ratio and size >= min_bytes else None


def rival_target_of(backend: str, case: Case, rival: str, size: int) -> Target | None:
    """Return the target of a store compared with a rival, or None if there is no target."""
    if backend != "file":
        return None
    min_bytes, ratio = _RIVAL_RATIOS.get((rival, case), (0, 0.0))
    return Target(ratio, Unit.RATIO) if ratio and size >= min_bytes else None
