"""The rows of `bench device`: one class for each kind of row, each row a JSON object."""

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
"""Bytes of a group from which on the ratio has a target."""
_RATIO: Final = Target(0.95, Unit.RATIO)
"""Target of copies by the calibration's choice, beside one contiguous copy."""
_LONGER: Final = Target(10, Unit.PERCENT)
"""Target of a forward pass that waits layer by layer, beside compute alone."""


class DeviceRow(ABC):
    """One row of the report; immutable."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object; null for a figure that has no meaning here."""


@dataclass(frozen=True, slots=True)
class CopyRow(DeviceRow):
    """Copies of `objects`, by one method or by the calibration's choice, beside one contiguous copy of as many bytes.

    Speeds are in 10**9 bytes per second. `chosen`: methods of the choice, with the number of groups of copies that each took.
    `engine_gb_s`: speed through the engine, with `transfers` at once.
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
        """Speed as a multiple of the contiguous copy's speed."""
        return self.gb_s / self.contiguous_gb_s

    @property
    def target(self) -> Target | None:
        """The target of the calibration's choice for groups of at least 16 MiB; None for other rows."""
        return _RATIO if self.method == CHOICE and self.nbytes >= _RATIO_FROM else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
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
    """Seconds of `products` matrix products `alone` and `beside` copies; `gb_s`: speed of these copies in 10**9 bytes per second."""

    method: Method
    direction: Direction
    products: int
    alone: float
    beside: float
    gb_s: float

    @property
    def slower(self) -> float:
        """Extra time beside copies, in per cent."""
        return (self.beside / self.alone - 1) * 100

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.MATMUL, "method": self.method, "direction": self.direction, "products": self.products,
            "alone_ms": digits(self.alone * 1e3), "beside_ms": digits(self.beside * 1e3), "slower_percent": digits(self.slower),
            "copy_gb_s": digits(self.gb_s),
        }  # fmt: skip


class Waiting(enum.StrEnum):
    """The part of a load that a forward pass waits for before it computes a layer."""

    LAYERS = "layer by layer"
    WHOLE = "whole load first"


@dataclass(frozen=True, slots=True)
class OverlapRow(DeviceRow):
    """A forward pass of `layers` layers with a load of `nbytes`: seconds of the load, of compute alone, and of both."""

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
        """Extra time beside compute alone, in per cent."""
        return (self.both / self.alone - 1) * 100

    @property
    def target(self) -> Target | None:
        """The target of waiting layer by layer; None for waiting for the whole load."""
        return _LONGER if self.waiting is Waiting.LAYERS else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
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
    """Seconds of one step of a start; `nbytes`: bytes of memory if the time grows with them, else 0."""

    what: str
    seconds: float
    nbytes: int = 0

    @property
    def seconds_per_gib(self) -> float | None:
        """Seconds per GiB of memory; None if the time does not depend on memory."""
        return self.seconds / self.nbytes * (1 << 30) if self.nbytes else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": Case.START, "what": self.what, "seconds": digits(self.seconds), "mib": round(self.nbytes / MIB, 3) or None,
            "seconds_per_gib": digits(self.seconds_per_gib),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellRow(DeviceRow):
    """A cell of the calibration by which methods are chosen."""

    cell: Cell

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": "calibration", "direction": self.cell.direction, "length": self.cell.length, "count": self.cell.count,
            "best": self.cell.best, "gb_s": {str(method): digits(speed) for method, speed in self.cell.speeds.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkippedRow(DeviceRow):
    """A case that cannot be measured on this machine, and the reason."""

    case: Case
    reason: str

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {"name": self.case, "skipped": self.reason}
