"""A small hybrid model with random weights, for a demonstration without a download.

The model's answers are random text, but its cache has the structure of a real architecture's cache.

The architecture is Qwen3-Next's with nine gated delta nets and three full attentions, in float32. On two CPU
threads, a prefill of 4,096 tokens takes about 1.2 s. The result is 12.6 MB of KV (3 KiB per token) and one
state of 0.7 MB. A restore of this KV and state from slots in memory takes about 3 ms. The vocabulary is the
256 bytes, so text in UTF-8 needs no tokenizer.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

LAYERS = 12
"""Number of layers of the model. Every fourth layer has full attention."""


def small_hybrid_config() -> Qwen3NextConfig:
    """Return the configuration of the small model.

    The model has 12 layers of width 384, dense MLPs, and 20 M weights. Full attention has 2 KV heads of
    dimension 64.
    """
    return Qwen3NextConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        layer_types=["full_attention" if n % 4 == 3 else "linear_attention" for n in range(LAYERS)],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=list(range(LAYERS)),
        num_experts=0,
        max_position_embeddings=65536,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def build_small_hybrid(seed: int = 0) -> PreTrainedModel:
    """Build the model in eval mode on the CPU; equal seeds give equal bits.

    The build takes a fraction of a second, and the model takes 80 MB.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3NextForCausalLM(small_hybrid_config())
    model.train(False)
    return strengthen(model, seed)


def strengthen(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Redraw a model's weights in place, and return the model. Its logits then depend strongly on its cache.

    With the usual initialisation, weights have a standard deviation of 0.02, and a state keeps almost nothing
    of a token after a few later tokens. Then the answers of the model depend only on the last token, and a
    wrong cache would change the logits by as little as rounding does. With the new weights, each layer
    changes the residual stream about as much as the embedding does, and recurrent states remember tens to
    hundreds of tokens.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(weight: torch.Tensor, spread: float) -> None:
        weight.copy_(torch.empty(weight.shape).normal_(std=spread, generator=rng))

    def uniform(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.empty(weight.shape).uniform_(low, high, generator=rng)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "A_log":
                weight.copy_(uniform(weight, 0.005, 0.1).log())
            elif leaf == "dt_bias":
                weight.copy_(uniform(weight, -1.0, 1.0))
            elif weight.dim() >= 2 and "embed" in name:
                normal(weight, 1.0)
            elif weight.dim() >= 2:
                fan_in = math.prod(weight.shape[1:]) if "conv" in name else weight.shape[-1]
                normal(weight, 1.5 / math.sqrt(fan_in))
    return model
