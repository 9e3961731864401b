"""A store that cannot be reached for a while: from `begin` to `end`, `Outage` answers at once without reaching the store."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import ParamSpec, TypeVar

from tiercache.core import ObjectKey, Outcome, Reason
from tiercache.errors import StorageError
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.wrappers.base import Wrapper

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


class _UnreachedError(StorageError):
    """Error of a call that meets the outage."""


class Outage(Wrapper):
    """A wrapper of `inner` that lets no call reach it between `begin` and `end`.

    - get: MISS, with the buffers unchanged. set: ERROR. exists and delete: False.
    - scan, describe, namespaces, usage and flush raise StorageError.
    - register_namespace: the record is remembered, and passed to `inner` at the end.
    - `outage` reports what the latest call met, as with a store behind a connection: UNAVAILABLE only after a call has met the outage, and
      until another one gets through.

    Thread safety: as `Wrapper`; `begin` and `end` may be called from any thread.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._down = Event()
        self._met = Reason.NONE
        self._registered: dict[bytes, NamespaceRecord] = {}

    def begin(self) -> None:
        """Begin the outage: no call gets through from now on."""
        self._down.set()

    def end(self) -> None:
        """End the outage: calls get through from now on, and remembered namespaces are registered with `inner`."""
        self._down.clear()
        for record in list(self._registered.values()):
            self.inner.register_namespace(record)

    def outage(self) -> Reason:
        return self._met if self._met is not Reason.NONE else self.inner.outage()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return _either(super().exists, keys, [False] * len(keys))

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return _either(super().get, items, [Outcome.MISS] * len(items))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return _either(super().set, items, [Outcome.ERROR] * len(items))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return _either(super().delete, keys, [False] * len(keys))

    def register_namespace(self, record: NamespaceRecord) -> None:
        record = record.over(self._registered.get(record.namespace))
        self._registered[record.namespace] = record  # before the call, so that an `end` in between finds the record
        _either(super().register_namespace, record, None)

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def reached() -> T:
            down = self._down.is_set()
            self._met = Reason.UNAVAILABLE if down else Reason.NONE
            if down:
                raise _UnreachedError(f"{operation}: the store is out of reach; try again when it is back")
            return call(*arguments, **named)

        return super()._perform(operation, reached)


def _either(call: Callable[[A], T], argument: A, otherwise: T) -> T:
    """Return the call's answer, or `otherwise` if it met the outage."""
    try:
        return call(argument)
    except _UnreachedError:
        return otherwise
