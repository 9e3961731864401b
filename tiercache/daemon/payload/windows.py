"""Windows of objects that are read for a client: groups that one store call reads into leased blocks."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.core import Outcome
from tiercache.daemon.access import LimitError
from tiercache.daemon.budget import Lease, blocks_for
from tiercache.daemon.call import Wanted
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import take
from tiercache.wire import messages
from tiercache.wire.pieces import Piece, cut
from tiercache.wire.v1 import storage_pb2 as pb

WINDOW_BYTES: Final = 8 << 20
"""Maximum bytes of blocks that one store call of Get or Set uses; a larger object is moved alone.

Larger windows let the store profit from batches; smaller windows let more clients share the budget."""
WINDOW_OBJECTS: Final = 1024
"""Maximum number of objects of one store call."""

_FIRST_WINDOW_BYTES: Final = 1 << 20
"""Maximum bytes of the first window of a Get; the limit doubles with each window, up to WINDOW_BYTES."""
_DESCRIBED_BYTES: Final = 128 << 10
"""Minimum length in bytes of an object whose checksum is asked of the store.

For a shorter object it is cheaper to compute the checksum again."""


@dataclass(frozen=True, slots=True)
class Window:
    """Objects that were read, and the blocks that hold them."""

    first: int
    """Position of the first object in the request."""
    items: Sequence[GetItem]
    outcomes: Sequence[Outcome]
    checksums: Sequence[bytes]
    """Checksum of each object; empty unless the outcome is HIT."""
    lease: Lease

    def pieces(self, chunk: int) -> Iterator[tuple[pb.GetPieces, list[memoryview]]]:
        """Yield messages with at most `chunk` bytes of these objects, each as header and payload."""
        sizes = [
            item.length if outcome is Outcome.HIT else 0
            for item, outcome in zip(self.items, self.outcomes, strict=True)
        ]
        for pieces in cut(sizes, chunk):
            yield self._message(pieces)

    def _message(self, pieces: Sequence[Piece]) -> tuple[pb.GetPieces, list[memoryview]]:
        # An object's outcome and checksum travel with its first piece, which starts at byte 0.
        begun = [piece.item for piece in pieces if not piece.start]
        outcomes = (None if piece.start else self.outcomes[piece.item] for piece in pieces)
        header = pb.GetPieces(
            items=[self.first + piece.item for piece in pieces],
            outcomes=[messages.NUMBER_OF[one] if one else 0 for one in outcomes],  # type: ignore[misc]
            sizes=[piece.stop - piece.start for piece in pieces],
            checksums=b"".join(self.checksums[item] for item in begun),
        )
        return header, [
            view for piece in pieces for view in take(self.items[piece.item].buffers, piece.start, piece.stop)
        ]


def read_window(
    store: StorageBackend, items: Sequence[GetItem], first: int, lease: Lease, peek: bool
) -> Window:
    """Read objects, as `peek` does or as `get` does, and find their checksums; runs in a store thread.

    A checksum covers the key and the payload. The client computes the checksum of the key that it asked for
    and the payload that it received, and compares the two.
    """
    outcomes = store.peek(items) if peek else store.get(items)
    large = [
        i.key
        for i, outcome in zip(items, outcomes, strict=True)
        if outcome is Outcome.HIT and i.length >= _DESCRIBED_BYTES
    ]
    known = {
        entry.key: entry.meta.checksum
        for entry in (store.describe(large) if large else ())
        if entry is not None
    }
    sums = [
        (
            (known.get(item.key) or checksum(item.key, item.buffers, item.length))
            if outcome is Outcome.HIT
            else b""
        )
        for item, outcome in zip(items, outcomes, strict=True)
    ]
    return Window(first, items, outcomes, sums, lease)


def windows_of(wanted: Wanted, max_bytes: int) -> Iterator[Wanted]:
    """Yield the windows of a Get: runs of objects for one store call each, or single larger objects.

    A window has at most WINDOW_OBJECTS objects, whose blocks take at most WINDOW_BYTES and `max_bytes`. The
    first windows are smaller, so that the client can soon check objects while the others are read. Raises
    LimitError for an object whose blocks take more than `max_bytes`.
    """
    room = min(_FIRST_WINDOW_BYTES, max_bytes)
    start = held = 0
    for at, blocks in enumerate(blocks_for(wanted.lengths)):
        size = blocks * Lease.block_bytes
        if size > max_bytes:
            raise LimitError(
                f"an object of {wanted.lengths[at]} bytes is more than this client may hold ({max_bytes});"
                " raise limits.client_bytes"
            )
        if at > start and (held + size > room or at - start == WINDOW_OBJECTS):
            yield Wanted(start, wanted.keys[start:at], wanted.lengths[start:at])
            start, held, room = at, 0, min(2 * room, WINDOW_BYTES, max_bytes)
        held += size
    if start < len(wanted.keys):
        yield Wanted(start, wanted.keys[start:], wanted.lengths[start:])


def release_window(reading: Future[Window]) -> None:
    """Release the blocks of a window that was read ahead and will not be sent."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().lease.release()
