"""Traces, which record requests as lengths and block ids. The ids are expanded into tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import Workload
from tiercache_lab.replay.sources.streams import expand, key_of, tokens

BLOCK: Final = 512
"""Tokens per block of a trace."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRow:
    """Request of a trace."""

    arrival: float
    """Seconds since the start."""
    input_length: int
    """Number of tokens of the prompt."""
    output_length: int
    """Number of tokens of the output."""
    ids: npt.NDArray[np.uint64]
    """One id per block of the prompt, whose last block may be partial.

    An id identifies its block together with all blocks before it.
    """


def expanded(rows: Iterator[TraceRow], salt: int = 0) -> Iterator[Request]:
    """Yield the requests of a trace.

    A trace does not record sessions, so each request is a session of its own. The tokens of a block depend
    only on its id and on `salt`. A trace does not record which prompts repeat an earlier output, so the
    tokens of an output are in no prompt.
    """
    for number, row in enumerate(rows):
        prompt = expand(row.ids, BLOCK, row.input_length, salt)
        output = tokens(key_of("trace", "output", salt, number), row.output_length)
        yield Request(prompt, output, row.arrival, number)


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
        """Yield the requests as they were recorded."""
        return expanded(self._rows())

    def _rows(self) -> Iterator[TraceRow]:
        for i in range(len(self.arrivals)):
            ids = self.ids[self.offsets[i] : self.offsets[i + 1]]
            yield TraceRow(
                float(self.arrivals[i]), int(self.input_lengths[i]), int(self.output_lengths[i]), ids
            )
