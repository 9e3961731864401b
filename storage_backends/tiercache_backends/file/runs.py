"""Which calls move a batch of objects: pure planning. Neighbours are joined, large objects are cut, and no call crosses a slab."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.checksum import Proof
from tiercache.storage.vectors import IOV_MAX, take, total
from tiercache_backends.file.space import Extent
from tiercache_backends.local.crew import SHARE_BYTES

CALL_BYTES: Final = 1 << 20
"""Of one call: enough for a device's full speed, so little that eight of them share an object, and that the bytes are still in the
processor's cache when their checksum is computed."""


@dataclass(slots=True)
class Movement:
    """One object on its way. `error` and `short` say how a call ended; where all went well the proof has seen all of the payload.

    Thread safety: a movement belongs to one thread at a time; `left` and `pending` are guarded by its Mover's lock.
    """

    extents: tuple[Extent, ...]
    buffers: Sequence[memoryview]
    length: int
    proof: Proof | None = None
    reused: bool = False
    error: OSError | None = None
    short: bool = False
    left: int = 0
    pending: list[list[memoryview]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Did a call not do all that it should?"""
        return self.short or self.error is not None


class Part(NamedTuple):
    """What one object contributes to a run: the buffers that move, whole blocks of them, and what of those is payload."""

    movement: Movement
    payload: list[memoryview]
    views: list[memoryview]


@dataclass(slots=True)
class Run:
    """Adjacent blocks that one call moves.

    Thread safety: one thread at a time.
    """

    start: int
    blocks: int
    parts: list[Part]
    views: list[memoryview]

    @property
    def is_whole(self) -> bool:
        """Does it hold all of every object that it has a part of?"""
        return all(total(part.payload) == part.movement.length for part in self.parts)

    def apart(self) -> list[Run]:
        """A run for each part, so that a bad block hurts one object only."""
        runs, start = [], self.start
        for part in self.parts:
            runs.append(Run(start, total(part.views) // BLOCK_ALIGN, [part], part.views))
            start += runs[-1].blocks
        return runs


def runs_of(movements: Sequence[Movement], filler: memoryview, slab_blocks: int) -> Iterable[Run]:
    """Cut objects into the parts of calls, and join those of neighbours."""
    run = Run(0, 0, [], [])
    most = CALL_BYTES // BLOCK_ALIGN
    for movement in movements:
        done = 0
        for start, count in movement.extents:
            end = start + count
            while start < end:
                room = most - run.blocks
                adjacent = run.blocks and run.start + run.blocks == start and start % slab_blocks
                if not adjacent or room < min(end - start, most) or len(run.views) + len(movement.buffers) >= IOV_MAX:
                    if run.blocks:
                        yield run
                    run, room = Run(start, 0, [], []), most
                step = min(end - start, room)
                part = _part(movement, done, step * BLOCK_ALIGN, filler)
                run.parts.append(part)
                run.views += part.views
                run.blocks += step
                done += step * BLOCK_ALIGN
                start += step
    if run.blocks:
        yield run


def shares_of(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs in shares that are worth a thread's while, each with whole objects only: the proof of an object sees its bytes in order."""
    shares: list[list[Run]] = []
    blocks = SHARE_BYTES // BLOCK_ALIGN
    held = blocks
    last: Movement | None = None
    for run in runs:
        if held >= blocks and run.parts[0].movement is not last:
            shares.append([])
            held = 0
        shares[-1].append(run)
        held += run.blocks
        last = run.parts[-1].movement
    return shares


def pieces_of(extents: Iterable[Extent], most: int = CALL_BYTES // BLOCK_ALIGN) -> Iterator[Extent]:
    """The same blocks in the same order, in extents of at most `most`."""
    for start, count in extents:
        for at in range(start, start + count, most):
            yield Extent(at, min(most, start + count - at))


def _part(movement: Movement, start: int, size: int, filler: memoryview) -> Part:
    """Bytes [start, start + size) of an object's blocks."""
    buffers, length, end = movement.buffers, movement.length, start + size
    if end <= length:
        views = take(buffers, start, end)
        return Part(movement, views, views)
    payload = take(buffers, start, length)
    whole = total(buffers) >= end
    return Part(movement, payload, take(buffers, start, end) if whole else [*payload, filler[: end - length]])
