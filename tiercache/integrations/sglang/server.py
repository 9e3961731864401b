"""Settings of SGLang's server that change the bytes of a cache and that no pool shows."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from blake3 import blake3
from sglang.srt.runtime_context import get_model, get_spec
from sglang.version import __version__ as sglang_version

from tiercache.errors import ConfigError

_log = logging.getLogger(__name__)

_MODEL: Final = (
    "model_path", "revision", "load_format", "json_model_override_args", "context_length", "dtype", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""Settings that say which model it is, and with which rope; the served name of a model is only an alias.

FP8 of both kinds is plain bytes in a pool; `kv_cache_dtype` tells them apart, and "auto" is what the checkpoint says.
"""

_DRAFT: Final = (
    "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
)  # fmt: skip
"""Settings that say the same of a draft model."""

_MOST_SCALES: Final = 64 << 20
"""Bytes of the largest file of KV scales that is read; real files have kilobytes."""


class Server:
    """The settings of the server as facts for the layout digest of a pool.

    `known` says whether a server has published its configuration; in a script it has not. Raises ConfigError if a file that the
    configuration names cannot be read.

    Thread safety: immutable.
    """

    def __init__(self, pp_size: int) -> None:
        try:
            model, spec = get_model(), get_spec()
        except ValueError:
            model = spec = None
        self.known = model is not None
        # AMD cards have an E4M3 format of their own under the same name.
        self._platform = ["sglang", sglang_version, "rocm" if torch.version.hip else "cuda"]
        # No pool of states shows how layers are divided among pipeline stages.
        self._stages = [pp_size, os.environ.get("SGLANG_PP_LAYER_PARTITION") if pp_size > 1 else None]
        self._model = [*_said(model, _MODEL), ["scales", _scales(model)]]
        self._draft = _said(spec, _DRAFT)

    def facts(self, *, draft: bool) -> list[Any]:
        """Return the settings that a pool's bytes depend on; with `draft` also those of a draft model."""
        return [*self._platform, self._stages, self._model, self._draft if draft else None]


def _said(published: Any, names: Sequence[str]) -> list[list[str]]:
    """Return (name, value) of published settings, None where one is absent; warn of those that this SGLang lacks."""
    absent = [name for name in names if published is not None and not hasattr(published, name)]
    if absent:
        _log.warning("tiercache: this SGLang does not say %s; what you set of that belongs into revision", ", ".join(absent))
    return [[name, str(getattr(published, name, None))] for name in names]


def _scales(model: Any) -> str | None:
    """Return the digest of the file of KV scales, which become part of keys and values; None if there is no such file."""
    path = getattr(model, "quantization_param_path", None)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_SCALES + 1)
    except OSError as error:
        raise ConfigError(f"the KV scales in {path} cannot be read, and cached bytes depend on them: {error}") from error
    if len(content) > _MOST_SCALES:
        raise ConfigError(f"the KV scales in {path} have more than {_MOST_SCALES} bytes; nothing of that size can be KV scales")
    return blake3(content).hexdigest()
