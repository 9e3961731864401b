"""The layout of a model's cache, read from the cache object itself after a tiny forward.

No model is recognised by its name. A layer of the cache holds attention KV, any number of recurrent tensors,
both, or nothing; the class of the layer tells which. A class is served only if this module reads all of its
tensors, because a tensor that is not saved would cause wrong answers after a restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from tiercache.core import PoolName
from tiercache.errors import UnsupportedModelError
from tiercache.geometry import Geometry, Segment, state_geometry

ATTENTION: Final = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
"""Classes of layers that hold attention KV."""
RECURRENT: Final = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
"""Classes of layers that hold recurrent tensors."""
SERVED: Final = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)
"""Classes of layers that are served.

Their subclasses are refused, because a subclass may hold more than its parent: the keys of an indexer, for
example, or a quantised part.
"""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of one sequence's cache in one layer."""

    layer: int
    name: str
    shape: tuple[int, ...]
    """Shape without the batch dimension; for `k` and `v` the shape of one token, `[heads, head_dim]`."""
    stride: tuple[int, ...]
    """Stride of each dimension of `shape`, in elements.

    A restored state gets the same strides, because a matrix product may round differently if an operand is
    transposed.
    """
    dtype: torch.dtype
    device: torch.device

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in geometries, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One convolution or recurrent tensor: entry `index` of its layer's `conv_states`/`recurrent_states`."""

    tensor: TensorLayout
    index: int
    conv_kernel_size: int | None
    """How many of the last inputs a convolution keeps; None for recurrent tensors."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The tensors that one layer keeps.

    `k` and `v` are both set or both None.
    """

    layer: int
    k: TensorLayout | None = None
    v: TensorLayout | None = None
    states: tuple[StateLayout, ...] = ()
    has_previous: tuple[bool, ...] = ()
    """The layer's flag `has_previous_state` for each state index; the next forward reads it."""

    @property
    def empty(self) -> bool:
        """Whether the layer has nothing to save.

        True for a layer that has experts and no attention, and for a layer that reads another layer's cache.
        """
        return self.k is None and not self.states


@dataclass(frozen=True)
class CacheLayout:
    """All layers of a cache, and the geometries of its pages and states."""

    page_size: int
    layers: tuple[LayerLayout, ...]

    @cached_property
    def kv_geometry(self) -> Geometry:
        """Geometry of a page: `k` and `v` of each attention layer, each `[page_size, heads, head_dim]`."""
        segments = [
            Segment(t.layer, t.name, (self.page_size, *t.shape), t.dtype_name)
            for layer in self.layers
            for t in (layer.k, layer.v)
            if t
        ]
        return Geometry(PoolName.KV, self.page_size, tuple(segments))

    @cached_property
    def state_geometry(self) -> Geometry | None:
        """Geometry of a state: `conv_i` and `recurrent_i` of every layer; None for a model without states."""
        tensors = [(s.layer, s.name, s.shape, s.dtype_name) for s in self.state_tensors()]
        return state_geometry(tensors, self.page_size) if tensors else None

    @property
    def geometries(self) -> dict[PoolName, Geometry]:
        """Geometry of each pool that the model needs."""
        state = self.state_geometry
        return {PoolName.KV: self.kv_geometry} | ({PoolName.MAMBA: state} if state else {})

    def kv_tensors(self) -> Iterator[TensorLayout]:
        """Iterate over `k` and `v` of every attention layer."""
        return (t for layer in self.layers for t in (layer.k, layer.v) if t is not None)

    def state_tensors(self) -> Iterator[TensorLayout]:
        """Iterate over every convolution and recurrent tensor."""
        return (s.tensor for layer in self.layers for s in layer.states)

    def length(self, cache: DynamicCache) -> int:
        """Return the number of tokens that `cache` holds; 0 for a new one."""
        first = next(layer.layer for layer in self.layers if layer.k)
        held: Any = cache.layers[first]
        return int(held.get_seq_length())

    def tensor_of(self, cache: DynamicCache, layer: int, name: str) -> torch.Tensor:
        """Return the cache's own tensor, with its batch dimension of 1.

        Shapes are `[1, heads, tokens, head_dim]` for k and v, `[1, ...]` for states.
        """
        held: Any = cache.layers[layer]
        if name in ("k", "v"):
            found = held.keys if name == "k" else held.values
        else:
            kind, _, index = name.rpartition("_")
            found = (held.conv_states if kind == "conv" else held.recurrent_states)[int(index)]
        assert isinstance(found, torch.Tensor), f"layer {layer} holds no {name} yet"
        return found


def inspect_cache(cache: object, page_size: int, tokens: int) -> CacheLayout:
    """Return the layout of `cache`, which holds exactly `tokens` tokens of one sequence.

    Raises UnsupportedModelError if the cache could not be restored exactly.
    """
    if type(cache) is not DynamicCache:
        raise UnsupportedModelError(
            f"the model keeps its cache in a {type(cache).__name__}, which may hold more than its layers;"
            " only DynamicCache is served"
        )
    layout = CacheLayout(page_size, tuple(_layer(n, layer, tokens) for n, layer in enumerate(cache.layers)))
    if not any(layer.k for layer in layout.layers):
        raise UnsupportedModelError(
            "no layer of the model keeps attention KV, so there are no pages to index; only models with some"
            " full attention are served"
        )
    return layout


def _layer(n: int, layer: Any, tokens: int) -> LayerLayout:
    """Return the layout of layer `n`.

    Raises UnsupportedModelError for a class not in `SERVED` and for tensors of unexpected shape.
    """
    if type(layer) not in SERVED:
        raise UnsupportedModelError(f"layer {n} keeps its cache in a {type(layer).__name__}, {_why(layer)}")
    k, v = (
        _attention(n, layer, tokens)
        if isinstance(layer, ATTENTION) and layer.is_initialized
        else (None, None)
    )
    recurrent = isinstance(layer, RECURRENT)
    states = range(layer.number_of_states) if recurrent else ()
    return LayerLayout(
        n, k, v,
        states=tuple(_states(n, layer)) if recurrent else (),
        has_previous=tuple(bool(layer.has_previous_state[i]) for i in states),
    )  # fmt: skip


def _why(layer: Any) -> str:
    """Return why a layer of an unserved class cannot be served, judged by its attributes."""
    if getattr(layer, "is_sliding", False):
        return (
            "which forgets what leaves its sliding window, so a prefix cannot be cut out of it; only full"
            " attention is served"
        )
    if hasattr(layer, "max_cache_len"):
        return "which is allocated at a fixed length; only caches that grow are served"
    if hasattr(layer, "indexer_keys"):
        return "which also keeps an indexer's keys, and these are not carried along"
    if hasattr(layer, "_quantize"):
        return (
            "which keeps its keys quantised, with a part in full precision; only unquantised caches are"
            " served"
        )
    return "whose content is unknown; the classes served are " + ", ".join(c.__name__ for c in SERVED)


def _attention(n: int, layer: Any, tokens: int) -> tuple[TensorLayout, TensorLayout]:
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != tokens:
            raise UnsupportedModelError(
                f"layer {n} ({type(layer).__name__}) holds {name} of shape {tuple(tensor.shape)} after"
                f" {tokens} tokens of one sequence; [1, heads, {tokens}, head_dim] is needed to cut it into"
                " pages"
            )
    return tuple(  # type: ignore[return-value]
        TensorLayout(n, name, (t.shape[1], t.shape[3]), (t.shape[3], 1), t.dtype, t.device)
        for name, t in (("k", layer.keys), ("v", layer.values))
    )


def _states(n: int, layer: Any) -> Iterator[StateLayout]:
    for kind, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
        for index in range(layer.number_of_states):
            tensor = held[index]
            if tensor is None:
                continue
            if tensor.dim() < 2 or tensor.shape[0] != 1 or tensor.numel() == 0:
                raise UnsupportedModelError(
                    f"layer {n} ({type(layer).__name__}) holds a {kind} state of shape {tuple(tensor.shape)} "
                    "for one sequence; [1, ...] is needed"
                )
            yield StateLayout(
                TensorLayout(
                    n,
                    f"{kind}_{index}",
                    tuple(tensor.shape[1:]),
                    tuple(tensor.stride()[1:]),
                    tensor.dtype,
                    tensor.device,
                ),
                index,
                layer.conv_kernel_size[index] if kind == "conv" else None,
            )
