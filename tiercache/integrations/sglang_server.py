"""SGLang's server: settings that change the cached bytes beside those of its pools."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from blake3 import blake3
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.runtime_context import get_memory, get_model, get_spec
from sglang.version import __version__ as sglang_version

from tiercache.errors import ConfigError

_log = logging.getLogger(__name__)

PLACE: Final = "hicache-storage-backend-extra-config"
"""Name of the settings in error messages."""
OF_SGLANG: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
})  # fmt: skip
"""Keys of the extra config that SGLang itself reads; all other keys are settings of tiercache."""

MODEL_SETTINGS: Final = (
    "model_path", "revision", "load_format", "json_model_override_args", "context_length", "dtype",
    "quantization", "kv_cache_dtype", "modelopt_quant", "modelopt_checkpoint_restore_path",
    "rl_quant_profile", "model_loader_extra_config", "decrypted_config_file", "model_impl",
)  # fmt: skip
"""Settings that identify the model and its rotary embedding.

The name under which the model is served is left out, because it is only an alias. A pool holds both kinds of
FP8 (E4M3 and E5M2) as plain bytes, so only `kv_cache_dtype` tells the kind. The value "auto" of
`kv_cache_dtype` means the dtype that the checkpoint names.
"""

DRAFT_SETTINGS: Final = (
    "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
)  # fmt: skip
"""Settings that identify the draft model."""

_MAX_SCALE_BYTES: Final = 64 << 20
"""Maximum size in bytes of a file of KV scales. Real files have a few kilobytes."""


class Server:
    """Settings of the server, as facts for the layout digest of a pool.

    Construction raises ConfigError if a file that the configuration names cannot be read.

    Thread safety: immutable.
    """

    def __init__(self, pp_size: int) -> None:
        try:
            model, spec = get_model(), get_spec()
        except ValueError:
            model = spec = None
        self.known = model is not None
        """Whether a server has published its configuration; False in a script without a server."""
        self.tells_prefixes = _tells_prefixes()
        """Whether SGLang says which pages come before those of a write; None if that is unknown."""
        # GPUs of AMD and NVIDIA have different FP8 formats with the name E4M3.
        self._platform = ["sglang", sglang_version, "rocm" if torch.version.hip else "cuda"]
        # A pool of states does not tell how layers are divided among pipeline stages (pp).
        self._stages = [pp_size, os.environ.get("SGLANG_PP_LAYER_PARTITION") if pp_size > 1 else None]
        self._model = [*_said(model, MODEL_SETTINGS), ["scales", _scales(model)]]
        self._draft = _said(spec, DRAFT_SETTINGS)

    def facts(self, *, draft: bool) -> list[Any]:
        """Return the settings on which a pool's bytes depend; with `draft`, also those of a draft model."""
        return [*self._platform, self._stages, self._model, self._draft if draft else None]


def _tells_prefixes() -> bool | None:
    # SGLang takes this option out of what a backend gets, but publishes the text that has it. Of a store that
    # is attached while the server runs, it publishes nothing before the attach has succeeded.
    try:
        memory = get_memory()
    except ValueError:
        return None
    if getattr(memory, "hicache_storage_backend", None) is None:
        return None
    text = memory.hicache_storage_backend_extra_config
    return bool(HybridCacheController.parse_storage_backend_extra_config(text)[-1])


def _said(published: Any, names: Sequence[str]) -> list[list[str]]:
    """Return the name and the value of each setting as text; "None" stands for no value.

    Logs a warning about settings that this version of SGLang does not have.
    """
    absent = [name for name in names if published is not None and not hasattr(published, name)]
    if absent:
        _log.warning(
            "tiercache: this SGLang does not report %s; if you set any of these, add its value to tiercache's"
            " setting revision",
            ", ".join(absent),
        )
    return [[name, str(getattr(published, name, None))] for name in names]


def _scales(model: Any) -> str | None:
    """Return the digest of the file of KV scales, or None if the configuration names no such file.

    KV scales are the factors with which keys and values are converted to FP8, so the cached bytes depend on
    them.
    """
    path = getattr(model, "quantization_param_path", None)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_SCALE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the KV scales in {path} cannot be read, and cached bytes depend on them: {error}"
        ) from error
    if len(content) > _MAX_SCALE_BYTES:
        raise ConfigError(
            f"the KV scales in {path} have more than {_MAX_SCALE_BYTES} bytes; nothing of that size can be KV"
            " scales"
        )
    return blake3(content).hexdigest()
