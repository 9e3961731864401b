"""The session of one rank: its requests, and the messages about them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from blake3 import blake3

from tiercache.controller.ranks.ballots import Ballots, Vote
from tiercache.controller.ranks.base import (
    LEADER,
    Decision,
    Message,
    MessageKind,
    RankFacts,
    RankGroup,
    check_rank,
    pack_depths,
    unpack,
    unpack_depths,
)
from tiercache.controller.ranks.handshake import REPEAT_S, Handshake
from tiercache.core import Reason, TokenArray
from tiercache.errors import RankError, WireError

_log = logging.getLogger(__name__)

_LEADER_SHARE: Final = 0.9
"""Share of the deadline for which the leader waits for the others."""
_MAX_CALLS: Final = 10_000
"""Maximum number of calls that the check of their order keeps, because another rank has not made them."""
_HANDSHAKE: Final = {
    MessageKind.HELLO,
    MessageKind.WELCOME,
    MessageKind.JOINED,
    MessageKind.BEGIN,
    MessageKind.REFUSED,
}


class Agreement:
    """One rank's part in the agreement on one request.

    Thread safety: the owner's thread. The session's lock guards what messages change.
    """

    def __init__(self, session: RankSession, number: int) -> None:
        """Begin without a vote."""
        self.number = number
        self.attempt = 0
        """Number of times that a load of this request has failed on some rank."""
        self.round = 0
        self.allowed: int | None = None
        """Set of the depths that all ranks may restore; None before the first round is over."""
        self.has_voted = False
        """Whether this rank waits for the others."""
        self.ready = 0
        """Depth in pages that this rank has promised to keep."""
        self.decision: Decision | None = None
        self._session = session

    @property
    def is_decided(self) -> bool:
        """Whether there is a decision on the present attempt."""
        return self.decision is not None

    @property
    def is_leader(self) -> bool:
        """Whether this rank's word begins the request on all ranks."""
        return self._session.is_leader

    def is_confirmed(self, attempt: int) -> bool:
        """Return whether all ranks have everything on the device. Only the leader knows."""
        if self.decision is not None and not self.decision.depth:
            return attempt == self.attempt  # nothing is loaded, also after the session has ended
        return self._session.is_confirmed(self.number, attempt)

    def vote(self, possible: int, ready: int) -> None:
        """Say which depths this rank may restore, and which one it holds and keeps."""
        self.has_voted, self.ready = True, ready  # before the vote, which may be the last
        self._session.vote(self, Vote(possible, ready))

    def expire(self) -> None:
        """End the wait: the request restores nothing. Called at the deadline."""
        self._session.expire(self)

    def follow(self, depth: int) -> None:
        """Take the word of the leader's engine: the request begins at `depth` pages.

        Raises RankError for a depth that this rank has not promised.
        """
        if depth not in (0, self.ready):
            raise RankError(
                f"rank {self._session.rank} cannot begin at a depth of {depth} pages, because it holds"
                f" {self.ready}; pass the depth that the leader's poll has returned for the same request"
            )
        self.decision = Decision(depth)

    def fail_load(self) -> None:
        """Let all ranks vote again, because a load has failed on this one."""
        self._session.fail_load(self)

    def note_loaded(self) -> None:
        """Say that everything is on the device of this rank."""
        self._session.note_loaded(self)

    def close(self) -> None:
        """Leave the agreement at the end of the request, or because this rank could not admit it."""
        self._session.close_agreement(self)

    def on_target(self, attempt: int, turn: int, allowed: int) -> None:
        """Begin round `turn` of the votes. The session calls this, and the next two, under its lock."""
        if attempt == self.attempt and turn > self.round:
            self.round, self.allowed, self.has_voted = turn, allowed, False

    def on_decided(self, attempt: int, decision: Decision) -> None:
        """Take the decision on the present attempt, unless there is one."""
        if attempt == self.attempt and self.decision is None:
            self.decision = decision

    def on_again(self, attempt: int) -> None:
        """Begin a further attempt."""
        if attempt > self.attempt:
            self.attempt, self.round, self.allowed = attempt, 0, None
            self.has_voted, self.decision, self.ready = False, None, 0


class RankSession:
    """Part of one rank in a session of its group: handshake, requests, check of the calls.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). Messages arrive on a
    thread of the group. `wake` is called on either.
    """

    def __init__(self, group: RankGroup, facts: RankFacts) -> None:
        """Open the group, whose messages arrive from now on."""
        self.rank, self.size = group.rank, group.size
        self.is_leader = self.rank == LEADER
        self.group = group
        self._facts = facts
        self.wake: Callable[[], None] = lambda: None
        """Function that ends a wait of the owner's thread for events."""
        self._next = 0
        self._agreements: dict[int, Agreement] = {}
        self._problem = ""
        self._is_leader_silent = self._has_left = False
        self._calls: dict[tuple[int, int], str] = {}
        """Calls that have not been compared, by rank and number."""
        self._made = 0
        # `_lock` guards everything that a message changes. Nothing waits under it: `send` only queues.
        self._lock = threading.Lock()
        self._ballots = Ballots(self.size, self._tell_all)
        self._handshake = Handshake(group, facts)
        group.open(self.deliver)

    @property
    def writes(self) -> frozenset[str]:
        """Pools of which this rank writes objects to storage; the others of its shard read them."""
        return frozenset(self._handshake.writes)

    def check(self) -> None:
        """Raise RankError if the calls of two engines differ."""
        if self._problem:
            raise RankError(self._problem)

    def note_call(self, text: Callable[[], str]) -> None:
        """Compare a call of this engine with those of the others, if the order of calls is checked."""
        if not self._facts.check_order:
            return
        with self._lock:
            number, self._made = self._made, self._made + 1
            self._note_call(self.rank, number, text())

    def begin(self) -> Agreement:
        """Begin the next request."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            agreement = self._agreements[number] = Agreement(self, number)
            if self._has_left:
                agreement.decision = Decision(0, Reason.UNAVAILABLE)
            elif self.is_leader:
                self._ballots.begin(number)
            elif self._is_leader_silent:
                self._send_vote(agreement, Vote(0, 0))
                agreement.has_voted, agreement.decision = True, Decision(0, Reason.UNAVAILABLE)
        return agreement

    def vote(self, agreement: Agreement, vote: Vote) -> None:
        """Send or count the vote of this rank."""
        with self._lock:
            if self.is_leader:
                self._ballots.vote(self.rank, agreement.number, agreement.attempt, agreement.round, vote)
            else:
                self._send_vote(agreement, vote)

    def expire(self, agreement: Agreement) -> None:
        """End the wait of this rank for the others."""
        with self._lock:
            if self.is_leader:
                self._ballots.expire(agreement.number)
            elif agreement.decision is None:
                self._is_leader_silent = True
                self._send_vote(agreement, Vote(0, 0))
                agreement.decision = Decision(0, Reason.TIMEOUT)

    def fail_load(self, agreement: Agreement) -> None:
        """Begin a further attempt, which this rank's failure makes necessary.

        After `leave`, nobody votes any more, and the further attempt restores nothing.
        """
        with self._lock:
            if self._has_left:
                agreement.on_again(agreement.attempt + 1)
                agreement.on_decided(agreement.attempt, Decision(0, Reason.UNAVAILABLE))
            elif self.is_leader:
                self._ballots.repeat(agreement.number)
            else:
                agreement.on_again(agreement.attempt + 1)

    def note_loaded(self, agreement: Agreement) -> None:
        """Tell the leader that this rank has everything on the device."""
        with self._lock:
            if self.is_leader:
                self._ballots.note_loaded(self.rank, agreement.number, agreement.attempt)
            else:
                self._send(LEADER, MessageKind.LOADED, [agreement.number, agreement.attempt])

    def is_confirmed(self, number: int, attempt: int) -> bool:
        """Return whether all ranks have everything on the device."""
        with self._lock:
            return self._ballots.is_confirmed(number, attempt)

    def close_agreement(self, agreement: Agreement) -> None:
        """Leave one request."""
        with self._lock:
            self._agreements.pop(agreement.number, None)
            if self.is_leader:
                self._ballots.end(agreement.number)
            elif agreement.decision is None:
                self._send_vote(agreement, Vote(0, 0, is_refused=True))

    def leave(self) -> None:
        """End the session: no message changes anything any more."""
        with self._lock:
            for agreement in self._agreements.values():
                if agreement.decision is None:
                    agreement.decision = Decision(0, Reason.UNAVAILABLE)
            self._agreements.clear()
            self._has_left = True

    def close(self) -> None:
        """End the session and its group."""
        self.leave()
        self.group.close()

    def deliver(self, data: bytes) -> None:
        """Handle one message. A message of another session, or one that cannot be read, changes nothing."""
        try:
            message = unpack(data)
            if message.kind in _HANDSHAKE:
                self._handshake.handle(message)
            elif message.session == self._handshake.session and self._is_from_a_peer(message):
                with self._lock:
                    self._handle(message)
                self.wake()
        except WireError as error:
            _log.warning("%s", error)

    def _is_from_a_peer(self, message: Message) -> bool:
        """Return whether a rank sent the message that talks to this one; followers talk to the leader."""
        return 0 < message.sender < self.size if self.is_leader else message.sender == LEADER

    def greet(self) -> bool:
        """Send what the handshake lacks, without waiting; return whether it is over."""
        self._handshake.advance()
        return self._handshake.over.is_set()

    def join(self, deadline: float) -> None:
        """Wait for all ranks, for at most `deadline` seconds.

        Raises RankError if they do not fit together, or if some do not answer.
        """
        # The leader gives up earlier, so that the others hear from it why.
        end = time.monotonic() + deadline * (_LEADER_SHARE if self.is_leader else 1.0)
        while True:
            self.greet()
            if self._handshake.over.wait(min(REPEAT_S, max(0.0, end - time.monotonic()))):
                break
            if time.monotonic() >= end:
                self._handshake.give_up()
                if self._handshake.trouble:
                    break
                absent = ", ".join(map(str, self._handshake.missing))
                raise RankError(
                    f"of the {self.size} ranks of this group, {absent} did not answer within {deadline:g} s;"
                    " start all ranks, with the same address and size"
                )
        if self._handshake.trouble:
            raise RankError(self._handshake.trouble)

    def _handle(self, message: Message) -> None:
        try:
            if message.sender == LEADER:
                self._is_leader_silent = False
                if message.kind is MessageKind.PROBLEM:
                    self._problem = str(message.fields[0])
                else:
                    number, *fields = message.fields
                    self._apply(message.kind, number, fields)
            else:
                self._count(message)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise WireError(
                f"rank {message.sender} sent a {message.kind.name} that cannot be read: {error}"
            ) from None

    def _count(self, message: Message) -> None:
        rank = message.sender
        self._ballots.silent.discard(rank)
        match message.kind, message.fields:
            case MessageKind.VOTE, [
                int(number),
                int(attempt),
                int(turn),
                bytes(possible),
                int(ready),
                refused,
            ]:
                vote = Vote(unpack_depths(possible), ready, bool(refused))
                decision = self._ballots.vote(rank, number, attempt, turn, vote)
                if decision is not None:
                    self._send(rank, MessageKind.DECIDED, [number, attempt, *decision])
            case MessageKind.LOADED, [int(number), int(attempt)]:
                self._ballots.note_loaded(rank, number, attempt)
            case MessageKind.CALL, [int(number), str(text)]:
                self._note_call(rank, number, text)

    def _apply(self, kind: MessageKind, number: int, fields: Sequence[Any]) -> None:
        """Apply what the leader says of one request to this rank's part in it."""
        agreement = self._agreements.get(number)
        if agreement is None:
            return
        match kind, fields:
            case MessageKind.TARGET, [int(attempt), int(turn), bytes(allowed)]:
                agreement.on_again(attempt)  # that message may have been lost
                agreement.on_target(attempt, turn, unpack_depths(allowed))
            case MessageKind.DECIDED, [int(attempt), int(depth), reason, refused]:
                agreement.on_again(attempt)
                agreement.on_decided(attempt, Decision(depth, Reason(reason), bool(refused)))
            case MessageKind.AGAIN, [int(attempt)]:
                agreement.on_again(attempt)

    def _tell_all(self, kind: MessageKind, fields: Sequence[Any]) -> None:
        for rank in range(1, self.size):
            self._send(rank, kind, fields)
        self._apply(kind, fields[0], fields[1:])
        self.wake()

    def _send_vote(self, agreement: Agreement, vote: Vote) -> None:
        self._send(
            LEADER,
            MessageKind.VOTE,
            [
                agreement.number,
                agreement.attempt,
                agreement.round,
                pack_depths(vote.possible),
                vote.ready,
                vote.is_refused,
            ],
        )

    def _send(self, to: int, kind: MessageKind, fields: Sequence[Any]) -> None:
        self.group.send(to, Message(kind, self._handshake.session, self.rank, fields).pack())

    def _note_call(self, rank: int, number: int, text: str) -> None:
        if not self.is_leader:
            self._send(LEADER, MessageKind.CALL, [number, text])
            return
        self._calls[rank, number] = text
        if len(self._calls) > _MAX_CALLS:  # a message was lost: the oldest call is compared with nothing
            del self._calls[next(iter(self._calls))]
        expected = self._calls.get((LEADER, number))
        made = {other: self._calls.get((other, number)) for other in range(self.size)}
        for other, call in made.items():
            if expected is not None and call not in (None, expected) and not self._problem:
                self._problem = (
                    f"call {number} of rank {other} is {call}, and that of rank 0 is {expected}; all engines"
                    " must make the same calls in the same order"
                )
                _log.error("%s", self._problem)
                for follower in range(1, self.size):
                    self._send(follower, MessageKind.PROBLEM, [self._problem])
        if all(made.values()):
            for other in made:
                del self._calls[other, number]


def join_ranks(group: RankGroup | None, facts: RankFacts, deadline: float) -> RankSession | None:
    """Return the session of this rank, once all ranks are there; None for a single rank.

    Raises as `RankSession` and its `join` do.
    """
    if group is None:
        return None
    check_rank(group.rank, group.size)
    if group.size == 1:
        return None
    session = RankSession(group, facts)
    session.join(deadline)
    return session


def describe_call(call: str, tokens: TokenArray) -> str:
    """Return a call on `tokens` as text, which is the same on all ranks if the tokens are."""
    return f"{call} of {len(tokens)} tokens with digest {blake3(tokens.tobytes()).hexdigest()[:12]}"
