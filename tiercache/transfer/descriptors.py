"""Conversion of (slots, blocks) to a list of contiguous copies.

Pure functions over columns, the same ones for every cache kind and engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tiercache.core import Locations
from tiercache.pools.device import SegmentTable

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies as columns of shape [copies]: `length[i]` bytes from address `source[i]` to address `destination[i]`."""

    source: npt.NDArray[np.uint64]
    destination: npt.NDArray[np.uint64]
    length: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, rows: slice) -> Copies:
        return Copies(self.source[rows], self.destination[rows], self.length[rows])

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Copies as columns of shape [descriptors], sorted by layer: `length[i]` bytes between addresses `device[i]` and `host[i]`.

    Neighbouring copies of one layer that are contiguous at both ends have been merged, if both lie in one allocation of the device.
    """

    device: npt.NDArray[np.uint64]
    host: npt.NDArray[np.uint64]
    length: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return int(self.length.sum())

    def copies(self, *, to_host: bool) -> Copies:
        """Return the copies in one direction. The columns are shared, not copied."""
        return Copies(self.device, self.host, self.length) if to_host else Copies(self.host, self.device, self.length)

    def cut(self, origin: int, period: int) -> Descriptors:
        """Return the same bytes with every copy split at the host addresses `origin + k * period`.

        There, memory that was page-locked separately meets, and a copy must not cross.
        """
        start = self.host.astype(np.int64) - origin
        count = (start + self.length - 1) // period - start // period + 1
        if (count <= 1).all():
            return self
        row = np.repeat(np.arange(len(count)), count)
        piece = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        begin = np.maximum(start[row], (start[row] // period + piece) * period)
        end = np.minimum(start[row] + self.length[row], (begin // period + 1) * period)
        shift = (begin - start[row]).astype(np.uint64)
        return Descriptors(self.device[row] + shift, self.host[row] + shift, end - begin, self.layer[row])

    def by_layer(self) -> Iterator[tuple[int, slice]]:
        """Yield each layer that occurs, in ascending order, with the slice of the columns that belongs to it."""
        layers, starts = np.unique(self.layer, return_index=True)
        bounds = pairwise([*starts.tolist(), len(self)])
        for layer, (start, end) in zip(layers.tolist(), bounds, strict=True):
            yield layer, slice(start, end)


def build_descriptors(
    segments: SegmentTable, slots: Locations, blocks: npt.NDArray[np.int64], block_bytes: int, arena_address: int
) -> Descriptors:
    """Return the copies between device slots `slots` [n] and the host objects that lie in `blocks` [n, blocks per object].

    A segment that crosses a block's end is split there. Within a layer the copies are ordered by object, then as in the geometry.
    """
    segment, column, start, length = _pieces(segments, block_bytes)
    # Signed arithmetic: NumPy would turn a mix of uint64 and int64 into floats, and user-space addresses stay below 2**63.
    piece_base = segments.base.astype(np.int64)[segment] + start - segments.offset[segment]
    device = piece_base + slots[:, None] * segments.stride[segment]
    host = arena_address + blocks[:, column] * block_bytes + start - column * block_bytes
    layer = segments.layer[segment]
    order = _layer_major(layer, len(slots))
    shape = device.shape
    per_piece = (np.broadcast_to(column, shape) for column in (length, layer, segments.allocation[segment]))
    return _merge(*(_reordered(column, order) for column in (device, host, *per_piece)))


def slot_copies(segments: SegmentTable, sources: Locations, destinations: Locations) -> Copies:
    """Return the copies from slots `sources` [n] to slots `destinations` [n] of the same pool, one per object and segment."""
    base, stride = segments.base.astype(np.int64), segments.stride
    source, destination = ((base + slots[:, None] * stride).reshape(-1).astype(np.uint64) for slots in (sources, destinations))
    return Copies(source, destination, np.tile(segments.length, len(sources)))


def join_copies(parts: Sequence[Copies]) -> Copies:
    """Return several lists of copies as one."""
    return Copies(
        np.concatenate([np.empty(0, np.uint64), *(p.source for p in parts)]),
        np.concatenate([np.empty(0, np.uint64), *(p.destination for p in parts)]),
        np.concatenate([np.empty(0, np.int64), *(p.length for p in parts)]),
    )


def join_descriptors(parts: Sequence[Descriptors]) -> Descriptors:
    """Return the copies of several pools as one list, sorted by layer."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *(p.layer for p in parts)]), kind="stable")
    return Descriptors(
        np.concatenate([np.empty(0, np.uint64), *(p.device for p in parts)])[order],
        np.concatenate([np.empty(0, np.uint64), *(p.host for p in parts)])[order],
        np.concatenate([np.empty(0, np.int64), *(p.length for p in parts)])[order],
        np.concatenate([np.empty(0, np.int64), *(p.layer for p in parts)])[order],
    )


def _pieces(segments: SegmentTable, block_bytes: int) -> tuple[_Column, _Column, _Column, _Column]:
    """Cut one object's segments at block ends: (segment, block of the object, start in the object, length), each of shape [pieces].

    The cuts are the same for every object, so callers broadcast them over all objects. Starts and lengths are in bytes.
    """
    end = segments.offset + segments.length
    first = segments.offset // block_bytes
    count = (end - 1) // block_bytes - first + 1
    segment = np.repeat(np.arange(len(count)), count)
    column = first[segment] + np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(segments.offset[segment], column * block_bytes)
    stop = np.minimum(end[segment], (column + 1) * block_bytes)
    return segment, column, start, stop - start


def _layer_major(layer: _Column, n: int) -> _Column:
    """Return the position of each entry (object, piece) in an order by layer, then object: shape [n, pieces].

    Pieces are sorted by layer already, so no sort is needed.
    """
    first = np.searchsorted(layer, layer, side="left")
    width = np.searchsorted(layer, layer, side="right") - first
    order: _Column = n * first + np.arange(n)[:, None] * width + np.arange(len(layer)) - first
    return order


def _reordered(column: _Column, order: _Column) -> _Column:
    out = np.empty(order.size, np.int64)
    out[order] = column
    return out


def _merge(device: _Column, host: _Column, length: _Column, layer: _Column, allocation: _Column) -> Descriptors:
    follows = (device[1:] == device[:-1] + length[:-1]) & (host[1:] == host[:-1] + length[:-1])
    # Two allocations may be adjacent in address space, and a copy must stay within one.
    follows &= (layer[1:] == layer[:-1]) & (allocation[1:] == allocation[:-1])
    heads = np.concatenate([[0], np.flatnonzero(~follows) + 1]) if len(device) else np.empty(0, np.int64)
    merged = np.add.reduceat(length, heads) if len(device) else length
    return Descriptors(device[heads].astype(np.uint64), host[heads].astype(np.uint64), merged, layer[heads])
