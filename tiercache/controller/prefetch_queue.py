"""Prefetches without a request: an engine or a router announces a prompt that will come."""

from __future__ import annotations

from collections import deque
from typing import Final

from tiercache.controller.context import ControllerContext
from tiercache.controller.prefetch import Prefetch, Step, look_up
from tiercache.core import Reason, TokenArray, full_pages
from tiercache.index import Match, Pin

_MAX_WAITING: Final = 64
"""Maximum number of prefetches that are not over."""
_MAX_TOKENS: Final = 1 << 22
"""Maximum number of tokens of all these prefetches together. A token takes 8 bytes."""
_SHARE: Final = 4
"""A prefetch may hold a fourth of the blocks that all fetches may hold, which leaves room for requests."""


class PrefetchTicket:
    """Prefetch of one prefix from storage to the host, which no request waits for.

    Thread safety: the owner's thread (the engine's thread, which calls the controller).
    """

    def __init__(self, context: ControllerContext, tokens: TokenArray, extra: bytes) -> None:
        self.done = False
        """Whether the prefetch is over."""
        self.reason = Reason.NONE
        """Reason why less than the prefix can be restored; NONE if storage has no more of it."""
        self.tokens = 0
        """Number of tokens that device and host could restore at the end of the prefetch; 0 before."""
        self.length = len(tokens)
        """Number of tokens of the prefix."""
        self._context = context
        self._prompt = tokens
        self._extra = extra
        self._pages = full_pages(len(tokens), context.page_size)
        self._prefetch: Prefetch | None = None

    def cancel(self) -> None:
        """End the prefetch. What has been fetched stays; reads that have not begun are cancelled.

        Does nothing if the prefetch is over.
        """
        if not self.done:
            self._end(self._match(), "cut_short")

    @property
    def pins(self) -> list[Pin]:
        """Pins that the prefetch holds in the index."""
        return [] if self._prefetch is None or self._prefetch.pin is None else [self._prefetch.pin]

    def refuse(self) -> None:
        """End the prefetch before its begin, because too many others wait."""
        self.reason = Reason.BUSY
        self._end(self._match(), "refused")

    def advance(self) -> None:
        """Go on as far as possible without waiting. The queue of prefetches calls this."""
        if self._prefetch is None and not self._ask():
            return
        prefetch = self._prefetch
        assert prefetch is not None, "storage was asked"
        if prefetch.waiting:
            return
        for reason in prefetch.collect_results():
            self.reason = reason
        match = self._match()
        while target := prefetch.target(match):
            # Requests go first: while one of them fetches, no further wave begins.
            if self._context.in_flight.count("fetch"):
                return
            if prefetch.begin(target, share=_SHARE) is not Step.NO_ROOM:
                return
            prefetch.give_up()
            self.reason = Reason.BUSY
            match = self._match()
        if self.reason is Reason.NONE:
            self.reason = prefetch.shortfall(match)
        self._end(match, "complete")

    def _ask(self) -> bool:
        """Ask storage; return whether the prefetch goes on. It is over if there is nothing to ask for."""
        lookup = look_up(self._context, self._prompt, self._extra, limit=self._pages)
        if lookup.unasked is Reason.BUSY:
            return False  # requests have all the queries; another attempt follows when one has landed
        if lookup.query is None:
            self.reason = lookup.unasked
            self._end(lookup.match, "complete")
            return False
        self._prefetch = Prefetch(self._context, lookup, self._pages)
        return True

    def _match(self) -> Match:
        return self._context.index.match(self._prompt, self._extra, limit=self._pages)

    def _end(self, match: Match, outcome: str) -> None:
        self.done = True
        self.tokens = match.near_depth * self._context.page_size
        if self._prefetch is not None:
            self._prefetch.close()
            self._prefetch = None
        self._prompt = self._prompt[:0]
        self._context.metrics.increment("prefetches_total", "hint", outcome)


class PrefetchQueue:
    """Queue of the prefetches without a request, of which one at a time goes on.

    Thread safety: the owner's thread. No method waits.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._tickets: deque[PrefetchTicket] = deque()

    @property
    def pins(self) -> list[Pin]:
        """Pins that the prefetches hold in the index."""
        return [pin for ticket in self._tickets for pin in ticket.pins]

    def add(self, tokens: TokenArray, extra: bytes) -> PrefetchTicket:
        """Queue a prefetch of the whole pages of `tokens`; return it, refused if too many are waiting."""
        self._forget_done()
        ticket = PrefetchTicket(self._context, tokens, extra)
        if (
            len(self._tickets) >= _MAX_WAITING
            or sum(other.length for other in self._tickets) + len(tokens) > _MAX_TOKENS
        ):
            ticket.refuse()
        else:
            self._tickets.append(ticket)
            self.advance()
        return ticket

    def advance(self) -> None:
        """Let the first prefetch go on, and the next ones when it is over."""
        while self._tickets and not self._context.is_draining:
            first = self._tickets[0]
            if not first.done:
                first.advance()
            if not first.done:
                return
            self._tickets.popleft()

    def close(self) -> None:
        """Cancel all prefetches."""
        for ticket in self._tickets:
            ticket.cancel()
        self._tickets.clear()

    def _forget_done(self) -> None:
        self._tickets = deque(ticket for ticket in self._tickets if not ticket.done)
