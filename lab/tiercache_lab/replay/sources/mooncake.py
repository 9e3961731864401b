"""Mooncake's traces, whose block ids are expanded into tokens.

A file has one JSON object per line, with the fields `timestamp` (milliseconds), `input_length` and
`output_length` (tokens), and `hash_ids` (one integer per block of 512 tokens of the prompt). The last block
of a prompt may be partial. If two blocks have the same id, their prompts are equal up to the ends of these
blocks. Other fields and blank lines are ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from tiercache.errors import InputError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import MAX_REQUESTS, MAX_TOKENS, Workload
from tiercache_lab.replay.sources.fields import block_ids, duration, parse_object, refuse, whole
from tiercache_lab.replay.sources.streams import block_keys, expand_keys, key_of, tokens

BLOCK: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrace(Workload):
    """Trace that was read from a file, as columns with one entry per request.

    The ids of prompt i are `ids[offsets[i] : offsets[i + 1]]`. The seed has no effect on a trace.
    """

    arrivals: npt.NDArray[np.float64]
    input_lengths: npt.NDArray[np.int64]
    output_lengths: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint64]

    def count(self, seed: int) -> int:
        """Return the number of requests that were read."""
        return len(self.arrivals)

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests as they were recorded.

        A trace does not record sessions, so each request is a session of its own. The tokens of a block
        depend only on its id. Which prompts repeat an earlier output is not recorded either, so the tokens
        of an output are in no prompt.
        """
        for i in range(len(self.arrivals)):
            ids = self.ids[self.offsets[i] : self.offsets[i + 1]]
            prompt = expand_keys(block_keys(ids), BLOCK, int(self.input_lengths[i]))
            output = tokens(key_of("trace", "output", 0, i), int(self.output_lengths[i]))
            yield Request(prompt, output, float(self.arrivals[i]), i)


_MAX_LINE: Final = 2**18
"""Maximum bytes of a line. A prompt of `MAX_TOKENS` has 8,192 ids of at most 20 digits."""

_MAX_LINES: Final = 2 * MAX_REQUESTS
"""Maximum number of lines, including blank lines."""

_MAX_IDS: Final = 2**24
"""Maximum number of ids of all requests together. They take 128 MiB and stand for 2**33 tokens."""

_GZIP: Final = b"\x1f\x8b"
_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: Path, limit: int | None = None) -> RecordedTrace:
    """Return the first `limit` requests of a trace file. The first request arrives at second 0.

    The function reads and checks all these requests before it returns. It raises InputError, with the number
    of the wrong line, in these cases:

    - The file is not a trace.
    - A timestamp is smaller than the timestamp before it. Requests are never sorted silently, because their
      order decides what is cached.
    - There are more than 2**20 requests, 2**22 tokens in a prompt or 2**24 ids in all.
    """
    # Arrays of C numbers: 2**24 ids take 128 MiB in an array, and over 600 MiB in a list of Python integers.
    times, inputs, outputs, offsets, ids = array("d"), array("q"), array("q"), array("q", [0]), array("Q")
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path):
                try:
                    time, prompt, output, found = _parse(line)
                    if times and time < times[-1]:
                        refuse(
                            f"timestamp {time:.15g} comes after {times[-1]:.15g} in the file; sort"
                            " the file by timestamp"
                        )
                    if len(times) == MAX_REQUESTS or len(ids) + len(found) > _MAX_IDS:
                        refuse(
                            f"a trace has at most {MAX_REQUESTS:,} requests and {_MAX_IDS:,} hash_ids; replay"
                            " it with a limit"
                        )
                except InputError as error:
                    raise InputError(f"{path}, line {number}: {error}") from error
                times.append(time)
                inputs.append(prompt)
                outputs.append(output)
                ids.extend(found)
                offsets.append(len(ids))
                if len(times) == limit:
                    break
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}; give the path of a Mooncake trace file"
            " (.jsonl)"
        ) from error
    if not times:
        raise InputError(
            f"{path} has no requests; give a Mooncake trace file, which has one JSON object a line"
        )
    seconds = np.array(times, dtype=np.float64)
    return RecordedTrace(
        arrivals=(seconds - seconds[0]) / 1000,
        input_lengths=np.array(inputs, dtype=np.int64),
        output_lengths=np.array(outputs, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        ids=np.array(ids, dtype=np.uint64),
    )


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1.

    Raises InputError for a line of more than `_MAX_LINE` bytes, without reading the rest of the line.
    """
    for number in count(1):
        line = file.readline(_MAX_LINE + 1)
        if not line:
            return
        if number == 1 and line.startswith(_GZIP):
            raise InputError(f"{path} is compressed; unpack it with gunzip first")
        if len(line) > _MAX_LINE:
            raise InputError(
                f"{path}, line {number}: longer than {_MAX_LINE:,} bytes; a trace has one JSON object a line"
            )
        if number > _MAX_LINES:
            raise InputError(
                f"{path}, line {number}: a trace has at most {_MAX_LINES:,} lines; replay it with a limit"
            )
        if line.strip():
            yield number, line


def _parse(line: bytes) -> tuple[int | float, int, int, list[int]]:
    """Return timestamp, lengths of prompt and output, and ids of one line, checked.

    Raises InputError without the number of the line; the caller adds this number.
    """
    row = parse_object(line, "a trace has one JSON object a line", _FIELDS)
    time = duration(row, "timestamp", "milliseconds")
    prompt, output = whole(row, "input_length", 1, MAX_TOKENS), whole(row, "output_length", 0, MAX_TOKENS)
    ids = block_ids(row, "hash_ids", 64)
    blocks = -(-prompt // BLOCK)
    if len(ids) != blocks:
        refuse(
            f"{len(ids)} hash_ids for input_length {prompt}, which takes {blocks} blocks of {BLOCK} tokens"
        )
    return time, prompt, output, ids
