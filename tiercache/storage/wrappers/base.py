"""Base class of all wrappers: passes each call on to the store inside, and closes only when no call is under way."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, Self, TypeVar

from tiercache.core import ObjectKey, Outcome, Reason
from tiercache.errors import ConfigError
from tiercache.storage.base import (
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
from tiercache.storage.gate import CallGate

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item", GetItem, SetItem)


class Wrapper(StorageBackend):
    """A store that passes every call on to `inner`, which belongs to it from now on: closing the wrapper closes `inner`.

    Subclasses override the calls that they change and make them through `_perform`; `capabilities` stay those of `inner`.

    Thread safety: as the contract says, and as good as the inner store's. A wrapper has a gate of its own, because a call of the wrapper
    may be between two calls of the inner store when `close` begins, and must still end as if it had not begun.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.inner: Final = inner
        self.capabilities = inner.capabilities
        self._gate: Final = CallGate(f"the {type(self).__name__} store")

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Raise ConfigError always: a wrapper needs a store to wrap, which no section can name."""
        raise ConfigError(f"{cls.__name__} is put around a store in code and has no section; construct it with the store that it wraps")

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._perform("exists", self.inner.exists, keys)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._perform("get", self.inner.get, items)

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

    def flush(self) -> None:
        self._perform("flush", self.inner.flush)

    def close(self) -> None:
        if self._gate.close():
            self.inner.close()

    def outage(self) -> Reason:
        return self.inner.outage()

    def attach(self, memory: SharedMemory) -> None:
        self.inner.attach(memory)

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Make one call of the contract, named `operation`. Subclasses override this for what concerns all calls."""
        with self._gate:
            return call(*arguments, **named)


OPERATIONS: Final = ("exists", "get", "set", "delete", "scan", "describe", "register_namespace", "namespaces", "usage", "flush")
"""Names of the calls that go through `Wrapper._perform`."""


def unwrap(store: StorageBackend) -> StorageBackend:
    """Return the store inside all wrappers."""
    while isinstance(store, Wrapper):
        store = store.inner
    return store


def decide(items: Sequence[Item], verdict: Callable[[Item], Outcome | None], rest: Callable[[list[Item]], list[Outcome]]) -> list[Outcome]:
    """Answer each item by `verdict` if it gives an outcome, and the others, in order and in one call, by `rest`."""
    verdicts = [verdict(item) for item in items]
    left = [item for item, known in zip(items, verdicts, strict=True) if known is None]
    answers = iter(rest(left) if left else ())
    return [next(answers) if known is None else known for known in verdicts]
