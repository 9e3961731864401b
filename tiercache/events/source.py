"""Contract between the parts that know where objects lie and the publisher that tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tiercache.events.base import KVEvent

MAX_KEYS: Final = 1024
"""Number of keys that one answer of a source has, about."""


ChangeNote = Callable[[Sequence[bytes], bool], None]
"""Function that takes the digests of objects that a store has from now on (True), or no longer has."""


class EventSource(ABC):
    """Part of a process that knows what is in some places.

    The implementation must return each change that it knows, in the order in which it happened, from
    `collect`, and begin a snapshot only with what `collect` has not returned yet or has returned before.

    Thread safety: one thread, the publisher's, calls `collect` and `snapshot`.
    """

    @abstractmethod
    def collect(self) -> Sequence[KVEvent]:
        """Return the next changes, with about `MAX_KEYS` keys; nothing if there are none now."""

    @abstractmethod
    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        """Yield STORED events of all that is there, in parts.

        Changes during the iteration may be in it or not; `collect` returns them all the same.
        """

    @abstractmethod
    def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever `collect` may have something new. It does not wait."""

    def close(self) -> None:  # noqa: B027
        """End the source; called once, on the thread that calls `collect`."""
