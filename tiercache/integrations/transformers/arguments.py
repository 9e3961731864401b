"""Checks of the arguments of a worker; each raises an error of one sentence for a wrong argument."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from tiercache.config.quantities import parse_size
from tiercache.errors import ConfigError, InputError
from tiercache.integrations.transformers.runner import first_line


def size_of(name: str, value: Any) -> int:
    """Return the bytes of a size such as 4294967296, "4GiB" or a NumPy integer.

    Raises ConfigError, naming the argument, for anything else.
    """
    try:
        return parse_size(value if isinstance(value, str | bool) else operator.index(value))
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{name} is {value!r}; give a number of bytes, or a size such as 4GiB") from error


def require(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Raise InputError, which says what is `wanted`, if `value` is neither None nor of type `kind`."""
    if value is not None and not isinstance(value, kind):
        raise InputError(f"{name} is of type {type(value).__name__}; give {wanted}")


def model_of(model: Any) -> PreTrainedModel:
    """Return a model as it is, or load the one in a local directory.

    Raises ConfigError for a directory without a model that can be loaded, InputError for anything else.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, str | os.PathLike):
        raise InputError(f"a model is a PreTrainedModel of transformers or a directory with one, not of type {type(model).__name__}")
    if not Path(model, "config.json").is_file():
        raise ConfigError(f"{os.fspath(model)} holds no config.json; pass a directory that save_pretrained or a download made")
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, use_safetensors=True)
    except Exception as error:  # what a loader raises depends on the file that it stumbles over
        raise ConfigError(f"{os.fspath(model)} holds no causal language model that can be loaded: {first_line(error)}") from error
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


def stops_of(value: Any) -> frozenset[int]:
    """Return stop tokens, given as one id or several. Raises InputError for anything else."""
    try:
        return frozenset(map(operator.index, value if isinstance(value, Iterable) else (value,)))
    except TypeError as error:
        raise InputError(f"stop is {value!r}; give token ids, as integers") from error


def extra_of(value: Any) -> bytes:
    """Return the extra data that the cache of a request depends on, as bytes. Raises InputError for anything but bytes."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InputError(f"extra is {value!r}; give bytes, such as sequence_extra of tiercache.keys makes, or text by .encode()")
    return bytes(value)
