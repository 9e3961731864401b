"""Conversion of device slots and host blocks to a list of contiguous copies.

All functions are pure, and work on columns (arrays with one entry per copy). They serve every cache kind and
every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercache.core import ABSENT, Locations
from tiercache.pools.device import SegmentTable

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Copies between device and host as columns of shape [descriptors], sorted by layer.

    Copy i moves `length[i]` bytes of layer `layer[i]` between the addresses `device[i]` and `host[i]`.
    Successive copies of one layer are merged if they are adjacent both on the device and on the host, and lie
    in one allocation of the device.
    """

    device: npt.NDArray[np.uint64]
    host: npt.NDArray[np.uint64]
    length: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    to_host: bool = False
    """Whether the bytes move from the device to the host, and not from the host to the device."""

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, rows: slice) -> Descriptors:
        return Descriptors(
            self.device[rows], self.host[rows], self.length[rows], self.layer[rows], self.to_host
        )

    @property
    def source(self) -> npt.NDArray[np.uint64]:
        """Addresses from which the bytes move."""
        return self.device if self.to_host else self.host

    @property
    def destination(self) -> npt.NDArray[np.uint64]:
        """Addresses to which the bytes move."""
        return self.host if self.to_host else self.device

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return int(self.length.sum())

    def cut(self, origin: int, period: int) -> Descriptors:
        """Return the same bytes with every copy split at the host addresses `origin + k * period`.

        At each of these addresses, one page-locked piece of memory ends and the next begins. A copy must stay
        within one piece:

            host     origin           + period         + 2 periods
                     |        [=======|========]       |              one copy, which crosses
                     |        [=======][=======]       |              two copies
        """
        start = self.host.astype(np.int64) - origin
        # Copy i is cut into `count[i]` pieces. Row j of the result is piece `piece[j]` of copy `row[j]`:
        #   count   2 1 3
        #   row     0 0 1 2 2 2
        #   piece   0 1 0 0 1 2
        count = (start + self.length - 1) // period - start // period + 1
        if (count <= 1).all():
            return self
        row = np.repeat(np.arange(len(count)), count)
        piece = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        begin = np.maximum(start[row], (start[row] // period + piece) * period)
        end = np.minimum(start[row] + self.length[row], (begin // period + 1) * period)
        shift = (begin - start[row]).astype(np.uint64)
        device, host = self.device[row] + shift, self.host[row] + shift
        return Descriptors(device, host, end - begin, self.layer[row], self.to_host)

    def by_layer(self) -> Iterator[tuple[int, slice]]:
        """Yield each layer that occurs, in ascending order, with its slice of the columns."""
        layers, starts = np.unique(self.layer, return_index=True)
        bounds = pairwise([*starts.tolist(), len(self)])
        for layer, (start, end) in zip(layers.tolist(), bounds, strict=True):
            yield layer, slice(start, end)


def build_descriptors(
    segments: SegmentTable,
    slots: Locations,
    blocks: npt.NDArray[np.int64],
    block_bytes: int,
    arena_address: int,
    *,
    to_host: bool = False,
) -> Descriptors:
    """Return the copies between device slots and the host objects that lie in `blocks`.

    `slots` are those of `DevicePool.places`, and `blocks` has shape [n, blocks per object]. Each block has
    `block_bytes` bytes; block 0 is at `arena_address`. A segment that crosses a block's end is split there,
    because the blocks of an object need not be adjacent:

        object    |   segment 0   |   segment 1  |unused|
        blocks    |    9    |    2    |     5    |
        copies    |====9====|==2==|=2=|====5=====|             four pieces, the same for every object

    Within a layer the copies are ordered by object, then as in the geometry.
    """
    segment, column, start, length = _pieces(segments, block_bytes)
    # NumPy would turn a mix of uint64 and int64 into floats, so addresses are signed here. They fit, because
    # addresses of a process are below 2**63.
    piece_base = segments.base.astype(np.int64)[segment] + start - segments.offset[segment]
    at = slots[:, None] if slots.ndim == 1 else slots[:, segment]
    device = piece_base + at * segments.stride[segment]
    host = arena_address + blocks[:, column] * block_bytes + start - column * block_bytes
    layer = segments.layer[segment]
    order = _layer_major(layer, len(slots))
    shape = device.shape
    per_piece = (np.broadcast_to(column, shape) for column in (length, layer, segments.allocation[segment]))
    columns = [_reordered(column, order) for column in (device, host, *per_piece)]
    if (at == ABSENT).any():
        there = _reordered(at, order) != ABSENT
        columns = [column[there] for column in columns]
    return _merge(*columns, to_host=to_host)


def join_descriptors(parts: Sequence[Descriptors]) -> Descriptors:
    """Return the copies of several pools, all in one direction, as one list, sorted by layer."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *(p.layer for p in parts)]), kind="stable")
    return Descriptors(
        np.concatenate([np.empty(0, np.uint64), *(p.device for p in parts)])[order],
        np.concatenate([np.empty(0, np.uint64), *(p.host for p in parts)])[order],
        np.concatenate([np.empty(0, np.int64), *(p.length for p in parts)])[order],
        np.concatenate([np.empty(0, np.int64), *(p.layer for p in parts)])[order],
        any(p.to_host for p in parts),
    )


def _pieces(segments: SegmentTable, block_bytes: int) -> tuple[_Column, _Column, _Column, _Column]:
    """Cut one object's segments at block ends; return four columns of shape [pieces].

    The columns are:

    1. number of the segment
    2. number of the block within the object
    3. start of the piece within the object, in bytes
    4. length of the piece in bytes

    The cuts are the same for every object.
    """
    end = segments.offset + segments.length
    first = segments.offset // block_bytes
    count = (end - 1) // block_bytes - first + 1
    segment = np.repeat(np.arange(len(count)), count)
    # The last two terms count the pieces of each segment from 0.
    column = first[segment] + np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(segments.offset[segment], column * block_bytes)
    stop = np.minimum(end[segment], (column + 1) * block_bytes)
    return segment, column, start, stop - start


def _layer_major(layer: _Column, n: int) -> _Column:
    """Return the position of each entry (object, piece) in an order by layer, then object, then piece.

    `layer` has the layer of each piece, in ascending order. The result has shape [n, pieces]. With two
    objects a and b, and pieces 0, 1, 2 of which 0 and 1 are of the first layer:

        entry        a0 a1 a2   b0 b1 b2
        position      0  1  4    2  3  5        in order: a0 a1 b0 b1 | a2 b2

    No sort is needed, because every object has the same pieces.
    """
    first = np.searchsorted(layer, layer, side="left")
    width = np.searchsorted(layer, layer, side="right") - first
    order: _Column = n * first + np.arange(n)[:, None] * width + np.arange(len(layer)) - first
    return order


def _reordered(column: _Column, order: _Column) -> _Column:
    out = np.empty(order.size, np.int64)
    out[order] = column
    return out


def _merge(
    device: _Column, host: _Column, length: _Column, layer: _Column, allocation: _Column, *, to_host: bool
) -> Descriptors:
    # Copy 1 follows copy 0 on both sides, so the two are merged. Copy 2 follows copy 1 on the host only:
    #   device   |==0==||==1==|        |==2==|
    #   host     |==0==||==1==||==2==|
    follows = (device[1:] == device[:-1] + length[:-1]) & (host[1:] == host[:-1] + length[:-1])
    # Two allocations may be adjacent in address space, but a copy must stay within one.
    follows &= (layer[1:] == layer[:-1]) & (allocation[1:] == allocation[:-1])
    heads = np.concatenate([[0], np.flatnonzero(~follows) + 1]) if len(device) else np.empty(0, np.int64)
    merged = np.add.reduceat(length, heads) if len(device) else length
    ends = (device[heads].astype(np.uint64), host[heads].astype(np.uint64))
    return Descriptors(*ends, merged, layer[heads], to_host)
