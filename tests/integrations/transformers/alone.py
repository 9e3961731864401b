"""Small models that keep states alone, and workers over them."""

from __future__ import annotations

import functools
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.integrations.transformers.models import PAGE, WINDOW
from tiercache.integrations.transformers import ModelRunner, ProbeReport, load
from tiercache.integrations.transformers import worker as worker_module
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.small import strengthen

_BASE: Final = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
ALONE: Final[dict[str, dict[str, Any]]] = {
    "mamba": _BASE | {"state_size": 8},
    "mamba2": _BASE | {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": _BASE | {"state_size": 8},
    "mistral": _BASE | {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
     "sliding_window": WINDOW},
    "rwkv": _BASE | {"attention_hidden_size": 64, "intermediate_size": 128, "context_length": 1024},
    "xlstm": _BASE | {"num_blocks": 3, "embedding_dim": 64, "num_heads": 4, "qk_dim_factor": 1.0,
     "chunk_size": 16, "max_inference_chunksize": 512},
}  # fmt: skip
"""Configurations by model type. All layers of mistral have windows; rwkv and xlstm are refused."""


def build(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A small model in eval mode; equal seeds give equal bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**ALONE[model_type]))
    built: PreTrainedModel = strengthen(model.eval(), seed).to(dtype)
    return built


@functools.cache
def loaded(
    model_type: str, page: int = PAGE, dtype: torch.dtype = torch.float32
) -> tuple[ModelRunner, ProbeReport]:
    """The model, probed once per test run; tests must not change it."""
    return load(build(model_type, dtype), page)


def serving(
    model_type: str,
    storage: Any = None,
    *,
    page: int = PAGE,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Worker:
    """A worker over a model that was probed once per test run."""
    found = loaded(model_type, page, dtype)
    given = {"device_bytes": "8MiB", "host_bytes": "8MiB"} | options
    with patch.object(worker_module, "load", lambda model, page_size: found):
        return Worker(found[0].model, storage=storage, page_size=page, **given)


def wrong_state(runner: ModelRunner, depth: int) -> tuple[float, float]:
    """How far the next logits move if the restored state is zero, and if it is another prompt's."""
    pool = runner.allocate_pools(0, 3)
    for slot, seed in enumerate((1, 2)):
        cache = runner.new_cache()
        runner.forward(cache, np.random.default_rng(seed).integers(0, 256, depth), 0)
        runner.export_state(cache, pool, slot)
    mine, theirs, nothing = (
        runner.forward(runner.restore(pool, (), slot, tokens=depth), [7], depth) for slot in (0, 1, 2)
    )
    return float((nothing - mine).abs().max()), float((theirs - mine).abs().max())
