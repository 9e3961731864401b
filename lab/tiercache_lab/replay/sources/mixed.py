"""Workload that mixes several other workloads."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.agents import Agents
from tiercache_lab.replay.sources.base import Workload, check_size
from tiercache_lab.replay.sources.chats import Chats
from tiercache_lab.replay.sources.conversations import MultiTurn
from tiercache_lab.replay.sources.groups import SharedPrefix
from tiercache_lab.replay.sources.options import bounds

_SECONDS: Final = 1200
"""Approximate duration in seconds of each of the mixed workloads."""

_LIVE: Final = 20
"""Maximum number of conversations at once."""
_AGENTS: Final = 6
"""Maximum number of agent sessions at once."""


@dataclass(frozen=True, slots=True)
class Mixed(Workload):
    """Mixture of four workloads: groups with system prompts, conversations, agents and short chats.

    The requests of these parts are merged by arrival time. All parts have about the same duration.
    """

    groups: int = field(
        default=20, metadata=bounds(1, 4096, "groups of 32 requests that share a system prompt")
    )
    conversations: int = field(
        default=60, metadata=bounds(1, 4096, f"conversations of 12 rounds, {_LIVE} at once")
    )
    sessions: int = field(default=26, metadata=bounds(1, 4096, f"agent sessions, {_AGENTS} at once"))
    chats: int = field(default=900, metadata=bounds(1, 65_536, "requests of short chats"))

    def __post_init__(self) -> None:
        # The parts have fixed lengths of prompts, so only the number of requests must be checked.
        check_size(self.groups * 32 + self.conversations * 12 + self.sessions * 50 + self.chats, 0)

    def count(self, seed: int) -> int:
        """Return the number of requests of all parts."""
        return sum(part.count(seed) for part in self._parts())

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all parts in order of arrival, with session numbers that are unique."""
        parts = self._parts()
        renumbered = [_renumber(part.generate(seed), number, len(parts)) for number, part in enumerate(parts)]
        return heapq.merge(*renumbered, key=lambda request: request.arrival)

    def _parts(self) -> tuple[Workload, ...]:
        live, acting = min(_LIVE, self.conversations), min(_AGENTS, self.sessions)
        return (
            SharedPrefix(groups=self.groups, prompts=32, rate=self.groups * 32 / _SECONDS),
            MultiTurn(
                conversations=self.conversations, live=live, pause=_SECONDS * live / (self.conversations * 12)
            ),
            # A session has about 28 turns on average.
            Agents(sessions=self.sessions, live=acting, pause=_SECONDS * acting / (self.sessions * 28)),
            Chats(chats=self.chats, rate=self.chats / _SECONDS),
        )


def _renumber(requests: Iterator[Request], part: int, parts: int) -> Iterator[Request]:
    """Return the requests of one part with new session numbers, which the other parts do not use."""
    return (replace(request, session=request.session * parts + part) for request in requests)
