"""Division of a batch into calls, and the outcomes of items whose call failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tiercache.core import Outcome
from tiercache_backends.grpc.failures import CallError, Kind

CALL_BYTES: Final = 128 << 20
"""Most payload bytes of one call: they pass in about a second, also over TCP, which is well within the deadline of a call."""


def parts(sizes: Sequence[int], most_items: int, most_bytes: int = CALL_BYTES) -> Iterator[slice]:
    """Yield slices of adjacent items, at most `most_items` items and `most_bytes` bytes each, or one larger item alone."""
    start = held = 0
    for at, size in enumerate(sizes):
        if at > start and (held + size > most_bytes or at - start >= most_items):
            yield slice(start, at)
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def unread(error: CallError) -> Outcome:
    """Return the outcome of an item to read that the failed call did not get to."""
    return {Kind.BUSY: Outcome.THROTTLED, Kind.WRONG: Outcome.ERROR}.get(error.kind, Outcome.MISS)


def unwritten(error: CallError) -> Outcome:
    """Return the outcome of an item to write that the failed call did not get to."""
    return Outcome.THROTTLED if error.kind is Kind.BUSY else Outcome.ERROR


def cut_off(error: CallError) -> bool:
    """Return whether it is useless to go on with the batch after this error."""
    return error.kind not in (Kind.BUSY, Kind.WRONG)
