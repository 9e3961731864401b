"""Comparison of batched forward passes with single ones: `python -m tests.benchmarks.batches llama bamba`.

Sequences have equal length, so that nothing is padded. Prints, for each family and batch size, how many rows
of a prefill and of a decoding step equal their single passes bit for bit, and the largest difference.
"""

from __future__ import annotations

import copy
import sys

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tests.integrations.transformers.models import loaded, prompt

TOKENS = 33
SIZES = (2, 4, 8)


def joined(caches: list[DynamicCache]) -> DynamicCache:
    """One cache of all sequences."""
    together = copy.deepcopy(caches[0])
    for n, layer in enumerate(together.layers):
        others = [cache.layers[n] for cache in caches]
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                setattr(layer, name, torch.cat([getattr(one, name) for one in others]))
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            for key in [key for key in states if states[key] is not None]:
                states[key] = torch.cat([getattr(one, name)[key] for one in others])
    return together


@torch.inference_mode()
def compare(family: str, size: int) -> str:
    """Run one family at one batch size."""
    runner = loaded(family)[0]
    prompts = [prompt(TOKENS, seed) for seed in range(size)]
    caches = [runner.new_cache() for _ in range(size)]
    ids = torch.from_numpy(np.stack([one.astype(np.int64) for one in prompts]))
    found = []

    def note(ids: torch.Tensor, start: int, cache: DynamicCache, single: list[torch.Tensor]) -> None:
        positions = torch.arange(start, start + ids.shape[1])[None].expand(size, -1)
        output = runner.model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=positions)
        rows = output.logits[:, -1].float()
        equal = sum(torch.equal(row, one) for row, one in zip(rows, single, strict=True))
        found.append(
            f"{equal} of {size} rows equal, off by {float((rows - torch.stack(single)).abs().max()):.1e}"
        )

    first = [runner.forward(cache, one, 0) for cache, one in zip(caches, prompts, strict=True)]
    note(ids, 0, runner.new_cache(), first)
    together, tokens = joined(caches), [int(logits.argmax()) for logits in first]
    second = [runner.forward(cache, [token], TOKENS) for cache, token in zip(caches, tokens, strict=True)]
    note(torch.tensor(tokens)[:, None], TOKENS, together, second)
    return f"{family}, {size} sequences: prefill {found[0]}; decoding {found[1]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:]:
        for size in SIZES:
            print(compare(family, size))
