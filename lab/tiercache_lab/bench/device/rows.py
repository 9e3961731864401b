"""The rows of `bench device`, with one class for each kind of row."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.transfer.cuda import Cell, Direction
from tiercache_lab.bench.device.plan import CHOICE, DeviceCase, TransferKind
from tiercache_lab.bench.rows import MIB, Target, Unit, digits

_RATIO_FROM: Final = 16 * MIB
"""Minimum bytes of a group whose ratio has a target."""
_RATIO: Final = Target(0.95, Unit.RATIO)
"""Target of copies by the calibration's choice: their speed as a multiple of the contiguous copy's speed."""
_LONGER: Final = Target(10, Unit.PERCENT)
"""Target of a forward pass that waits layer by layer: extra time, in per cent of the compute alone."""


class DeviceRow(ABC):
    """Row of the report, immutable."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the row as a JSON object; figures that do not apply are null."""


@dataclass(frozen=True, slots=True)
class CopyRow(DeviceRow):
    """Speed of the copies of one group of objects, by one method or by the calibration's choice.

    Speeds are in 10**9 bytes per second.
    """

    model: str
    kind: TransferKind
    direction: Direction
    objects: int
    """Number of objects."""
    nbytes: int
    """Payload bytes of all objects."""
    copies: int
    """Number of copies that move these objects."""
    method: str
    """Name of the method, or "choice" for the calibration's choice."""
    gb_s: float
    """Speed of all these copies together."""
    contiguous_gb_s: float
    """Speed of one contiguous copy of as many bytes."""
    chosen: Mapping[str, int] = field(default_factory=dict)
    """Number of groups of copies for which the calibration chose a method, by the method's name.

    Empty for a row of one method.
    """
    engine_gb_s: float | None = None
    """Speed through the transfer engine."""
    transfers: int = 0
    """Number of transfers that were in the engine at once."""

    @property
    def ratio(self) -> float:
        """Speed as a multiple of the contiguous copy's speed."""
        return self.gb_s / self.contiguous_gb_s

    @property
    def target(self) -> Target | None:
        """Target of the calibration's choice for groups of at least 16 MiB; None for other rows."""
        return _RATIO if self.method == CHOICE and self.nbytes >= _RATIO_FROM else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
        return self.ratio >= _RATIO.bound if self.target else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": DeviceCase.COPY, "model": self.model, "kind": self.kind, "direction": self.direction,
            "objects": self.objects,
            "mib": round(self.nbytes / MIB, 3), "copies": self.copies, "method": self.method,
            "chosen": dict(self.chosen) or None,
            "gb_s": digits(self.gb_s), "contiguous_gb_s": digits(self.contiguous_gb_s),
            "ratio": digits(self.ratio),
            "engine_gb_s": digits(self.engine_gb_s), "transfers": self.transfers or None,
            "target": str(self.target) if self.target else None, "met": self.met,
        }  # fmt: skip


class Waiting(enum.StrEnum):
    """How a forward pass waits for a load before it computes a layer."""

    LAYERS = "layer by layer"
    WHOLE = "whole load first"


@dataclass(frozen=True, slots=True)
class OverlapRow(DeviceRow):
    """Forward pass with a load."""

    model: str
    waiting: Waiting
    pages: int
    """Number of loaded pages."""
    states: int
    """Number of loaded states."""
    nbytes: int
    """Payload bytes of the load."""
    layers: int
    """Number of layers of the forward pass."""
    products: int
    """Number of matrix products per layer."""
    load: float
    """Seconds of the load alone."""
    alone: float
    """Seconds of the forward pass alone."""
    both: float
    """Seconds of both together."""

    @property
    def longer(self) -> float:
        """Extra time of both together, in per cent of the forward pass alone."""
        return (self.both / self.alone - 1) * 100

    @property
    def target(self) -> Target | None:
        """Target if the pass waits layer by layer; None if it waits for the whole load."""
        return _LONGER if self.waiting is Waiting.LAYERS else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
        return self.longer <= _LONGER.bound if self.target else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": DeviceCase.OVERLAP, "model": self.model, "waiting": self.waiting, "pages": self.pages,
            "states": self.states,
            "mib": round(self.nbytes / MIB, 3), "layers": self.layers, "products_per_layer": self.products,
            "load_ms": digits(self.load * 1e3), "compute_ms": digits(self.alone * 1e3),
            "both_ms": digits(self.both * 1e3),
            "longer_percent": digits(self.longer), "target": str(self.target) if self.target else None,
            "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartRow(DeviceRow):
    """Duration of one step of a start."""

    what: str
    """Name of the step."""
    seconds: float
    nbytes: int = 0
    """Size of the arena in bytes; 0 for a step whose duration does not depend on an arena."""

    @property
    def seconds_per_gib(self) -> float | None:
        """Seconds per GiB of memory; None if the duration does not depend on memory."""
        return self.seconds / self.nbytes * (1 << 30) if self.nbytes else None

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": DeviceCase.START, "what": self.what, "seconds": digits(self.seconds),
            "mib": round(self.nbytes / MIB, 3) or None,
            "seconds_per_gib": digits(self.seconds_per_gib),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellRow(DeviceRow):
    """Cell of the calibration: the speeds of all methods for copies of one length and number."""

    cell: Cell

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {
            "name": "calibration", "direction": self.cell.direction, "length": self.cell.length,
            "count": self.cell.count,
            "best": self.cell.best,
            "gb_s": {str(method): digits(speed) for method, speed in self.cell.speeds.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkippedRow(DeviceRow):
    """Case that cannot be measured on this machine, and the reason."""

    case: DeviceCase
    reason: str

    def record(self) -> dict[str, Any]:  # noqa: D102
        return {"name": self.case, "skipped": self.reason}
