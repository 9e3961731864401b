"""The layout of a model's cache, read from the cache object itself after a tiny forward.

No model is recognised by its name. A layer of the cache holds the KV of full attention, a window of KV, any
number of recurrent tensors, KV and recurrent tensors, or nothing; the class of the layer tells which. A class
is served only if this module reads all of its tensors, because a tensor that is not saved would cause wrong
answers after a restore.

A layer with a sliding window of W tokens, or with chunks of W tokens, keeps the KV of the last W - 1 tokens,
which is all that the next token reads of the past. Kept at a depth, this is a state: its size is fixed, and
it restores exactly that depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from tiercache.core import PoolName
from tiercache.errors import UnsupportedModelError
from tiercache.geometry import Geometry, Segment, state_geometry

WINDOWED: Final = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Classes of layers that hold the KV of a window."""
ATTENTION: Final = (DynamicLayer, DynamicIndexedLayer, LinearAttentionAndFullAttentionLayer, *WINDOWED)
"""Classes of layers that hold KV, of all tokens or of a window."""
RECURRENT: Final = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Classes of layers that hold recurrent tensors."""
SERVED: Final = (*dict.fromkeys((*ATTENTION, *RECURRENT)), DummyLayer)
"""Classes of layers that are served.

Their subclasses are refused, because a subclass may hold more than its parent: a compressed past, for
example, or a quantised part.
"""
STATES: Final = (PoolName.MAMBA, PoolName.SWA)
"""Pools of states: recurrent tensors, and windows."""
StateSlots: TypeAlias = int | Mapping[PoolName, int]
"""Slot of a state in each state pool; a number stands for that slot of every state pool."""


class StateCache(DynamicCache):
    """Cache of a model that keeps states alone. No layer says how many tokens it has seen, so this does."""

    tokens = 0
    """Number of tokens that the cache holds."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of one sequence's cache in one layer."""

    layer: int
    name: str
    shape: tuple[int, ...]
    """Shape without the batch dimension.

    For a tensor of pages it is the shape of one token, `[heads, head_dim]`. For a window it is
    `[heads, W - 1, head_dim]`, also while the cache holds fewer tokens.
    """
    stride: tuple[int, ...]
    """Stride of each dimension of `shape`, in elements.

    A restored state gets the same strides, because a matrix product may round differently if an operand is
    transposed.
    """
    dtype: torch.dtype
    device: torch.device
    pool: PoolName = PoolName.KV
    """Pool that keeps the tensor: KV for tensors of pages, SWA for a window, MAMBA for recurrent tensors."""
    index: int = 0
    """Entry of a recurrent tensor in its layer's `conv_states` or `recurrent_states`."""
    conv_kernel_size: int | None = None
    """How many of the last inputs a convolution keeps; None for other tensors."""

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in geometries, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The tensors that one layer keeps."""

    layer: int
    tensors: tuple[TensorLayout, ...] = ()
    """First `k` and `v` of attention, then `indexer`, then `conv_i` and `recurrent_i`, each if there is one.

    `indexer` are the keys by which sparse attention selects tokens, one for each token. There are none for a
    layer that has experts and no attention, and for a layer that reads another layer's cache.
    """
    window: int | None = None
    """Length of the window in tokens; None for a layer that keeps the KV of all tokens."""
    has_previous: tuple[bool, ...] = ()
    """The layer's flag `has_previous_state` for each state index; the next forward reads it."""

    def kv(self) -> tuple[TensorLayout, ...]:
        """Return `k` and `v`, or nothing for a layer without attention."""
        return tuple(t for t in self.tensors if t.name in ("k", "v"))


@dataclass(frozen=True)
class CacheLayout:
    """All layers of a cache, and the geometries of its pages and states."""

    page_size: int
    layers: tuple[LayerLayout, ...]

    @cached_property
    def kv_geometry(self) -> Geometry:
        """Geometry of a page: `k` and `v` of each attention layer, each `[page_size, heads, head_dim]`."""
        size, tensors = self.page_size, self.kv_tensors()
        segments = (Segment(t.layer, t.name, (size, *t.shape), t.dtype_name) for t in tensors)
        return Geometry(PoolName.KV, size, tuple(segments))

    @cached_property
    def state_geometries(self) -> dict[PoolName, Geometry]:
        """Geometry of the state in each state pool that the model needs; empty for a model without states.

        `conv_i` and `recurrent_i` of every layer are in MAMBA, `k` and `v` of windows in SWA.
        """
        tensors = {
            pool: [(t.layer, t.name, t.shape, t.dtype_name) for t in self.state_tensors() if t.pool is pool]
            for pool in STATES
        }
        size = self.page_size
        return {pool: state_geometry(held, size, pool=pool) for pool, held in tensors.items() if held}

    @property
    def geometries(self) -> dict[PoolName, Geometry]:
        """Geometry of each pool that the model needs; a model with states alone has no pool of pages."""
        return ({PoolName.KV: self.kv_geometry} if self.has_pages else {}) | self.state_geometries

    @cached_property
    def has_pages(self) -> bool:
        """Whether the model keeps something for every token."""
        return next(self.kv_tensors(), None) is not None

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Lengths of all windows in tokens, ascending; empty for a model without windows."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))

    def kv_tensors(self) -> Iterator[TensorLayout]:
        """Iterate over the tensors of pages: `k`, `v` and `indexer` of every layer that keeps all tokens."""
        return (t for layer in self.layers for t in layer.tensors if t.pool is PoolName.KV)

    def state_tensors(self) -> Iterator[TensorLayout]:
        """Iterate over the tensors of states: convolution and recurrent tensors, `k` and `v` of windows."""
        return (t for layer in self.layers for t in layer.tensors if t.pool is not PoolName.KV)

    @property
    def counts_tokens(self) -> bool:
        """Whether a layer knows how many tokens the cache holds; one of recurrent tensors does not."""
        return any(layer.kv() for layer in self.layers)

    def tensors(self) -> Iterator[TensorLayout]:
        """Iterate over every tensor that is kept."""
        yield from self.kv_tensors()
        yield from self.state_tensors()

    def length(self, cache: DynamicCache) -> int:
        """Return the number of tokens that `cache` holds; 0 for a new one."""
        if isinstance(cache, StateCache):
            return cache.tokens
        first = next(layer.layer for layer in self.layers if layer.kv())
        held: Any = cache.layers[first]
        return int(held.get_seq_length())

    def tensor_of(self, cache: DynamicCache, layer: int, name: str) -> torch.Tensor:
        """Return the cache's own tensor, with its batch dimension of 1.

        Shapes are `[1, heads, tokens, head_dim]` for k, v and indexer, `[1, ...]` for other tensors. A window
        has at most W - 1 tokens.
        """
        held: Any = cache.layers[layer]
        if name in ("k", "v"):
            found = held.keys if name == "k" else held.values
        elif name == "indexer":
            found = held.indexer_keys[:, None]
        else:
            kind, _, index = name.rpartition("_")
            found = (held.conv_states if kind == "conv" else held.recurrent_states)[int(index)]
        assert isinstance(found, torch.Tensor), f"layer {layer} holds no {name} yet"
        return found

    def cut(self, cache: DynamicCache, tokens: int) -> None:
        """Cut what `cache` keeps of every token to the first `tokens` tokens; states and windows stay."""
        with torch.inference_mode():
            for layer in self.layers:
                held: Any = cache.layers[layer.layer]
                if layer.kv() and layer.window is None:
                    held.keys, held.values = (t[:, :, :tokens].contiguous() for t in (held.keys, held.values))
                    if isinstance(held, WINDOWED):  # a window longer than all sequences
                        held.cumulative_length = tokens
                if any(t.name == "indexer" for t in layer.tensors):
                    held.indexer_keys = held.indexer_keys[:, :tokens].contiguous()

    def read_state(self, cache: DynamicCache, t: TensorLayout, into: torch.Tensor) -> None:
        """Copy a tensor of a state from `cache` into a tensor of its shape, without the batch dimension.

        Before a window is full, zeros fill the rest, so that equal states have equal bytes.
        """
        held = self.tensor_of(cache, t.layer, t.name)[0]
        if t.pool is not PoolName.SWA:
            into.copy_(held)
            return
        into[:, : held.shape[1]].copy_(held)
        into[:, held.shape[1] :].zero_()


def inspect_cache(cache: object, page_size: int, tokens: int, *, positions: int | None = None) -> CacheLayout:
    """Return the layout of `cache`, which holds exactly `tokens` tokens of one sequence.

    `positions` is the number of positions of the model, None if it has no limit. A window that is longer than
    all sequences never forgets, so its KV is kept in pages. Raises UnsupportedModelError if the cache could
    not be restored exactly.
    """
    if not isinstance(cache, DynamicCache) or type(cache) not in (DynamicCache, StateCache):
        raise UnsupportedModelError(
            f"the model keeps its cache in a {type(cache).__name__}, which may hold more than its layers;"
            " only DynamicCache is served"
        )
    layers = (_layer(n, layer, tokens, positions) for n, layer in enumerate(cache.layers))
    layout = CacheLayout(page_size, tuple(layers))
    if not layout.geometries:
        raise UnsupportedModelError("no layer of the model keeps KV or a state, so there is nothing to cache")
    return layout


def _layer(n: int, layer: Any, tokens: int, positions: int | None) -> LayerLayout:
    """Return the layout of layer `n`.

    Raises UnsupportedModelError for a class not in `SERVED` and for tensors of unexpected shape.
    """
    if type(layer) not in SERVED:
        raise UnsupportedModelError(
            f"layer {n} keeps its cache in a {type(layer).__name__}, whose content is not known; only"
            " transformers' own dynamic layers are served"
        )
    window = layer.sliding_window if isinstance(layer, WINDOWED) else None
    if window is not None and positions is not None and window > positions:
        window = None
    tensors: list[TensorLayout] = []
    if has_kv := isinstance(layer, ATTENTION) and layer.is_initialized:
        tensors += _attention(n, layer, tokens, window)
    if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
        tensors.append(_indexer(n, layer, tokens))
    previous: tuple[bool, ...] = ()
    if isinstance(layer, RECURRENT):
        tensors += _states(n, layer)
        previous = tuple(bool(layer.has_previous_state[i]) for i in range(layer.number_of_states))
    return LayerLayout(n, tuple(tensors), window if has_kv else None, previous)


def _attention(n: int, layer: Any, tokens: int, window: int | None) -> Iterator[TensorLayout]:
    held = tokens if window is None else min(tokens, window - 1)
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != held:
            use = "cut it into pages" if window is None else f"keep its window of {window} tokens"
            raise UnsupportedModelError(
                f"layer {n} ({type(layer).__name__}) holds {name} of shape {tuple(tensor.shape)} after"
                f" {tokens} tokens of one sequence; [1, heads, {held}, head_dim] is needed to {use}"
            )
    pool = PoolName.KV if window is None else PoolName.SWA
    rows = () if window is None else (window - 1,)
    for name, tensor in (("k", layer.keys), ("v", layer.values)):
        shape = (tensor.shape[1], *rows, tensor.shape[3])
        yield TensorLayout(n, name, shape, _dense(shape), tensor.dtype, tensor.device, pool)


def _indexer(n: int, layer: Any, tokens: int) -> TensorLayout:
    held = layer.indexer_keys
    if held.dim() != 3 or held.shape[:2] != (1, tokens):
        raise UnsupportedModelError(
            f"layer {n} ({type(layer).__name__}) holds an indexer's keys of shape {tuple(held.shape)} after"
            f" {tokens} tokens of one sequence; [1, {tokens}, head_dim] is needed to cut them into pages"
        )
    if layer.indexer_position_ids is not None:
        raise UnsupportedModelError(
            f"layer {n} ({type(layer).__name__}) also keeps positions beside its indexer's keys, and these"
            " are not carried along"
        )
    shape = (1, held.shape[2])
    return TensorLayout(n, "indexer", shape, _dense(shape), held.dtype, held.device)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _states(n: int, layer: Any) -> Iterator[TensorLayout]:
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
            name, kernel = f"{kind}_{index}", layer.conv_kernel_size[index] if kind == "conv" else None
            shape, stride = tuple(tensor.shape[1:]), tuple(tensor.stride()[1:])
            dtype, device = tensor.dtype, tensor.device
            yield TensorLayout(n, name, shape, stride, dtype, device, PoolName.MAMBA, index, kernel)
