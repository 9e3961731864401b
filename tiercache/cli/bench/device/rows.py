"""The rows of `bench device`: one class a case, each a line of JSON."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.cli.bench.device.plan import CHOICE, Case, Kind
from tiercache.cli.bench.rows import MIB, Target, Unit, digits
from tiercache.transfer.cuda import Cell, Direction, Method

_RATIO_FROM: Final = 16 * MIB
_RATIO: Final = Target(0.95, Unit.RATIO)
_LONGER: Final = Target(10, Unit.PERCENT)


class DeviceRow(ABC):
    """One measurement. Thread safety: immutable."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """The row as JSON has it; null where a figure has no meaning."""


@dataclass(frozen=True, slots=True)
class CopyRow(DeviceRow):
    """Copies of `objects`, by one method or by the calibration's choice, beside one contiguous copy of as many bytes; 10**9 bytes a second.

    `chosen`: methods of the choice, with the number of groups of copies that each took. `engine_gb_s`: through the engine, in `transfers`.
    """

    model: str
    kind: Kind
    direction: Direction
    objects: int
    nbytes: int
    copies: int
    method: str
    gb_s: float
    contiguous_gb_s: float
    chosen: Mapping[str, int] = field(default_factory=dict)
    engine_gb_s: float | None = None
    transfers: int = 0

    @property
    def ratio(self) -> float:
        """Of the contiguous copy's speed."""
        return self.gb_s / self.contiguous_gb_s

    @property
    def target(self) -> Target | None:
        """What is wanted of the choice, where bytes decide."""
        return _RATIO if self.method == CHOICE and self.nbytes >= _RATIO_FROM else None

    @property
    def met(self) -> bool | None:
        """Is it met? None where there is no target."""
        return self.ratio >= _RATIO.bound if self.target else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.COPY, "model": self.model, "kind": self.kind, "direction": self.direction, "objects": self.objects,
            "mib": round(self.nbytes / MIB, 3), "copies": self.copies, "method": self.method, "chosen": dict(self.chosen) or None,
            "gb_s": digits(self.gb_s), "contiguous_gb_s": digits(self.contiguous_gb_s), "ratio": digits(self.ratio),
            "engine_gb_s": digits(self.engine_gb_s), "transfers": self.transfers or None,
            "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatmulRow(DeviceRow):
    """`products` in `alone` seconds, or in `beside` while copies run; `gb_s` of these."""

    method: Method
    direction: Direction
    products: int
    alone: float
    beside: float
    gb_s: float

    @property
    def slower(self) -> float:
        """Per cent more time."""
        return (self.beside / self.alone - 1) * 100

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.MATMUL, "method": self.method, "direction": self.direction, "products": self.products,
            "alone_ms": digits(self.alone * 1e3), "beside_ms": digits(self.beside * 1e3), "slower_percent": digits(self.slower),
            "copy_gb_s": digits(self.gb_s),
        }  # fmt: skip


class Waiting(enum.StrEnum):
    """What a forward pass waits for."""

    LAYERS = "layer by layer"
    WHOLE = "whole load first"


@dataclass(frozen=True, slots=True)
class OverlapRow(DeviceRow):
    """A forward pass of `layers` with a load of `nbytes`: seconds of the load, of compute alone, and of both."""

    model: str
    waiting: Waiting
    pages: int
    states: int
    nbytes: int
    layers: int
    products: int
    load: float
    alone: float
    both: float

    @property
    def longer(self) -> float:
        """Per cent more time than compute alone."""
        return (self.both / self.alone - 1) * 100

    @property
    def target(self) -> Target | None:
        """What is wanted of waiting layer by layer."""
        return _LONGER if self.waiting is Waiting.LAYERS else None

    @property
    def met(self) -> bool | None:
        """Is it met? None where there is no target."""
        return self.longer <= _LONGER.bound if self.target else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.OVERLAP, "model": self.model, "waiting": self.waiting, "pages": self.pages, "states": self.states,
            "mib": round(self.nbytes / MIB, 3), "layers": self.layers, "products_per_layer": self.products,
            "load_ms": digits(self.load * 1e3), "compute_ms": digits(self.alone * 1e3), "both_ms": digits(self.both * 1e3),
            "longer_percent": digits(self.longer), "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartRow(DeviceRow):
    """Seconds of one step of a start; `nbytes` where they grow with memory."""

    what: str
    seconds: float
    nbytes: int = 0

    @property
    def seconds_per_gib(self) -> float | None:
        """None where memory does not matter."""
        return self.seconds / self.nbytes * (1 << 30) if self.nbytes else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.START, "what": self.what, "seconds": digits(self.seconds), "mib": round(self.nbytes / MIB, 3) or None,
            "seconds_per_gib": digits(self.seconds_per_gib),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellRow(DeviceRow):
    """A measurement that copies are chosen by."""

    cell: Cell

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": "calibration", "direction": self.cell.direction, "length": self.cell.length, "count": self.cell.count,
            "best": self.cell.best, "gb_s": {str(method): digits(speed) for method, speed in self.cell.speeds.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkippedRow(DeviceRow):
    """A case that cannot be measured here."""

    case: Case
    reason: str

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {"name": self.case, "skipped": self.reason}
