"""Arguments of the worker in the worker's form, or a refusal; and what follows from them: sizes, profile."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from tiercache.errors import ConfigError, InputError
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS
from tiercache.integrations.transformers.runner import first_line
from tiercache.policy import ModelProfile, profile_of
from tiercache.text import parse_size

if TYPE_CHECKING:
    from tiercache.integrations.transformers.layout import CacheLayout

_log = logging.getLogger(__name__)


def size_of(name: str, value: Any) -> int:
    """Return the bytes of a size such as 4294967296, "4GiB" or a NumPy integer.

    Raises ConfigError, naming the argument, for anything else.
    """
    try:
        return parse_size(value if isinstance(value, str | bool) else operator.index(value))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{name} is {value!r}; give a number of bytes, or a size such as 4GiB") from error


def require(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Raise InputError, which says what is `wanted`, unless `value` is None or of type `kind`."""
    if value is not None and not isinstance(value, kind):
        raise InputError(f"{name} is of type {type(value).__name__}; give {wanted}")


def model_of(model: Any) -> PreTrainedModel:
    """Return the model, loaded first if `model` is a local directory.

    Raises ConfigError for a directory without a model that can be loaded, and InputError for anything else.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, str | os.PathLike):
        raise InputError(
            "a model is a PreTrainedModel of transformers or a directory with one, not of type"
            f" {type(model).__name__}"
        )
    if not Path(model, "config.json").is_file():
        raise ConfigError(
            f"{os.fspath(model)} holds no config.json; pass a directory that save_pretrained or a download"
            " made"
        )
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # the exception depends on the file that the loader cannot read
        raise ConfigError(
            f"{os.fspath(model)} holds no causal language model that can be loaded: {first_line(error)}"
        ) from error
    return loaded


def count_of(name: str, value: Any) -> int:
    """Return a number of tokens. Raises InputError unless it is a Python or NumPy integer of at least 1."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; give an integer, at least one")
    return count


def chunk_of(value: Any, page_size: int) -> int | None:
    """Return the limit of a chunk in tokens, or None for no limit.

    Raises InputError unless the limit is a positive multiple of the page size.
    """
    limit = None if value is None else count_of("chunk_limit", value)
    if limit is not None and limit % page_size:
        raise InputError(f"chunk_limit is {limit}; give a multiple of the page size of {page_size} tokens")
    return limit


def stops_of(value: Any) -> frozenset[int]:
    """Return stop tokens, given as one id or several. Raises InputError for anything else."""
    try:
        return frozenset(map(operator.index, value if isinstance(value, Iterable) else (value,)))
    except TypeError as error:
        raise InputError(f"stop is {value!r}; give token ids, as integers") from error


def extra_of(value: Any) -> bytes:
    """Return, as bytes, the extra data on which the cache of a request depends.

    Raises InputError for anything but bytes.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InputError(
            f"extra is {value!r}; give bytes, for example from sequence_extra of tiercache.keys, or encode"
            " text by .encode()"
        )
    return bytes(value)


def known_profile(model: PreTrainedModel) -> ModelProfile | None:
    """Return the model profile, from which the eviction policy estimates the cost of a recomputation.

    Returns None if the architecture is unknown; the policy then uses the default profile.
    """
    try:
        return profile_of(model.config.to_dict())
    except ConfigError as error:
        _log.info("using the default model profile: %s", error)
        return None


def split_device_bytes(device_bytes: int, layout: CacheLayout) -> tuple[int, int]:
    """Return the numbers of page slots and state slots for `device_bytes`.

    Half of the bytes go to states, because without a state no page can be restored; all of them, if there are
    no pages. Raises ConfigError if the bytes are too few to hold a single request.
    """
    page = layout.kv_geometry.nbytes if layout.has_pages else 0
    state = sum(geometry.nbytes for geometry in layout.state_geometries.values())
    # A request needs state slots for the states that it leaves, one slot for the state that it restores, and
    # one that its admission reserves for loading that state from the host.
    least = CHECKPOINTS + DECODE_SNAPSHOTS + 2 if state else 0
    states = max(least, min(device_bytes // (2 if page else 1) // state, 1 << 16)) if state else 0
    pages = (device_bytes - states * state) // page if page else 0
    fewest = 2 if page else 0
    if pages < fewest or states * state > device_bytes:
        raise ConfigError(
            f"{device_bytes} device bytes are too few; {least} states and {fewest} pages of this model take"
            f" {least * state + fewest * page}"
        )
    return pages, states
