"""Workload that imitates Mooncake's synthetic trace: chats, long requests, questions about documents.

The real trace is FAST25-release/traces/synthetic_trace.jsonl of kvcache-ai/Mooncake. Public facts about it:

- It has 3,993 requests in 1,022 seconds, made of ShareGPT, L-Eval and LooGLE with Poisson arrivals.
- Prompts have 15 k tokens on average. There are 43,924 distinct blocks of 512 tokens.
- Chats and new documents come early. The last requests are questions about earlier documents.

The imitation has prompts of 15.4 k tokens and 44,500 distinct blocks, on average over seeds. Its lengths are
log-normal and similar to the real ones. No row of the real trace is in this file. Results for the imitation
are not valid for the real trace, and vice versa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import Span, Workload, bounds, check_size
from tiercache_lab.replay.sources.conversations import poisson
from tiercache_lab.replay.sources.mooncake import BLOCK, TraceRow, expanded
from tiercache_lab.replay.sources.streams import key_of, rng_of

_NEW_UNTIL: Final = 0.8
"""Fraction of the trace, from its start, in which all chats, single requests and first questions arrive."""

_GAP: Final = 0.06
"""Mean gap between two questions about a document, as a fraction of the trace."""

_ASKED_MORE: Final = 2.8
"""Mean number of questions about a document of average length, in addition to the minimum.

30 % of this number is the same for all documents. 70 % is proportional to a document's length.
"""


class _Lengths(NamedTuple):
    """Log-normal distribution of lengths in tokens, clipped at both ends."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        return np.clip(rng.lognormal(math.log(self.median), self.sigma, size), self.low, self.high).astype(
            np.int64
        )


_CHAT: Final = _Lengths(40, 1.3, 8, 4000)
_CHAT_ANSWER: Final = _Lengths(240, 0.8, 8, 1500)
_LONG: Final = _Lengths(17_500, 0.25, 8000, 40_000)
_LONG_ANSWER: Final = _Lengths(220, 0.4, 40, 800)
_QUESTION: Final = _Lengths(60, 0.7, 10, 700)
_QUESTION_ANSWER: Final = _Lengths(14, 1.2, 2, 400)
_DOCUMENT: Final = Span(2500, 67_000)
"""Tokens of a document, log-normal, clipped to this range."""
_ASKED: Final = Span(1, 15)
"""Questions about a document; longer documents get more of them."""


class _Plan(NamedTuple):
    """Columns with one entry per request, in order of arrival."""

    document: npt.NDArray[np.int64]
    """Number of the document that the request is about; -1 for chats and single requests."""
    shared: npt.NDArray[np.int64]
    """Number of blocks at the start of the prompt that all requests about the document share."""
    private: npt.NDArray[np.int64]
    """Number of tokens of the prompt after these blocks."""
    output: npt.NDArray[np.int64]
    """Number of tokens of the output."""


@dataclass(frozen=True, slots=True)
class Documents(Workload):
    """Chats, long single requests, and questions about documents.

    Prompts about the same document share the whole blocks of the document. Other prompts share nothing.
    """

    chats: int = field(default=1293, metadata=bounds(0, 2**18, "short requests"))
    singles: int = field(
        default=500, metadata=bounds(0, 2**18, "long requests that come once, such as summaries")
    )
    questions: int = field(default=2200, metadata=bounds(1, 2**18, "requests about documents"))
    rate: float = field(default=3.9, metadata=bounds(0.001, 1e6, "requests per second"))

    def __post_init__(self) -> None:
        check_size(self.chats + self.singles + self.questions, _DOCUMENT.high + _QUESTION.high)

    def count(self, seed: int) -> int:
        """Return the number of chats, single requests and questions together."""
        return self.chats + self.singles + self.questions

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each is a session of its own."""
        return expanded(self._rows(seed), key_of(seed, "documents"))

    def _rows(self, seed: int) -> Iterator[TraceRow]:
        """Yield the requests as rows of a trace. Blocks are numbered in the order of their first use."""
        plan = self._plan(rng_of(seed, "documents", "plan"))
        times = poisson(self.rate, rng_of(seed, "documents", "times"))
        first_block: dict[int, int] = {}
        unused = 0
        for number, now in zip(range(self.count(seed)), times, strict=False):
            document, shared, private, output = (int(column[number]) for column in plan)
            # The ids of a prompt are two ranges: the blocks of the document, which all its questions share,
            # and then the blocks of this prompt alone:
            #
            #     [begin, begin + shared)  |  [unused, unused + blocks)
            begin = first_block.setdefault(document, unused) if shared else unused
            if begin == unused:
                unused += shared
            blocks = -(-private // BLOCK)
            ids = np.concatenate([np.arange(begin, begin + shared), np.arange(unused, unused + blocks)])
            unused += blocks
            yield TraceRow(now, shared * BLOCK + private, output, ids.astype(np.uint64))

    def _plan(self, rng: np.random.Generator) -> _Plan:
        # The range is four sigmas wide: two below the median and two above.
        middle = _Lengths(
            math.sqrt(_DOCUMENT.low * _DOCUMENT.high),
            math.log(_DOCUMENT.high / _DOCUMENT.low) / 4,
            *_DOCUMENT,
        )
        # Every document has at least one question, so there are never more documents than questions.
        lengths = middle.draw(rng, self.questions)
        more = rng.exponential(_ASKED_MORE * (0.3 + 0.7 * lengths / lengths.mean())).astype(np.int64)
        asked = np.minimum(_ASKED.low + more, _ASKED.high)
        documents = int(np.searchsorted(np.cumsum(asked), self.questions)) + 1
        document = np.repeat(np.arange(documents), asked[:documents])[: self.questions]
        # Times are fractions of the trace. A document's first question comes at a random time, and each
        # further question comes one gap after the previous question. `cumsum` runs on over all documents, so
        # the sum over all earlier documents is subtracted.
        gaps = rng.exponential(_GAP, self.questions)
        begins = np.flatnonzero(np.diff(document, prepend=-1))
        gaps[begins] = rng.uniform(0, _NEW_UNTIL, len(begins))
        when = np.cumsum(gaps)
        when -= np.repeat(when[begins] - gaps[begins], np.diff(begins, append=self.questions))
        singles = self.chats + self.singles
        order = np.argsort(np.concatenate([when, rng.uniform(0, _NEW_UNTIL, singles)]), kind="stable")
        none = np.zeros(singles, np.int64)
        private = [
            lengths[document] % BLOCK + _QUESTION.draw(rng, self.questions),
            _CHAT.draw(rng, self.chats),
            _LONG.draw(rng, self.singles),
        ]
        output = [draws.draw(rng, size) for draws, size in self._outputs()]
        return _Plan(
            document=np.concatenate([document, none - 1])[order],
            shared=np.concatenate([lengths[document] // BLOCK, none])[order],
            private=np.concatenate(private)[order],
            output=np.concatenate(output)[order],
        )

    def _outputs(self) -> tuple[tuple[_Lengths, int], ...]:
        return (_QUESTION_ANSWER, self.questions), (_CHAT_ANSWER, self.chats), (_LONG_ANSWER, self.singles)
