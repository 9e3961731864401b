"""Wrapper that counts a store's calls and answers for Prometheus."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.metrics import table
from tiercache.metrics.families import Families
from tiercache.storage.base import GetItem, ScanEntry, ScanPage, SetItem, StorageBackend
from tiercache.storage.env import Env
from tiercache.storage.wrappers.base import OPERATIONS, Wrapper

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

P = ParamSpec("P")
T = TypeVar("T")

assert table.OPERATIONS == OPERATIONS, "metrics.table.OPERATIONS does not list the calls of a store"


class StoreMetrics(Families):
    """Metric families of stores (`metrics.table.STORE`), in which the label `store` names the store.

    The families are registered in `registry` (None: in a registry of their own). Make only one `StoreMetrics`
    per registry, and pass it to every `Metered` whose metrics belong in that registry.

    Thread safety: as `Families`.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(table.STORE, registry)

    def value(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of `tiercache_store_<name>` that have these labels.

        Meant for tests and status pages.
        """
        return self.total(f"store_{name}", **labels)


class Metered(Wrapper):
    """Wrapper that counts the calls of `inner` in `metrics`, under the label `store`.

    `metrics` is a new `StoreMetrics` by default. Times come from the clock of `env`.

    Thread safety: as `Wrapper`.
    """

    def __init__(
        self,
        inner: StorageBackend,
        store: str = "store",
        metrics: StoreMetrics | None = None,
        env: Env | None = None,
    ) -> None:
        super().__init__(inner)
        self.metrics: Final = metrics or StoreMetrics()
        self._env: Final = env or Env()
        self.metrics.add(store=store)
        counter, histogram = self.metrics.counter, self.metrics.histogram
        self._under_way: Final = self.metrics.gauge("store_calls_under_way", store)
        self._seconds: Final = {name: histogram("store_seconds", store, name) for name in OPERATIONS}
        self._calls: Final = {
            result: {name: counter("store_calls_total", store, name, result) for name in OPERATIONS}
            for result in ("returned", "raised")
        }
        self._items: Final = {
            name: [(outcome, counter("store_items_total", store, name, outcome)) for outcome in outcomes]
            for name, outcomes in table.ANSWERS.items()
        }
        self._bytes: Final = {name: counter("store_bytes_total", store, name) for name in ("get", "set")}

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        answers = super().exists(keys)
        self._count("exists", [_found(there) for there in answers])
        return answers

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        answers = super().get(items)
        self._count("get", answers)
        self._moved(
            "get",
            sum(item.length for item, answer in zip(items, answers, strict=True) if answer is Outcome.HIT),
        )
        return answers

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        answers = super().set(items)
        self._count("set", answers)
        self._moved(
            "set",
            sum(
                item.meta.length
                for item, answer in zip(items, answers, strict=True)
                if answer is Outcome.STORED
            ),
        )
        return answers

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        answers = super().delete(keys)
        self._count("delete", [_found(gone) for gone in answers])
        return answers

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        page = super().scan(namespace, cursor)
        self._count("scan", [Outcome.HIT] * len(page.entries))
        return page

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        entries = super().describe(keys)
        self._count("describe", [_found(entry is not None) for entry in entries])
        return entries

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        result = "raised"
        self._under_way.inc()
        start = self._env.monotonic()
        try:
            answer = super()._perform(operation, call, *arguments, **named)
            result = "returned"
            return answer
        finally:
            self._seconds[operation].observe(self._env.monotonic() - start)
            self._under_way.dec()
            self._calls[result][operation].inc()

    def _count(self, operation: str, answers: Sequence[Outcome]) -> None:
        for outcome, counter in self._items[operation]:
            if n := answers.count(outcome):
                counter.inc(n)

    def _moved(self, operation: str, nbytes: int) -> None:
        if nbytes:
            self._bytes[operation].inc(nbytes)


def _found(there: bool) -> Outcome:
    return Outcome.HIT if there else Outcome.MISS
