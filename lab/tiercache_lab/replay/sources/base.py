"""Workloads, and sources that replay a workload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final

from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.options import Option, options_of

MAX_REQUESTS: Final = 2**20
"""Maximum number of requests of one source."""

MAX_TOKENS: Final = 2**22
"""Maximum number of tokens of one prompt, and also of one output."""

NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


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
    """Bytes of the host divided by bytes of the device."""
    file_storage: bool
    """Whether there is a file store below the host."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Entry of the catalogue: a workload, and how it is replayed."""

    summary: str
    workload: Workload
    page_size: int = 64
    concurrency: int = 1
    fixed: bool = False
    """Whether the workload has no parameters, because it repeats a published benchmark."""
    published: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """Figures that were published for this workload, by name."""
    layout: Layout | None = None
    """Tiers with which these figures were measured, if known."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Parameters with their defaults and bounds; a fixed workload has none."""
        return () if self.fixed else options_of(self.workload)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """Source of the first `count` requests of a workload. The other fields are as in `Kind`."""

    name: str
    workload: Workload
    seed: int
    count: int
    page_size: int = 64
    concurrency: int = 1
    published: Mapping[str, float] = field(default_factory=lambda: NOTHING)
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
