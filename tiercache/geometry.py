"""Geometry of pools: the bytes that make one object. Byte arithmetic only: no torch, no tensors.

Every tier below the device sees an object as opaque bytes of a known length. Attention variants, dtypes, quantisation and tensor-parallel
shards differ in their geometry and nowhere else.
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
"""Element widths in bits, by the names that torch and safetensors use. 4-bit elements are packed two to a byte."""


def nbytes_of(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a dense tensor. Raises GeometryError for an unknown dtype, an empty shape or a part of a byte."""
    if dtype not in DTYPE_BITS:
        raise GeometryError(f"dtype {dtype!r} is unknown; use one of {', '.join(sorted(DTYPE_BITS))}")
    if any(n < 1 for n in shape):
        raise GeometryError(f"shape {tuple(shape)} has an empty dimension; every dimension must be at least 1")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise GeometryError(f"shape {tuple(shape)} of {dtype} does not fill whole bytes; pad the last dimension")
    return bits // 8


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's share of an object: `shape` elements of `dtype` of tensor `name` in layer `layer`."""

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
    """Ordered segments of one object of `pool`.

    `page_size` is the number of tokens that an object of a page pool covers; for a state pool it is the unit at which states are taken.
    `hit_policy` says which objects a prefix needs, with `trailing` as in `HitPolicy`. `layout` names how a segment's elements are ordered,
    where two layouts would have equal shapes. Immutable; safe to share between threads.
    """

    pool: PoolName
    page_size: int
    segments: tuple[Segment, ...]
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing: int = 1
    layout: str = "token_head_dim"

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise GeometryError(f"page size {self.page_size} is not possible; use a positive number of tokens, such as 64")
        if type(self.trailing) is not int or not 1 <= self.trailing <= MOST_TRAILING:
            raise GeometryError(f"trailing={self.trailing!r} is not possible; a prefix needs its last page at least, and at most 2**31")
        if not self.segments:
            raise GeometryError(f"pool {self.pool} has no segments; give it at least one tensor")
        names = [(s.layer, s.name) for s in self.segments]
        if len(set(names)) != len(names):
            raise GeometryError(f"pool {self.pool} names a tensor of one layer twice; give each tensor its own name")
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
        """Digest of 32 bytes that differs whenever the meaning of a single byte of an object differs."""
        description = [
            "tiercache.geometry", 1, str(self.pool), self.page_size, str(self.hit_policy), self.trailing, self.layout,
            [[s.layer, s.name, list(s.shape), s.dtype] for s in self.segments],
        ]  # fmt: skip
        return blake3(msgpack.packb(description, use_bin_type=True)).digest()


def kv_geometry(
    layers: Sequence[int], kv_heads: int, head_dim: int, dtype: str, page_size: int, *, value_dim: int | None = None, packed: bool = False
) -> Geometry:
    """Return the geometry of KV pages of multi-head or grouped-query attention.

    Each layer has K and V `[page_size, kv_heads, head_dim]`; the last dimension of V is `value_dim` where that is given. With `packed`, one
    tensor `[page_size, 2, kv_heads, head_dim]` holds both.
    """
    segments: list[Segment] = []
    for layer in layers:
        if packed:
            segments.append(Segment(layer, "kv", (page_size, 2, kv_heads, head_dim), dtype))
        else:
            segments.append(Segment(layer, "k", (page_size, kv_heads, head_dim), dtype))
            segments.append(Segment(layer, "v", (page_size, kv_heads, value_dim or head_dim), dtype))
    return Geometry(PoolName.KV, page_size, tuple(segments))


def mla_geometry(layers: Sequence[int], latent_dim: int, dtype: str, page_size: int) -> Geometry:
    """Return the geometry of KV pages of multi-head latent attention: one `[page_size, latent_dim]` per layer (rank plus rope part)."""
    return Geometry(PoolName.KV, page_size, tuple(Segment(n, "latent", (page_size, latent_dim), dtype) for n in layers))


def state_geometry(
    tensors: Sequence[tuple[int, str, tuple[int, ...], str]], page_size: int, *, pool: PoolName = PoolName.MAMBA
) -> Geometry:
    """Return the geometry of states made of any `(layer, name, shape, dtype)`: conv, SSM, further convs, side tensors.

    States are restorable at exactly their own depth.
    """
    segments = tuple(Segment(*t) for t in sorted(tensors, key=lambda t: t[0]))
    return Geometry(pool, page_size, segments, HitPolicy.TRAILING_PAGES, trailing=1, layout="state")
