"""Counters of one controller."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from tiercache.core import PoolName
from tiercache.metrics.families import Families
from tiercache.metrics.table import CONTROLLER


class Metrics(Families):
    """All metrics of one controller with these pools. `increment` and `set` take label values in the order of the table.

    Thread safety: as `Families`.
    """

    def __init__(self, pools: Iterable[PoolName], registry: CollectorRegistry | None = None) -> None:
        super().__init__(CONTROLLER, registry, pool=[str(pool) for pool in pools])

    def increment(self, name: str, *labels: str, by: float = 1) -> None:
        """Count `by` more."""
        self.counter(name, *labels).inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        self.gauge(name, *labels).set(to)

    def value(self, name: str, *labels: str) -> float:
        """The present value of one label set, for tests and status pages."""
        return self.total(name, **dict(zip(self._rows[name].label_names, labels, strict=True)))
