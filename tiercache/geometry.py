"""Geometry of pools: the bytes that make one object. This is arithmetic on sizes, without torch or tensors.

Every tier below the device sees an object as opaque bytes of a known length. Attention variants, dtypes,
quantisation and tensor-parallel shards differ in their geometry and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgpack
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tiercache.core import BLOCK_ALIGN, MOST_TRAILING, HitPolicy, PoolName
from tiercache.errors import GeometryError

DTYPE_BITS = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8, "bool": 8,
    "int4": 4, "uint4": 4, "float4_e2m1fn": 4,
}  # fmt: skip
"""Element widths in bits, by the dtype names that torch and safetensors use.

Two 4-bit elements are packed in a byte.
"""


def nbytes_of(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a dense tensor.

    Raises GeometryError for an unknown dtype, an empty dimension, or a size that is not a whole number of
    bytes.
    """
    if dtype not in DTYPE_BITS:
        raise GeometryError(f"dtype {dtype!r} is unknown; use one of {', '.join(sorted(DTYPE_BITS))}")
    if any(n < 1 for n in shape):
        raise GeometryError(
            f"shape {tuple(shape)} has an empty dimension; every dimension must be at least 1"
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise GeometryError(
            f"shape {tuple(shape)} of {dtype} does not fill whole bytes; pad the last dimension"
        )
    return bits // 8


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's part of an object: `shape` elements of type `dtype`.

    The tensor is called `name` and belongs to layer `layer`.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of this segment in one object."""
        return nbytes_of(self.shape, self.dtype)


@dataclass(frozen=True)
class Geometry:
    """Description of the bytes of one object of `pool`: its segments, one after another.

        | segment 0 | segment 1   | segment 2 | padding |
        0           offsets[1]    offsets[2]  nbytes    padded_nbytes

    The padding is not part of the payload. It fills up the last block of 4 KiB.
    """

    pool: PoolName
    page_size: int
    """Tokens that an object of a page pool covers. States are taken at multiples of this number."""
    segments: tuple[Segment, ...]
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    """Rule that says which objects a prefix needs."""
    trailing: int = 1
    """Number of last objects that a prefix needs under `TRAILING_PAGES`."""
    layout: str = "token_head_dim"
    """Name for the order of the elements in a segment, which the shape alone does not determine."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise GeometryError(
                f"page size {self.page_size} is not possible; use a positive number of tokens, such as 64"
            )
        if type(self.trailing) is not int or not 1 <= self.trailing <= MOST_TRAILING:
            raise GeometryError(
                f"trailing={self.trailing!r} is not possible; a prefix needs its last page at least, and at"
                " most 2**31"
            )
        if not self.segments:
            raise GeometryError(f"pool {self.pool} has no segments; give it at least one tensor")
        names = [(s.layer, s.name) for s in self.segments]
        if len(set(names)) != len(names):
            raise GeometryError(
                f"pool {self.pool} names a tensor of one layer twice; give each tensor its own name"
            )
        if any(a.layer > b.layer for a, b in zip(self.segments, self.segments[1:], strict=False)):
            raise GeometryError(f"pool {self.pool} lists its layers out of order; sort the segments by layer")

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of one object."""
        return sum(s.nbytes for s in self.segments)

    @cached_property
    def padded_nbytes(self) -> int:
        """Payload bytes rounded up to `BLOCK_ALIGN`."""
        return -(-self.nbytes // BLOCK_ALIGN) * BLOCK_ALIGN

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each segment, shape [segments]."""
        return np.array([s.nbytes for s in self.segments], np.int64)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Byte offset of each segment in the object, shape [segments]."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that have a segment, ascending."""
        return tuple(sorted({s.layer for s in self.segments}))

    @cached_property
    def fingerprint(self) -> bytes:
        """Digest of 32 bytes.

        Two geometries have the same digest only if every byte of their objects means the same.
        """
        description = [
            "tiercache.geometry", 1, str(self.pool), self.page_size, str(self.hit_policy), self.trailing,
            self.layout,
            [[s.layer, s.name, list(s.shape), s.dtype] for s in self.segments],
        ]  # fmt: skip
        return blake3(msgpack.packb(description, use_bin_type=True)).digest()


def kv_geometry(
    layers: Sequence[int],
    kv_heads: int,
    head_dim: int,
    dtype: str,
    page_size: int,
    *,
    value_dim: int | None = None,
    packed: bool = False,
) -> Geometry:
    """Return the geometry of KV pages of multi-head or grouped-query attention.

    Each layer has two tensors, K and V, of shape `[page_size, kv_heads, head_dim]`. If `value_dim` is given,
    it is the last dimension of V. With `packed`, each layer has one tensor
    `[page_size, 2, kv_heads, head_dim]`, and `value_dim` is ignored.
    """
    segments: list[Segment] = []
    for layer in layers:
        if packed:
            segments.append(Segment(layer, "kv", (page_size, 2, kv_heads, head_dim), dtype))
        else:
            segments.append(Segment(layer, "k", (page_size, kv_heads, head_dim), dtype))
            segments.append(Segment(layer, "v", (page_size, kv_heads, value_dim or head_dim), dtype))
    return Geometry(PoolName.KV, page_size, tuple(segments))


def state_geometry(
    tensors: Sequence[tuple[int, str, tuple[int, ...], str]],
    page_size: int,
    *,
    pool: PoolName = PoolName.MAMBA,
) -> Geometry:
    """Return the geometry of states that consist of `tensors`, each a `(layer, name, shape, dtype)`.

    The tensors may be of any kind, for example convolution windows and SSM states. A state restores exactly
    its own depth.
    """
    segments = tuple(Segment(*t) for t in sorted(tensors, key=lambda t: t[0]))
    return Geometry(pool, page_size, segments, HitPolicy.TRAILING_PAGES, trailing=1, layout="state")
