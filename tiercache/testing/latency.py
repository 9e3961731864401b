"""A store that answers late: `Latency` sleeps before calls, with a sleep function that a test can replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

from tiercache.metrics.table import OPERATIONS
from tiercache.storage.base import StorageBackend
from tiercache.storage.wrappers import Wrapper

P = ParamSpec("P")
T = TypeVar("T")


class Latency(Wrapper):
    """A wrapper of `inner` that delays each call by `seconds`.

    `seconds` is one number for all operations, or a mapping by operation. Operations that the mapping does
    not name are not delayed. `sleep` gets the seconds; a test may pass a function that only records them. A
    call that sleeps counts as inside the store, so `close` waits for that call. Raises ValueError for an
    operation that does not exist.

    Thread safety: as `Wrapper`; every thread that makes a call also calls `sleep`.
    """

    def __init__(
        self,
        inner: StorageBackend,
        seconds: float | Mapping[str, float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds: Final = (
            dict(seconds) if isinstance(seconds, Mapping) else dict.fromkeys(OPERATIONS, seconds)
        )
        self._sleep: Final = sleep
        for operation in self._seconds:
            if operation not in OPERATIONS:
                raise ValueError(
                    f"{operation!r} is not an operation of a store; use one of {', '.join(OPERATIONS)}"
                )

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def late() -> T:
            self._sleep(self._seconds[operation])
            return call(*arguments, **named)

        return (
            super()._perform(operation, late)
            if operation in self._seconds
            else super()._perform(operation, call, *arguments, **named)
        )
