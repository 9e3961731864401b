"""Workloads, and the source that replays one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Final

from tiercache.errors import ConfigError
from tiercache.replay.base import Request
from tiercache.replay.sources.options import Option, options_of

MAX_REQUESTS: Final = 2**20
"""Largest number of requests of one source."""

MAX_TOKENS: Final = 2**22
"""Largest number of tokens of one prompt, and of one output."""

NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class Workload(ABC):
    """A recipe for requests: a frozen dataclass whose fields are its parameters.

    `generate` yields requests in order of arrival, with times that never fall, as a function of the fields and the seed alone. It makes
    each prompt when it is asked for and keeps lengths, never tokens. `__post_init__` raises ConfigError for fields that do not go together.
    Thread safety: immutable; an iterator belongs to one thread.
    """

    __slots__ = ()

    @abstractmethod
    def count(self, seed: int) -> int:
        """Return the number of requests that `generate` yields."""

    @abstractmethod
    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests from the first one; each call starts anew."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiers of a published benchmark.

    `device_states`: state slots of the device. `host_ratio`: host bytes per device byte. `file_storage`: whether a file store follows.
    """

    device_states: int
    host_ratio: float
    file_storage: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """A named workload. `fixed`: whether it takes no parameters because it repeats a published benchmark."""

    summary: str
    workload: Workload
    page_size: int = 64
    concurrency: int = 1
    fixed: bool = False
    published: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    layout: Layout | None = None

    @property
    def options(self) -> tuple[Option, ...]:
        """The parameters, with their defaults and bounds; none for a fixed workload."""
        return () if self.fixed else options_of(self.workload)


@dataclass(frozen=True, slots=True)
class WorkloadSource:
    """A `Source`: the first `count` requests of a workload.

    `published`: figures published for it, by the name of what they measure; `layout`: the tiers they were measured with, where known.
    """

    name: str
    workload: Workload
    seed: int
    count: int
    page_size: int = 64
    concurrency: int = 1
    published: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    layout: Layout | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        return islice(self.workload.generate(self.seed), self.count)


def check_size(requests: int, longest: int) -> None:
    """Raise ConfigError if a workload would have more than `MAX_REQUESTS` requests, or prompts longer than `MAX_TOKENS`."""
    if requests > MAX_REQUESTS:
        raise ConfigError(f"the parameters make {requests:,} requests, and a source has at most {MAX_REQUESTS:,}; choose smaller ones")
    if longest > MAX_TOKENS:
        raise ConfigError(
            f"the parameters make prompts of {longest:,} tokens, and a prompt has at most {MAX_TOKENS:,}; choose smaller ones"
        )
