"""Model profiles: what a cache must know about a model to weigh the bytes that it frees against the computation that it loses."""

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
STATE_WIDTH: Final = 4
"""Bytes of an element of recurrent state: engines keep it in float32, whatever the model's dtype."""

PROFILES: Final = tuple(sorted(CONFIGS))
"""The names that `profile_named` knows."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Bytes and FLOPs of one model. Raises ConfigError for a number that is negative or not finite. Immutable; any thread."""

    name: str
    kv_bytes_per_token: int
    """Over all attention layers."""
    state_bytes: int
    """One complete recurrent snapshot; 0 for a model without states."""
    flops_per_token: float
    """Prefilling one token, but for attention over its context."""
    flops_per_context_token: float
    """More per token, for every token before it."""

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
        """FLOPs of prefilling tokens [start, end) of a sequence, the tokens before `start` being cached.

        Integers or arrays of them, 0 <= start <= end, of any shapes that broadcast; float64 comes out. A token counts half for itself.
        """
        first, last = np.asarray(start, np.float64), np.asarray(end, np.float64)
        total = self.flops_per_token * (last - first) + self.flops_per_context_token * (last * last - first * first) / 2
        return total if total.ndim else float(total)


def profile_of(config: Mapping[str, Any], name: str = "") -> ModelProfile:
    """The profile of the model that a Hugging Face config describes, in the mapping that its `config.json` holds.

    KV is in the config's dtype (bfloat16 if it says none). A state is that of the recurrences, in float32, and the past inputs of the
    convolutions, in the config's dtype and one fewer than the kernel is wide. FLOPs are two per active weight, and those of the
    recurrences and of attention.
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
    """The profile of a known model, or of the model whose `config.json` lies at a path; raises ConfigError where there is neither."""
    name = name_or_path.lower()
    if name in CONFIGS:
        return profile_of(CONFIGS[name], name)
    path = Path(name_or_path)
    return profile_of(_read(path), path.absolute().parent.name if path.stem == "config" else path.stem)


def _read(path: Path) -> Any:
    called = repr(str(path)[-200:])
    content = None
    try:
        # Only a plain file: a pipe or a device could keep its reader waiting.
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
