"""Reader of recorded agent sessions in the format of kv-cache-tester's traces: one JSON object per file.

A file has `block_size` (64), `tool_tokens` and `system_tokens` (tokens with which the prompts open), and
`requests` in order of time. A request has `t` (seconds since the session's start), `in` and `out` (tokens),
`hash_ids` (one integer per whole block of the prompt; an id for the partial block at the end may follow), and
perhaps `api_time` (seconds that the answer took).
A request of `type` `subagent` has `requests` of its own instead, whose `t` counts from its start, and perhaps
`tool_tokens`, `system_tokens` and `subagent_type`; its ids are those of the file. Other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiercache.errors import InputError
from tiercache.policy import Ending
from tiercache.text import shown
from tiercache_lab.replay.sources.base import MAX_REQUESTS, MAX_TOKENS
from tiercache_lab.replay.sources.fields import block_ids, check_object, duration, parse_object, refuse, whole
from tiercache_lab.replay.sources.sessions import BLOCK, RecordedAgent, RecordedSession, RecordedTurn

SUFFIX: Final = ".json"
"""End of the names of the files."""

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
