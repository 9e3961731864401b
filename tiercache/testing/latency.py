"""A store that is far away: `Latency` waits before every call, on a clock of the test's choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

from tiercache.storage.base import StorageBackend
from tiercache.storage.wrappers.base import OPERATIONS, Wrapper

P = ParamSpec("P")
T = TypeVar("T")


class Latency(Wrapper):
    """`inner` behind a delay in seconds per call: one for all, or by operation (those that are not named are not delayed).

    `sleep` gets the seconds; hand in something that waits for the test, or only notes them. The call is inside the store while it sleeps:
    `close` waits for it. Raises ValueError for an operation that does not exist.

    Thread safety: as `Wrapper`; `sleep` is called by every thread that calls.
    """

    def __init__(self, inner: StorageBackend, seconds: float | Mapping[str, float], sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._seconds: Final = dict(seconds) if isinstance(seconds, Mapping) else dict.fromkeys(OPERATIONS, seconds)
        self._sleep: Final = sleep
        for operation in self._seconds:
            if operation not in OPERATIONS:
                raise ValueError(f"{operation!r} is not an operation of a store; use one of {', '.join(OPERATIONS)}")

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def late() -> T:
            self._sleep(self._seconds[operation])
            return call(*arguments, **named)

        return super()._perform(operation, late) if operation in self._seconds else super()._perform(operation, call, *arguments, **named)
