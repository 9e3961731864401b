"""Requests that are replayed, and the protocol of their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tiercache.core import TokenArray


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    `prompt` and `output`: token ids, uint64, one-dimensional; the prompt has at least one. `arrival`: seconds since the start, never
    falling from request to request. `session`: number of the session; requests of one session never overlap, each begins when the one
    before has ended. `round`: ordinal of the request in its session, from 0.
    """

    prompt: TokenArray
    output: TokenArray
    arrival: float
    session: int
    round: int = 0


class Source(Protocol):
    """Requests in order of arrival. Each iteration yields the same requests, token by token. Thread safety: immutable."""

    @property
    def name(self) -> str:
        """Name of the source in rows and reports."""

    @property
    def page_size(self) -> int:
        """Tokens per page at which this traffic can match: 64, or the block size of the recorded trace."""

    @property
    def concurrency(self) -> int:
        """Number of requests that are under way at once."""

    def __len__(self) -> int:
        """Return the number of requests."""

    def __iter__(self) -> Iterator[Request]: ...
