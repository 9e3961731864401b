"""Comparison of a block of tokens with single ones: `python -m tests.benchmarks.blocks llama qwen3`.

A draft's proposals are verified in such a block. Prints, for each family, how many rows of logits equal those
of passes of one token bit for bit, how many choose the same token, and the largest difference.
"""

from __future__ import annotations

import sys

import torch

from tests.integrations.transformers.models import loaded, prompt

PROMPTS = range(40, 48)
"""Lengths of the prompts in tokens."""
BLOCK = 5


def compare(family: str) -> str:
    """Run one family."""
    runner = loaded(family)[0]
    equal, chosen, off = 0, 0, 0.0
    for length in PROMPTS:
        tokens = prompt(length + BLOCK, seed=length)
        block, single = runner.new_cache(), runner.new_cache()
        for cache in (block, single):
            runner.forward(cache, tokens[:length], 0)
        rows = runner.logits(block, tokens[length:], length, keep=BLOCK)
        ones = torch.stack(
            [runner.forward(single, tokens[at : at + 1], at) for at in range(length, length + BLOCK)]
        )
        equal += int((rows == ones).all(1).sum())
        chosen += int((rows.argmax(1) == ones.argmax(1)).sum())
        off = max(off, float((rows - ones).abs().max()))
    count = len(PROMPTS) * BLOCK
    return f"{family}: {equal} of {count} rows equal, {chosen} choose the same token, off by {off:.1e}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[1:]:
        print(compare(family))
