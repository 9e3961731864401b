"""Workloads of conversations, short chats and groups with a common prompt, and the pauses between turns."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.core import TokenArray
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.base import Span, Workload, bounds, check_size
from tiercache_lab.replay.sources.streams import join, key_of, rng_of, tokens


class Turn(NamedTuple):
    """Request of a session, without its arrival time."""

    prompt: TokenArray
    output: TokenArray


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield an endless sequence of arrival times in seconds, on average `rate` times per second."""
    now = 0.0
    while True:
        now += rng.exponential(1 / rate)
        yield now


def take_turns(
    sessions: Iterable[Iterator[Turn]], live: int, pause: float, rng: np.random.Generator
) -> Iterator[Request]:
    """Yield the requests of all sessions, with `live` sessions running at a time.

    Each session pauses before each of its turns. The pauses are exponentially distributed with a mean of
    `pause` seconds. So the first `live` sessions begin at different times. When the pause after the last turn
    of a session ends, the next session begins with its first turn. Every session must have at least one turn.
    """
    waiting = enumerate(sessions)
    # Entries are (time of the next turn, session, round, turns). No two entries have the same session, so the
    # heap never compares the iterators.
    heap: list[tuple[float, int, int, Iterator[Turn]]] = []
    for number, turns in waiting:
        heap.append((rng.exponential(pause), number, 0, turns))
        if len(heap) == live:
            break
    heapq.heapify(heap)
    while heap:
        now, number, round_, turns = heap[0]
        turn = next(turns, None)
        if turn is not None:
            heapq.heapreplace(heap, (now + rng.exponential(pause), number, round_ + 1, turns))
            yield Request(turn.prompt, turn.output, now, number, round_)
        elif (following := next(waiting, None)) is not None:
            heapq.heapreplace(heap, (now, following[0], 0, following[1]))
        else:
            heapq.heappop(heap)


@dataclass(frozen=True, slots=True)
class MultiTurn(Workload):
    """Conversations of `rounds` rounds. A prompt is the history, including all answers, and a new message.

    If `thinking` is not 0, an output is thinking followed by an answer, and only the answer goes into the
    history. The next prompt then begins with the previous prompt and the answer without the thinking:

        prompt and output of round 0    message 0 | thinking 0 | answer 0
        prompt of round 1               message 0 | answer 0 | message 1
    """

    conversations: int = field(default=200, metadata=bounds(1, 65_536, "conversations"))
    rounds: int = field(default=12, metadata=bounds(1, 4096, "rounds of a conversation"))
    live: int = field(
        default=50,
        metadata=bounds(1, 4096, "conversations at once; when one ends, a new one takes its place"),
    )
    user: Span = field(
        default=Span(64, 2048), metadata=bounds(1, 2**20, "tokens that the user says in a round, log-uniform")
    )
    answer: Span = field(default=Span(64, 512), metadata=bounds(1, 2**20, "tokens of an answer, log-uniform"))
    thinking: Span = field(
        default=Span(0, 0),
        metadata=bounds(0, 2**20, "tokens of thinking before an answer, uniform; dropped from the history"),
    )
    pause: float = field(
        default=25.0, metadata=bounds(0.001, 1e6, "seconds between the rounds of a conversation, on average")
    )

    def __post_init__(self) -> None:
        check_size(
            self.conversations * self.rounds,
            self.rounds * (self.user.high + self.answer.high) + self.thinking.high,
        )

    def count(self, seed: int) -> int:
        """Return the number of requests: one per conversation and round."""
        return self.conversations * self.rounds

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each conversation is a session.

        Random pauses determine the order.
        """
        conversations = (self._conversation(seed, number) for number in range(self.conversations))
        return take_turns(conversations, self.live, self.pause, rng_of(seed, "conversations", "pauses"))

    def _conversation(self, seed: int, number: int) -> Iterator[Turn]:
        rng = rng_of(seed, "conversations", number)
        users = self.user.log_uniform(rng, self.rounds)
        answers = self.answer.log_uniform(rng, self.rounds)
        thinking = self.thinking.uniform(rng, self.rounds)
        ends = np.cumsum(users + answers).tolist()
        for round_, (end, answer, thought) in enumerate(
            zip(ends, answers.tolist(), thinking.tolist(), strict=True)
        ):
            said = tokens(key_of(seed, "conversations", "history", number), end)
            prompt, output = said[:-answer], said[-answer:]
            if thought:
                output = join(
                    tokens(key_of(seed, "conversations", "thinking", number, round_), thought), output
                )
            yield Turn(prompt, output)


@dataclass(frozen=True, slots=True)
class RoundRobin(Workload):
    """Conversations of several clients that send requests in turn, `rounds` requests each.

    Each round is a question of `question` tokens and an answer of `answer` tokens. Both are kept in the
    history. Arrivals are a tenth of a second apart. In the benchmark that this workload imitates, a client
    sends its next request when it has the answer to the previous one.
    """

    clients: int
    rounds: int
    question: int
    answer: int

    def count(self, seed: int) -> int:
        """Return the number of requests: one per client and round."""
        return self.clients * self.rounds

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each client is a session."""
        for number in range(self.clients * self.rounds):
            round_, client = divmod(number, self.clients)
            said = tokens(key_of(seed, "clients", client), (round_ + 1) * (self.question + self.answer))
            yield Request(said[: -self.answer], said[-self.answer :], number / 10, client, round_)


_MAX_LENGTH: Final = 8192
"""Maximum number of tokens of a question, and also of an answer."""

_MAX_ROUNDS: Final = 64
_RECENT: Final = 1000
"""How many of the newest chats may be continued."""
_QUESTION: Final = 180
"""Tokens of a question of a chat, median of a log-normal."""
_ANSWER: Final = 250
"""Tokens of an answer of a chat, median of a log-normal."""
_SPREAD: Final = 1.0


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
    Only the newest `_RECENT` chats can be continued.
    """

    chats: int = field(default=4000, metadata=bounds(1, 2**20, "requests"))
    continued: float = field(
        default=0.03, metadata=bounds(0, 1, "fraction of the requests that continue an older chat")
    )
    rate: float = field(default=2.0, metadata=bounds(0.001, 1e6, "requests per second"))

    def __post_init__(self) -> None:
        check_size(self.chats, _MAX_ROUNDS * 2 * _MAX_LENGTH)

    def count(self, seed: int) -> int:
        """Return the number of requests: the parameter `chats`."""
        return self.chats

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each chat is a session."""
        rng = rng_of(seed, "chats")
        recent: deque[_Chat] = deque(maxlen=_RECENT)
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
            lengths = rng.lognormal([math.log(_QUESTION), math.log(_ANSWER)], _SPREAD)
            question, answer = (min(max(int(length), 1), _MAX_LENGTH) for length in lengths)
            said = tokens(key_of(seed, "chats", chat.number), chat.length + question + answer)
            yield Request(said[:-answer], said[-answer:], now, chat.number, chat.rounds)
            chat.length += question + answer
            chat.rounds += 1


@dataclass(frozen=True, slots=True)
class SharedPrefix(Workload):
    """`groups` x `prompts` requests, each with the system prompt of a group and a question of its own.

    If `zipf` is 0, each group has exactly `prompts` requests, in random order. Otherwise the group of each
    request is drawn at random, and the n-th most popular group has the weight n ** -zipf.
    """

    groups: int = field(default=64, metadata=bounds(1, 65_536, "groups, each with a system prompt"))
    prompts: int = field(
        default=32, metadata=bounds(1, 65_536, "requests per group, on average where zipf is not 0")
    )
    zipf: float = field(
        default=0.0, metadata=bounds(0, 4, "exponent of the groups' popularity; 0: all alike")
    )
    system: Span = field(
        default=Span(1024, 10_240), metadata=bounds(1, 2**20, "tokens of a system prompt, uniform")
    )
    question: Span = field(default=Span(64, 512), metadata=bounds(1, 2**20, "tokens of a question, uniform"))
    answer: Span = field(default=Span(64, 512), metadata=bounds(1, 2**20, "tokens of an answer, uniform"))
    rate: float = field(default=2.0, metadata=bounds(0.001, 1e6, "requests per second"))

    def __post_init__(self) -> None:
        check_size(self.groups * self.prompts, self.system.high + self.question.high)

    def count(self, seed: int) -> int:
        """Return the number of requests: `groups` x `prompts`."""
        return self.groups * self.prompts

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests in order of arrival; each is a session of its own."""
        total = self.groups * self.prompts
        lengths = self.system.uniform(rng_of(seed, "groups", "system"), self.groups)
        rng = rng_of(seed, "groups", "requests")
        order = self._order(rng, total)
        questions = self.question.uniform(rng, total)
        answers = self.answer.uniform(rng, total)
        times = poisson(self.rate, rng_of(seed, "groups", "times"))
        for number, now in zip(range(total), times, strict=False):
            group = int(order[number])
            system = tokens(key_of(seed, "groups", "system", group), int(lengths[group]))
            question = tokens(key_of(seed, "groups", "question", number), int(questions[number]))
            answer = tokens(key_of(seed, "groups", "answer", number), int(answers[number]))
            yield Request(join(system, question), answer, now, number)

    def _order(self, rng: np.random.Generator, total: int) -> npt.NDArray[np.int64]:
        """Return the group of each request."""
        if not self.zipf:
            return rng.permutation(np.repeat(np.arange(self.groups), self.prompts))
        weights = np.arange(1, self.groups + 1) ** -self.zipf
        return rng.choice(self.groups, total, p=weights / weights.sum())
