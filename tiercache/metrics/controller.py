"""Metrics of a controller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tiercache.core import PoolName
from tiercache.metrics.families import Families
from tiercache.metrics.table import CONTROLLER

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Metrics(Families):
    """Metrics of one controller, which has the given pools.

    All methods take the label values of a metric in the order in which `metrics.table` lists its labels.

    Thread safety: any thread.
    """

    def __init__(self, pools: Iterable[PoolName], registry: CollectorRegistry | None = None) -> None:
        super().__init__(CONTROLLER, registry, pool=[str(pool) for pool in pools])

    def increment(self, name: str, *labels: str, by: float = 1) -> None:
        """Add `by` to a counter."""
        self.counter(name, *labels).inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge to `to`."""
        self.gauge(name, *labels).set(to)

    def value(self, name: str, *labels: str) -> float:
        """Return the present value of one label set, for tests and status pages."""
        return self.total(name, **dict(zip(self.rows[name].label_names, labels, strict=True)))
