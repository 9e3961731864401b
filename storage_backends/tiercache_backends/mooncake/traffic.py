"""The way of a batch's parts through Mooncake: one call at a time, each within the deadline.

    the caller's thread      prepare 1 | prepare 2      | finish 1, prepare 3 | finish 2 ...
    a thread of the link               | call for 1     | call for 2          | call for 3 ...

A second call at once would be slower, because Mooncake spins in every thread that waits for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.guard import PendingCall
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link
from tiercache_backends.mooncake.memory import Region
from tiercache_backends.mooncake.parts import Part
from tiercache_backends.mooncake.patience import Patience

Item = TypeVar("Item", GetItem, SetItem)
Codes = list[int]


class Work(Protocol[Item]):
    """The calls for a part, made on a thread of the link."""

    def __call__(self, client: MooncakeClient, part: Part[Item], region: Region) -> Codes:
        """Return a code for each item."""


def move(
    link: Link,
    patience: Patience,
    what: str,
    parts: Iterable[Part[Item]],
    work: Work[Item],
    prepare: Callable[[Part[Item], Region], None],
    finish: Callable[[Part[Item], Region, Codes], None],
    outcomes: list[Outcome],
) -> None:
    """Pass all parts through `prepare`, `work` (on a thread of the link) and `finish`.

    Items whose call cannot be made or does not return get UNAVAILABLE in `outcomes`, as do all items after
    them; items for which there is no staging memory get THROTTLED.
    """
    way = _Way(link, patience, what, work, finish, outcomes)
    try:
        for part in parts:
            region = way.room(part)
            if region is None:
                continue
            try:
                prepare(part, region)
                rest = way.wait()
            except BaseException:  # whatever it is, nothing uses the memory
                link.staging.give(region)
                raise
            try:
                way.go(part, region)
            finally:
                rest()
    finally:
        way.wait()()


class _Way(Generic[Item]):
    """The call under way for a batch.

    Thread safety: one thread.
    """

    def __init__(
        self,
        link: Link,
        patience: Patience,
        what: str,
        work: Work[Item],
        finish: Callable[[Part[Item], Region, Codes], None],
        outcomes: list[Outcome],
    ) -> None:
        self._link: Final = link
        self._patience: Final = patience
        self._what: Final = what
        self._work: Final[Work[Item]] = work
        self._finish: Final[Callable[[Part[Item], Region, Codes], None]] = finish
        self._outcomes: Final = outcomes
        self._under_way: tuple[Part[Item], Region, PendingCall[Codes]] | None = None

    def room(self, part: Part[Item]) -> Region | None:
        """Return staging memory for a part, if need be when the call under way has given its own back.

        Returns None, and answers the items, if there is none.
        """
        region = self._link.staging.take(part.nbytes, 0) if self._patience.left else None
        if region is None:
            self.wait()()
            is_out = not self._patience.left
            region = None if is_out else self._link.staging.take(part.nbytes, self._patience.left)
            if region is None:
                self._answer(part, Outcome.UNAVAILABLE if is_out else Outcome.THROTTLED)
        return region

    def go(self, part: Part[Item], region: Region) -> None:
        """Begin the call for a part."""
        try:
            pending = self._link.begin(
                self._patience,
                self._what,
                partial(self._work, part=part, region=region),
                partial(part.withhold, region, self._link.staging, self._link.attached),
            )
        except BaseException as error:
            self._link.staging.give(region)
            if not isinstance(error, UnavailableError):
                raise
            self._answer(part, Outcome.UNAVAILABLE)
        else:
            self._under_way = part, region, pending

    def wait(self) -> Callable[[], None]:
        """Wait for the end of the call under way; return what is left to do for its part."""
        if self._under_way is None:
            return lambda: None
        (part, region, pending), self._under_way = self._under_way, None
        try:
            codes = self._link.end(self._patience, pending)
        except BaseException as error:
            # A call that was given up while it ran gives its memory back when it returns.
            if not pending.hangs:
                self._link.staging.give(region)
            if not isinstance(error, UnavailableError):
                raise
            self._answer(part, Outcome.UNAVAILABLE)
            return lambda: None
        self._patience.answered(codes)
        return partial(self._end, part, region, codes)

    def _answer(self, part: Part[Item], outcome: Outcome) -> None:
        for one in part.placed:
            self._outcomes[one.index] = outcome

    def _end(self, part: Part[Item], region: Region, codes: Codes) -> None:
        try:
            self._finish(part, region, codes)
        finally:
            self._link.staging.give(region)
