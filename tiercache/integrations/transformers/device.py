"""Pool tensors of the reference worker, and copies between them and a Hugging Face cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from tiercache.core import PoolName
from tiercache.errors import ConfigError, SlotError, TokenError
from tiercache.integrations.transformers.layout import (
    WINDOWED,
    CacheLayout,
    StateCache,
    StateSlots,
    TensorLayout,
)
from tiercache.integrations.transformers.stream import to_device

Slots: TypeAlias = npt.NDArray[np.int64] | Iterable[int]
"""Slot numbers of one pool, from 0."""


Tensors: TypeAlias = Mapping[tuple[int, str], torch.Tensor]
"""Tensors by (layer, name)."""


@dataclass(frozen=True)
class PoolTensors:
    """The tensors that hold the slots of one worker, by (layer, name) as in the geometries.

    On a device, the functions of this module queue their copies in torch's current stream. Before another
    stream uses a slot, the caller must make that stream wait for these copies, for example by a fence.

    Thread safety: not synchronised; only the owner of a slot may use it.
    """

    layout: CacheLayout
    page_slots: int
    state_slots: int
    kv: Tensors
    """Tensors `[page_slots * page_size, heads, head_dim]`.

    Slot s owns the rows `[s * page_size, (s + 1) * page_size)`.
    """
    states: Tensors
    """Tensors `[state_slots, ...]` of all state pools; none for a model without states."""

    def of(self, pool: PoolName) -> Tensors:
        """Return the tensors of one pool."""
        if pool is PoolName.KV:
            return self.kv
        names = {(t.layer, t.name) for t in self.layout.state_tensors() if t.pool is pool}
        return {name: tensor for name, tensor in self.states.items() if name in names}

    def pages(self, layer: int, name: str) -> torch.Tensor:
        """Return one KV tensor by slot: a view `[page_slots, page_size, heads, head_dim]`."""
        tensor = self.kv[layer, name]
        return tensor.view(self.page_slots, self.layout.page_size, *tensor.shape[1:])


def allocate_pools(layout: CacheLayout, page_slots: int, state_slots: int) -> PoolTensors:
    """Return zeroed pools, each tensor on the device on which the model keeps that layer's cache.

    Raises ConfigError if a device has no room for them.
    """

    def zeros(count: int, tensors: Iterable[TensorLayout]) -> dict[tuple[int, str], torch.Tensor]:
        return {
            (t.layer, t.name): torch.zeros((count, *t.shape), dtype=t.dtype, device=t.device) for t in tensors
        }

    try:
        kv = zeros(page_slots * layout.page_size, layout.kv_tensors())
        states = zeros(state_slots, layout.state_tensors())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no room for {page_slots} pages and {state_slots} states beside the model; ask"
            " for fewer"
        ) from error
    return PoolTensors(layout, page_slots if kv else 0, state_slots if states else 0, kv, states)


def export_pages(cache: DynamicCache, pool: PoolTensors, first_page: int, slots: Slots) -> None:
    """Copy pages `[first_page, first_page + len(slots))` of the cache into `slots`.

    Raises TokenError if the cache does not hold all of these tokens, SlotError for a slot that the pool does
    not have; nothing is copied in either case.
    """
    index, layout = _slots(slots, pool.page_slots), pool.layout
    start, stop = first_page * layout.page_size, (first_page + len(index)) * layout.page_size
    if not 0 <= start <= stop <= layout.length(cache):
        raise TokenError(
            f"the cache holds {layout.length(cache)} tokens, not the pages of tokens [{start}, {stop});"
            " export full pages only"
        )
    with torch.inference_mode():
        at = _on_devices(index, layout)
        for t in layout.kv_tensors() if len(index) else ():
            # [heads, tokens, head_dim] -> [heads, pages, page_size, head_dim]
            #                           -> [pages, page_size, heads, head_dim]
            held = layout.tensor_of(cache, t.layer, t.name)[0, :, start:stop]
            by_page = held.reshape(held.shape[0], len(index), layout.page_size, held.shape[-1])
            by_page = by_page.permute(1, 2, 0, 3)
            pool.pages(t.layer, t.name).index_copy_(0, at[t.device], by_page)


def export_state(cache: DynamicCache, pool: PoolTensors, slots: StateSlots) -> None:
    """Copy the cache's recurrent tensors and windows into a slot of each state pool.

    The state in the slots stands for exactly the tokens that the cache holds now. Raises SlotError for an
    unknown slot, and unless there is a slot for each state pool.
    """
    at = _state_slots(slots, pool)
    with torch.inference_mode():
        for t in pool.layout.state_tensors():
            pool.layout.read_state(cache, t, pool.states[t.layer, t.name][at[t.pool]])


def fill(
    cache: DynamicCache,
    pool: PoolTensors,
    page_slots: Slots,
    state_slots: StateSlots | None,
    wait_layer: Callable[[int], None],
    tokens: int | None = None,
) -> DynamicCache:
    """Fill a *new* cache from slots and return it.

    It then holds `tokens` tokens (default: those of the pages). The cache shares no memory with the pool,
    because a forward writes states in place.

    `wait_layer(n)` is called before the first read of layer n's slots is made or queued, in ascending order
    of layers. An exception of `wait_layer` is passed on; after such an exception, do not use the cache.
    Raises SlotError for an unknown slot, for a missing state slot, for a state slot without pages (or, where
    no pages are kept, without `tokens`), and for a state slot of a model without states.
    """
    index = _slots(page_slots, pool.page_slots)
    if len(index) == 0 and state_slots is None:
        return cache
    tokens = len(index) * pool.layout.page_size if tokens is None else tokens
    if (state_slots is not None) != bool(pool.states) or bool(len(index)) != bool(pool.kv) or not tokens:
        raise SlotError(
            f"{len(index)} pages and state slot {state_slots} at {tokens} tokens are no prefix of this model;"
            " a hit has pages if the model keeps any, and a state if it has one"
        )
    states = _state_slots(state_slots, pool) if state_slots is not None else {}
    with torch.inference_mode():
        at = _on_devices(index, pool.layout)
        for layer in pool.layout.layers:
            if not layer.tensors:
                continue
            wait_layer(layer.layer)
            held: Any = cache.layers[layer.layer]
            if kv := layer.kv():
                keys, values = (
                    _gather(pool, t, at[t.device])
                    if t.pool is PoolName.KV
                    else _window(pool, t, states[t.pool], tokens)
                    for t in kv
                )
                # This sets dtype, device and flags as the first update would.
                held.lazy_initialization(keys, values)
                held.keys, held.values = keys, values
            if isinstance(held, WINDOWED):
                held.cumulative_length = tokens
            for t in layer.tensors[len(kv) :]:
                if t.pool is PoolName.KV:
                    keys = _gather(pool, t, at[t.device])[:, 0]
                    held.lazy_initialization_indexer(keys)
                    held.indexer_keys = keys
                else:
                    _fill_state(held, pool, t, states[t.pool])
                    held.has_previous_state = dict(enumerate(layer.has_previous))
    if isinstance(cache, StateCache):
        cache.tokens = tokens
    return cache


def _on_devices(index: torch.Tensor, layout: CacheLayout) -> dict[torch.device, torch.Tensor]:
    """Copy an index to every device that holds KV, once for all layers of that device."""
    return {device: to_device(index, device) for device in {t.device for t in layout.kv_tensors()}}


def _window(pool: PoolTensors, t: TensorLayout, slot: int, tokens: int) -> torch.Tensor:
    """Return a copy of a window in the form of the cache, `[1, heads, tokens, head_dim]`."""
    heads, most, dim = t.shape
    # Beyond its window, a forward leaves a view without the first rows of a longer tensor. The copy is such a
    # view too, so that no operation is given operands of another form than without a restore.
    first = int(tokens > most)
    rows = torch.empty((1, heads, min(tokens, most) + first, dim), dtype=t.dtype, device=t.device)
    window = rows[:, :, first:]
    window[0].copy_(pool.states[t.layer, t.name][slot][:, :tokens])
    return window


def _gather(pool: PoolTensors, t: TensorLayout, at: torch.Tensor) -> torch.Tensor:
    """Gather pages into the form of the cache: a new contiguous tensor `[1, heads, tokens, head_dim]`."""
    pages, (heads, dim) = pool.pages(t.layer, t.name), t.shape
    gathered = torch.empty((heads, len(at), pool.layout.page_size, dim), dtype=t.dtype, device=t.device)
    # Gather rows directly into their final place. A gather of whole pages would need a transposition, which
    # is a second copy.
    for head in range(heads):
        torch.index_select(pages[:, :, head], 0, at, out=gathered[head])
    return gathered.view(1, heads, len(at) * pool.layout.page_size, dim)


def _fill_state(held: Any, pool: PoolTensors, t: TensorLayout, slot: int) -> None:
    source = pool.states[t.layer, t.name][slot][None]
    template = torch.empty_strided(source.shape, (source.numel(), *t.stride), dtype=t.dtype, device=t.device)
    # The layer itself allocates a zeroed tensor in the form of the template. The state is copied into that
    # tensor, because CUDA graphs require that its address stays the same.
    if t.conv_kernel_size is not None:
        held.lazy_initialization(conv_states=template, state_idx=t.index, conv_kernel_size=t.conv_kernel_size)
        held.conv_states[t.index].copy_(source)
    else:
        held.lazy_initialization(recurrent_states=template, state_idx=t.index)
        held.recurrent_states[t.index].copy_(source)


def _state_slots(slots: StateSlots, pool: PoolTensors) -> Mapping[PoolName, int]:
    """Return the slot in each state pool.

    Raises SlotError unless each state pool has exactly one, and for a slot outside the pool.
    """
    names = pool.layout.state_geometries.keys()
    found = slots if isinstance(slots, Mapping) else dict.fromkeys(names, slots)
    if found.keys() != names:
        raise SlotError(
            f"a state of this model needs a slot of each of {', '.join(names) or 'no pool'}, not of"
            f" {', '.join(found) or 'none'}"
        )
    _slots(list(found.values()), pool.state_slots)
    return found


def _slots(slots: Slots, capacity: int) -> torch.Tensor:
    """Return slots as an int64 tensor on the CPU. Raises SlotError for a slot outside `[0, capacity)`."""
    index = torch.as_tensor(np.asarray(slots if isinstance(slots, np.ndarray) else list(slots), np.int64))
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < capacity:
        raise SlotError(
            f"slots {int(index.min())} to {int(index.max())} are not all in a pool of {capacity}; use slots"
            " that the pool handed out"
        )
    return index


def differences(layout: CacheLayout, a: DynamicCache, b: DynamicCache) -> tuple[str, ...]:
    """Return the places where two caches differ in bits, or in flags that the next forward reads.

    If there are none, the caches are interchangeable.
    """
    found = []
    for layer in layout.layers:
        left, right = _flags(a.layers[layer.layer]), _flags(b.layers[layer.layer])
        if left != right:
            found += [f"layer {layer.layer} {name}" for name in left if left[name] != right[name]]
            continue
        for t in layer.tensors:
            if not _same_bits(layout.tensor_of(a, t.layer, t.name), layout.tensor_of(b, t.layer, t.name)):
                found.append(f"layer {t.layer} {t.name}")
    return tuple(found)


def _flags(held: Any) -> dict[str, object]:
    """Return the attributes of a cache layer that the next forward reads.

    Attributes that the layer's class lacks are None.
    """
    names = (
        "is_initialized", "has_previous_state", "is_conv_states_initialized",
        "is_recurrent_states_initialized", "conv_kernel_size",
        "number_of_states", "record_past", "dtype", "device", "sliding_window", "cumulative_length",
        "is_indexer_initialized",
    )  # fmt: skip
    return {name: getattr(held, name, None) for name in names}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal as bytes: NaNs equal themselves, and 0.0 differs from -0.0."""
    if (a.shape, a.dtype, a.is_contiguous()) != (b.shape, b.dtype, b.is_contiguous()):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def export_last_page(cache: DynamicCache, pool: PoolTensors, slot: int) -> None:
    """Copy the KV behind the cache's last full page into the beginning of page slot `slot`.

    What the slot holds behind them stays as it was.
    """
    layout = pool.layout
    start = layout.length(cache) // layout.page_size * layout.page_size
    with torch.inference_mode():
        for t in layout.kv_tensors():
            held = layout.tensor_of(cache, t.layer, t.name)[0, :, start:].transpose(0, 1)
            pool.pages(t.layer, t.name)[slot, : len(held)].copy_(held)
