"""Traces: requests as lengths and block ids, and their expansion into tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.replay.base import Request
from tiercache.replay.sources.base import Workload
from tiercache.replay.sources.streams import expand, key_of, tokens

BLOCK: Final = 512
"""Tokens of a block."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One request: its arrival in seconds, its lengths in tokens, and one uint64 id per block of its prompt.

    An id stands for its block and all blocks before it; the last block may be cut off.
    """

    arrival: float
    input_length: int
    output_length: int
    ids: npt.NDArray[np.uint64]


def expanded(rows: Iterator[Row], salt: int = 0) -> Iterator[Request]:
    """Yield the requests of a trace; each is a session of its own, because a trace does not record sessions.

    A block's tokens depend on its id and on `salt` alone. Outputs share nothing with anything: where a prompt repeats an older output, it
    does so under block ids of its own.
    """
    for number, row in enumerate(rows):
        prompt = expand(row.ids, BLOCK, row.input_length, salt)
        output = tokens(key_of("trace", "output", salt, number), row.output_length)
        yield Request(prompt, output, row.arrival, number)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded(Workload):
    """A trace that was read from a file, as columns; it is the same with every seed.

    The ids of prompt i are `ids[offsets[i] : offsets[i + 1]]`.
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

    def _rows(self) -> Iterator[Row]:
        for i in range(len(self.arrivals)):
            ids = self.ids[self.offsets[i] : self.offsets[i + 1]]
            yield Row(float(self.arrivals[i]), int(self.input_lengths[i]), int(self.output_lengths[i]), ids)
