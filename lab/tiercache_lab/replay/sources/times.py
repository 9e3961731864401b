"""Arrival times from files: BurstGPT's and Azure's traces of LLM requests, as CSV.

- BurstGPT: `Timestamp` (seconds), `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log Type`,
  and in newer files `Session ID` and `Elapsed time`.
- Azure LLM inference, 2023 and 2024: `TIMESTAMP` (date and time; UTC if there is no offset), `ContextTokens`,
  `GeneratedTokens`.

Only the times are used. Requests that failed, which BurstGPT's files have with 0 response tokens, count too.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError, InputError
from tiercache.text import shown
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import MAX_REQUESTS, Workload, WorkloadSource
from tiercache_lab.replay.sources.fields import refuse

_MAX_LINE: Final = 2**14
"""Maximum bytes of a line."""
_MAX_SECONDS: Final = 10.0**12
_GZIP: Final = b"\x1f\x8b"
_MARK: Final = b"\xef\xbb\xbf"
"""Mark at the beginning of some files in UTF-8."""
_MOMENT: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,13}(\.\d{1,12})?", re.ASCII)


def read_times(path: Path, count: int) -> npt.NDArray[np.float64]:
    """Return the times of the first `count` requests of a file, in seconds; the first is 0.

    Later lines are not read. Raises InputError, with the line, for a file that is neither of the two formats,
    for a time before that of the line above, and if there are fewer requests.
    """
    times = array("d")
    try:
        with path.open("rb") as file:
            rows = csv.reader(_lines(file, path), strict=True)
            column, parse = _columns(path, next(rows, []))
            for row in rows:
                if not row:
                    continue
                try:
                    if len(row) <= column:
                        refuse(f"{len(row)} fields; the time is in field {column + 1}")
                    time = parse(row[column].strip())
                    if times and time < times[-1]:
                        refuse(f"{shown(row[column])} comes before the time of the line above; sort the file")
                except InputError as error:
                    raise InputError(f"{path}, line {rows.line_num}: {error}") from error
                times.append(time)
                if len(times) == count:
                    break
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}; give a CSV file") from error
    except csv.Error as error:
        raise InputError(f"{path}, line {rows.line_num}: not CSV: {error}") from error
    if len(times) < count:
        raise InputError(
            f"{path} has {len(times):,} requests, and the source needs {count:,} times, one for each session;"
            " give a longer file, or replay less with --limit"
        )
    found = np.array(times)
    found -= found[0] if count else 0.0
    return found


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield at most `2 * MAX_REQUESTS` lines as text."""
    for number in range(1, 2 * MAX_REQUESTS + 1):
        line = file.readline(_MAX_LINE + 1)
        if not line:
            return
        if number == 1 and line.startswith(_GZIP):
            raise InputError(f"{path} is compressed; unpack it with gunzip first")
        if len(line) > _MAX_LINE:
            raise InputError(f"{path}, line {number}: longer than {_MAX_LINE:,} bytes; is it a CSV file?")
        try:
            yield line.removeprefix(_MARK if number == 1 else b"").decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}, line {number}: not UTF-8; is it a CSV file?") from error


def _columns(path: Path, header: list[str]) -> tuple[int, Callable[[str], float]]:
    """Return the column of the times, and the function that reads one."""
    names = [name.strip().lower() for name in header]
    if "timestamp" in names:
        column = names.index("timestamp")
        if "contexttokens" in names:
            return column, _moment
        if "request tokens" in names:
            return column, _seconds
    raise InputError(
        f"{path} begins with {shown(','.join(header))}; give a file of BurstGPT (Timestamp, Model, Request"
        " tokens, ...) or of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens)"
    )


def _seconds(text: str) -> float:
    time = float(text) if _SECONDS.fullmatch(text) else math.nan
    if not time <= _MAX_SECONDS:
        refuse(f"the Timestamp must be a number of seconds from 0 to {_MAX_SECONDS:g}, not {shown(text)}")
    return time


def _moment(text: str) -> float:
    match = _MOMENT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, time, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day} {time}{zone if zone not in (None, 'Z') else '+00:00'}")
    except ValueError:
        refuse(f"the TIMESTAMP must be a date and time, such as 2023-11-16 18:17:03.98, not {shown(text)}")
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() + float(fraction or 0)


_MAX_TOKENS: Final = 2**27
"""Maximum number of tokens of requests that wait for earlier ones. They take 1 GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Retimed(Workload):
    """Requests of a workload at other times, which `retimed` calculates for one seed and count."""

    workload: Workload
    arrivals: npt.NDArray[np.float64]
    """New arrival of each request, in the order of `workload`."""

    def count(self, seed: int) -> int:
        """Return the number of requests."""
        return len(self.arrivals)

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of their new arrivals.

        Raises ConfigError if the new order is so different that too many requests would have to wait.
        """
        waiting: dict[int, Request] = {}
        tokens = 0
        given = enumerate(islice(self.workload.generate(seed), len(self.arrivals)))
        for wanted in np.argsort(self.arrivals, kind="stable").tolist():
            while wanted not in waiting:
                number, request = next(given)
                waiting[number] = request
                tokens += len(request.prompt) + len(request.output)
                if tokens > _MAX_TOKENS:
                    raise ConfigError(
                        f"sessions that start at other times overlap so differently that {len(waiting):,}"
                        " requests would have to wait in memory; replay fewer sessions at once, or fewer in"
                        " all"
                    )
            request = waiting.pop(wanted)
            tokens -= len(request.prompt) + len(request.output)
            yield replace(request, arrival=float(self.arrivals[wanted]))


def retimed(source: WorkloadSource, path: Path) -> WorkloadSource:
    """Return a source whose sessions start at the times in a file of `read_times`.

    The n-th session, in the order of the first requests, starts at the n-th time. Its other requests keep
    their distances from its first. Where each request is a session, all requests have the times of the file.
    Reads the source once. Raises InputError as `read_times` does.
    """
    starts: dict[int, int] = {}
    sessions, old, first = array("q"), array("d"), array("d")
    for request in source:
        if request.session not in starts:
            starts[request.session] = len(starts)
            first.append(request.arrival)
        sessions.append(starts[request.session])
        old.append(request.arrival)
    times = read_times(path, len(starts))
    which = np.array(sessions, np.int64)
    arrivals = times[which] + (np.array(old) - np.array(first)[which])
    about = f"Sessions start at the times of {path.name}." if len(starts) < len(which) else ""
    about = about or f"Requests come at the times of {path.name}."
    return replace(source, workload=Retimed(source.workload, arrivals), about=about)
