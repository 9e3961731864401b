"""A mixture of several workloads."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from tiercache.replay.base import Request
from tiercache.replay.sources.agents import Agents
from tiercache.replay.sources.base import Workload, check_size
from tiercache.replay.sources.chats import Chats
from tiercache.replay.sources.conversations import MultiTurn
from tiercache.replay.sources.groups import SharedPrefix
from tiercache.replay.sources.options import bounds

_SECONDS: Final = 1200
"""Approximate duration of each part in seconds."""

_LIVE: Final = 20
_AGENTS: Final = 6


@dataclass(frozen=True, slots=True)
class Mixed(Workload):
    """Groups with system prompts, conversations, agents and short chats, interleaved by arrival; the parts take about equally long."""

    groups: int = field(default=20, metadata=bounds(1, 4096, "groups of 32 requests that share a system prompt"))
    conversations: int = field(default=60, metadata=bounds(1, 4096, f"conversations of 12 rounds, {_LIVE} at once"))
    sessions: int = field(default=26, metadata=bounds(1, 4096, f"agent sessions, {_AGENTS} at once"))
    chats: int = field(default=900, metadata=bounds(1, 65_536, "requests of short chats"))

    def __post_init__(self) -> None:
        check_size(self.groups * 32 + self.conversations * 12 + self.sessions * 50 + self.chats, 0)

    def count(self, seed: int) -> int:
        """Return the number of requests: the sum over the parts."""
        return sum(part.count(seed) for part in self._parts())

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all parts in order of arrival; sessions are renumbered so that no two parts share a number."""
        parts = self._parts()
        renumbered = [_renumber(part.generate(seed), number, len(parts)) for number, part in enumerate(parts)]
        return heapq.merge(*renumbered, key=lambda request: request.arrival)

    def _parts(self) -> tuple[Workload, ...]:
        live, acting = min(_LIVE, self.conversations), min(_AGENTS, self.sessions)
        return (
            SharedPrefix(groups=self.groups, prompts=32, rate=self.groups * 32 / _SECONDS),
            MultiTurn(conversations=self.conversations, live=live, pause=_SECONDS * live / (self.conversations * 12)),
            # A session has about 28 turns on average.
            Agents(sessions=self.sessions, live=acting, pause=_SECONDS * acting / (self.sessions * 28)),
            Chats(chats=self.chats, rate=self.chats / _SECONDS),
        )


def _renumber(requests: Iterator[Request], part: int, parts: int) -> Iterator[Request]:
    """Yield `requests` with session numbers that no other of the `parts` parts uses."""
    return (replace(request, session=request.session * parts + part) for request in requests)
