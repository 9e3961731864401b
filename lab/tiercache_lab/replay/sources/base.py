"""Workloads with their parameters, and sources that replay a workload."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.text import shown
from tiercache_lab.replay.base import Request

_WHOLE: Final = re.compile(r"[0-9]{1,12}")
_DECIMAL: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")
_SPAN: Final = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")
_METADATA: Final = "option"

W = TypeVar("W")


class Span(NamedTuple):
    """Range of lengths from `low` to `high`, both included.

    As text it is "64-512", or "64" if `low` and `high` are equal.
    """

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def uniform(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Return `size` random lengths, all equally likely."""
        return rng.integers(self.low, self.high + 1, size)

    def log_uniform(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Return `size` random lengths whose logarithm is uniform; `low` must be at least 1."""
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), size))
        return np.clip(drawn.astype(np.int64), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Option:
    """Parameter of a generator."""

    name: str
    default: int | float | Span
    low: int | float
    """Lowest possible value; for a span, of each end."""
    high: int | float
    """Highest possible value; for a span, of each end."""
    about: str
    """Meaning of the parameter, with its unit."""


def bounds(low: int | float, high: int | float, about: str) -> Mapping[str, Any]:
    """Return the metadata of a dataclass field that is a parameter of its workload.

    The parameter has the type of the field's default: int, float or Span.
    """
    return {_METADATA: (low, high, about)}


def options_of(workload: Any) -> tuple[Option, ...]:
    """Return the parameters of a workload in the order of the fields. The workload's values are defaults."""
    return tuple(
        Option(f.name, getattr(workload, f.name), *f.metadata[_METADATA])
        for f in fields(workload)
        if _METADATA in f.metadata
    )


def parameters(name: str, query: str) -> dict[str, str]:
    """Return the parameters that a query such as "live=8&turns=2-4" gives, as texts by name.

    `name` is what has the parameters, in error messages. Raises ConfigError for a malformed query.
    """
    texts: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, equals, text = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}: {shown(part)} is not a parameter; write {name}?name=value&name=value")
        if key in texts:
            raise ConfigError(f"{name}: {shown(key)} is given twice; remove one of them")
        texts[key] = text
    return texts


def with_options(workload: W, name: str, texts: Mapping[str, str]) -> W:
    """Return a copy of `workload` with the values that `texts` gives to its parameters.

    `name` is the workload's name in error messages. Raises ConfigError for an unknown parameter, for a value
    that is malformed or out of bounds, and for values that contradict each other.
    """
    known = {o.name: o for o in options_of(workload)}
    values = {}
    for key, text in texts.items():
        if key not in known:
            raise ConfigError(f"{name} has no parameter {shown(key)}; it has {', '.join(known) or 'none'}")
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


MAX_REQUESTS: Final = 2**20
"""Maximum number of requests of one source."""

MAX_TOKENS: Final = 2**22
"""Maximum number of tokens of one prompt, and also of one output."""


class Workload(ABC):
    """Generator of requests: a frozen dataclass whose fields are the parameters.

    `generate` yields requests in order of arrival. The requests depend only on the fields and the seed. Each
    prompt is made only when it is yielded, so the tokens of all prompts are never in memory together.
    `__post_init__` raises ConfigError for fields that contradict each other.

    Thread safety: immutable; an iterator belongs to one thread.
    """

    __slots__ = ()

    @abstractmethod
    def count(self, seed: int) -> int:
        """Return the number of requests that `generate` yields."""

    @abstractmethod
    def generate(self, seed: int) -> Iterator[Request]:
        """Yield all requests; each call begins with the first request."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiers of a published benchmark."""

    device_states: int
    """Number of state slots of the device."""
    host_ratio: float
    """Bytes of the host divided by bytes of the device; below the host there is an unlimited file store."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Entry of the catalogue: a workload, and how it is replayed."""

    summary: str
    workload: Workload
    page_size: int = 64
    concurrency: int = 1
    fixed: bool = False
    """Whether the workload has no parameters, because it repeats a published benchmark."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Figures that were published for this workload, by name."""
    layout: Layout | None = None
    """Tiers with which these figures were measured, if known."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Parameters with their defaults and bounds; a fixed workload has none."""
        return () if self.fixed else options_of(self.workload)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """The first `count` requests of a workload in the order of their arrival, the same at every iteration."""

    name: str
    """Name of the source in rows and reports."""
    workload: Workload
    seed: int
    count: int
    page_size: int = 64
    """Tokens per page: 64, or the block size of a trace, in which only whole blocks can match."""
    concurrency: int = 1
    """Maximum number of requests that run at once."""
    published: Mapping[str, float] = field(default_factory=dict)
    layout: Layout | None = None
    about: str = ""
    """Sentence on how the source is replayed, for readers of the results; may be empty."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return islice(self.workload.generate(self.seed), self.count)


def check_size(requests: int, longest: int) -> None:
    """Raise ConfigError for more than `MAX_REQUESTS` requests, or a prompt of more than `MAX_TOKENS`.

    `longest` is the highest number of tokens that a prompt can have.
    """
    if requests > MAX_REQUESTS:
        raise ConfigError(
            f"the parameters make {requests:,} requests, and a source has at most {MAX_REQUESTS:,}; choose"
            " smaller ones"
        )
    if longest > MAX_TOKENS:
        raise ConfigError(
            f"the parameters make prompts of {longest:,} tokens, and a prompt has at most {MAX_TOKENS:,};"
            " choose smaller ones"
        )
