"""How a batch is cut into calls, and what a call that failed means for its items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tiercache.core import Outcome
from tiercache_backends.grpc.failures import CallError, Kind

CALL_BYTES: Final = 128 << 20
"""Payload of one call: what passes in a second or so, also over TCP, and well within the deadline of a call."""


def parts(sizes: Sequence[int], most_items: int, most_bytes: int = CALL_BYTES) -> Iterator[slice]:
    """Neighbours of at most so many bytes together, or one item alone."""
    start = held = 0
    for at, size in enumerate(sizes):
        if at > start and (held + size > most_bytes or at - start >= most_items):
            yield slice(start, at)
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def unread(error: CallError) -> Outcome:
    """What an item to read is answered that the call did not get to."""
    return {Kind.BUSY: Outcome.THROTTLED, Kind.WRONG: Outcome.ERROR}.get(error.kind, Outcome.MISS)


def unwritten(error: CallError) -> Outcome:
    """The same of an item to write."""
    return Outcome.THROTTLED if error.kind is Kind.BUSY else Outcome.ERROR


def cut_off(error: CallError) -> bool:
    """Is it of no use to go on with the batch?"""
    return error.kind not in (Kind.BUSY, Kind.WRONG)
