"""Device pools: the engine's own cache tensors, described as addresses.

No tensor is copied and torch is not imported.

Each tensor holds the segment of one (layer, name) of the pool's geometry, for all slots. Its form is one of:

- slot form `[slots, *segment shape]`: states, and pages kept as `[slots, page_size, ...]`;
- token form `[slots * page_size, *segment shape after its first dimension]`: pages of a token-indexed cache.

The functions here take a mapping from (layer, name) to tensor. `by_layer` makes such a mapping, from one
tensor `[layers, slots, ...]` or from a list with one tensor per layer. The operator `|` joins two mappings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import HitPolicy, Locations, PoolName
from tiercache.errors import GeometryError
from tiercache.geometry import DTYPE_BITS, Geometry, Segment, state_geometry
from tiercache.pools.slots import SlotAllocator, SlotSource, as_locations

_PACKED_CARRIERS = ("uint8", "int8")
"""Dtypes of tensors in which each byte may hold two elements of 4 bits, if the geometry says so."""


class DeviceTensor(Protocol):
    """The part of `torch.Tensor` that a pool uses."""

    @property
    def shape(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def dtype(self) -> Any: ...  # noqa: D102
    @property
    def device(self) -> Any: ...  # noqa: D102
    def data_ptr(self) -> int: ...  # noqa: D102
    def stride(self) -> Sequence[int]: ...  # noqa: D102
    def element_size(self) -> int: ...  # noqa: D102


Tensors: TypeAlias = Mapping[tuple[int, str], DeviceTensor]
"""Tensors by (layer, name)."""


def by_layer(name: str, tensors: Any, layers: Sequence[int]) -> dict[tuple[int, str], DeviceTensor]:
    """Map the tensors of several layers by (layer, name).

    `tensors` is one tensor `[layers, slots, ...]` or a list with one tensor per layer. `layers` has the
    numbers of these layers in the model, in the same order. Raises GeometryError if the two have different
    lengths.
    """
    if len(tensors) != len(layers):
        raise GeometryError(
            f"tensor {name!r} has {len(tensors)} layers and {len(layers)} layer numbers; give one number per"
            " layer"
        )
    return {(layer, name): tensors[i] for i, layer in enumerate(layers)}


def page_geometry_of(
    tensors: Tensors,
    page_size: int,
    *,
    paged: bool = False,
    pool: PoolName = PoolName.KV,
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES,
    trailing: int = 1,
) -> Geometry:
    """Return the geometry of page tensors in token form, or with `paged` in slot form.

    Within a layer, the segments keep the order of the mapping. `hit_policy` and `trailing` are those of
    `Geometry`. Raises GeometryError for an unknown dtype, and for tensors in slot form `[slots, n, ...]`
    whose `n` is not `page_size`.
    """
    segments = []
    for (layer, name), tensor in tensors.items():
        dtype, shape = _elements(layer, name, tensor)
        if paged and (len(shape) < 2 or shape[1] != page_size):
            raise GeometryError(
                f"layer {layer} tensor {name!r} is {shape}, which does not have {page_size} tokens a page in"
                " dimension 1"
            )
        segments.append(Segment(layer, name, shape[1:] if paged else (page_size, *shape[1:]), dtype))
    segments.sort(key=lambda s: s.layer)
    return Geometry(pool, page_size, tuple(segments), hit_policy, trailing)


def state_geometry_of(tensors: Tensors, page_size: int, *, pool: PoolName = PoolName.MAMBA) -> Geometry:
    """Return the geometry of state tensors `[slots, ...]`.

    Within a layer, the segments keep the order of the mapping.
    """
    described = []
    for (layer, name), tensor in tensors.items():
        dtype, shape = _elements(layer, name, tensor)
        described.append((layer, name, shape[1:], dtype))
    return state_geometry(described, page_size, pool=pool)


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """Places of the segments of a pool's objects, as columns of shape [segments], in geometry order.

    Segment i of slot s lies at address `base[i] + s * stride[i]`:

        base[i]       + stride[i]   + 2 * stride[i]
        |==slot 0==|  |==slot 1==|  |==slot 2==|          each `length[i]` bytes long
    """

    base: npt.NDArray[np.uint64]
    """Address of the segment in slot 0."""
    stride: npt.NDArray[np.int64]
    """Bytes from the segment's start in one slot to its start in the next slot."""
    length: npt.NDArray[np.int64]
    """Length of the segment in bytes."""
    offset: npt.NDArray[np.int64]
    """Byte at which the segment starts in the object."""
    layer: npt.NDArray[np.int64]
    """Number of the segment's layer."""
    allocation: npt.NDArray[np.int64]
    """Number that `allocations` gives to the segment's tensor.

    One copy must not touch tensors with different numbers.
    """


class DevicePool:
    """Slots of one cache kind in the engine's tensors. The pool keeps a reference to the tensors.

    The slots come from `source`. By default, the pool hands out all slots of the tensors itself. An engine
    that allocates for its requests from the same tensors passes its own allocator.

    Thread safety: `alloc`, `free` and `available` belong to one owner thread. The rest never changes, and any
    thread may read it.
    """

    def __init__(
        self,
        geometry: Geometry,
        segments: SegmentTable,
        capacity: int,
        device: str,
        tensors: Tensors,
        source: SlotSource | None = None,
    ) -> None:
        self.geometry = geometry
        self.segments = segments
        self.capacity = capacity
        self.device = device
        self.source = source or SlotAllocator(capacity, noun=f"{geometry.pool} slot")
        self._tensors = dict(tensors)

    @classmethod
    def from_tensors(cls, geometry: Geometry, tensors: Tensors, source: SlotSource | None = None) -> Self:
        """Create a pool over `tensors`, one for each segment of `geometry`, without copying them.

        Raises GeometryError if a tensor is missing, is unknown, has another shape, dtype, device or number of
        slots, or has a slot whose bytes are not contiguous. The message names the layer and the tensor.
        """
        _check_names(geometry, tensors)
        ordered = [tensors[s.layer, s.name] for s in geometry.segments]
        rows = [
            _layout(segment, tensor, geometry.page_size)
            for segment, tensor in zip(geometry.segments, ordered, strict=True)
        ]
        capacity = rows[0][0]
        device = str(ordered[0].device)
        for segment, tensor, (count, _) in zip(geometry.segments, ordered, rows, strict=True):
            if count != capacity:
                raise GeometryError(
                    f"{_label(segment)} has {count} slots where {capacity} are expected; give all tensors of"
                    " a pool the same number"
                )
            if str(tensor.device) != device:
                raise GeometryError(
                    f"{_label(segment)} is on {tensor.device} and the pool on {device}; keep a pool on one"
                    " device"
                )
        base, stride = (
            np.array([t.data_ptr() for t in ordered], np.uint64),
            np.array([stride for _, stride in rows], np.int64),
        )
        table = SegmentTable(
            base=base,
            stride=stride,
            length=geometry.lengths,
            offset=geometry.offsets,
            layer=np.array([s.layer for s in geometry.segments], np.int64),
            allocation=allocations(
                base.astype(np.int64), base.astype(np.int64) + (capacity - 1) * stride + geometry.lengths
            ),
        )
        return cls(geometry, table, capacity, device, tensors, source)

    @property
    def name(self) -> PoolName:
        """Cache kind of the pool."""
        return self.geometry.pool

    @property
    def available(self) -> int:
        """Number of free slots."""
        return self.source.available

    def alloc(self, n: int) -> Locations:
        """Take `n` slots: int64, shape [n]. Raises PoolFullError, with nothing taken, if fewer are free."""
        return self.source.alloc(n)

    def free(self, slots: npt.ArrayLike) -> None:
        """Give slots back. The pool's own allocator raises SlotError, with nothing freed, for wrong slots."""
        self.source.free(slots)

    def checked(self, slots: npt.ArrayLike) -> Locations:
        """Return `slots` as int64, shape [n]. Raises SlotError for one out of range.

        A free slot passes, because an engine may keep its own record of the slots in use.
        """
        return as_locations(slots, self.capacity, f"{self.name} slot")

    def places(self, slots: npt.ArrayLike) -> Locations:
        """Return the slot of the tensors at which each object lies: int64, a copy.

        The shape is [n]. A pool whose objects lie in several slots at once overrides this, and returns the
        slot of each segment, with the shape [n, segments]; ABSENT for a segment that is not to be copied.
        Raises SlotError as `checked` does.
        """
        return self.checked(slots).copy()


def allocations(begin: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a number for the memory of each tensor; tensors with the same number lie in one allocation.

    Tensor i takes the addresses [`begin[i]`, `end[i]`). Both arrays and the result have the shape [tensors].
    Two allocations of a driver never overlap, so tensors that overlap get the same number. Allocations may be
    adjacent, so tensors that are only adjacent get different numbers.
    """
    # In order of address, a tensor gets a new number if it begins at or behind the highest end so far:
    #   addresses  0 ... 9 | 5 ... 20 | 20 ... 30      overlap at 5; adjacent at 20
    #   number        0    |    0     |     1
    order = np.lexsort((end, begin))
    reached = np.maximum.accumulate(end[order])
    found = np.empty(len(begin), np.int64)
    found[order] = np.concatenate([[0], np.cumsum(begin[order][1:] >= reached[:-1])])[: len(begin)]
    return found


def _check_names(geometry: Geometry, tensors: Tensors) -> None:
    expected = {(s.layer, s.name) for s in geometry.segments}
    for layer, name in sorted(expected - tensors.keys()):
        raise GeometryError(
            f"pool {geometry.pool} has no tensor {name!r} for layer {layer}; pass every tensor of its"
            " geometry"
        )
    for layer, name in sorted(tensors.keys() - expected):
        raise GeometryError(
            f"pool {geometry.pool} does not know tensor {name!r} of layer {layer}; name the tensors as its"
            " geometry does"
        )


def _layout(segment: Segment, tensor: DeviceTensor, page_size: int) -> tuple[int, int]:
    """Return (slots, bytes from one slot to the next) of a tensor in slot form or token form."""
    if not all(callable(getattr(tensor, name, None)) for name in ("data_ptr", "stride", "element_size")):
        raise GeometryError(
            f"{_label(segment)} is of type {type(tensor).__name__}; pass a tensor, such as a result of"
            " torch.from_numpy"
        )
    dtype, shape = _elements(segment.layer, segment.name, tensor)
    if DTYPE_BITS[segment.dtype] == 4 and dtype in _PACKED_CARRIERS:
        dtype, shape = segment.dtype, (*shape[:-1], shape[-1] * 2)
    if dtype != segment.dtype:
        raise GeometryError(f"{_label(segment)} is {dtype} where its geometry says {segment.dtype}")
    # `tokens`: rows of the tensor's first dimension that make one slot.
    if shape[1:] == segment.shape:
        tokens = 1
    elif segment.shape[:1] == (page_size,) and shape[1:] == segment.shape[1:]:
        tokens = page_size
    else:
        forms = f"[slots, {_join(segment.shape)}] or [slots * {page_size}, {_join(segment.shape[1:])}]"
        raise GeometryError(f"{_label(segment)} has shape {shape}; expected {forms}")
    if shape[0] % tokens:
        raise GeometryError(
            f"{_label(segment)} has {shape[0]} tokens, which is not a multiple of the page size {page_size}"
        )
    count = shape[0] // tokens
    stride = tensor.stride()[0] * tokens * tensor.element_size()
    _check_contiguous(segment, tensor, tokens)
    if count > 1 and stride < segment.nbytes:
        raise GeometryError(
            f"{_label(segment)} has slots {stride} bytes apart that hold {segment.nbytes} bytes each; they"
            " would overlap"
        )
    return count, stride


def _check_contiguous(segment: Segment, tensor: DeviceTensor, tokens: int) -> None:
    """Check that the elements of one slot are contiguous and in order; raise GeometryError otherwise.

    A dimension of one element may have any stride.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    dense = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and stride != dense:
            break
        dense *= size
    else:
        if tokens == 1 or strides[0] == dense:
            return
    raise GeometryError(
        f"{_label(segment)} has shape {shape} and strides {strides}: one slot is not one contiguous run of"
        " bytes; pass a dense tensor"
    )


def _elements(layer: int, label: str, tensor: DeviceTensor) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype by its name in `DTYPE_BITS`, and its shape in elements of that dtype."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(int(n) for n in tensor.shape)
    if dtype == "float4_e2m1fn_x2":  # torch counts pairs of elements
        dtype, shape = "float4_e2m1fn", (*shape[:-1], shape[-1] * 2)
    if dtype not in DTYPE_BITS:
        raise GeometryError(
            f"layer {layer} tensor {label!r} has the unknown dtype {dtype}; view it as one of"
            f" {', '.join(sorted(DTYPE_BITS))}"
        )
    if not shape or math.prod(shape) == 0:
        raise GeometryError(
            f"layer {layer} tensor {label!r} has shape {shape} and so no slots; its first dimension counts"
            " slots or tokens"
        )
    return dtype, shape


def _label(segment: Segment) -> str:
    return f"layer {segment.layer} tensor {segment.name!r}"


def _join(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))
