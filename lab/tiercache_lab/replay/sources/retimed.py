"""Workload whose sessions start at other times than its own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import Workload, WorkloadSource
from tiercache_lab.replay.sources.times import read_times

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
