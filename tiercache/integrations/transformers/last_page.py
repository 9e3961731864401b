"""Copies of a sequence's last page, which need not be full, between a Hugging Face cache and device pools."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from tiercache.integrations.transformers.device import PoolTensors
from tiercache.integrations.transformers.layout import WINDOWED, CacheLayout


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


def cut(cache: DynamicCache, layout: CacheLayout, tokens: int) -> None:
    """Cut what is kept of every token to the first `tokens` tokens; states and windows stay."""
    with torch.inference_mode():
        for layer in layout.layers:
            held: Any = cache.layers[layer.layer]
            if layer.k is not None and layer.window is None:
                held.keys, held.values = (t[:, :, :tokens].contiguous() for t in (held.keys, held.values))
                if isinstance(held, WINDOWED):  # a window longer than all sequences
                    held.cumulative_length = tokens
            if layer.indexer is not None:
                held.indexer_keys = held.indexer_keys[:, :tokens].contiguous()
