"""Counts what a store is asked and what it answers, for Prometheus."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import GetItem, ScanPage, SetItem, StorageBackend
from tiercache.storage.env import Env
from tiercache.storage.wrappers.base import OPERATIONS, Wrapper

P = ParamSpec("P")
T = TypeVar("T")

SECONDS: Final = (25e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 25e-3, 0.1, 0.25, 1.0, 2.5, 10.0)
"""Upper ends of the latency histogram: from a dict's answer to a remote store's deadline."""

ANSWERS: Final = {
    "exists": (Outcome.HIT, Outcome.MISS),
    "get": (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR),
    "set": (Outcome.STORED, Outcome.HIT, Outcome.THROTTLED, Outcome.ERROR),
    "delete": (Outcome.HIT, Outcome.MISS),
    "scan": (Outcome.HIT,),
}
"""What an item can be answered, by operation; of a deletion HIT means that it is gone now, of a scan that it was listed."""


class StoreMetrics:
    """The families that metered stores share, told apart by the label `store`, in `registry` or one of their own.

        tiercache_store_calls_total       store, operation, result (returned, raised)
        tiercache_store_items_total       store, operation, outcome
        tiercache_store_bytes_total       store, operation (get: of hits; set: of what was stored)
        tiercache_store_seconds           store, operation; a histogram over calls, raised ones included

    A registry takes one `StoreMetrics`; hand it to every `Metered` whose figures belong there.

    Thread rule: any thread; prometheus_client locks for us.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry: Final = registry or CollectorRegistry()
        self.calls = Counter("tiercache_store_calls_total", "Calls of a store.", ("store", "operation", "result"), registry=self.registry)
        self.items = Counter(
            "tiercache_store_items_total", "Items of those calls by answer.", ("store", "operation", "outcome"), registry=self.registry
        )
        self.bytes = Counter("tiercache_store_bytes_total", "Payload bytes read or stored.", ("store", "operation"), registry=self.registry)
        self.seconds = Histogram(
            "tiercache_store_seconds", "How long calls took.", ("store", "operation"), registry=self.registry, buckets=SECONDS
        )

    def add_store(self, store: str) -> None:
        """Make every label set of a store, at 0, so that "never happened" and "not measured" look different."""
        for operation in OPERATIONS:
            self.seconds.labels(store, operation)
            for result in ("returned", "raised"):
                self.calls.labels(store, operation, result)
        for operation, outcomes in ANSWERS.items():
            for outcome in outcomes:
                self.items.labels(store, operation, outcome)
        for operation in ("get", "set"):
            self.bytes.labels(store, operation)

    def value(self, name: str, **labels: str) -> float:
        """The sum over all samples `tiercache_store_<name>` that agree with `labels`, for tests and status pages."""
        samples = (s for family in self.registry.collect() for s in family.samples if s.name == f"tiercache_store_{name}")
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


class Metered(Wrapper):
    """`inner`, counted under the name `store` in `metrics` (without: one of its own, see `metrics`). The clock is that of `env`.

    Thread rule: as `Wrapper`.
    """

    def __init__(self, inner: StorageBackend, store: str = "store", metrics: StoreMetrics | None = None, env: Env | None = None) -> None:
        super().__init__(inner)
        self.metrics: Final = metrics or StoreMetrics()
        self._store: Final = store
        self._env: Final = env or Env()
        self.metrics.add_store(store)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        answers = super().exists(keys)
        self._count("exists", [_found(there) for there in answers])
        return answers

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        answers = super().get(items)
        self._count("get", answers)
        self._moved("get", sum(item.length for item, answer in zip(items, answers, strict=True) if answer is Outcome.HIT))
        return answers

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        answers = super().set(items)
        self._count("set", answers)
        self._moved("set", sum(item.meta.length for item, answer in zip(items, answers, strict=True) if answer is Outcome.STORED))
        return answers

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        answers = super().delete(keys)
        self._count("delete", [_found(gone) for gone in answers])
        return answers

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        page = super().scan(namespace, cursor)
        self.metrics.items.labels(self._store, "scan", Outcome.HIT).inc(len(page.entries))
        return page

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        result = "raised"
        start = self._env.monotonic()
        try:
            answer = super()._perform(operation, call, *arguments, **named)
            result = "returned"
            return answer
        finally:
            self.metrics.seconds.labels(self._store, operation).observe(self._env.monotonic() - start)
            self.metrics.calls.labels(self._store, operation, result).inc()

    def _count(self, operation: str, answers: Sequence[Outcome]) -> None:
        for outcome in ANSWERS[operation]:
            if n := answers.count(outcome):
                self.metrics.items.labels(self._store, operation, outcome).inc(n)

    def _moved(self, operation: str, nbytes: int) -> None:
        if nbytes:
            self.metrics.bytes.labels(self._store, operation).inc(nbytes)


def _found(there: bool) -> Outcome:
    return Outcome.HIT if there else Outcome.MISS
