"""Votes of all ranks on the depths of their requests, as the leader counts them.

    round 0     every rank votes with all depths that it may restore from any tier
    round r     the deepest depth that all have is the target; a rank votes again when it holds the target
                safely on device or host, or without the target when that cannot be had
    decided     all hold the target, or no depth is left (depth 0)

A vote is a promise: what a rank calls ready stays pinned until the request ends on that rank. So any rank can
begin at the decided depth, whenever it hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tiercache.controller.ranks.base import Decision, MessageKind, pack_depths
from tiercache.core import Reason

MAX_BALLOTS: Final = 4096
"""Maximum number of requests on which votes are kept."""
_MAX_ROUNDS: Final = 16
"""Maximum number of rounds of one attempt. A round is repeated only if a rank has lost the target."""
_MAX_ATTEMPTS: Final = 4
"""Maximum number of attempts of one request. An attempt is repeated only if a load has failed."""


class Vote(NamedTuple):
    """Depths in pages that one rank can restore of a request."""

    possible: int
    """Set of the depths that the rank holds or may fetch; bit d - 1 stands for depth d."""
    ready: int
    """Depth that the rank holds and keeps; 0 for none."""
    is_refused: bool = False
    """Whether the rank could not admit the request."""


@dataclass
class Ballot:
    """Votes on one request."""

    attempt: int = 0
    round: int = 0
    votes: dict[int, Vote] = field(default_factory=dict)
    """Votes of the present round, by rank."""
    decision: Decision | None = None
    loaded: set[int] = field(default_factory=set)
    """Ranks that have everything on the device."""


class Ballots:
    """Votes on all requests that the leader has not ended. Only the leader has ballots.

    Thread safety: none; the session holds its lock.
    """

    def __init__(self, size: int, tell: Callable[[MessageKind, Sequence[Any]], None]) -> None:
        """Begin without a request. `tell` sends a message to all ranks, the leader's own included."""
        self.silent: set[int] = set()
        """Ranks that did not answer in time, and have not been heard since. Nobody waits for them."""
        self._size = size
        self._tell = tell
        self._ballots: dict[int, Ballot] = {}
        self._ended = 0
        """Numbers below this one are of requests that the leader has begun."""

    def begin(self, number: int) -> None:
        """Begin the leader's own part in a request. While a rank is silent, the answer is a miss at once."""
        self._ended = number + 1
        ballot = self._ballots.setdefault(number, Ballot())
        if self.silent and ballot.decision is None:
            self._decide(number, ballot, Decision(0, Reason.UNAVAILABLE))

    def end(self, number: int) -> None:
        """Forget a request that the leader has released."""
        ballot = self._ballots.pop(number, None)
        if ballot is not None and ballot.decision is None:
            self._decide(number, ballot, Decision(0, Reason.BUSY, is_refused=True))

    def vote(self, rank: int, number: int, attempt: int, turn: int, vote: Vote) -> Decision | None:
        """Count one vote of `rank` in round `turn`; return the decision if there was one before."""
        self.silent.discard(rank)
        ballot = self._ballots.get(number)
        if ballot is None:
            if number < self._ended:
                return Decision(0, Reason.BUSY, is_refused=True)
            if len(self._ballots) >= MAX_BALLOTS or number >= self._ended + MAX_BALLOTS:
                return None
            ballot = self._ballots[number] = Ballot()
        if attempt == ballot.attempt + 1 and ballot.decision is not None and ballot.decision.depth:
            self.repeat(number)
            ballot = self._ballots[number]
        if attempt != ballot.attempt:
            return None
        if ballot.decision is not None:
            return ballot.decision
        if turn == ballot.round:
            ballot.votes[rank] = vote
            self._count(number, ballot)
        return None

    def repeat(self, number: int) -> None:
        """Let all ranks vote again on a request whose load has failed on some rank."""
        ballot = self._ballots.get(number)
        if ballot is None or ballot.decision is None:
            return
        again = Ballot(ballot.attempt + 1)
        self._ballots[number] = again
        self._tell(MessageKind.AGAIN, [number, again.attempt])
        if again.attempt >= _MAX_ATTEMPTS:
            self._decide(number, again, Decision(0, Reason.IO_ERROR))

    def expire(self, number: int) -> None:
        """End the wait for votes: nothing is restored, and ranks that have not voted count as silent."""
        ballot = self._ballots.get(number)
        if ballot is not None and ballot.decision is None:
            self.silent.update(rank for rank in range(self._size) if rank not in ballot.votes)
            self._decide(number, ballot, Decision(0, Reason.TIMEOUT))

    def note_loaded(self, rank: int, number: int, attempt: int) -> None:
        """Record that `rank` has everything of a request on the device."""
        ballot = self._ballots.get(number)
        if ballot is not None and ballot.attempt == attempt:
            ballot.loaded.add(rank)

    def is_confirmed(self, number: int, attempt: int) -> bool:
        """Return whether all ranks have everything on the device that was decided."""
        ballot = self._ballots.get(number)
        return (
            ballot is not None
            and ballot.attempt == attempt
            and ballot.decision is not None
            and (not ballot.decision.depth or len(ballot.loaded) == self._size)
        )

    def _count(self, number: int, ballot: Ballot) -> None:
        votes = ballot.votes.values()
        if any(vote.is_refused for vote in votes):
            self._decide(number, ballot, Decision(0, Reason.BUSY, is_refused=True))
        if len(votes) < self._size or ballot.decision is not None:
            return
        # Not the minimum of each rank's deepest depth: a rank may lack the state at that depth.
        #   rank 0    depths 2, 3, 5      deepest 5
        #   rank 1    depths 2, 4         deepest 4
        #   agreed    depth 2
        possible = -1
        for vote in votes:
            possible &= vote.possible
        target = possible.bit_length()
        if all(vote.ready == target for vote in votes) or not target:
            self._decide(number, ballot, Decision(target))
        elif ballot.round + 1 == _MAX_ROUNDS:
            self._decide(number, ballot, Decision(0, Reason.BUSY))
        else:
            ballot.round += 1
            ballot.votes.clear()
            self._tell(MessageKind.TARGET, [number, ballot.attempt, ballot.round, pack_depths(possible)])

    def _decide(self, number: int, ballot: Ballot, decision: Decision) -> None:
        ballot.decision = decision
        self._tell(MessageKind.DECIDED, [number, ballot.attempt, *decision])
