"""The one place that every call of the daemon passes when it begins, is refused, changes something or ends.

    call ──▶ metrics    log (slow, refused, changes)    audit log    journal

A record in the log and in the audit log names the principal, the peer and the request. It never has tokens,
salts or payload.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, NamedTuple, TypeVar

from grpc import StatusCode

from tiercache.daemon.access import Refusal, reason_of
from tiercache.daemon.audit import AuditLog
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.metrics.table import HEALTHS
from tiercache.storage.base import TierReport
from tiercache.storage.tiers import DELIBERATE, STUCK

_log = logging.getLogger(__name__)

_BURST: Final = 5
"""Number of refusals of one kind in a period that are told one by one; further ones are counted."""
_PERIOD_S: Final = 10.0
"""Seconds of such a period."""
_TOLD: Final = {"reload": ("changed", "removed", "at_next_start", "dropped")}
"""Changes that are told in the journal, and their details there. Its readers must not learn URLs of tiers."""
_KEPT: Final = 48
"""Number of entries that the journal keeps."""
_TEXT: Final = 300
"""Maximum number of characters of an entry."""

T = TypeVar("T")


@dataclass(slots=True)
class CallRecord:
    """Call as the log knows it."""

    request: str
    """Name of the call, unique in the life of a daemon."""
    method: str
    peer: str
    """Client's address, or its process on this host."""
    principal: str = ""
    """Principal that makes the call; empty while it is not known."""
    code: StatusCode = StatusCode.CANCELLED
    """Status with which the call has ended; CANCELLED if the client left before."""

    def fields(self) -> dict[str, str]:
        """Return what every record of this call has, without what is empty."""
        named = {
            "request": self.request, "method": self.method, "peer": self.peer, "principal": self.principal
        }  # fmt: skip
        return {name: value for name, value in named.items() if value}


CURRENT: Final[ContextVar[CallRecord | None]] = ContextVar("call", default=None)
"""Call that is being served; lines of the log that come meanwhile belong to it."""


class CallLog:
    """Observer of all calls, which tells its sinks of each: metrics, log, audit log, journal.

    A flood of refusals fills none of them: after a few of one kind (principal and reason), the rest of a
    period is counted, and the number comes with the next that is told.

    Thread safety: any thread.
    """

    def __init__(
        self,
        metrics: NodeMetrics | None = None,
        audit: AuditLog | None = None,
        *,
        instance: bytes = b"",
        slow: float = float("inf"),
    ) -> None:
        """Name calls after `instance`, and tell of those that take `slow` seconds or longer."""
        self.metrics: Final = metrics or NodeMetrics()
        self.audit: Final = audit
        self.journal: Final = Journal()
        self._prefix = instance.hex()[:8]
        self.slow = slow
        """Seconds from which a call is slow."""
        self._numbers = itertools.count(1)
        self._told: Final = _Counts()

    @contextmanager
    def follow(self, method: str, peer: str) -> Iterator[CallRecord]:
        """Let lines of the log belong to a call, and tell of it at its end if it was slow."""
        record = CallRecord(f"{self._prefix}-{next(self._numbers):x}", method, peer)
        token = CURRENT.set(record)
        started = time.monotonic()
        try:
            yield record
        finally:
            seconds = time.monotonic() - started
            if seconds >= self.slow:
                _log.warning("a call took %.3f s", seconds, extra=record.fields())
            CURRENT.reset(token)

    @contextmanager
    def call(self, method: str, peer: str) -> Iterator[CallRecord]:
        """Follow a call of the service and measure it, with the time before its caller is known.

        Whoever serves it sets the code of the record.
        """
        with self.follow(method, peer) as record:
            self.metrics.begin_call(method)
            started = time.perf_counter()
            try:
                yield record
            finally:
                self.metrics.end_call(method, record.code.name, time.perf_counter() - started)

    def know(self, principal: str, peer: str = "") -> None:
        """Note and count the principal of the current call, and its client if more is known of it."""
        self.metrics.count_call(principal)
        if (call := CURRENT.get()) is not None:
            call.principal = principal
            call.peer = peer or call.peer

    def refused(self, error: BaseException | None) -> None:
        """Count and tell a refusal, if the client is the cause of `error`."""
        reason = reason_of(error)
        if reason is not None:
            self.metrics.count_refusal(reason)
            self._tell_refusal(reason, str(error))

    def refused_connection(self, reason: str, peer: str = "") -> None:
        """Count and tell the refusal of a connection, of which perhaps not even the peer is known."""
        self.metrics.count_refusal(reason)
        self._tell_refusal(reason, "a connection was refused or cut", peer)

    async def change(
        self,
        event: str,
        start: Callable[..., Awaitable[T]],
        work: Callable[[], T],
        told: Callable[[T], Mapping[str, Any]] = lambda _: {},
        **details: Any,
    ) -> T:
        """Record a change before and after it is made, and return what `work`, which makes it, returns.

        `start` begins work in a thread (`Threads.start`); `told` returns what the record at the end has of
        the result. If the call ends before `work`, as when its client leaves, that is recorded too:

            asked ── the call ends ──▶ goes on; the client left ── the work ends ──▶ done, or failed
            asked ── the call ends while the work waits for a thread ──▶ not begun; the client left

        Raises Refusal, before the change, if it must not be made.
        """
        await self.begin(event, **details)
        call, left = CURRENT.get(), "not begun; the client left"

        def run() -> T:
            nonlocal left
            left = "goes on; the client left"
            try:
                result = work()
            except BaseException as error:
                left = ""
                self.end(event, f"failed: {str(error) or type(error).__name__}", call, **details)
                raise
            left = ""
            self.end(event, "done", call, **details, **told(result))
            return result

        try:
            return await start(run)
        except asyncio.CancelledError:
            if left:
                self.end(event, left, call, **details)
            raise

    async def begin(self, event: str, **details: Any) -> None:
        """Record a change that is about to be made; raises Refusal if it must not be made."""
        call = CURRENT.get()
        fields = call.fields() if call else {}
        _log.info("%s", event, extra=fields | details)
        asked = {**fields, "outcome": "asked", **details}
        if self.audit is not None and not await self.audit.require(event, asked):
            raise Refusal(
                StatusCode.UNAVAILABLE,
                f"nothing was changed, because the audit log {self.audit.path} cannot be written and"
                " audit.required is set; the daemon's log says why",
            )

    def end(self, event: str, outcome: str, call: CallRecord | None = None, **details: Any) -> None:
        """Record what came of a change, of the current call or of `call`."""
        call = call or CURRENT.get()
        fields = call.fields() if call else {}
        _log.info("%s: %s", event, outcome, extra=fields | details)
        if self.audit is not None:
            self.audit.record(event, {**fields, "outcome": outcome, **details})
        if event in _TOLD:
            named = {**{name: details.get(name) for name in _TOLD[event]}, "by": fields.get("principal")}
            more = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items() if value)
            self.journal.add(f"{event.replace('_', ' ')} {outcome}" + (f" ({more})" if more else ""),
                              is_warning=outcome != "done")  # fmt: skip

    def _tell_refusal(self, reason: str, why: str, peer: str = "") -> None:
        call = CURRENT.get()
        fields: dict[str, Any] = call.fields() if call else {"peer": peer} if peer else {}
        unsaid = self._told.count((fields.get("principal", ""), reason))
        if unsaid is None:
            return
        more: dict[str, Any] = {"reason": reason, "why": why} | ({"unsaid": unsaid} if unsaid else {})
        _log.info("refused", extra=fields | more)
        if self.audit is not None:
            self.audit.record("refused", fields | more)


class _Counts:
    """Numbers of events by kind in the present period; there are few kinds.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: dict[tuple[str, str], tuple[float, int]] = {}

    def count(self, kind: tuple[str, str]) -> int | None:
        """Return the number of events left out since the last that was told; None to leave out this one."""
        now = time.monotonic()
        with self._lock:
            since, number = self._since.get(kind, (now, 0))
            if now - since >= _PERIOD_S:
                unsaid, since, number = max(0, number - _BURST), now, 0
            else:
                unsaid = 0
            self._since[kind] = since, number + 1
            return unsaid if number < _BURST else None


class JournalEntry(NamedTuple):
    """Something that has happened in the daemon."""

    time: float
    level: Literal["info", "warning"]
    text: str


class Journal:
    """List of the last entries, and the health of the tiers, whose changes are entries.

    Thread safety: any thread, but `compare` from one at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._entries: Final[deque[JournalEntry]] = deque(maxlen=_KEPT)
        self._health: dict[str, str] = {}

    def add(self, text: str, *, is_warning: bool = False) -> None:
        """Add an entry about something ordinary, or about something that an operator should look at."""
        self._entries.append(JournalEntry(self._clock(), "warning" if is_warning else "info", text[:_TEXT]))

    def compare(self, tiers: Sequence[TierReport]) -> None:
        """Add entries for tiers whose health has changed since the last call."""
        # A tier that leaves the chain has one health all the time, also if it cannot leave.
        now = {tier.name: tier.health + STUCK * tier.why.startswith(STUCK) for tier in tiers}
        for tier in tiers:
            if now[tier.name] != self._health.get(tier.name, HEALTHS[0]):
                is_deliberate = tier.why.startswith(DELIBERATE) or tier.health == HEALTHS[0]
                self.add(in_words(tier), is_warning=not is_deliberate)
        for name in self._health.keys() - now.keys():
            self.add(f"tier {name} has left the chain")
        self._health = now

    def latest(self) -> list[JournalEntry]:
        """Return the entries, the newest first."""
        return list(self._entries)[::-1]


def in_words(tier: TierReport) -> str:
    """Return the health of a tier as a sentence."""
    return f"tier {tier.name} is {tier.health}" + (f": {tier.why}" if tier.why else "")
