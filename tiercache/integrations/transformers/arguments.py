"""Arguments of the worker: each function returns a value in the worker's form, or refuses it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from tiercache.errors import ConfigError, InputError
from tiercache.integrations.transformers.requests.request import GREEDY, Sampling
from tiercache.integrations.transformers.runner import first_line
from tiercache.text import parse_size


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


def samplings_of(sampling: Any, n: Any) -> tuple[Sampling, ...]:
    """Return the samplings of `n` continuations.

    Raises InputError for anything but a Sampling, for an `n` below 1, and for several greedy continuations.
    """
    require("sampling", sampling, Sampling, "a Sampling of tiercache.integrations.transformers")
    chosen, count = sampling or GREEDY, count_of("n", n)
    if count > 1 and not chosen.temperature:
        raise InputError(
            f"n is {count}, and greedy continuations would all be equal; pass a sampling with a temperature,"
            " such as Sampling(temperature=0.8, seed=1)"
        )
    return chosen.spread(count)


def chunk_of(value: Any, page_size: int) -> int | None:
    """Return the limit of a chunk in tokens, or None for no limit.

    Raises InputError unless the limit is a positive multiple of the page size.
    """
    if value is None:
        return None
    try:
        limit = operator.index(value)
    except TypeError:
        limit = 0
    if limit < 1 or limit % page_size or isinstance(value, bool):
        raise InputError(
            f"chunk_limit is {value!r}; give a multiple of the page size of {page_size} tokens, at least one"
            " page, or None for no limit"
        )
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
