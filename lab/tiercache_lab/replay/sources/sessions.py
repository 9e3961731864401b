"""Workload of recorded sessions: agents with their sub-agents, replayed side by side."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.core import TokenArray
from tiercache.errors import ConfigError
from tiercache.policy import Ending
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.arrivals import poisson
from tiercache_lab.replay.sources.base import Workload
from tiercache_lab.replay.sources.options import bounds
from tiercache_lab.replay.sources.streams import block_keys, expand_keys, join, key_of, rng_of, tokens

BLOCK: Final = 64
"""Tokens per block of a session."""

BlockIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """Request of a session."""

    time: float
    """Seconds since the start of the session."""
    input_length: int
    """Number of tokens of the prompt."""
    output_length: int
    """Number of tokens of the output."""
    ids: BlockIds
    """One id per whole block of the prompt, and perhaps one for the partial block at its end.

    In one session, equal ids at equal places mean equal blocks.
    """
    service: float = 0.0
    """Seconds that the recorded answer took; 0 if that is not known."""
    ending: Ending = Ending.UNKNOWN
    """Whether the answer called tools (CALL) or was complete (TURN)."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAgent:
    """Agent or sub-agent of a session."""

    kind: str
    """Kind of sub-agent; "" for the session's own agent."""
    opening: int
    """Number of tokens of the tools and the system prompt, with which the prompts open."""
    turns: Sequence[RecordedTurn]
    """Requests in order of time; at least one."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSession:
    """Session that was recorded: its own agent, then its sub-agents, whose block ids are from one space."""

    name: str
    agents: Sequence[RecordedAgent]

    @property
    def seconds(self) -> float:
        """Time from the start to the last request."""
        return max(agent.turns[-1].time for agent in self.agents)


class _Opening(NamedTuple):
    """Blocks of a session that all sessions share."""

    ids: BlockIds
    """Ids of these blocks, ascending."""
    keys: npt.NDArray[np.uint64]
    """Key of each of these blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class Sessions(Workload):
    """Recorded sessions, which a Poisson process starts, at most `live` at a time.

    Inside a session, requests keep their recorded times. A sub-agent counts as a session of its own, so its
    requests do not wait for those of its parent.

    The tokens of a block depend on the session's name and the block's id alone. With `shared`, the blocks
    of the tools and the system prompt (the most frequent opening of an agent's prompts) depend on their
    places in the prompt instead, so that all sessions share them; sub-agents share those of their kind.

    A recorded session has no tokens of outputs. Where the next prompt of the same agent repeats the whole
    prompt and is long enough to hold the output as well, the output is what follows there. Other outputs,
    and blocks that have no id, are in no other prompt.
    """

    sessions: tuple[RecordedSession, ...] = ()
    live: int = field(
        default=32, metadata=bounds(1, 4096, "sessions at once; when one ends, a new one may start")
    )
    gap: float = field(
        default=30.0, metadata=bounds(0.001, 1e6, "seconds between the starts of sessions, on average")
    )
    shared: int = field(
        default=1, metadata=bounds(0, 1, "whether all sessions share tools and system prompt; 0: no")
    )
    page: int = field(default=BLOCK, metadata=bounds(BLOCK, 4096, "tokens per page, a multiple of 64"))
    folds: int = field(
        default=1,
        metadata=bounds(1, 1000, "parts of the recorded sessions, dealt in the order of their names"),
    )
    fold: int = field(default=0, metadata=bounds(0, 999, "number of the part that is replayed, from 0"))
    rest: int = field(default=0, metadata=bounds(0, 1, "1: all parts but that one are replayed instead"))

    closed: bool = False
    """Whether the times of an agent's requests leave out how long the recorded answers took.

    For a replay that adds times of its own: what is left are the pauses between the answers and the requests.
    """

    def __post_init__(self) -> None:
        if self.page % BLOCK:
            raise ConfigError(f"page={self.page} is no multiple of {BLOCK}, the block of the recorded ids")
        if self.fold >= self.folds:
            raise ConfigError(f"fold={self.fold} is none of {self.folds} parts; use a number below folds")
        if self.rest and self.folds == 1:
            raise ConfigError("rest=1 leaves nothing if there is one part; use folds=2 or more")

    def dealt(self, sessions: Sequence[RecordedSession]) -> Sessions:
        """Return the workload of the part of these sessions that `folds`, `fold` and `rest` name.

        Raises ConfigError if it is empty.
        """
        kept = [
            one
            for number, one in enumerate(sessions)
            if (number % self.folds == self.fold) != bool(self.rest)
        ]
        if not kept:
            raise ConfigError(f"{len(sessions)} sessions make no {self.folds} parts; use fewer folds")
        return replace(self, sessions=tuple(kept))

    def count(self, seed: int) -> int:
        """Return the number of requests of all sessions."""
        return sum(len(agent.turns) for session in self.sessions for agent in session.agents)

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all sessions, whose order and starting times depend on the seed."""
        openings = [_opening(session) if self.shared else None for session in self.sessions]
        offsets = [0, *accumulate(len(session.agents) for session in self.sessions)]
        for arrival, number, agent, turn in self._schedule(seed):
            prompt, output = _tokens(self.sessions[number], openings[number], agent, turn)
            ending = self.sessions[number].agents[agent].turns[turn].ending
            yield Request(prompt, output, arrival, offsets[number] + agent, turn, ending)

    def about(self) -> str:
        """Return a sentence on how the sessions are replayed."""
        opening = (
            "their tools and system prompts are the same tokens, as in one deployment (shared=1)"
            if self.shared
            else "they share no tokens (shared=0)"
        )
        return (
            f"{len(self.sessions)} recorded sessions, at most {self.live} at once, started by a Poisson"
            f" process every {self.gap:g} s; {opening}."
        )

    def _schedule(self, seed: int) -> list[tuple[float, int, int, int]]:
        """Return (arrival, session, agent, turn) of each request in order of arrival."""
        starts = poisson(1 / self.gap, rng_of(seed, "sessions", "starts"))
        order = rng_of(seed, "sessions", "order").permutation(len(self.sessions)).tolist()
        ends: list[float] = []  # of the sessions that run, a heap
        schedule = []
        for number, start in zip(order, starts, strict=False):
            session = self.sessions[number]
            begin = max(start, heapq.heappop(ends)) if len(ends) == self.live else start
            heapq.heappush(ends, begin + session.seconds)
            schedule += [
                (begin + time, number, i, j)
                for i, agent in enumerate(session.agents)
                for j, time in enumerate(_times(agent, closed=self.closed))
            ]
        return sorted(schedule)


def _opening(session: RecordedSession) -> _Opening:
    found: dict[int, int] = {}
    for agent in session.agents:
        length = agent.opening // BLOCK
        # A session may begin with a request to another model, so the first prompt does not decide.
        ids, _ = Counter(turn.ids[:length].tobytes() for turn in agent.turns).most_common(1)[0]
        opening = np.frombuffer(ids, np.uint32)
        keys = block_keys(np.arange(len(opening), dtype=np.uint64), key_of("sessions", "opening", agent.kind))
        found = dict(zip(opening.tolist(), keys.tolist(), strict=True)) | found
    ordered = np.array(sorted(found), np.uint32)
    return _Opening(ordered, np.array([found[one] for one in ordered.tolist()], np.uint64))


def _times(agent: RecordedAgent, *, closed: bool) -> Iterator[float]:
    """Yield the times of an agent's requests, in seconds since the session's start."""
    if not closed:
        yield from (turn.time for turn in agent.turns)
        return
    now = agent.turns[0].time
    yield now
    for turn, following in pairwise(agent.turns):
        now += max(0.0, following.time - turn.time - turn.service)
        yield now


def _tokens(
    session: RecordedSession, opening: _Opening | None, agent: int, number: int
) -> tuple[TokenArray, TokenArray]:
    """Return prompt and output of a turn."""
    turns = session.agents[agent].turns
    turn, length = turns[number], turns[number].input_length
    # tokens    | block | block | block | par|tial.. output | rest |
    #           0                       covered             end
    covered, end = min(length, len(turn.ids) * BLOCK), length + turn.output_length
    parts = [_expanded(session.name, opening, turn.ids, covered)]
    if number + 1 < len(turns) and _continues(turn, turns[number + 1]):
        following, first = turns[number + 1], covered // BLOCK
        known = min(end, len(following.ids) * BLOCK) - first * BLOCK
        ids = following.ids[first : -(-end // BLOCK)]
        parts.append(_expanded(session.name, opening, ids, known)[covered - first * BLOCK :])
    rest = end - sum(len(part) for part in parts)
    parts.append(tokens(key_of("sessions", "own", session.name, agent, number), rest))
    made = join(*parts)
    return made[:length], made[length:]


def _continues(turn: RecordedTurn, following: RecordedTurn) -> bool:
    """Return whether the next prompt repeats this one and is long enough to hold its output as well."""
    blocks = turn.input_length // BLOCK
    return following.input_length >= turn.input_length + turn.output_length and np.array_equal(
        turn.ids[:blocks], following.ids[:blocks]
    )


def _expanded(name: str, opening: _Opening | None, ids: BlockIds, length: int) -> TokenArray:
    keys = block_keys(ids.astype(np.uint64), key_of("sessions", "block", name))
    if opening is not None and len(opening.ids):
        at = np.minimum(np.searchsorted(opening.ids, ids), len(opening.ids) - 1)
        keys = np.where(opening.ids[at] == ids, opening.keys[at], keys)
    return expand_keys(keys, BLOCK, length)
