"""Workload of single requests in groups that share a system prompt, and the mixture of all kinds."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.agents import Agents
from tiercache_lab.replay.sources.base import Span, Workload, bounds, check_size
from tiercache_lab.replay.sources.conversations import Chats, MultiTurn, poisson
from tiercache_lab.replay.sources.streams import join, key_of, rng_of, tokens


@dataclass(frozen=True, slots=True)
class SharedPrefix(Workload):
    """`groups` x `prompts` requests, each with the system prompt of a group and a question of its own.

    If `zipf` is 0, each group has exactly `prompts` requests, in random order. Otherwise the group of each
    request is drawn at random, and the n-th most popular group has the weight n ** -zipf.
    """

    groups: int = field(default=64, metadata=bounds(1, 65_536, "groups, each with a system prompt"))
    prompts: int = field(
        default=32, metadata=bounds(1, 65_536, "requests per group, on average where zipf is not 0")
    )
    zipf: float = field(
        default=0.0, metadata=bounds(0, 4, "exponent of the groups' popularity; 0: all alike")
    )
    system: Span = field(
        default=Span(1024, 10_240), metadata=bounds(1, 2**20, "tokens of a system prompt, uniform")
    )
    question: Span = field(default=Span(64, 512), metadata=bounds(1, 2**20, "tokens of a question, uniform"))
    answer: Span = field(default=Span(64, 512), metadata=bounds(1, 2**20, "tokens of an answer, uniform"))
    rate: float = field(default=2.0, metadata=bounds(0.001, 1e6, "requests per second"))

    def __post_init__(self) -> None:
        check_size(self.groups * self.prompts, self.system.high + self.question.high)

    def count(self, seed: int) -> int:
        """Return the number of requests: `groups` x `prompts`."""
        return self.groups * self.prompts

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each is a session of its own."""
        total = self.groups * self.prompts
        lengths = self.system.uniform(rng_of(seed, "groups", "system"), self.groups)
        rng = rng_of(seed, "groups", "requests")
        order = self._order(rng, total)
        questions = self.question.uniform(rng, total)
        answers = self.answer.uniform(rng, total)
        times = poisson(self.rate, rng_of(seed, "groups", "times"))
        for number, now in zip(range(total), times, strict=False):
            group = int(order[number])
            system = tokens(key_of(seed, "groups", "system", group), int(lengths[group]))
            question = tokens(key_of(seed, "groups", "question", number), int(questions[number]))
            answer = tokens(key_of(seed, "groups", "answer", number), int(answers[number]))
            yield Request(join(system, question), answer, now, number)

    def _order(self, rng: np.random.Generator, total: int) -> npt.NDArray[np.int64]:
        """Return the group of each request."""
        if not self.zipf:
            return rng.permutation(np.repeat(np.arange(self.groups), self.prompts))
        weights = np.arange(1, self.groups + 1) ** -self.zipf
        return rng.choice(self.groups, total, p=weights / weights.sum())


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

    def count(self, seed: int) -> int:
        """Return the number of requests of all parts."""
        return sum(part.count(seed) for part in self._parts())

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all parts in order of arrival, with session numbers that are unique."""
        parts = self._parts()
        renumbered = [_renumber(part.generate(seed), number, len(parts)) for number, part in enumerate(parts)]
        return heapq.merge(*renumbered, key=lambda request: request.arrival)

    def _parts(self) -> tuple[Workload, ...]:
        # Each part takes about `_SECONDS`: 20 groups of 32 requests, 60 conversations of 12 rounds, 26
        # sessions of agents with about 28 turns, and 900 chats.
        return (
            SharedPrefix(groups=20, prompts=32, rate=20 * 32 / _SECONDS),
            MultiTurn(conversations=60, live=_LIVE, pause=_SECONDS * _LIVE / (60 * 12)),
            Agents(sessions=26, live=_AGENTS, pause=_SECONDS * _AGENTS / (26 * 28)),
            Chats(chats=900, rate=900 / _SECONDS),
        )


def _renumber(requests: Iterator[Request], part: int, parts: int) -> Iterator[Request]:
    """Return the requests of one part with new session numbers, which the other parts do not use."""
    return (replace(request, session=request.session * parts + part) for request in requests)
