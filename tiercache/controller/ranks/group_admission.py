"""Admission of one request on one rank of a group: all ranks begin it at the same depth.

The depth is agreed on by votes (see `ballots`). Everything else is as with a single rank.
"""

from __future__ import annotations

from typing import Final

from tiercache.controller.admission import Admission
from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import near_depth, near_depths
from tiercache.controller.lookup import Lookup
from tiercache.controller.ranks.session import Agreement
from tiercache.controller.waiting import Poll, Status
from tiercache.core import Reason, Tier
from tiercache.errors import AdmissionError, InputError, PoolFullError, RankError, TransferError
from tiercache.index import Match
from tiercache.transfer import Fence

_STORAGE_SHARE: Final = 0.75
"""Share of the deadline after which a rank waits no longer for storage, and votes with what it has."""
_LEADER_SHARE: Final = 0.875
"""Share of the deadline after which the leader waits no longer for votes.

It ends before the deadline of the others, so that they hear of it in time.
"""
_LEAST_S: Final = 0.2
"""Least time in seconds for the votes, however short the deadline is."""


class GroupAdmission(Admission):
    """Admission of one rank of a group (see `docs/ranks.md`)."""

    def __init__(
        self,
        context: ControllerContext,
        lookup: Lookup,
        tokens: int,
        states: int,
        wait: float,
        agreement: Agreement,
    ) -> None:
        """Begin as `Admission` does. `wait` is the time in seconds after which the request is decided."""
        self._agreement = agreement
        self._attempt = agreement.attempt
        """Attempt of which the loads are."""
        self._has_told = False
        """Whether the others know that everything is on the device of this rank."""
        self._is_hasty = False
        """Whether the wait for storage is over, because the caller or the deadline ended it."""
        self._patience = max(wait, _LEAST_S)
        self._vote_end = self._end_of_wait(context)
        """Clock time at which the wait for the other ranks ends: for votes, then for their loads."""
        deadline = context.clock() + wait * _STORAGE_SHARE
        try:
            super().__init__(context, lookup, tokens, states, deadline)
        except BaseException:
            agreement.close()
            raise

    @property
    def confirmed(self) -> bool:  # noqa: D102
        return (
            super().confirmed
            and self._agreement.attempt == self._attempt
            and (not self._agreement.is_leader or self._agreement.is_confirmed(self._attempt))
        )

    def poll(self) -> Poll:  # noqa: D102
        if self._agreement.is_leader:
            self._end_wait()
        return super().poll()

    def _pause(self) -> float:
        now = self._context.clock()
        return min([0.1, *(end - now for end in (self._deadline, self._vote_end) if end > now)])

    @property
    def attempt(self) -> int:  # noqa: D102
        return self._attempt

    def follow(self, depth: int, attempt: int = 0) -> Poll:  # noqa: D102
        self.require_open()
        self._context.drain()
        agreement = self._agreement
        pages, rest = divmod(depth, self._context.page_size)
        if rest or depth < 0:
            raise InputError(f"a depth of {depth} tokens is no whole number of pages; pass the leader's")
        self._follow_loads()
        if attempt < agreement.attempt:
            raise TransferError(
                "a load has failed on some rank, of which the leader has not heard; poll again"
            )
        if attempt > agreement.attempt and not self.committed:
            agreement.on_again(attempt)  # the message that says so has not come
            self.status = Status.PENDING
        if self.status is Status.PENDING:
            agreement.follow(pages)
        elif pages != self._depth:
            raise RankError(
                f"this rank has begun at a depth of {self.depth} tokens, because no word of the leader came"
                f" before its deadline; it cannot begin at {depth}"
            )
        return self._proceed(freeze=False)

    def close(self, fence: Fence | None = None) -> None:  # noqa: D102
        super().close(fence)
        self._agreement.close()

    def _end_of_wait(self, context: ControllerContext) -> float:
        return context.clock() + self._patience * (_LEADER_SHARE if self._agreement.is_leader else 1.0)

    def _end_wait(self) -> None:
        """At the end of the wait for other ranks, decide without them, or try again without the restore."""
        agreement = self._agreement
        if agreement.attempt != self._attempt or self._context.clock() < self._vote_end:
            return
        if agreement.decision is None:
            agreement.expire()
        elif (
            agreement.is_leader and not self.committed and self.status is Status.READY and not self.confirmed
        ):
            agreement.fail_load()

    def _follow_loads(self) -> None:
        agreement = self._agreement
        # A load may fail at any moment, but it lands on this thread. So a load that has landed, and of which
        # the first line finds no failure, has none.
        if self._restore.has_failed and agreement.attempt == self._attempt:
            agreement.fail_load()
        if agreement.attempt != self._attempt:
            if self.committed:
                raise AdmissionError(
                    "a rank has lost a layer of a restore after a commit; commit when the leader's"
                    " `confirmed` says that all ranks have restored everything"
                )
            self.status = Status.PENDING
        elif self.status is Status.READY and self._restore.has_landed and not self._restore.has_failed:
            self._restore.forget_loads()
            if not self._has_told:
                self._has_told = True
                agreement.note_loaded()

    def _fall_back(self) -> None:
        """After a failed load on any rank, vote again, once no load writes to a slot any more."""
        if self._restore.has_landed:
            self._restore.forget_loads()
            self._vote_again()

    def _vote_again(self) -> None:
        self._attempt = self._agreement.attempt
        self._settled = self._has_told = False
        self._vote_end = self._end_of_wait(self._context)
        self._fail(Reason.IO_ERROR)
        self._advance(freeze=False, late=False)

    def _advance(self, freeze: bool, late: bool) -> None:
        if self._agreement.attempt != self._attempt:
            self._vote_again()
        elif self._agreement.decision is not None:
            self._end()
        elif not self._agreement.has_voted:
            self._work(freeze, late)
            if self._agreement.is_decided:  # the leader's own vote was the last
                self._end()

    def _work(self, freeze: bool, late: bool) -> None:
        """Do what this rank's next vote needs, and vote when it is done."""
        freeze = self._is_hasty = freeze or self._is_hasty
        waiting, allowed = self._prefetch.waiting and not self._frozen, self._agreement.allowed
        if waiting and not freeze:
            self._load_ahead()
            return
        self._cut_short |= waiting
        if waiting and late:
            self._fail(Reason.TIMEOUT)
        if not waiting:
            for reason in self._prefetch.collect_results():
                self._fail(reason)
        match = self._match()
        target = 0 if allowed is None else allowed.bit_length()
        near, possible = self._depths(match, freeze)
        while target and possible & ~near & 1 << target - 1:
            if self._fetch(target):
                return
            match = self._match()
            near, possible = self._depths(match, freeze)
        if allowed is not None:
            possible &= allowed
        ready = (near & possible).bit_length()
        on_device = near_depths(self._context, match, device_only=True) << 1 | 1
        tiers = (Tier.DEVICE,) if on_device >> ready & 1 else (Tier.DEVICE, Tier.HOST)
        self._hold(self._node_ending(match, ready), ready, *tiers)
        self._agreement.vote(possible, ready)

    def _depths(self, match: Match, freeze: bool) -> tuple[int, int]:
        """Return the sets of depths that this rank holds, and that it holds or may fetch.

        The leader leaves out, in its first vote, what is faster to compute than to restore. So the ranks need
        not agree on speeds.
        """
        near = near_depths(self._context, match, device_only=self._frozen)
        if self._frozen:
            return near, near
        weighs = self._agreement.is_leader and self._agreement.allowed is None
        if weighs:
            near &= (1 << near_depth(self._context, match)) - 1
        if freeze or self._prefetch.is_cut_off:
            return near, near
        # A shallower state may be in storage only, and is wanted if a rank has lost the deeper one.
        far = self._prefetch.restorable(match, beyond=0)
        if weighs:
            worthwhile = max(match.near_depth, self._prefetch.worthwhile_depth(match))
            far = [depth for depth in far if depth <= worthwhile]
        possible = near
        for depth in far:
            possible |= 1 << depth - 1 if self._context.index.state_pools else (1 << depth) - 1
        return near, possible

    def _end(self) -> None:
        """Freeze the depth that was decided."""
        decision = self._agreement.decision
        assert decision is not None
        if decision.is_refused:
            raise PoolFullError(
                "another rank has too few slots for this request; release it, and admit it again on all ranks"
            )
        if not self._settled:
            if decision.reason is not Reason.NONE:
                self._fail(decision.reason)
            elif self.reason is Reason.NONE and decision.depth < self._match().depth:
                self.reason = Reason.RANKS
            self._prefetch.close()
            self._settled = True
            self._vote_end = self._end_of_wait(self._context)
        self._settle()

    def _settle(self) -> None:
        decision = self._agreement.decision
        if decision is None or self._agreement.attempt != self._attempt:
            self._vote_again()
            return
        try:
            self._freeze(self._match(), decision.depth)
        except PoolFullError:
            if not self._restore.is_loading_ahead:
                raise
