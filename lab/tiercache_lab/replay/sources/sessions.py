"""Recorded sessions: agents with their sub-agents, read from files and replayed side by side.

The format is that of kv-cache-tester's traces: one JSON object per file, with `block_size` (64),
`tool_tokens` and `system_tokens` (tokens with which the prompts open), and `requests` in order of time. A
request has `t` (seconds since the session's start), `in` and `out` (tokens), `hash_ids` (one integer per
whole block of the prompt; an id for the partial block at the end may follow), and perhaps `api_time`
(seconds that the answer took). A request of `type` `subagent` has `requests` of its own instead, whose
`t` counts from its start, and perhaps `tool_tokens`, `system_tokens` and `subagent_type`; its ids are
those of the file. Other fields are ignored.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.core import TokenArray
from tiercache.errors import ConfigError, InputError
from tiercache.policy import Ending
from tiercache.text import shown
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import MAX_REQUESTS, MAX_TOKENS, Workload, bounds
from tiercache_lab.replay.sources.conversations import poisson
from tiercache_lab.replay.sources.fields import block_ids, check_object, duration, parse_object, refuse, whole
from tiercache_lab.replay.sources.streams import block_keys, expand_keys, join, key_of, rng_of, tokens

BLOCK: Final = 64

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
    """One id per whole block of the prompt, and perhaps one for the partial block at its end. In one session,
    equal ids at equal places mean equal blocks."""
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
    """Whether the times of an agent's requests leave out how long the recorded answers took. For a replay
    that adds times of its own: what is left are the pauses between the answers and the requests."""

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


SUFFIX: Final = ".json"

_MAX_FILES: Final = 2**14
_MAX_FILE: Final = 2**26
"""Maximum bytes of a file. The JSON parser needs some six times as much memory while it reads the file."""
_MAX_IDS: Final = 2**26
"""Maximum number of ids of all files. They take 256 MiB."""
_MAX_DEPTH: Final = 8
"""Maximum number of sub-agents inside each other."""
_ENDINGS: Final = {"tool_use": Ending.CALL, "end_turn": Ending.TURN}
"""Values of `stop`; others say nothing."""


def read_sessions(path: Path) -> tuple[RecordedSession, ...]:
    """Return the session of a file, or the sessions of all files of a directory whose names end in `.json`.

    The sessions are in the order of their files' names. Files are read and checked whole, one at a time.
    Raises InputError, with the name of the file and the place in it, for a file that is not such a session,
    and for more than 2**20 requests or 2**26 ids in all.
    """
    found: list[RecordedSession] = []
    requests = ids = 0
    for file in _files(path):
        try:
            found.append(_session(file))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
        except InputError as error:
            raise InputError(f"{file}: {error}") from error
        turns = [turn for agent in found[-1].agents for turn in agent.turns]
        requests, ids = requests + len(turns), ids + sum(len(turn.ids) for turn in turns)
        if requests > MAX_REQUESTS or ids > _MAX_IDS:
            raise InputError(
                f"{path}: up to {file.name} there are more than {MAX_REQUESTS:,} requests or {_MAX_IDS:,}"
                " hash_ids; replay fewer files at a time"
            )
    return tuple(found)


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.iterdir() if file.suffix == SUFFIX and file.is_file())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if not files:
        raise InputError(f"{path} has no files whose names end in {SUFFIX}, one for each recorded session")
    if len(files) > _MAX_FILES:
        raise InputError(f"{path} has {len(files):,} sessions; replay at most {_MAX_FILES:,} at a time")
    return files


def _session(file: Path) -> RecordedSession:
    with file.open("rb") as opened:
        text = opened.read(_MAX_FILE + 1)
    if len(text) > _MAX_FILE:
        refuse(f"longer than {_MAX_FILE:,} bytes; a file has one session")
    row = parse_object(text, "a file has the JSON object of one session", ("block_size", "requests"))
    if whole(row, "block_size", 1, MAX_TOKENS) != BLOCK:
        refuse(f"block_size must be {BLOCK}, not {row['block_size']}")
    if row.get("hash_id_scope", "local") != "local":
        refuse(f"hash_id_scope must be 'local', not {shown(row['hash_id_scope'])}")
    return RecordedSession(file.stem, list(_agents(row, "", "", 0.0, _MAX_DEPTH)))


def _agents(row: dict[str, Any], kind: str, place: str, start: float, depth: int) -> Iterator[RecordedAgent]:
    """Yield the agent of `row` if it has requests, then its sub-agents, and theirs.

    `place` is where `row` is in the file, `start` its time since the session's start, and `depth` how many
    sub-agents may be inside each other.
    """
    if not isinstance(row["requests"], list) or not row["requests"]:
        refuse(f"{place}requests must be a list of at least one request, not {shown(row['requests'])}")
    opening = sum(whole(row, name, 0, MAX_TOKENS) for name in ("tool_tokens", "system_tokens") if name in row)
    turns: list[RecordedTurn] = []
    inner: list[RecordedAgent] = []
    last = 0.0
    for number, one in enumerate(row["requests"], 1):
        here = f"{place}request {number}"
        try:
            request = check_object(one, ("t", "type"))
            time = duration(request, "t", "seconds")
            if time < last:
                refuse(f"t {time:.15g} comes after {last:.15g} in the file; sort the requests by t")
            last = time
            if request["type"] != "subagent":
                turns.append(_turn(request, start + time))
                continue
            if not depth:
                refuse(f"more than {_MAX_DEPTH} sub-agents are inside each other")
            check_object(request, ("t", "type", "requests"))
        except InputError as error:
            raise InputError(f"{here}: {error}") from error
        inner += _agents(
            request, f"sub-agent {request.get('subagent_type', '')}", f"{here}, ", start + time, depth - 1
        )
    if turns:
        yield RecordedAgent(kind, opening, turns)
    yield from inner


def _turn(row: dict[str, Any], time: float) -> RecordedTurn:
    check_object(row, ("in", "out", "hash_ids"))
    prompt, output = whole(row, "in", 1, MAX_TOKENS), whole(row, "out", 0, MAX_TOKENS)
    ids = block_ids(row, "hash_ids", 32)
    if len(ids) not in (prompt // BLOCK, -(-prompt // BLOCK)):
        refuse(
            f"{len(ids)} hash_ids for in {prompt}, which has {prompt // BLOCK} whole blocks of {BLOCK} tokens"
        )
    service = duration(row, "api_time", "seconds") if row.get("api_time") is not None else 0.0
    return RecordedTurn(
        time,
        prompt,
        output,
        np.array(ids, np.uint32),
        service,
        _ENDINGS.get(str(row.get("stop")), Ending.UNKNOWN),
    )
