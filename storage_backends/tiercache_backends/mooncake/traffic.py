"""The way of a batch's parts through Mooncake: two parts at a time, each within the deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.calls import PendingCall
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link
from tiercache_backends.mooncake.memory import Region
from tiercache_backends.mooncake.parts import Part

Item = TypeVar("Item", GetItem, SetItem)
Codes = list[int]

_AT_ONCE = 2
"""Parts of a batch under way: one is checked while the next is moved."""


class Work(Protocol[Item]):
    """The calls for a part, made on a thread of the link."""

    def __call__(self, client: MooncakeClient, part: Part[Item], region: Region) -> Codes:
        """Return a code for each item."""


@dataclass(slots=True)
class _UnderWay(Generic[Item]):
    part: Part[Item]
    region: Region
    pending: PendingCall[Codes]


def move(
    link: Link,
    what: str,
    deadline: float,
    parts: Iterable[Part[Item]],
    work: Work[Item],
    prepare: Callable[[Part[Item], Region], None],
    finish: Callable[[Part[Item], Region, Codes], None],
    outcomes: list[Outcome],
) -> None:
    """Pass all parts through `prepare`, `work` (on a thread of the link) and `finish`.

    Items whose call cannot be made or does not return get UNAVAILABLE in `outcomes`; items for which there is
    no staging memory get THROTTLED.
    """
    under_way: deque[_UnderWay[Item]] = deque()
    is_out = False

    def end() -> None:
        nonlocal is_out
        one = under_way.popleft()
        try:
            codes = link.end(one.pending)
            finish(one.part, one.region, codes)
        except UnavailableError:
            is_out = True
            _answer(one.part, outcomes, Outcome.UNAVAILABLE)
        finally:
            # A call that was given up while it ran gives its memory back when it returns.
            if not one.pending.given_up or not one.pending.thread:
                link.staging.give(one.region)

    for part in parts:
        while len(under_way) >= _AT_ONCE:
            end()
        region = None
        while not is_out and region is None:
            region = link.staging.take(part.nbytes, 0 if under_way else deadline)
            if region is None and not under_way:
                break
            if region is None:
                end()
        if is_out or region is None:
            if region is not None:
                link.staging.give(region)
            _answer(part, outcomes, Outcome.UNAVAILABLE if is_out else Outcome.THROTTLED)
            continue
        try:
            prepare(part, region)
            pending = link.begin(
                what,
                partial(work, part=part, region=region),
                partial(part.withhold, region, link.staging, link.attached),
            )
        except UnavailableError:
            is_out = True
            link.staging.give(region)
            _answer(part, outcomes, Outcome.UNAVAILABLE)
        except BaseException:  # whatever it is, nothing uses the memory
            link.staging.give(region)
            raise
        else:
            under_way.append(_UnderWay(part, region, pending))
    while under_way:
        end()


def _answer(part: Part[Item], outcomes: list[Outcome], outcome: Outcome) -> None:
    for one in part.placed:
        outcomes[one.index] = outcome
