"""What is replayed: requests, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tiercache.core import TokenArray


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `prompt` and `output`: token ids, uint64, one-dimensional; the prompt has at least one.

    `arrival`: seconds since the start, never falling. `session`: requests of one session never overlap: each begins when the one before
    has ended. `round`: which request of its session, from 0.
    """

    prompt: TokenArray
    output: TokenArray
    arrival: float
    session: int
    round: int = 0


class Source(Protocol):
    """Requests in order of arrival. Iterating again gives the same again, token by token. Thread safety: immutable."""

    @property
    def name(self) -> str:
        """How rows and reports call it."""

    @property
    def page_size(self) -> int:
        """Tokens per page at which this traffic can match: 64, or what the trace was recorded at."""

    @property
    def concurrency(self) -> int:
        """Requests that are under way at once."""

    def __len__(self) -> int:
        """How many requests."""

    def __iter__(self) -> Iterator[Request]: ...
