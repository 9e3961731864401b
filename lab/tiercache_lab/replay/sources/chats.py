"""Workload of short chats, few of which are continued."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.arrivals import poisson
from tiercache_lab.replay.sources.base import Workload, check_size
from tiercache_lab.replay.sources.options import bounds
from tiercache_lab.replay.sources.streams import key_of, rng_of, tokens

_MAX_LENGTH: Final = 8192
"""Maximum number of tokens of a question, and also of an answer."""

_MAX_ROUNDS: Final = 64
"""Maximum number of rounds of a chat."""


@dataclass(slots=True)
class _Chat:
    """Chat that can be continued."""

    number: int
    length: int = 0
    """Tokens of the history: the first `length` tokens of the stream that `number` names."""
    rounds: int = 0
    """Number of rounds so far."""


@dataclass(frozen=True, slots=True)
class Chats(Workload):
    """Chats of one or more questions, each with its answer.

    Each request continues an older chat with the probability `continued`, and otherwise begins a new chat.
    Only the newest chats, `recent` in number, can be continued.
    """

    chats: int = field(default=4000, metadata=bounds(1, 2**20, "requests"))
    continued: float = field(
        default=0.03, metadata=bounds(0, 1, "fraction of the requests that continue an older chat")
    )
    recent: int = field(
        default=1000, metadata=bounds(1, 65_536, "how many of the newest chats may be continued")
    )
    question: int = field(
        default=180, metadata=bounds(1, 4096, "tokens of a question, median of a log-normal")
    )
    answer: int = field(default=250, metadata=bounds(1, 4096, "tokens of an answer, median of a log-normal"))
    spread: float = field(default=1.0, metadata=bounds(0, 3, "sigma of both log-normals"))
    rate: float = field(default=2.0, metadata=bounds(0.001, 1e6, "requests per second"))

    def __post_init__(self) -> None:
        check_size(self.chats, _MAX_ROUNDS * 2 * _MAX_LENGTH)

    def count(self, seed: int) -> int:
        """Return the number of requests: the parameter `chats`."""
        return self.chats

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each chat is a session."""
        rng = rng_of(seed, "chats")
        recent: deque[_Chat] = deque(maxlen=self.recent)
        begun = 0
        for _, now in zip(
            range(self.chats), poisson(self.rate, rng_of(seed, "chats", "times")), strict=False
        ):
            goes_on = rng.random() < self.continued and len(recent) > 0
            chat = recent[int(rng.integers(len(recent)))] if goes_on else None
            if chat is None or chat.rounds == _MAX_ROUNDS:
                chat = _Chat(begun)
                begun += 1
                recent.append(chat)
            lengths = rng.lognormal([math.log(self.question), math.log(self.answer)], self.spread)
            question, answer = (min(max(int(length), 1), _MAX_LENGTH) for length in lengths)
            said = tokens(key_of(seed, "chats", chat.number), chat.length + question + answer)
            yield Request(said[:-answer], said[-answer:], now, chat.number, chat.rounds)
            chat.length += question + answer
            chat.rounds += 1
