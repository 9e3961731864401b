"""Parameters of generators: declared as dataclass fields, read from `name=value` texts, bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tiercache.config.quantities import shown
from tiercache.errors import ConfigError

_WHOLE: Final = re.compile(r"[0-9]{1,12}")
_DECIMAL: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_SPAN: Final = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_METADATA: Final = "option"

W = TypeVar("W")


class Span(NamedTuple):
    """Range of lengths from `low` to `high`, both included; written "64-512", or "64" where they are equal."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def uniform(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Draw `size` lengths, all equally likely."""
        return rng.integers(self.low, self.high + 1, size)

    def log_uniform(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Draw `size` lengths with a uniform logarithm, so that every octave is equally likely; `low` must be at least 1."""
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), size))
        return np.clip(drawn.astype(np.int64), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of a generator, for help texts. `low` and `high` bound the value, or both ends of a span."""

    name: str
    default: int | float | Span
    low: int | float
    high: int | float
    about: str


class _Bounds(NamedTuple):
    low: int | float
    high: int | float
    about: str


def bounds(low: int | float, high: int | float, about: str) -> Mapping[str, Any]:
    """Return the metadata that make a field of a workload a parameter; its type is that of its default: int, float or Span."""
    return {_METADATA: _Bounds(low, high, about)}


def options_of(workload: Any) -> tuple[Option, ...]:
    """Return the parameters of a workload in order; the workload's own values are the defaults."""
    return tuple(Option(f.name, getattr(workload, f.name), *f.metadata[_METADATA]) for f in fields(workload) if _METADATA in f.metadata)


def with_options(workload: W, name: str, texts: Mapping[str, str]) -> W:
    """Return `workload` with the parameters that `texts` gives; `name` names the workload in error messages.

    Raises ConfigError for an unknown parameter, for a value that is malformed or out of bounds, and for values that do not go together.
    """
    known = {o.name: o for o in options_of(workload)}
    values = {}
    for key, text in texts.items():
        if key not in known:
            raise ConfigError(f"{name} has no parameter {shown(key)}; it has {', '.join(known)}")
        values[key] = _parse(known[key], name, text)
    try:
        return cast(W, replace(cast(Any, workload), **values))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _parse(o: Option, name: str, text: str) -> int | float | Span:
    value: int | float | Span | None = None
    if isinstance(o.default, Span):
        if match := _SPAN.fullmatch(text):
            low, high = int(match[1]), int(match[2] or match[1])
            value = Span(low, high) if o.low <= low <= high <= o.high else None
        wanted = f"a number or a range such as {o.default}, within {o.low} to {o.high}"
    elif isinstance(o.default, int):
        value = int(text) if _WHOLE.fullmatch(text) and o.low <= int(text) <= o.high else None
        wanted = f"a whole number from {o.low} to {o.high}"
    else:
        value = float(text) if _DECIMAL.fullmatch(text) and o.low <= float(text) <= o.high else None
        wanted = f"a number from {o.low} to {o.high}"
    if value is None:
        raise ConfigError(f"{name}: {o.name} must be {wanted} ({o.about}), not {shown(text)}")
    return value
