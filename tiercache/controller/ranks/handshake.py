"""How the ranks of a group find out that all are there and fit together, before their first request.

    follower                     leader
    HELLO(nonce, facts)  ---->            until all ranks have said HELLO
                         <----   WELCOME  or REFUSED, with the sentence that every rank raises

A follower repeats what has not been answered. A rank that was started again has a new nonce, which takes the
place of the old one, until all ranks were there.
"""

from __future__ import annotations

import secrets
import threading
from typing import Final

from tiercache.controller.ranks.base import (
    LEADER,
    Message,
    MessageKind,
    RankFacts,
    RankGroup,
    find_difference,
    sizes_differ,
    writers,
)
from tiercache.errors import WireError

REPEAT_S: Final = 0.1
"""Seconds after which a message of the handshake is sent again."""


class Handshake:
    """One rank's part in the handshake.

    Thread safety: any thread.
    """

    def __init__(self, group: RankGroup, facts: RankFacts) -> None:
        """Prepare the handshake of this rank. Nothing is sent before `advance`."""
        self.over = threading.Event()
        """Set when all ranks were there, or when `trouble` says why they do not fit together."""
        self.trouble = ""
        self.writes: list[str] = []
        """Pools of which this rank writes objects to storage."""
        self.session = secrets.token_bytes(8)
        """Name of the session: the leader's choice. For a follower, its nonce until it is welcome."""
        self._group = group
        self._facts = facts
        self._nonce = self.session
        self._lock = threading.Lock()
        self._ranks = {LEADER: facts}
        self._nonces: dict[int, bytes] = {}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        if self._group.rank != LEADER:
            return [LEADER]
        with self._lock:
            return [rank for rank in range(1, self._group.size) if rank not in self._ranks]

    def give_up(self) -> None:
        """Look for trouble among the ranks that have come. The leader does so at its deadline."""
        with self._lock:
            if self._group.rank == LEADER:
                self._refuse(find_difference(self._ranks))

    def advance(self) -> None:
        """Send what has not been answered yet."""
        if self._group.rank == LEADER:
            with self._lock:
                self._welcome()
        elif not self.over.is_set():
            self._send(LEADER, MessageKind.HELLO, self._nonce, *self._facts.fields())

    def handle(self, message: Message) -> None:
        """Handle one message of the handshake. Raises WireError for one that cannot be read."""
        with self._lock:
            if self._group.rank == LEADER:
                self._lead(message)
            else:
                self._follow(message)

    def _lead(self, message: Message) -> None:
        rank = message.sender
        if rank < 1 or not message.fields or message.kind is not MessageKind.HELLO:
            return
        nonce = message.fields[0]
        if not self.over.is_set():
            self._ranks[rank] = RankFacts.of(message.fields[1:])
            self._nonces[rank] = nonce
            self._welcome()
        # A rank that comes late hears the trouble too. One that comes again waits for a new session.
        elif self.trouble and self._nonces.setdefault(rank, nonce) == nonce:
            self._send(rank, MessageKind.REFUSED, nonce, self.trouble)
        elif rank in self._nonces and self._nonces[rank] == nonce:  # the answer was lost
            self._answer(rank)

    def _welcome(self) -> None:
        is_complete = len(self._ranks) == self._group.size
        self._refuse(find_difference(self._ranks) if is_complete else sizes_differ(self._ranks))
        if is_complete and not self.over.is_set():
            self.writes = writers(self._ranks, LEADER)
            self.over.set()
            for rank in self._nonces:
                self._answer(rank)

    def _answer(self, rank: int) -> None:
        pools = writers(self._ranks, rank)
        self._send(rank, MessageKind.WELCOME, self._nonces[rank], self.session, pools)

    def _refuse(self, trouble: str) -> None:
        if trouble and not self.over.is_set():
            self.trouble = trouble
            for rank, nonce in self._nonces.items():
                self._send(rank, MessageKind.REFUSED, nonce, trouble)
            self.over.set()

    def _follow(self, message: Message) -> None:
        if message.sender != LEADER or not message.fields or message.fields[0] != self._nonce:
            return
        try:
            if message.kind is MessageKind.WELCOME and not self.over.is_set():
                _, session, pools = message.fields
                self.session, self.writes = bytes(session), list(pools)
                self.over.set()
            elif message.kind is MessageKind.REFUSED:
                self.trouble = str(message.fields[1])
                self.over.set()
        except (ValueError, TypeError, IndexError) as error:
            raise WireError(f"rank 0 sent a {message.kind.name} that cannot be read: {error}") from None

    def _send(self, to: int, kind: MessageKind, *fields: object) -> None:
        self._group.send(to, Message(kind, self.session, self._group.rank, fields).pack())
