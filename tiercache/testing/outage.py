"""A store that cannot be reached for a while: between `begin` and `end`, no call reaches the store."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import ParamSpec, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.wrappers import Wrapper

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


class Outage(Wrapper):
    """A wrapper of `inner` that lets no call reach `inner` between `begin` and `end`.

    - get, peek and set answer UNAVAILABLE, and leave the buffers unchanged.
    - advise does nothing.
    - register_namespace remembers the record; `end` passes it to `inner`.
    - Every other call raises UnavailableError.

    Thread safety: as `Wrapper`; `begin` and `end` may be called from any thread.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._down = Event()
        self._registered: dict[bytes, NamespaceRecord] = {}

    def begin(self) -> None:
        """Begin the outage: no call reaches the store from now on."""
        self._down.set()

    def end(self) -> None:
        """End the outage: calls reach the store again, and the store gets the remembered records."""
        self._down.clear()
        for record in list(self._registered.values()):
            self.inner.register_namespace(record)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return _either(super().get, items, [Outcome.UNAVAILABLE] * len(items))

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return _either(super().peek, items, [Outcome.UNAVAILABLE] * len(items))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return _either(super().set, items, [Outcome.UNAVAILABLE] * len(items))

    def register_namespace(self, record: NamespaceRecord) -> None:
        record = record.over(self._registered.get(record.namespace))
        # Remember the record before the call. Otherwise it could be lost:
        #   1. the call meets the outage   2. `end` registers all records that are remembered
        #   3. the record is remembered, too late for `end`
        self._registered[record.namespace] = record
        _either(super().register_namespace, record, None)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        _either(lambda keys: super(Outage, self).advise(keys, values, worker), keys, None)

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def reached() -> T:
            if self._down.is_set():
                raise UnavailableError(f"{operation}: the store is out of reach; try again when it is back")
            return call(*arguments, **named)

        return super()._perform(operation, reached)


def _either(call: Callable[[A], T], argument: A, otherwise: T) -> T:
    """Return the call's answer, or `otherwise` if the call met the outage."""
    try:
        return call(argument)
    except UnavailableError:
        return otherwise
