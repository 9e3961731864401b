"""Workloads of conversations whose history grows from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.arrivals import Turn, take_turns
from tiercache_lab.replay.sources.base import Workload, check_size
from tiercache_lab.replay.sources.options import Span, bounds
from tiercache_lab.replay.sources.streams import join, key_of, rng_of, tokens


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
