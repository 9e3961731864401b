"""A store that cannot be reached for a while: `Outage` answers at once, and nothing, from `begin` to `end`."""

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
    """The call met the outage."""


class Outage(Wrapper):
    """`inner`, which nobody reaches between `begin` and `end`.

    - get: MISS, with the buffers left alone. set: ERROR. exists and delete: False.
    - scan, describe, namespaces, usage and flush raise StorageError.
    - register_namespace: remembered, and told to `inner` at the end.
    - `outage` is what the latest call met, as with a store behind a connection: UNAVAILABLE only once a call found out, and until another
      one gets through.

    Thread safety: as `Wrapper`; `begin` and `end` may be called from any thread.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._down = Event()
        self._met = Reason.NONE
        self._registered: dict[bytes, NamespaceRecord] = {}

    def begin(self) -> None:
        """From now on no call gets through."""
        self._down.set()

    def end(self) -> None:
        """From now on calls get through again."""
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
        self._registered[record.namespace] = record  # first, so that an end that comes in between finds it
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
    """What the call answers, or `otherwise` where it met the outage."""
    try:
        return call(argument)
    except _UnreachedError:
        return otherwise
