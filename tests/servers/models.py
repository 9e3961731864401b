"""Tiny models with random weights, and a tokenizer of bytes, as directories that an engine can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = 512
"""Tokens of the vocabulary: 256 bytes, fillers, and three marks at the end."""
MODELS = ("llama", "qwen3next")


def make_model(name: str, directory: Path) -> Path:
    """Write a model, if that has not been done, and return its directory; equal names give equal bits."""
    import torch
    from transformers import AutoModelForCausalLM

    from tiercache_lab.demo.small import strengthen

    path = directory / name
    if (path / "done").exists():
        return path
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_config(name), dtype=torch.float32)
    # The usual random weights forget a prompt after a few tokens: a wrong cache would give the same answers.
    strengthen(model, 7)
    if name.startswith("gemma"):  # whose embeddings are larger inside, and its answers' weights
        model.get_input_embeddings().weight.data /= model.config.hidden_size**0.5
    model.save_pretrained(path)
    if name == "qwen3next":  # SGLang reads the interval, which newer releases of transformers do not write
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"full_attention_interval": 4}))
    _tokenizer().save_pretrained(path)
    (path / "done").touch()
    return path


def _config(name: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": WORDS, "bos_token_id": WORDS - 3, "eos_token_id": WORDS - 2, "pad_token_id": WORDS - 1,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 32768,
    }  # fmt: skip
    gated: dict[str, Any] = {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
    }  # fmt: skip
    mamba: dict[str, Any] = {
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1,
        "mamba_expand": 2, "mamba_chunk_size": 64,
    }  # fmt: skip
    wide: dict[str, Any] = {  # 32 KiB of KV a token
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 8,
    }  # fmt: skip
    window: dict[str, Any] = {"sliding_window": 200}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    chunks: dict[str, Any] = {
        "attention_chunk_size": 256, "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [], "interleave_moe_layer_step": 9, "intermediate_size_mlp": 256,
    }  # fmt: skip
    kind, own = {
        "llama": ("Llama", {}),
        "wide": ("Llama", wide),
        "qwen3next": ("Qwen3Next", gated),
        "gemma3": ("Gemma3Text", {**window, "layer_types": kinds, "query_pre_attn_scalar": 32}),
        "gemma4": (  # whose layer without a window has larger heads
            "Gemma4Text",
            {
                **window, "layer_types": kinds, "per_layer_config": {"3": {"head_dim": 64}},
                "hidden_size_per_layer_input": 0,
            },
        ),
        "gemma2": ("Gemma2", {**window, "query_pre_attn_scalar": 32}),
        "gptoss": ("GptOss", {**window, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "mistral": ("Mistral", window),
        "llama4": ("Llama4Text", chunks),
        "falconh1": ("FalconH1", {**mamba, "mamba_d_ssm": 256}),
        "granite4": (
            "GraniteMoeHybrid",
            {
                **mamba, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 4,
                "num_experts_per_tok": 2, "shared_intermediate_size": 128,
            },
        ),
    }[name]  # fmt: skip
    return getattr(transformers, f"{kind}Config")(**common | own)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words |= {f"<{n}>": n for n in range(len(words), WORDS - 3)}
    words |= {"<s>": WORDS - 3, "</s>": WORDS - 2, "<pad>": WORDS - 1}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=32768
    )
