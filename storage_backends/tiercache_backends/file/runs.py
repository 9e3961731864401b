"""Plan of the calls that move a batch of objects: neighbours are joined, large objects are cut, no call crosses a slab. Does no I/O."""

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
"""Most bytes of one call: enough for a device's full speed, yet few enough that eight calls share an object and that the bytes are still in
the processor's cache when their checksum is computed."""


@dataclass(slots=True)
class Movement:
    """Object on its way between buffers and slabs, and how that ended.

    `error`: the failure of a call. `short`: a call moved too few bytes. Without either, the proof has seen all of the payload.
    `left`: runs still to be read past the page cache; `pending`: payload that the proof sees after them.

    Thread safety: a movement belongs to one thread at a time; `left` is guarded by its Mover's lock while several threads read its runs.
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
        """Whether a call failed or moved too few bytes."""
        return self.short or self.error is not None


class Part(NamedTuple):
    """Contribution of one object to a run: `views` are the buffers that are moved, whole blocks; `payload` is their payload part."""

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
        """Whether the run holds all of the payload of every object of which it has a part."""
        return all(total(part.payload) == part.movement.length for part in self.parts)

    def apart(self) -> list[Run]:
        """Return a run for each part, so that a bad block affects only one object."""
        runs, start = [], self.start
        for part in self.parts:
            runs.append(Run(start, total(part.views) // BLOCK_ALIGN, [part], part.views))
            start += runs[-1].blocks
        return runs


def runs_of(movements: Sequence[Movement], filler: memoryview, slab_blocks: int) -> Iterable[Run]:
    """Cut objects into parts of at most `CALL_BYTES`, join adjacent parts, and yield the runs.

    `filler`: a block of memory, used where the buffers of an object end before its last block does.
    """
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
    """Group runs into shares that are worth a thread's work, of whole objects only, so that a proof sees its object's bytes in order."""
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
    """Yield the same blocks in the same order, in extents of at most `most` blocks."""
    for start, count in extents:
        for at in range(start, start + count, most):
            yield Extent(at, min(most, start + count - at))


def _part(movement: Movement, start: int, size: int, filler: memoryview) -> Part:
    """Return the part for bytes [start, start + size) of an object's blocks."""
    buffers, length, end = movement.buffers, movement.length, start + size
    if end <= length:
        views = take(buffers, start, end)
        return Part(movement, views, views)
    payload = take(buffers, start, length)
    whole = total(buffers) >= end
    return Part(movement, payload, take(buffers, start, end) if whole else [*payload, filler[: end - length]])
