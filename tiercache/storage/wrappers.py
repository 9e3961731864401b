"""Wrappers: stores that contain another store and add one feature to it.

A feature in a wrapper is written once, and works for all backends. `Wrapper` adds nothing and passes each
call on; `Metered` counts calls and answers.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, ParamSpec, Self, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import ConfigError
from tiercache.events.base import ChangeNote
from tiercache.metrics import table
from tiercache.metrics.families import Families
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    SharedMemory,
    StorageBackend,
    StoreContext,
    Usage,
)
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.history import History
from tiercache.storage.shares import Shares

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item", GetItem, SetItem)


class Wrapper(StorageBackend):
    """Store that passes every call on to the store `inner`, which it owns.

    Closing the wrapper closes `inner`.

    Subclasses override the calls that they change, and call the inner store through `_perform`.

    Thread safety: as the contract says, if the inner store keeps the contract. A wrapper has a gate of its
    own (`CallGate`), because one call of the wrapper may make several calls of the inner store: `close` must
    not close the inner store between these calls.
    """

    shows_all: ClassVar[bool] = True
    """Whether callers see all objects of `inner`, under their own names."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner: Final = inner
        self._gate: Final = CallGate(f"the {type(self).__name__} store")

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of `inner`."""
        return self.inner.capabilities

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Always raise ConfigError: a section cannot name the store to wrap."""
        raise ConfigError(
            f"{cls.__name__} is put around a store in code and has no section; construct it with the store"
            " that it wraps"
        )

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._perform("exists", self.inner.exists, keys)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._perform("get", self.inner.get, items)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._perform("peek", self.inner.peek, items)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return self._perform("set", self.inner.set, items)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._perform("delete", self.inner.delete, keys)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        return self._perform("scan", self.inner.scan, namespace, cursor)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return self._perform("describe", self.inner.describe, keys)

    def register_namespace(self, record: NamespaceRecord) -> None:
        self._perform("register_namespace", self.inner.register_namespace, record)

    def namespaces(self) -> list[NamespaceRecord]:
        return self._perform("namespaces", self.inner.namespaces)

    def usage(self) -> Usage:
        return self._perform("usage", self.inner.usage)

    def coldest(self, nbytes: int) -> Sequence[ScanEntry] | None:
        return self._perform("coldest", self.inner.coldest, nbytes)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        self._perform("advise", self.inner.advise, keys, values, worker)

    def flush(self) -> None:
        self._perform("flush", self.inner.flush)

    def close(self) -> None:
        if self._gate.close():
            self.inner.close()

    def watch(self, note: ChangeNote | None) -> bool:
        return self.inner.watch(note)

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        with self._gate:
            return self.inner.history(keys, pages)

    def share(self, shares: Shares) -> None:
        self.inner.share(shares)

    def attach(self, memory: SharedMemory) -> None:
        self.inner.attach(memory)

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Make one call of the contract, named `operation`.

        Subclasses override this to change all calls in the same way.
        """
        with self._gate:
            return call(*arguments, **named)


def unwrap(store: StorageBackend, *, whole: bool = False) -> StorageBackend:
    """Return the store inside all wrappers; with `whole`, stop at one that does not show all of it."""
    while isinstance(store, Wrapper) and (store.shows_all or not whole):
        store = store.inner
    return store


def decide(
    items: Sequence[Item],
    verdict: Callable[[Item], Outcome | None],
    rest: Callable[[list[Item]], list[Outcome]],
) -> list[Outcome]:
    """Answer the items for which `verdict` gives an outcome, and pass the other items to `rest`.

    `rest` gets the other items in one call, in their order. It is not called if there are none.
    """
    verdicts = [verdict(item) for item in items]
    left = [item for item, known in zip(items, verdicts, strict=True) if known is None]
    answers = iter(rest(left) if left else ())
    return [next(answers) if known is None else known for known in verdicts]


def store_once(
    items: Sequence[SetItem], store: Callable[[Sequence[SetItem]], list[Outcome]]
) -> list[Outcome]:
    """Store the first item of each key; return the outcomes of all items.

    A further item of the same key is a HIT if the first item was STORED. Otherwise it has the outcome of the
    first item.
    """
    first: dict[bytes, int] = {}  # position of the first item of each key
    for number, item in enumerate(items):
        first.setdefault(item.key.digest, number)
    outcomes = store([items[number] for number in first.values()]) if first else []
    answers = dict(zip(first, outcomes, strict=True))

    def answer(number: int, digest: bytes) -> Outcome:
        found = answers[digest]
        return Outcome.HIT if found is Outcome.STORED and first[digest] != number else found

    return [answer(number, item.key.digest) for number, item in enumerate(items)]


class Metered(Wrapper):
    """Wrapper that counts the calls of `inner` in `metrics`, under the label `store`.

    `metrics` are the families of `metrics.table.STORE`, which several stores may share; by default they are
    the store's own. Times come from the clock of `env`.

    Thread safety: as `Wrapper`.
    """

    def __init__(
        self,
        inner: StorageBackend,
        store: str = "store",
        metrics: Families | None = None,
        env: Env | None = None,
    ) -> None:
        super().__init__(inner)
        self.metrics: Final = metrics or Families(table.STORE)
        self._env: Final = env or Env()
        self.metrics.add(store=store)
        counter, histogram = self.metrics.counter, self.metrics.histogram
        self._under_way: Final = self.metrics.gauge("store_calls_under_way", store)
        self._seconds: Final = {name: histogram("store_seconds", store, name) for name in table.OPERATIONS}
        self._calls: Final = {
            result: {name: counter("store_calls_total", store, name, result) for name in table.OPERATIONS}
            for result in ("returned", "raised")
        }
        self._items: Final = {
            name: [(outcome, counter("store_items_total", store, name, outcome)) for outcome in outcomes]
            for name, outcomes in table.ANSWERS.items()
        }
        self._bytes: Final = {name: counter("store_bytes_total", store, name) for name in ("get", "set")}

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        answers = super().get(items)
        self._moved("get", [item.length for item in items], answers, Outcome.HIT)
        return answers

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        answers = super().set(items)
        self._moved("set", [item.meta.length for item in items], answers, Outcome.STORED)
        return answers

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        result = "raised"
        self._under_way.inc()
        start = self._env.monotonic()
        try:
            answer = super()._perform(operation, call, *arguments, **named)
            result = "returned"
        finally:
            self._seconds[operation].observe(self._env.monotonic() - start)
            self._under_way.dec()
            self._calls[result][operation].inc()
        if counters := self._items.get(operation):
            outcomes = _outcomes(answer)
            for outcome, counter in counters:
                if n := outcomes.count(outcome):
                    counter.inc(n)
        return answer

    def _moved(
        self, operation: str, lengths: Sequence[int], answers: Sequence[Outcome], done: Outcome
    ) -> None:
        nbytes = sum(length for length, answer in zip(lengths, answers, strict=True) if answer is done)
        if nbytes:
            self._bytes[operation].inc(nbytes)


def _outcomes(answer: Any) -> Sequence[Outcome]:
    """Return the outcome of each item in the answer of a call: what is True or an entry counts as a HIT."""
    if isinstance(answer, ScanPage):
        answer = answer.entries
    return [one if isinstance(one, Outcome) else Outcome.HIT if one else Outcome.MISS for one in answer]
