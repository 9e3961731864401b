"""Copy of a sequence's last page, which need not be full, from a Hugging Face cache to device pools."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache

from tiercache.integrations.transformers.device import PoolTensors


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
