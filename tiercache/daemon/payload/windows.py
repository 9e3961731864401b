"""Windows: groups of objects in leased blocks of the arena, each of which one store call moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from tiercache.core import BLOCK_ALIGN, ObjectKey, ObjectMeta, Outcome
from tiercache.daemon.access import LimitError
from tiercache.daemon.budget import BLOCK_BYTES, Lease, blocks_for
from tiercache.daemon.call import Wanted, check_length, read_keys
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.errors import WireError
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import batches, take, zero_tail
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

WINDOW_BYTES: Final = 16 << 20
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

    def described(self, most: int) -> Iterator[tuple[pb.GetHeader, list[memoryview]]]:
        """Yield headers, each of objects of at most `most` bytes or of one, and the bytes that follow it."""
        sizes = [
            item.length if outcome is Outcome.HIT else 0
            for item, outcome in zip(self.items, self.outcomes, strict=True)
        ]
        for part in batches(range(len(sizes)), sizes.__getitem__, WINDOW_OBJECTS, most):
            start, stop = part[0], part[-1] + 1
            header = pb.GetHeader(
                items=range(self.first + start, self.first + stop),
                outcomes=[messages.NUMBER_OF[one] for one in self.outcomes[start:stop]],  # type: ignore[misc]
                sizes=sizes[start:stop],
                checksums=b"".join(self.checksums[start:stop]),
            )
            yield header, [view for n in part for view in take(self.items[n].buffers, 0, sizes[n])]


def read_window(store: StorageBackend, wanted: Wanted, lease: Lease, peek: bool) -> Window:
    """Read objects, as `peek` does or as `get` does, and find their checksums; not in the event loop.

    A checksum covers the key and the payload. The client computes the checksum of the key that it asked for
    and the payload that it received, and compares the two.
    """
    items = [
        GetItem(key, views, length)
        for key, views, length in zip(wanted.keys, lease.views, wanted.lengths, strict=True)
    ]
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
    return Window(wanted.first, items, outcomes, sums, lease)


def windows_to_read(wanted: Wanted, max_bytes: int) -> Iterator[Wanted]:
    """Yield the windows of a Get: runs of objects for one store call each, or single larger objects.

    A window has at most WINDOW_OBJECTS objects, whose blocks take at most WINDOW_BYTES and `max_bytes`. The
    first windows are smaller, so that the client can soon check objects while the others are read. Raises
    LimitError for an object whose blocks take more than `max_bytes`.
    """
    room = min(_FIRST_WINDOW_BYTES, max_bytes)
    start = held = 0
    for at, blocks in enumerate(blocks_for(wanted.lengths)):
        size = blocks * BLOCK_BYTES
        if size > max_bytes:
            raise LimitError(
                f"an object of {wanted.lengths[at]} bytes is more than this client may hold ({max_bytes});"
                " raise host_bytes"
            )
        if at > start and (held + size > room or at - start == WINDOW_OBJECTS):
            yield Wanted(start, wanted.keys[start:at], wanted.lengths[start:at])
            start, held, room = at, 0, min(2 * room, WINDOW_BYTES, max_bytes)
        held += size
    if start < len(wanted.keys):
        yield Wanted(start, wanted.keys[start:], wanted.lengths[start:])


Described = tuple[ObjectKey, ObjectMeta]
"""Object of a Set, before its bytes are there."""


def windows_to_store(header: pb.SetHeader, limits: pb.Limits, max_bytes: int) -> list[list[Described]]:
    """Return the windows of a Set; raises WireError, or LimitError for an object beyond a limit.

    `max_bytes`: the bytes of blocks that its client may hold.
    """
    keys = read_keys(header.keys, limits.keys)
    metas = [messages.read_meta(meta) for meta in header.metas]
    if len(metas) != len(keys):
        raise WireError(f"{len(keys)} keys came with {len(metas)} descriptions")
    for meta in metas:
        check_length(meta.length, limits.object_bytes)
        if _leased_bytes((None, meta)) > max_bytes:
            raise LimitError(
                f"an object of {meta.length} bytes is more than this client may hold ({max_bytes})"
            )
    objects = zip(keys, metas, strict=True)
    return list(batches(objects, _leased_bytes, WINDOW_OBJECTS, min(WINDOW_BYTES, max_bytes)))


def room_in(lease: Lease, window: Sequence[Described]) -> list[memoryview]:
    """Return the views into which the bytes of a window's objects go, one after the other."""
    return [
        view
        for blocks, (_, meta) in zip(lease.views, window, strict=True)
        for view in take(blocks, 0, meta.length)
    ]


def store_window(
    store: StorageBackend, window: Sequence[Described], lease: Lease, metrics: NodeMetrics
) -> list[Outcome]:
    """Store the objects whose checksum is right or was not given; return ERROR for the others.

    Not in the event loop.
    """
    items = [_item(key, meta, blocks) for (key, meta), blocks in zip(window, lease.views, strict=True)]
    intact = [
        not i.meta.checksum or checksum(i.key, i.buffers, i.meta.length) == i.meta.checksum for i in items
    ]
    metrics.count_damaged(intact.count(False))
    answers = iter(store.set(list(compress(items, intact))))
    return [next(answers) if is_intact else Outcome.ERROR for is_intact in intact]


def _item(key: ObjectKey, meta: ObjectMeta, blocks: Sequence[memoryview]) -> SetItem:
    """Return the item for the store: whole blocks of BLOCK_ALIGN bytes, with zeros behind the payload."""
    buffers = take(blocks, 0, -(-meta.length // BLOCK_ALIGN) * BLOCK_ALIGN)
    zero_tail(buffers, meta.length)
    return SetItem(key, buffers, meta)


def _leased_bytes(item: tuple[object, ObjectMeta]) -> int:
    """Return the bytes of the blocks that an object takes."""
    return blocks_for([item[1].length])[0] * BLOCK_BYTES
