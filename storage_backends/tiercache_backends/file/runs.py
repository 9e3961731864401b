"""Plan of the calls that move a batch: join adjacent blocks, cut large objects. Nothing here does I/O.

    object      A            B                 C (3 MiB)
    extents     [0, 64)      [64, 128)         [128, 896)
    pieces      [0, 64)      [64, 128)         [128, 384) [384, 640) [640, 896)    at most 1 MiB = 256 blocks
    runs        [0, 64)+[64, 128)              [128, 384) [384, 640) [640, 896)    at most 1 MiB

A run never crosses a slab's end. If its call fails, the caller moves each piece alone, so that a bad block
affects only one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from tiercache.core import BLOCK_ALIGN, ObjectKey
from tiercache.storage.checksum import NO_MAC, MacKey, Verifier, checksum
from tiercache.storage.env import IOV_MAX
from tiercache.storage.vectors import take, total
from tiercache_backends.file.records import Extent, Places

CALL_BYTES: Final = 1 << 20
"""Largest size of one call, in bytes.

Calls of this size are large enough for the full speed of a device. They are also small enough that several
threads share a large object, and that the bytes are still in the processor's cache when their checksum is
computed.
"""
_SHARE_BYTES: Final = 4 << 20
"""Minimum payload bytes of one share of work. A smaller share is not worth a thread."""
_CALL_BLOCKS: Final = CALL_BYTES // BLOCK_ALIGN


@dataclass(slots=True)
class _Stream:
    """Payload of an object in several pieces, on its way to the object's verifier.

    Thread safety: one thread at a time. While several threads read pieces, the lock of the batch guards
    `left`.
    """

    verifier: Verifier
    left: int = 0
    """Number of pieces that are still to be read past the page cache."""
    pending: list[list[memoryview]] = field(default_factory=list)
    """Payload that waits for the pieces counted in `left`. The verifier then gets it, in payload order."""


class IoBatch:
    """Objects to move between buffers and slabs, in columns, and the result of the move.

    `given`: checksums that are known already. For such an object none is computed, unless there are MACs.

    If an object has no entry in `errors` and `short` after the move, its `checksums` and `macs` are those of
    the whole payload.

    Thread safety: several threads may move and verify different runs at the same time.
    """

    def __init__(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[Sequence[memoryview]],
        lengths: Sequence[int],
        places: Places,
        mac_key: MacKey,
        *,
        given: Sequence[bytes] = (),
        reused: Sequence[bool] = (),
    ) -> None:
        self.keys = keys
        self.buffers = buffers
        self.lengths = lengths
        self.reused = reused or [False] * len(keys)
        """Whether each object was read before (see `Pins.reused`)."""
        self.checksums = list(given) or [b""] * len(keys)
        self.macs = [NO_MAC] * len(keys)
        self.errors: dict[int, OSError] = {}
        """Failures of calls, by object."""
        self.short: set[int] = set()
        """Objects of which a call moved too few bytes."""
        self._mac_key = mac_key
        self._has_macs = mac_key.fingerprint is not None
        self._streams: dict[int, _Stream] = {}
        """Objects in several pieces."""
        self._mutex = Lock()
        """Guards only `_Stream.left`. No other lock is taken and no I/O is done while it is held."""
        self._cut(places)

    # The columns of pieces: the object, the payload bytes before the piece, its first block and its blocks.
    owners: Sequence[int]
    _offsets: Sequence[int]
    starts: Sequence[int]
    blocks: Sequence[int]

    def _cut(self, places: Places) -> None:
        """Cut the objects into pieces."""
        count = len(self.keys)
        self.owners, self._offsets, self.starts, self.blocks = (
            range(count), [0] * count, places.starts, places.blocks
        )  # fmt: skip
        if not places.further and max(places.blocks, default=0) <= _CALL_BLOCKS:
            return
        pieces: list[tuple[int, int, int, int]] = []
        for i, (start, blocks) in enumerate(zip(places.starts, places.blocks, strict=True)):
            if blocks <= _CALL_BLOCKS and i not in places.further:
                pieces.append((i, 0, start, blocks))
                continue
            self._streams[i] = _Stream(self._mac_key.verifier(self.keys[i], self.lengths[i]))
            at = 0
            for piece in pieces_of(places.extents(i)):
                pieces.append((i, at, *piece))
                at += piece.blocks * BLOCK_ALIGN
        self.owners, self._offsets, self.starts, self.blocks = zip(*pieces, strict=True)

    def failed(self, i: int) -> bool:
        """Return whether a call for an object failed or moved too few bytes."""
        return i in self.short or i in self.errors

    def is_whole(self, piece: int) -> bool:
        """Return whether a piece is a complete object."""
        return self.owners[piece] not in self._streams

    def views(self, piece: int, filler: memoryview) -> Sequence[memoryview]:
        """Return buffers for the whole blocks of a piece.

        `filler`: a block of memory for the bytes between the payload's end and the end of an object's last
        block. It is used if the object's buffers do not reach that far.
        """
        #   blocks     |----------|----------|
        #   payload    |---------------|          length
        #   buffers    |---------------...        the filler follows the payload if the buffers are too short
        i, size = self.owners[piece], self.blocks[piece] * BLOCK_ALIGN
        buffers, length = self.buffers[i], self.lengths[i]
        if len(buffers) == 1 and buffers[0].nbytes == size:
            return buffers
        start = self._offsets[piece]
        end = start + size
        if end <= length or total(buffers) >= end:
            return take(buffers, start, end)
        return [*take(buffers, start, length), filler[: end - length]]

    def payload(self, piece: int) -> list[memoryview]:
        """Return the buffers of the payload bytes in a piece."""
        i, start = self.owners[piece], self._offsets[piece]
        end = min(start + self.blocks[piece] * BLOCK_ALIGN, self.lengths[i])
        return take(self.buffers[i], start, end)

    def verify(self, pieces: Iterable[int]) -> None:
        """Compute the checksums of payload in the buffers; keep it while earlier pieces are unread."""
        owners, streams, checksums, has_macs = self.owners, self._streams, self.checksums, self._has_macs
        for piece in pieces:
            i = owners[piece]
            if (self.errors or self.short) and self.failed(i):
                continue
            stream = streams.get(i)
            if stream is None:
                if not checksums[i]:
                    checksums[i] = checksum(self.keys[i], self.buffers[i], self.lengths[i])
                if has_macs:
                    self.macs[i] = self._mac_key.mac(self.keys[i], self.buffers[i], self.lengths[i])
            elif stream.pending:
                stream.pending.append(self.payload(piece))
            elif has_macs or not checksums[i]:
                stream.verifier.add(self.payload(piece))

    def postpone(self, run: Run) -> None:
        """Note that a run is read later, in any order, past the page cache."""
        # Until then, the payload of this run and all later payload of its objects wait in `pending`, so that
        # the verifiers get each object in order:
        #   pieces of an object    1 (cached)      2 (cold)      3 (cached)
        #   verifier               gets 1 now      gets 2 and 3 when piece 2 was read
        for piece in run.pieces:
            stream = self._streams.get(self.owners[piece])
            if stream is not None:
                stream.left += 1
                stream.pending.append(self.payload(piece))

    def arrived(self, run: Run) -> None:
        """Verify what a postponed run has completed."""
        for piece in run.pieces:
            i = self.owners[piece]
            stream = self._streams.get(i)
            if stream is None:
                self.verify((piece,))
                continue
            # Without the lock: (1) thread A reads left = 2. (2) B reads left = 2. (3) Both store 1. Then no
            # thread sees 0, and the verifier never gets the pending payload.
            with self._mutex:
                stream.left -= 1
                last = not stream.left
            if last and not self.failed(i):
                for views in stream.pending:
                    stream.verifier.add(views)

    def finish(self) -> None:
        """Note the checksums of the objects in several pieces; call this when all runs were moved."""
        for i, stream in self._streams.items():
            found = stream.verifier.checksums()
            self.checksums[i], self.macs[i] = self.checksums[i] or found.checksum, found.mac


@dataclass(slots=True)
class Run:
    """Adjacent blocks that one call moves: pieces of a batch.

    Thread safety: one thread at a time.
    """

    batch: IoBatch
    start: int
    """First block."""
    blocks: int
    """Number of blocks."""
    pieces: range
    views: list[memoryview]
    """Buffers of all pieces, in order."""

    @property
    def owners(self) -> Sequence[int]:
        """Objects of the pieces."""
        return self.batch.owners[self.pieces.start : self.pieces.stop]

    @property
    def is_whole(self) -> bool:
        """Whether the run contains the complete payload of each of its objects."""
        return all(map(self.batch.is_whole, self.pieces))

    def split(self, filler: memoryview) -> list[Run]:
        """Return one run per piece, so that a bad block affects only one object."""
        batch = self.batch
        return [
            Run(batch, batch.starts[p], batch.blocks[p], range(p, p + 1), [*batch.views(p, filler)])
            for p in self.pieces
        ]


def runs_of(batch: IoBatch, filler: memoryview, slab_blocks: int) -> Iterator[Run]:
    """Join adjacent pieces, and yield the runs. `filler`: see `IoBatch.views`."""
    first, begin, end = 0, 0, -1
    views: list[memoryview] = []
    for piece, (start, blocks) in enumerate(zip(batch.starts, batch.blocks, strict=True)):
        more = batch.views(piece, filler)
        # A new run begins in three cases: (1) The blocks are not adjacent to the run, or are the first of a
        # slab. (2) The piece does not fit into the rest of the call. (3) The call would take too many
        # buffers.
        if (
            start != end
            or not start % slab_blocks
            or end + blocks - begin > _CALL_BLOCKS
            or len(views) + len(more) > IOV_MAX
        ):
            if views:
                yield Run(batch, begin, end - begin, range(first, piece), views)
            first, begin, views = piece, start, []
        views += more
        end = start + blocks
    if views:
        yield Run(batch, begin, end - begin, range(first, len(batch.starts)), views)


def shares_of(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs into shares for threads, of at least `_SHARE_BYTES` bytes (the last may be smaller).

    No object is divided between two shares. So each verifier gets the bytes of its object in order.
    """
    shares: list[list[Run]] = []
    blocks = _SHARE_BYTES // BLOCK_ALIGN
    held = blocks  # "full", so that the first run begins a share
    last = -1
    for run in runs:
        if held >= blocks and run.owners[0] != last:
            shares.append([])
            held = 0
        shares[-1].append(run)
        held += run.blocks
        last = run.owners[-1]
    return shares


def pieces_of(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Cut these extents into extents of at most `CALL_BYTES`, and yield them in order."""
    for start, count in extents:
        for at in range(start, start + count, _CALL_BLOCKS):
            yield Extent(at, min(_CALL_BLOCKS, start + count - at))
