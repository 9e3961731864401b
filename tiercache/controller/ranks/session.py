"""The session of one rank: its requests, and the messages about them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tiercache.controller.ranks import base
from tiercache.controller.ranks.ballots import Ballots, Vote
from tiercache.controller.ranks.base import LEADER, Decision, Message, MessageKind, RankFacts, RankGroup
from tiercache.controller.ranks.handshake import REPEAT_S, Handshake
from tiercache.core import Reason
from tiercache.errors import RankError, WireError

_log = logging.getLogger(__name__)
_LEADER_SHARE: Final = 0.9
"""Share of the deadline for which the leader waits for the others."""
_HANDSHAKE: Final = {MessageKind.HELLO, MessageKind.WELCOME, MessageKind.REFUSED}


class Agreement:
    """One rank's part in the agreement on one request.

    Thread safety: the owner's thread. The session's `lock` guards what messages change.
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
            return attempt == self.attempt  # nothing is loaded
        with self._session.lock:
            return self._session.ballots.is_confirmed(self.number, attempt)

    def vote(self, possible: int, ready: int) -> None:
        """Say which depths this rank may restore, and which one it holds and keeps."""
        self.has_voted, self.ready = True, ready  # before the vote, which may be the last
        with self._session.lock:
            self._session.send_vote(self, Vote(possible, ready))

    def expire(self) -> None:
        """End the wait for the other ranks: the request restores nothing. Called at the deadline."""
        with self._session.lock:
            if self.is_leader:
                self._session.ballots.expire(self.number)
            elif self.decision is None:
                self._session.is_leader_silent = True
                self._session.send_vote(self, Vote(0, 0))
                self.decision = Decision(0, Reason.TIMEOUT)

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
        with self._session.lock:
            if self.is_leader:
                self._session.ballots.repeat(self.number)
            else:
                self.on_again(self.attempt + 1)

    def note_loaded(self) -> None:
        """Say that everything is on the device of this rank."""
        with self._session.lock:
            self._session.send(LEADER, MessageKind.LOADED, [self.number, self.attempt])

    def close(self) -> None:
        """Leave the agreement at the end of the request, or because this rank could not admit it."""
        session = self._session
        with session.lock:
            session.agreements.pop(self.number, None)
            if self.is_leader:
                session.ballots.end(self.number)
            elif self.decision is None:
                session.send_vote(self, Vote(0, 0, is_refused=True))

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
    """Part of one rank in a session of its group: handshake and requests.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). Messages arrive on a
    thread of the group. `wake` is called on either.
    """

    def __init__(self, group: RankGroup, facts: RankFacts) -> None:
        """Open the group, whose messages arrive from now on."""
        self.rank, self.size = group.rank, group.size
        self.is_leader = self.rank == LEADER
        self.group = group
        self.wake: Callable[[], None] = lambda: None
        """Function that ends a wait of the owner's thread for events."""
        self._next = 0
        self.agreements: dict[int, Agreement] = {}
        self.is_leader_silent = False
        # `lock` guards everything that a message changes. Nothing waits under it: `send` only queues.
        self.lock = threading.Lock()
        self.ballots = Ballots(self.size, self._tell_all)
        self._handshake = Handshake(group, facts)
        group.open(self.deliver)

    @property
    def writes(self) -> frozenset[str]:
        """Pools of which this rank writes objects to storage; the others of its shard read them."""
        return frozenset(self._handshake.writes)

    def begin(self) -> Agreement:
        """Begin the next request."""
        with self.lock:
            number, self._next = self._next, self._next + 1
            agreement = self.agreements[number] = Agreement(self, number)
            if self.is_leader:
                self.ballots.begin(number)
            elif self.is_leader_silent:
                self.send_vote(agreement, Vote(0, 0))
                agreement.has_voted, agreement.decision = True, Decision(0, Reason.UNAVAILABLE)
        return agreement

    def close(self) -> None:
        """End the session and its group."""
        self.group.close()

    def deliver(self, data: bytes) -> None:
        """Handle one message. A message of another session, or one that cannot be read, changes nothing."""
        try:
            message = base.unpack(data)
            if message.kind in _HANDSHAKE:
                self._handshake.handle(message)
            elif message.session == self._handshake.session and self._is_from_a_peer(message):
                with self.lock:
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
                self.is_leader_silent = False
                number, *fields = message.fields
                self._apply(message.kind, number, fields)
            else:
                self._count(message)
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            sent = f"rank {message.sender} sent a {message.kind.name}"
            raise WireError(f"{sent} that cannot be read: {error}") from None

    def _count(self, message: Message) -> None:
        rank = message.sender
        self.ballots.silent.discard(rank)
        match message.kind, message.fields:
            case MessageKind.VOTE, [int(number), int(attempt), int(turn), bytes(mask), int(ready), refused]:
                vote = Vote(base.unpack_depths(mask), ready, bool(refused))
                decision = self.ballots.vote(rank, number, attempt, turn, vote)
                if decision is not None:
                    self.send(rank, MessageKind.DECIDED, [number, attempt, *decision])
            case MessageKind.LOADED, [int(number), int(attempt)]:
                self.ballots.note_loaded(rank, number, attempt)

    def _apply(self, kind: MessageKind, number: int, fields: Sequence[Any]) -> None:
        """Apply what the leader says of one request to this rank's part in it."""
        agreement = self.agreements.get(number)
        if agreement is None:
            return
        match kind, fields:
            case MessageKind.TARGET, [int(attempt), int(turn), bytes(allowed)]:
                agreement.on_again(attempt)  # that message may have been lost
                agreement.on_target(attempt, turn, base.unpack_depths(allowed))
            case MessageKind.DECIDED, [int(attempt), int(depth), reason, refused]:
                agreement.on_again(attempt)
                agreement.on_decided(attempt, Decision(depth, Reason(reason), bool(refused)))
            case MessageKind.AGAIN, [int(attempt)]:
                agreement.on_again(attempt)

    def _tell_all(self, kind: MessageKind, fields: Sequence[Any]) -> None:
        for rank in range(1, self.size):
            self.send(rank, kind, fields)
        self._apply(kind, fields[0], fields[1:])
        self.wake()

    def send_vote(self, agreement: Agreement, vote: Vote) -> None:
        """Send the leader a vote of this rank."""
        at, possible = [agreement.number, agreement.attempt, agreement.round], base.pack_depths(vote.possible)
        self.send(LEADER, MessageKind.VOTE, [*at, possible, vote.ready, vote.is_refused])

    def send(self, to: int, kind: MessageKind, fields: Sequence[Any]) -> None:
        """Send a message of this session. What the leader tells itself is counted at once, under the lock."""
        message = Message(kind, self._handshake.session, self.rank, fields)
        if to == self.rank:
            self._count(message)
        else:
            self.group.send(to, message.pack())


def join_ranks(group: RankGroup | None, facts: RankFacts, deadline: float) -> RankSession | None:
    """Return the session of this rank, once all ranks are there; None for a single rank.

    Raises as `RankSession` and its `join` do.
    """
    if group is None:
        return None
    base.check_rank(group.rank, group.size)
    if group.size == 1:
        return None
    session = RankSession(group, facts)
    session.join(deadline)
    return session
