"""Ratio and speed of each codec of the `s3` store on real caches: `python -m tests.benchmarks.compression`.

The caches are those of transformers models that read this project's own pages, as bytes of UTF-8:

- `small`: the model of `tiercache demo`, with random weights under which its states remember;
- others: one attention layer and one recurrent layer of a published model's width, with the random weights of
  transformers' own initialisation. No model is trained: no published weights come without a download.

Models compute in float32, and the caches are rounded to the other dtypes. An object is a page of PAGE tokens
(K and V of each layer, `[heads, tokens, dim]`) or a state at one depth. A row is JSON: `ratio`, and `encode`
and `decode` in GB of payload for each second of CPU time of one thread, the best of three passes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiercache_backends.s3.compression import Codec, decode, encode
from transformers import AutoModelForCausalLM, NemotronHConfig, PreTrainedModel, Qwen3NextConfig

from tiercache_lab.demo.small import build_small_hybrid

PAGE = 64
TOKENS = 2048
DEPTHS = (512, 1024, 2048)
KV = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn,
      "fp8_e5m2": torch.float8_e5m2}  # fmt: skip
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
READ = "stores.md"
"""Page that every model reads."""


def tokens_of(path: Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def qwen3_next() -> PreTrainedModel:
    """Two layers of Qwen3-Next 80B-A3B, with a small dense MLP and a vocabulary of bytes."""
    return from_config(
        Qwen3NextConfig(
            vocab_size=256, hidden_size=2048, intermediate_size=512, num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"], num_attention_heads=16, num_key_value_heads=2,
            head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
            linear_value_head_dim=128, mlp_only_layers=[0, 1], num_experts=0, bos_token_id=None,
            eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def nemotron_h() -> PreTrainedModel:
    """Two layers of Nemotron-H 8B, with a vocabulary of bytes."""
    return from_config(
        NemotronHConfig(
            vocab_size=256, hidden_size=4096, layers_block_type=["linear_attention", "full_attention"],
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=512,
            ssm_state_size=128, mamba_num_heads=128, mamba_head_dim=64, n_groups=8, chunk_size=128,
        )
    )  # fmt: skip


def from_config(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "small": build_small_hybrid,
    "qwen3_next": qwen3_next,
    "nemotron_h": nemotron_h,
}


def caches(model: PreTrainedModel) -> Iterator[tuple[str, str, list[bytes]]]:
    """Yield pool, dtype and objects of each pool that the model's cache fills."""
    text = tokens_of(next(path for path in PAGES if path.name == READ))[:TOKENS]
    model.train(False)
    states: dict[str, list[list[torch.Tensor]]] = {"state": [], "conv": []}
    with torch.no_grad():
        for depth in DEPTHS:
            layers = model(text[None, :depth], use_cache=True).past_key_values.layers
            recurrent = [layer for layer in layers if hasattr(layer, "recurrent_states")]
            states["state"].append([layer.recurrent_states[0] for layer in recurrent])
            states["conv"].append([layer.conv_states[0] for layer in recurrent])
    attention = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    pages = [
        [part[:, :, start : start + PAGE] for layer in attention for part in (layer.keys, layer.values)]
        for start in range(0, TOKENS, PAGE)
    ]
    for name, dtype in KV.items():
        yield "kv", name, [payload(page, dtype) for page in pages]
    for pool, objects in states.items():
        for name, dtype in STATES.items():
            yield pool, name, [payload(one, dtype) for one in objects]


def payload(tensors: list[torch.Tensor], dtype: torch.dtype) -> bytes:
    return b"".join(tensor.contiguous().to(dtype).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def measure(codec: Codec, objects: list[bytes]) -> dict[str, float]:
    """Ratio and GB/s over these objects; an object that does not shrink counts as stored raw."""
    nbytes = sum(map(len, objects))
    encoding = decoding = float("inf")
    for _ in range(3):
        start = time.thread_time()
        encoded = [encode(codec, [memoryview(one)], len(one)) for one in objects]
        encoding = min(encoding, time.thread_time() - start)
        whole = [
            one if pieces is None else b"".join(pieces) for one, pieces in zip(objects, encoded, strict=True)
        ]
        start = time.thread_time()
        found = [
            decode(Codec.RAW if pieces is None else codec, memoryview(one), len(plain))
            for one, pieces, plain in zip(whole, encoded, objects, strict=True)
        ]
        decoding = min(decoding, time.thread_time() - start)
        assert found == objects
    ratio = nbytes / sum(map(len, whole))
    return {"ratio": round(ratio, 3), "encode": round(nbytes / encoding / 1e9, 2),
            "decode": round(nbytes / decoding / 1e9, 2)}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        for pool, dtype, objects in caches(MODELS[name]()):
            for codec in Codec:
                if codec is not Codec.RAW:
                    row = {"benchmark": "compression", "model": name, "pool": pool, "dtype": dtype,
                                           "codec": codec.name.lower(), "bytes": len(objects[0])}  # fmt: skip
                    print(json.dumps(row | measure(codec, objects)), flush=True)


if __name__ == "__main__":
    main()
