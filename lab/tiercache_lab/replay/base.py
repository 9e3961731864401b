"""Requests that are replayed, and the protocol of their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tiercache.core import TokenArray
from tiercache.policy import Ending


@dataclass(frozen=True, slots=True)
class Request:
    """Request that is replayed."""

    prompt: TokenArray
    """Token ids: one-dimensional, uint64, at least one."""
    output: TokenArray
    """Token ids: one-dimensional, uint64."""
    arrival: float
    """Seconds since the start. No request has an earlier arrival than the request before it."""
    session: int
    """Number of the session. A request begins only after the previous request of its session has ended."""
    round: int = 0
    """Number of the request in its session, from 0."""
    ending: Ending = Ending.UNKNOWN
    """How the request ended, where the source says it."""


class Source(Protocol):
    """Sequence of requests in the order of their arrival; every iteration yields the same requests."""

    @property
    def name(self) -> str:
        """Name of the source in rows and reports."""

    @property
    def page_size(self) -> int:
        """Tokens per page: 64, or the block size of a trace, in which only whole blocks can match."""

    @property
    def concurrency(self) -> int:
        """Maximum number of requests that run at once."""

    def __len__(self) -> int:
        """Return the number of requests."""

    def __iter__(self) -> Iterator[Request]: ...
