"""Plan of the calls that move a batch: join adjacent blocks, cut large objects. Nothing here does I/O.

    object      A            B                 C (3 MiB)
    extents     [0, 64)      [64, 128)         [128, 896)
    runs        [0, 64)+[64, 128)              [128, 384) [384, 640) [640, 896)    at most 1 MiB = 256 blocks

A run never crosses a slab's end. A run of several objects has one part per object. If a call fails, the
caller moves each part alone, so that a bad block affects only one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.checksum import Verifier
from tiercache.storage.vectors import IOV_MAX, take, total
from tiercache_backends.file.records import Extent
from tiercache_backends.local.threads import SHARE_BYTES

CALL_BYTES: Final = 1 << 20
"""Largest size of one call, in bytes.

Calls of this size are large enough for the full speed of a device. They are also small enough that several
threads share a large object, and that the bytes are still in the processor's cache when their checksum is
computed.
"""


@dataclass(slots=True)
class IoRequest:
    """Object to move between buffers and slabs, and the result of the move.

    If neither `error` nor `short` is set after the move, the verifier has seen the whole payload.

    Thread safety: one thread at a time. While several threads read the object's runs, the lock of the
    IoEngine guards `left`.
    """

    extents: tuple[Extent, ...]
    buffers: Sequence[memoryview]
    length: int
    """Payload bytes."""
    verifier: Verifier | None = None
    reused: bool = False
    """Whether the object was read before (see `Pin.reused`)."""
    error: OSError | None = None
    """Failure of a call."""
    short: bool = False
    """Whether a call moved too few bytes."""
    left: int = 0
    """Number of runs that are still to be read past the page cache."""
    pending: list[list[memoryview]] = field(default_factory=list)
    """Payload that waits for the runs counted in `left`. The verifier then gets it, in payload order."""

    @property
    def failed(self) -> bool:
        """Whether a call failed or moved too few bytes."""
        return self.short or self.error is not None


class Part(NamedTuple):
    """Part of a run that belongs to one object."""

    request: IoRequest
    payload: list[memoryview]
    """Buffers of the payload bytes in this part."""
    views: list[memoryview]
    """Buffers of whole blocks: the payload and, in an object's last block, the bytes after it."""


@dataclass(slots=True)
class Run:
    """Adjacent blocks that one call moves.

    Thread safety: one thread at a time.
    """

    start: int
    """First block."""
    blocks: int
    """Number of blocks."""
    parts: list[Part]
    views: list[memoryview]
    """Views of all parts, in order."""

    @property
    def is_whole(self) -> bool:
        """Whether the run contains the complete payload of each of its objects."""
        return all(total(part.payload) == part.request.length for part in self.parts)

    def split(self) -> list[Run]:
        """Return one run per part, so that a bad block affects only one object."""
        runs, start = [], self.start
        for part in self.parts:
            runs.append(Run(start, total(part.views) // BLOCK_ALIGN, [part], part.views))
            start += runs[-1].blocks
        return runs


def runs_of(requests: Sequence[IoRequest], filler: memoryview, slab_blocks: int) -> Iterable[Run]:
    """Cut objects into parts of at most `CALL_BYTES`, join adjacent parts, and yield the runs.

    `filler`: a block of memory for the bytes between the payload's end and the end of an object's last block.
    It is used if the object's buffers do not reach that far.
    """
    run = Run(0, 0, [], [])
    limit = CALL_BYTES // BLOCK_ALIGN
    for request in requests:
        done = 0
        for start, count in request.extents:
            end = start + count
            while start < end:
                room = limit - run.blocks
                # A block number divisible by slab_blocks begins another file.
                adjacent = run.blocks and run.start + run.blocks == start and start % slab_blocks
                # A new run begins in three cases: (1) The blocks are not adjacent to the run. (2) The rest of
                # the extent fits into one call, but not into the room that is left in this run. (3) The call
                # would take too many buffers.
                if (
                    not adjacent
                    or room < min(end - start, limit)
                    or len(run.views) + len(request.buffers) >= IOV_MAX
                ):
                    if run.blocks:
                        yield run
                    run, room = Run(start, 0, [], []), limit
                step = min(end - start, room)
                part = _part(request, done, step * BLOCK_ALIGN, filler)
                run.parts.append(part)
                run.views += part.views
                run.blocks += step
                done += step * BLOCK_ALIGN
                start += step
    if run.blocks:
        yield run


def shares_of(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs into shares for threads, of at least `SHARE_BYTES` bytes (the last may be smaller).

    No object is divided between two shares. So each verifier gets the bytes of its object in order.
    """
    shares: list[list[Run]] = []
    blocks = SHARE_BYTES // BLOCK_ALIGN
    held = blocks  # "full", so that the first run begins a share
    last: IoRequest | None = None
    for run in runs:
        if held >= blocks and run.parts[0].request is not last:
            shares.append([])
            held = 0
        shares[-1].append(run)
        held += run.blocks
        last = run.parts[-1].request
    return shares


def pieces_of(extents: Iterable[Extent], max_blocks: int = CALL_BYTES // BLOCK_ALIGN) -> Iterator[Extent]:
    """Cut these extents into extents of at most `max_blocks` blocks, and yield them in order."""
    for start, count in extents:
        for at in range(start, start + count, max_blocks):
            yield Extent(at, min(max_blocks, start + count - at))


def _part(request: IoRequest, start: int, size: int, filler: memoryview) -> Part:
    """Return the part for bytes [start, start + size) of an object's blocks."""
    buffers, length, end = request.buffers, request.length, start + size
    if end <= length:
        views = take(buffers, start, end)
        return Part(request, views, views)
    # The object's last part extends to the end of a block, and perhaps beyond the buffers:
    #   blocks     |----------|----------|
    #   payload    |---------------|          length
    #   buffers    |---------------...        the filler follows the payload if the buffers are too short
    payload = take(buffers, start, length)
    whole = total(buffers) >= end
    return Part(request, payload, take(buffers, start, end) if whole else [*payload, filler[: end - length]])
