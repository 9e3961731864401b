"""Model profiles: the numbers by which a cache weighs the bytes that an eviction frees against the computation that it loses."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.policy.architecture import cost_of
from tiercache.policy.fields import shown
from tiercache.policy.known import CONFIGS

MAX_CONFIG_BYTES: Final = 1 << 20
"""Largest accepted `config.json`, in bytes."""
STATE_WIDTH: Final = 4
"""Bytes per element of recurrent state: engines keep it in float32, whatever the model's dtype."""

PROFILES: Final = tuple(sorted(CONFIGS))
"""Names that `profile_named` knows."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Bytes and FLOPs of one model. Raises ConfigError for a number that is negative or not finite."""

    name: str
    kv_bytes_per_token: int
    """Bytes of KV per token, over all attention layers."""
    state_bytes: int
    """Bytes of one complete recurrent state; 0 for a model without states."""
    flops_per_token: float
    """FLOPs of prefilling one token, without attention over its context."""
    flops_per_context_token: float
    """Further FLOPs of prefilling one token, for each token before it."""

    def __post_init__(self) -> None:
        for field in ("kv_bytes_per_token", "state_bytes"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{field} of a model profile is {shown(value)}; a whole number of bytes from 0 is needed")
        for field in ("flops_per_token", "flops_per_context_token"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
                raise ConfigError(f"{field} of a model profile is {shown(value)}; a finite number from 0 is needed")

    @overload
    def flops(self, start: int, end: int) -> float: ...

    @overload
    def flops(self, start: npt.ArrayLike, end: npt.ArrayLike) -> npt.NDArray[np.float64]: ...

    def flops(self, start: npt.ArrayLike, end: npt.ArrayLike) -> float | npt.NDArray[np.float64]:
        """Return the FLOPs of prefilling tokens [start, end) of a sequence whose tokens before `start` are cached.

        `start` and `end` are integers or arrays of them, 0 <= start <= end, of any shapes that broadcast. The result is a float, or a
        float64 array. A token counts as half a token of its own context.
        """
        first, last = np.asarray(start, np.float64), np.asarray(end, np.float64)
        total = self.flops_per_token * (last - first) + self.flops_per_context_token * (last * last - first * first) / 2
        return total if total.ndim else float(total)


def profile_of(config: Mapping[str, Any], name: str = "") -> ModelProfile:
    """Return the profile of the model that a Hugging Face config describes; `config` is the mapping that its `config.json` holds.

    KV is in the config's dtype (bfloat16 if it gives none). A state consists of the states of the recurrences, in float32, and of the past
    inputs of the convolutions, in the config's dtype, one fewer than the kernel is wide. FLOPs are two per active weight, plus those of
    recurrences and attention.
    Raises ConfigError, in one sentence, for an architecture that is not known and for fields that are missing, malformed or contradictory.
    """
    cost, width = cost_of(config, f"config of model {name[:80]}" if name else "model config")
    return ModelProfile(
        name or str(config.get("model_type") or "model")[:80],
        kv_bytes_per_token=cost.kv * width,
        state_bytes=cost.state * STATE_WIDTH + cost.conv * width,
        flops_per_token=float(2 * cost.weights + cost.work),
        flops_per_context_token=float(cost.context),
    )


def profile_named(name_or_path: str) -> ModelProfile:
    """Return the profile of a known model, or of the model whose `config.json` is at a path; raise ConfigError if there is neither."""
    name = name_or_path.lower()
    if name in CONFIGS:
        return profile_of(CONFIGS[name], name)
    path = Path(name_or_path)
    return profile_of(_read(path), path.absolute().parent.name if path.stem == "config" else path.stem)


def _read(path: Path) -> Any:
    called = repr(str(path)[-200:])
    content = None
    try:
        # Only a plain file is read: a pipe or a device could block.
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"model config {called} cannot be read: {e.strerror}") from e
    if content is None:
        raise ConfigError(
            f"there is no model profile and no file {called}; give the path of a config.json, or one of {', '.join(PROFILES)}"
        )
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(f"model config {called} is larger than {MAX_CONFIG_BYTES} bytes; is it a config.json?")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"model config {called} is not JSON; is it a config.json?") from e
