"""Workload of agents: sessions of many turns. In each turn the model acts, and then observes the effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from tiercache.core import TokenArray
from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import Span, Workload, bounds, check_size
from tiercache_lab.replay.sources.conversations import Turn, take_turns
from tiercache_lab.replay.sources.streams import join, key_of, rng_of, tokens

_PLACEHOLDER: Final = 16
"""Number of tokens of the placeholder. The same placeholder replaces every dropped observation."""

_OBSERVATION: Final = Span(16, 8192)
"""Range in tokens to which the log-normal lengths of observations are clipped; its sigma is `_SPREAD`."""
_SPREAD: Final = 1.0
_KINDS: Final = 3
"""Kinds of agents, each with a system prompt and tools of its own."""
_TASK: Final = Span(200, 2000)
"""Tokens of a session's task, uniform."""
_ACTION: Final = Span(50, 300)
"""Tokens of an action, uniform."""


class _Plan(NamedTuple):
    """Kind of agent of one session, and the lengths in tokens of the session's parts."""

    kind: int
    task: int
    actions: list[int]
    """Length of the action of each turn, for as many turns as fit into the context."""
    observations: list[int]
    """Length of the observation of each of these turns."""


@dataclass(frozen=True, slots=True)
class Agents(Workload):
    """Sessions of agents. All agents of a kind share a system prompt, which describes their tools.

        prompt of turn 2    system | task | action 0 | observation 0 | action 1 | observation 1
        output of turn 2    action 2

    If `keep` is not 0, a placeholder replaces each observation that is older than `keep` turns. Each prompt
    then replaces one more observation than the previous prompt. The two prompts are equal up to this
    observation. A session ends after its last turn, or before a turn that would exceed the context.
    """

    sessions: int = field(default=96, metadata=bounds(1, 16_384, "sessions"))
    live: int = field(
        default=24, metadata=bounds(1, 4096, "sessions at once; when one ends, a new one takes its place")
    )
    turns: Span = field(default=Span(12, 50), metadata=bounds(1, 256, "turns of a session, uniform"))
    context: int = field(
        default=49_152, metadata=bounds(1024, 2**21, "tokens that a prompt and its output may have together")
    )
    system: Span = field(
        default=Span(3000, 5000),
        metadata=bounds(1, 2**19, "tokens of a kind's system prompt and tools, uniform"),
    )
    observation: int = field(
        default=750, metadata=bounds(16, 8192, "tokens of an observation, median of a log-normal")
    )
    keep: int = field(
        default=0, metadata=bounds(0, 1024, "turns after which an observation is dropped; 0: never")
    )
    pause: float = field(
        default=12.0, metadata=bounds(0.001, 1e6, "seconds between the turns of a session, on average")
    )

    def __post_init__(self) -> None:
        check_size(self.sessions * self.turns.high, self.context)
        first = self.system.high + _TASK.high + _ACTION.high
        if first > self.context:
            raise ConfigError(
                f"context={self.context} has no room for a first turn of up to {first} tokens; raise it or"
                " shorten system and task"
            )

    def count(self, seed: int) -> int:
        """Plan every session and return the number of turns of all sessions."""
        systems = self._systems(seed)
        return sum(len(self._plan(seed, number, systems).actions) for number in range(self.sessions))

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all sessions in order of arrival.

        Random pauses determine the order. A pause stands for the time that the tools take.
        """
        systems = self._systems(seed)
        sessions = (self._session(seed, number, systems) for number in range(self.sessions))
        return take_turns(sessions, self.live, self.pause, rng_of(seed, "agents", "pauses"))

    def _systems(self, seed: int) -> list[int]:
        return [int(length) for length in self.system.uniform(rng_of(seed, "agents", "system"), _KINDS)]

    def _plan(self, seed: int, number: int, systems: list[int]) -> _Plan:
        rng = rng_of(seed, "agents", number)
        kind = int(rng.integers(_KINDS))
        task = int(_TASK.uniform(rng, 1)[0])
        turns = int(self.turns.uniform(rng, 1)[0])
        actions = _ACTION.uniform(rng, turns)
        drawn = rng.lognormal(math.log(self.observation), _SPREAD, turns)
        observations = np.clip(drawn, _OBSERVATION.low, _OBSERVATION.high).astype(np.int64)
        # `held` is the number of tokens in the context after the action of each turn:
        # system | task | all actions so far | placeholders for dropped observations | kept observations
        before = np.concatenate([[0], np.cumsum(observations)[:-1]])
        dropped = np.maximum(np.arange(turns) - self.keep, 0) if self.keep else np.zeros(turns, np.int64)
        held = systems[kind] + task + np.cumsum(actions) + before - before[dropped] + dropped * _PLACEHOLDER
        fits = int(np.logical_and.accumulate(held <= self.context).sum())
        return _Plan(kind, task, actions[:fits].tolist(), observations[:fits].tolist())

    def _session(self, seed: int, number: int, systems: list[int]) -> Iterator[Turn]:
        plan = self._plan(seed, number, systems)
        system = tokens(key_of(seed, "agents", "system", plan.kind), systems[plan.kind])
        placeholder = tokens(key_of(seed, "agents", "placeholder"), _PLACEHOLDER)
        # The prompt and the output of a turn, as parts of the session's own tokens:
        #     task | turns before `oldest`, without observations | own[begin:end]      own[end : end + action]
        oldest, begin, end = (0, plan.task, plan.task)
        for turn, action in enumerate(plan.actions):
            own = tokens(key_of(seed, "agents", "session", number), end + action)
            if self.keep and turn > self.keep:
                begin += plan.actions[oldest] + plan.observations[oldest]
                oldest += 1
            yield Turn(join(system, *_collapsed(own, plan, oldest, placeholder), own[begin:end]), own[end:])
            end += action + plan.observations[turn]


def _collapsed(own: TokenArray, plan: _Plan, upto: int, placeholder: TokenArray) -> Iterator[TokenArray]:
    """Yield the task and the turns before turn `upto`, with a placeholder for each observation.

    `own` has the tokens of the session, without those of the system prompt.
    """
    yield own[: plan.task]
    begin = plan.task
    for action, observation in zip(plan.actions[:upto], plan.observations, strict=False):
        yield own[begin : begin + action]
        yield placeholder
        begin += action + observation
