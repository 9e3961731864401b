"""The log of calls: refusals, slow calls, and the changes that administrators make.

A record in the log and in the audit log names the principal, the peer and the request. It never has tokens,
salts or payload.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from grpc import StatusCode

from tiercache.daemon.access import Refusal, reason_of
from tiercache.daemon.audit import AuditLog
from tiercache.daemon.status.journal import Journal

_log = logging.getLogger(__name__)

_BURST: Final = 5
"""Number of refusals of one kind in a period that are told one by one; further ones are counted."""
_PERIOD_S: Final = 10.0
"""Seconds of such a period."""
_GOES_ON: Final = "goes on; the client left"
"""Outcome of a change that is being made when its call ends."""
_TOLD: Final = {"reload": ("removed", "at_next_start", "quotas")}
"""Changes that are told in the journal, and their details there. Its readers must not learn URLs of tiers."""

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

    def fields(self) -> dict[str, str]:
        """Return what every record of this call has, without what is empty."""
        named = {
            "request": self.request, "method": self.method, "peer": self.peer, "principal": self.principal
        }  # fmt: skip
        return {name: value for name, value in named.items() if value}


CURRENT: Final[ContextVar[CallRecord | None]] = ContextVar("call", default=None)
"""Call that is being served; lines of the log that come meanwhile belong to it."""


class CallLog:
    """Writer of what happens to calls, into the log and the audit log.

    A flood of refusals fills neither: after a few of one kind (principal and reason), the rest of a period
    is counted, and the number comes with the next that is told.

    Thread safety: any thread.
    """

    def __init__(
        self,
        count_refusal: Callable[[str], object] = lambda _: None,
        audit: AuditLog | None = None,
        *,
        instance: bytes = b"",
        slow: float = float("inf"),
        journal: Journal | None = None,
    ) -> None:
        """Name calls after `instance`, and tell of those that take `slow` seconds or longer.

        `count_refusal` counts a refusal by its reason. `journal` tells operators of changes of the daemon.
        """
        self._count_refusal = count_refusal
        self.audit: Final = audit
        self._journal: Final = journal
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

    def refused(self, error: BaseException | None) -> None:
        """Count and tell a refusal, if the client is the cause of `error`."""
        reason = reason_of(error)
        if reason is not None:
            self._count_refusal(reason)
            self._tell_refusal(reason, str(error))

    def refused_connection(self, reason: str, peer: str = "") -> None:
        """Count and tell the refusal of a connection, of which perhaps not even the peer is known."""
        self._count_refusal(reason)
        self._tell_refusal(reason, "a connection was refused or cut", peer)

    def name_peer(self, peer: str) -> None:
        """Note the client of the current call, if more is known than at its start."""
        if (call := CURRENT.get()) is not None:
            call.peer = peer

    def name_caller(self, principal: str) -> None:
        """Note the principal of the current call."""
        if (call := CURRENT.get()) is not None:
            call.principal = principal

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
        the result. If the call ends before `work`, as when its client leaves, the work goes on, and the
        record at its end comes all the same:

            asked ── the call ends ──▶ goes on; the client left ── the work ends ──▶ done, or failed
            asked ── the call ends while the work waits for a thread ──▶ not begun; the client left

        Raises Refusal, before the change, if it must not be made.
        """
        await self.begin(event, **details)
        call, outcome, is_over = CURRENT.get(), {"outcome": "not begun; the client left"}, False

        def run() -> T:
            outcome["outcome"] = _GOES_ON
            try:
                result = work()
            except BaseException as error:
                outcome["outcome"] = f"failed: {str(error) or type(error).__name__}"
                raise
            outcome.update({**told(result), "outcome": "done"})
            return result

        def landed() -> None:
            nonlocal is_over
            is_over = True
            self.end(event, call=call, **details, **outcome)

        try:
            return await start(run, landed=landed)
        except asyncio.CancelledError:
            if not is_over and outcome["outcome"] == _GOES_ON:
                self.end(event, _GOES_ON, call, **details)
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
        if self._journal is not None and event in _TOLD:
            named = {**{name: details.get(name) for name in _TOLD[event]}, "by": fields.get("principal")}
            more = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items() if value)
            self._journal.add(f"{event.replace('_', ' ')} {outcome}" + (f" ({more})" if more else ""),
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
        self._lock = threading.Lock()
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
