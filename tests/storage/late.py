"""A store that waits inside chosen operations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from tiercache.storage.base import StorageBackend
from tiercache.storage.wrappers import Wrapper

P = ParamSpec("P")
T = TypeVar("T")


class Late(Wrapper):
    """A wrapper that calls `wait` inside each call of these operations, before the store's own."""

    def __init__(
        self, inner: StorageBackend, operations: Collection[str], wait: Callable[[], object]
    ) -> None:
        super().__init__(inner)
        self.operations, self.wait = operations, wait

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def late() -> T:
            if operation in self.operations:
                self.wait()
            return call(*arguments, **named)

        return super()._perform(operation, late)
