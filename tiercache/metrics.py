"""Counters and gauges of one controller or store, in a registry of their own.

Every label set exists from the start at 0, so that a dashboard can tell "never happened" from "not measured". The table at the end of this
module is the only place that names a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from tiercache.core import Outcome, PoolName, Reason, Tier

HIT: Final = "hit"
MISS: Final = "miss"


class Metric(NamedTuple):
    """One row of the table: label names in order, with the values that each may take (None: the pools of the controller)."""

    name: str
    kind: type[Counter] | type[Gauge]
    help: str
    labels: Mapping[str, tuple[str, ...] | None]


class Metrics:
    """All metrics of one owner.

    `increment` and `set` take label values in the order of the table. Thread rule: any thread; prometheus_client locks for us.
    """

    def __init__(self, pools: Iterable[PoolName], registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        names = tuple(str(p) for p in pools)
        self._children: dict[tuple[str, ...], Counter | Gauge] = {}
        for metric in TABLE:
            family = metric.kind(f"tiercache_{metric.name}", metric.help, tuple(metric.labels), registry=self.registry)
            for values in product(*(names if v is None else v for v in metric.labels.values())):
                self._children[(metric.name, *values)] = family.labels(*values) if values else family

    def increment(self, name: str, *labels: str, by: float = 1) -> None:
        """Count `by` more."""
        self._children[(name, *labels)].inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge."""
        gauge = self._children[(name, *labels)]
        assert isinstance(gauge, Gauge)
        gauge.set(to)

    def value(self, name: str, *labels: str) -> float:
        """The present value of one label set, for tests and status pages."""
        metric = next(m for m in TABLE if m.name == name)
        return self.total(name, **dict(zip(metric.labels, labels, strict=True)))

    def total(self, name: str, **where: str) -> float:
        """The sum over all label sets that agree with `where`."""
        samples = (s for family in self.registry.collect() for s in family.samples if s.name == f"tiercache_{name}")
        return sum(s.value for s in samples if where.items() <= s.labels.items())


_TIERS: Final = tuple(str(t) for t in Tier)
_NEAR: Final = ("device", "host")
_RESULTS: Final = (HIT, MISS)
_REASONS: Final = tuple(str(r) for r in Reason)

TABLE: Final = (
    Metric(
        "lookups_total", Counter, "Lookups by what each tier contributed to the restore, and why it did not.",
        {"tier": _TIERS, "pool": None, "result": _RESULTS, "reason": _REASONS},
    ),
    Metric("restored_objects_total", Counter, "Objects restored, by the tier that they came from.", {"tier": _TIERS, "pool": None}),
    Metric("restored_bytes_total", Counter, "Payload bytes restored, by the tier that they came from.", {"tier": _TIERS, "pool": None}),
    Metric("tokens_total", Counter, "Prompt tokens, restored or left to compute.", {"how": ("restored", "computed")}),
    Metric("restore_failures_total", Counter, "Restores that were planned and had to be cut short, by reason.", {"reason": _REASONS}),
    Metric("written_objects_total", Counter, "Objects copied down into a tier by write-through.", {"tier": _TIERS, "pool": None}),
    Metric("storage_sets_total", Counter, "Outcomes of storage sets.", {"pool": None, "outcome": tuple(str(o) for o in Outcome)}),
    Metric("storage_gets_total", Counter, "Outcomes of storage gets.", {"pool": None, "outcome": tuple(str(o) for o in Outcome)}),
    Metric(
        "write_through_skipped_total", Counter, "Objects whose write-through was skipped; they are tried again when next committed.",
        {"pool": None, "reason": ("host_full", "transfer_failed")},
    ),
    Metric("evicted_objects_total", Counter, "Objects evicted: demoted or lost.", {"tier": _NEAR, "fate": ("demoted", "lost")}),
    Metric("in_flight_operations", Gauge, "Operations under way.", {"operation": ("query", "fetch", "load", "write")}),
    Metric("tier_last_read_seconds", Gauge, "When a tier last contributed to a restore, by the wall clock; 0 is never.", {"tier": _TIERS}),
)  # fmt: skip
