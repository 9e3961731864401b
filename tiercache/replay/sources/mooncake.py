"""Reader of Mooncake's trace files, which have one JSON object a line.

The fields of a line: `timestamp` (milliseconds), `input_length` and `output_length` (tokens), `hash_ids` (one integer per block of 512
tokens of the prompt, the last of which may be partial; equal ids mean equal prefixes up to there). Other fields are ignored, blank lines
skipped.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn

import numpy as np

from tiercache.config.quantities import shown
from tiercache.errors import InputError
from tiercache.replay.sources.base import MAX_REQUESTS, MAX_TOKENS
from tiercache.replay.sources.trace import BLOCK, Recorded

_MAX_LINE: Final = 2**18
"""Largest size of a line in bytes: a prompt of `MAX_TOKENS` has 8,192 ids of at most 20 digits."""

_MAX_LINES: Final = 2 * MAX_REQUESTS
"""Largest number of lines, blank ones included."""

_MAX_IDS: Final = 2**24
"""Largest number of ids of all requests together: 128 MiB of memory, or 8 G tokens."""

_MAX_TIME: Final = 10**15
"""Largest timestamp in milliseconds."""

_GZIP: Final = b"\x1f\x8b"


class _Fields(NamedTuple):
    """Fields of a line that has been checked."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int | None = None) -> Recorded:
    """Read the first `limit` requests of a trace file; arrivals are counted from the first.

    The whole file is checked, up to the limit, before anything is replayed. Raises InputError, with the number of the line, if the file is
    not a trace; if timestamps fall (they are never sorted silently: the order of requests decides what is cached); and beyond 2**20
    requests, 2**22 tokens of a prompt or 2**24 ids.
    """
    times, inputs, outputs, offsets, ids = array("d"), array("q"), array("q"), array("q", [0]), array("Q")
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path):
                try:
                    row = _parse(line)
                    if times and row.timestamp < times[-1]:
                        _refuse(f"timestamp {row.timestamp:.15g} comes after {times[-1]:.15g} in the file; sort it by timestamp")
                    if len(times) == MAX_REQUESTS or len(ids) + len(row.hash_ids) > _MAX_IDS:
                        _refuse(f"a trace has at most {MAX_REQUESTS:,} requests and {_MAX_IDS:,} hash_ids; replay it with a limit")
                except InputError as error:
                    raise InputError(f"{path}, line {number}: {error}") from error
                times.append(row.timestamp)
                inputs.append(row.input_length)
                outputs.append(row.output_length)
                ids.extend(row.hash_ids)
                offsets.append(len(ids))
                if len(times) == limit:
                    break
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}; give the path of a Mooncake trace file (.jsonl)") from error
    if not times:
        raise InputError(f"{path} has no requests; give a Mooncake trace file, which has one JSON object a line")
    seconds = np.array(times, dtype=np.float64)
    return Recorded(
        arrivals=(seconds - seconds[0]) / 1000,
        input_lengths=np.array(inputs, dtype=np.int64),
        output_lengths=np.array(outputs, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        ids=np.array(ids, dtype=np.uint64),
    )


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1; at most `_MAX_LINE` + 1 bytes of a line are read."""
    for number in count(1):
        line = file.readline(_MAX_LINE + 1)
        if not line:
            return
        if number == 1 and line.startswith(_GZIP):
            raise InputError(f"{path} is compressed; unpack it with gunzip first")
        if len(line) > _MAX_LINE:
            raise InputError(f"{path}, line {number}: longer than {_MAX_LINE:,} bytes; a trace has one JSON object a line")
        if number > _MAX_LINES:
            raise InputError(f"{path}, line {number}: a trace has at most {_MAX_LINES:,} lines; replay it with a limit")
        if line.strip():
            yield number, line


def _parse(line: bytes) -> _Fields:
    """Parse and check one line. Raises InputError without the line's number, which the caller adds."""
    try:
        row = json.loads(line.decode(), parse_constant=_constant)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {shown(line[:40].decode(errors='replace'))}; a trace has one JSON object a line") from error
    if not isinstance(row, dict):
        _refuse(f"{shown(row)} is not a JSON object with timestamp, input_length, output_length and hash_ids")
    missing = [name for name in _Fields._fields if name not in row]
    if missing:
        _refuse(f"no {' and no '.join(missing)}; a request has {', '.join(_Fields._fields)}")
    time = row["timestamp"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= _MAX_TIME:
        _refuse(f"timestamp must be a number of milliseconds from 0 to 1e15, not {shown(time)}")
    prompt, output = _whole(row, "input_length", 1, MAX_TOKENS), _whole(row, "output_length", 0, MAX_TOKENS)
    ids = row["hash_ids"]
    # bool is a subclass of int, and an id beyond 64 bits would not fit its column.
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**64 for i in ids):
        _refuse(f"hash_ids must be a list of integers from 0 to 2**64 - 1, not {shown(ids)}")
    blocks = -(-prompt // BLOCK)
    if len(ids) != blocks:
        _refuse(f"{len(ids)} hash_ids for input_length {prompt}, which takes {blocks} blocks of {BLOCK} tokens")
    return _Fields(time, prompt, output, ids)


def _whole(row: dict[str, Any], name: str, low: int, high: int) -> int:
    value = row[name]
    if type(value) is not int or not low <= value <= high:
        _refuse(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
    return value


def _constant(text: str) -> NoReturn:
    _refuse(f"{text} is not a number that JSON knows")


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
