"""Every causal language model of the installed transformers, built small from its own configuration and
served: what comes of it.

    python -m tests.integrations.transformers.sweep > docs/models.md   writes the table in a few minutes
    python -m tests.integrations.transformers.sweep llama mpt          tries some types
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.integrations.transformers import alone
from tests.integrations.transformers.models import FAMILIES, PAGE, WINDOW, build, prompt
from tiercache.core import Tier
from tiercache.errors import TierCacheError, UnsupportedModelError
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.registry import open_backend
from tiercache_lab.demo.audit import Audit
from tiercache_lab.demo.small import strengthen

TYPES: Final = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SECONDS: Final = 600.0
"""How long one model may take."""
LAYERS: Final = 4
_SMALL: Final[tuple[tuple[str, int], ...]] = (
    (r"^vocab_size(_per_layer_input)?$|^(pad|bos|eos|sep|cls|mask|unk)_vocab", 256),
    (r"^(num|n)_(hidden_|decoder_|encoder_|kv_shared_)?layers?$|^(decoder|encoder)_layers$|^depth$", LAYERS),
    # A score of an indexer is a sum over heads of what is 0 half of the time: with few heads, many are equal.
    (r"^index_n_heads$", 32),
    (r"key_value_heads$|kv_heads$|^n_head_kv$|^num_key_value_heads", 2),
    (r"heads?$|^n_heads$|attention_heads", 4),
    (r"^qk_rope_head_dim$|^rotary_dim$|^index_head_dim$", 8),
    (r"head_dim$|^mamba_d_state$|ssm_state_size|^state_size$|^mamba_d_head$|_rank$|^d_kv$", 16),
    (r"^(hidden_size|d_model|n_embd|dim_model|embed_dim|emb_dim|word_embed_proj_dim|embedding_size|"
     r"lru_width|d_embed)$", 64),
    (r"(intermediate|ffn|inner|ff)_?(size|dim|hidden_size)?$|^dim_ff$|^ffn_hidden_size$|^d_inner$|^n_inner$|"
     r"^mamba_d_ssm$", 128),
    (r"^(num|n)_(local_|routed_)?experts$|^num_local_experts$|^moe_num_experts$", 4),
    (r"experts_per_tok|^moe_k$|^moe_top_?k$|^topk$|^num_selects$", 2),
    (r"^n_groups?$|^topk_group$|^num_expert_groups?$|^n_shared_experts$|^mamba_n_groups$|"
     r"^first_k_dense_replace$", 1),
    # Shorter than the prompts, and no multiple of a page.
    (r"^sliding_window$|^attention_chunk_size$|^index_topk$|^sliding_window_size$", WINDOW),
    (r"^(hidden_size_per_layer_input|kv_channels|conv_dim|moe_intermediate_size|"
     r"shared_expert_intermediate_size)$", 32),
)  # fmt: skip
_MEASURED: Final = re.compile(
    r" by \d[\d.e+-]*|, more than the \d[\d.e+-]* that rounding explains|, rounding explains \d[\d.e+-]*"
)
"""Measured numbers in a reason, which differ from processor to processor and are left out of the table."""
_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Row:
    """Result for one model type.

    `served` says how the model is fed, so that all bytes, logits and the text equal those of a recompute; it
    is empty if the model is refused, and "not built" if the small model fails by itself. `reason` says why
    the model is refused, or why its length is limited.
    """

    model_type: str
    served: str
    reason: str

    @property
    def line(self) -> str:
        said = re.sub(r"\s+", " ", _MEASURED.sub("", self.reason)).replace("|", "\\|")
        return f"| {self.model_type} | {self.served or 'refused'} | {said} |"


def settled(line: str) -> str:
    """A line of the table without the lengths that it lacked the time for: a faster machine reaches more."""
    return " ".join(re.sub(r"[^|;]*not reached within[^|;]*", " ", line).split())


def small(model_type: str) -> PreTrainedModel:
    """A small model of a type, with fewer and narrower layers; raises what its code raises."""
    for name, family in FAMILIES.items():
        if family.model_type == model_type:
            return build(name)
    if model_type in alone.ALONE:
        return alone.build(model_type)
    kind = CONFIG_MAPPING[model_type]
    values = _shrunk(kind().to_dict())
    if values.get("is_decoder") is False and not values.get("is_encoder_decoder"):
        values["is_decoder"] = True  # else its attention is not causal
    config = kind.from_dict(values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    layers = next(
        (
            values[name]
            for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
            if name in values
        ),
        None,
    )
    kept = LAYERS
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _shrunk(value) if name.endswith("_config") or name == "text_config" else value
        elif isinstance(value, list) and layers is not None and len(value) == layers:
            value = _mixed(value, kept)
        elif name in _TOKENS:
            value = _TOKENS[name] if value is not None else None
        elif isinstance(value, int) and not isinstance(value, bool):
            value = next(
                (
                    min(value, to) if value > 0 else value
                    for pattern, to in _SMALL
                    if re.search(pattern, name)
                ),
                value,
            )
            if name == "max_position_embeddings":
                value = min(value, 2048)
        found[name] = value
    per_layer = found.pop("per_layer_config", None)
    if "head_dim" in found and found["head_dim"] is None:
        found["head_dim"] = 16
    if "num_key_value_heads" in found and found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = 2
    if "qk_head_dim" in found:
        found["qk_head_dim"] = found["qk_rope_head_dim"] + found["qk_nope_head_dim"]
    if "kv_lora_rank" in found:  # one compressed key for all heads, whose rotated part has a size of its own
        found["num_key_value_heads"] = found.get("num_attention_heads", 4)
        if "head_dim" in found:
            found["head_dim"] = found.get("qk_rope_head_dim", 8)
    if per_layer and "kv_lora_rank" in found:
        # Else the layers of a kind that has ranks of its own would have those of the large model.
        own = {values["layer_types"][int(layer)]: _shrunk(one) for layer, one in per_layer.items()}
        heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 24}
        found["per_layer_config"] = {
            layer: own[kind] | heads for layer, kind in enumerate(found["layer_types"]) if kind in own
        }
    return found


def _mixed(values: list[Any], count: int) -> list[Any]:
    """`count` layers, with one of each kind that there is, in the order that they have."""
    kinds = list(dict.fromkeys(map(str, values)))
    return [values[list(map(str, values)).index(kinds[n % len(kinds)])] for n in range(count)]


def trial(model_type: str) -> Row:
    """Serve a short conversation from nothing, and then from the store alone, in this process."""
    try:
        model = small(model_type)
        with torch.inference_mode():
            model(input_ids=torch.arange(8)[None])
    except Exception as error:  # noqa: BLE001  (a configuration that was not made to be cut)
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        return Row(model_type, "not built", f"the small model fails by itself: {first[:100]}")
    refusals = []
    for prepare in (strengthen, lambda model, seed: model):
        try:
            served, limit = _converse(prepare(model, 0))
        except UnsupportedModelError as error:
            refusals.append(str(error))
            continue
        return Row(model_type, served, limit)
    return Row(model_type, "", refusals[0])


def _converse(model: PreTrainedModel) -> tuple[str, str]:
    """Two turns, the second from the store, checked against a recompute; raises what the worker raises."""
    storage = open_backend("memory://?capacity=256MiB")
    with Worker(model, device_bytes="16MiB", host_bytes="16MiB", storage=storage, page_size=PAGE) as worker:
        audit = Audit(worker.runner, page_slots=64, state_slots=16)
        first = worker.serve(prompt(5 * PAGE + 5, 1, worker.runner.vocab_size), 12, audit=True)
        _check(worker, audit, first)
        worker.synchronize()
        worker.controller.flush()
        for tier in (Tier.DEVICE, Tier.HOST):
            worker.controller.evict(tier)
        again = np.concatenate([first.tokens, prompt(7, 2, worker.runner.vocab_size)])
        second = worker.serve(again, 3, audit=True)
        _check(worker, audit, second)
        limit = worker.limit
        assert second.restored >= 5 * PAGE or (limit is not None and limit < len(again)), second.restored
        return f"by {worker.probe.tail_mode}", worker.probe.why if limit is not None else ""


def _check(worker: Worker, audit: Audit, generation: Any) -> None:
    """Bit for bit what the same steps compute without a cache, and as near to the model as the probe."""
    verdict = audit.check(generation)
    assert (verdict.max_logit_diff, verdict.same_text, verdict.same_bytes) == (0.0, True, True), verdict
    by_itself = worker.runner.without_cache(generation.tokens[: generation.prompt_tokens], 1)[0]
    assert float((generation.first_logits - by_itself).abs().max()) <= worker.probe.tolerance


def _child(model_type: str, end: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        found = asdict(trial(model_type))
    except TierCacheError as error:
        found = {"error": f"refused while it was served: {error}"}
    except BaseException as error:  # noqa: BLE001  (whatever it is, the parent is to say it)
        found = {"error": f"{type(error).__name__}: {error}"}
    end.send_bytes(json.dumps(found).encode())


def tried(model_type: str, seconds: float = SECONDS) -> Row:
    """`trial` in a process of its own.

    RuntimeError for one that ends by itself, or not in time, or with a raw exception.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integrations.transformers.sweep"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found = (
            json.loads(ours.recv_bytes())
            if ours.poll(seconds)
            else {"error": f"no end within {seconds:g} seconds"}
        )
    except EOFError:
        found = {"error": "the process died"}
    finally:
        process.kill()
        process.join()
        ours.close()
    if "error" in found:
        raise RuntimeError(f"{model_type}: {found['error']}")
    return Row(**found)


def half(part: int) -> list[Any]:
    """Parameters of one of two tests of all types, which can run beside each other.

    Of the types that are served by chunk and without a limit, as most are, the slow tests try every fourth.
    """
    plain = [name for name, line in documented().items() if line.endswith("| by chunk |  |")]
    stress = {*plain} - {*plain[::4]}
    return [
        pytest.param(name, marks=pytest.mark.stress if name in stress else pytest.mark.slow)
        for name in TYPES[part::2]
    ]


def documented() -> dict[str, str]:
    """The lines of docs/models.md by type."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    return {
        line.split(" | ")[0].strip("| "): line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| type")
    }


def rows(types: Sequence[str], jobs: int = 2) -> Iterator[Row]:
    """Every type's row, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(tried, types)


def table(found: Sequence[Row]) -> str:
    """The page, in Markdown."""
    served = sum(row.served.startswith("by") for row in found)
    refused = sum(not row.served for row in found)
    return "\n".join([
        "# Models",
        "",
        "This page is written by `python -m tests.integrations.transformers.sweep > docs/models.md`, "
        f"with transformers {transformers.__version__}.",
        "Do not edit it.",
        "",
        "It lists every causal language model type that transformers knows, each built as a small model from",
        f"its own configuration, with random weights and with windows and chunks of {WINDOW} tokens.",
        "It served two turns of a conversation; before the second, device and host were emptied.",
        "",
        "- **Served** *by chunk* or *by token*: so the tokens after a restored prefix are fed to the model.",
        "  Every restored byte, the logits and the text equal, to the last bit, the same passes without a",
        "  cache, and the logits are within the probe's tolerance of the model by itself.",
        "- *Refused*: the worker does not serve it. *Not built*: no small model could be built and run.",
        "- **Reason or limit**: sequences longer than a limit are computed without the cache.",
        "",
        "The worker decides by the behaviour of the model that it is given; another configuration of a type",
        "may be served or refused for other reasons.",
        "",
        f"Of {len(found)} types, {served} are served, {refused} are refused, and "
        f"{len(found) - served - refused} could not be built small.",
        "",
        "| type | served | reason or limit |",
        "|---|---|---|",
        *(row.line for row in found),
        "",
    ])  # fmt: skip


def _line(model_type: str) -> str:
    try:
        return tried(model_type).line
    except RuntimeError as error:
        return f"FAILED {error}"


def main(types: Sequence[str]) -> None:
    """Write the table of all types, or what becomes of some, to standard output."""
    if types:
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(_line, types):
                print(line, flush=True)
        return
    sys.stdout.write(table(list(rows(TYPES))))


if __name__ == "__main__":
    main(sys.argv[1:])
