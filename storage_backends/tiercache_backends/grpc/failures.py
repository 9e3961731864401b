"""Failures of calls to a daemon."""

from __future__ import annotations

import enum
from typing import Any, Final

import grpc
from grpc import StatusCode

from tiercache.wire.methods import UNTOUCHED_METADATA


class Kind(enum.Enum):
    """Kinds of failed calls, by their cause and by what the client does next."""

    AWAY = enum.auto()
    """The daemon did not answer; the breaker counts it."""
    ENDED = enum.auto()
    """The daemon does not know the session, or no longer does; the client opens another one."""
    REFUSED = enum.auto()
    """The daemon answers, but does not serve this client or this call. No outage: waiting does not help, and asking costs no deadline."""
    BUSY = enum.auto()
    """The daemon cannot serve the call now, but later."""
    WRONG = enum.auto()
    """This call in particular cannot be served."""


class CallError(Exception):
    """Call that got no answer. `text` says what happened, and what to do.

    `untouched`: the daemon does not touch shared memory for this call, now or later.
    """

    def __init__(self, kind: Kind, text: str, *, untouched: bool = False) -> None:
        super().__init__(text)
        self.kind: Final = kind
        self.text: Final = text
        self.untouched: Final = untouched

    def again(self) -> CallError:
        """Return a copy to keep or to raise again, without the traceback, whose frames would keep a caller's buffers alive."""
        return CallError(self.kind, self.text, untouched=self.untouched)


_KINDS: Final = {
    StatusCode.UNAVAILABLE: Kind.AWAY,
    StatusCode.DEADLINE_EXCEEDED: Kind.AWAY,
    StatusCode.CANCELLED: Kind.AWAY,
    StatusCode.UNKNOWN: Kind.AWAY,
    StatusCode.UNAUTHENTICATED: Kind.ENDED,
    StatusCode.PERMISSION_DENIED: Kind.REFUSED,
    StatusCode.UNIMPLEMENTED: Kind.REFUSED,
    StatusCode.RESOURCE_EXHAUSTED: Kind.BUSY,
}


def judge(error: grpc.RpcError, what: str, *, session: bool) -> CallError:
    """Return what an error of gRPC means. `what`: names the daemon. `session`: the connection has a session, which can be renewed."""
    call: Any = error  # the exception that gRPC raises is also the call
    code = call.code()
    kind = _KINDS.get(code, Kind.WRONG)
    if kind is Kind.ENDED and not session:
        kind = Kind.REFUSED
    details = " ".join(str(call.details() or "").split())[:500]
    text = f"{what} does not answer in time" if code is StatusCode.DEADLINE_EXCEEDED else f"{what}: {code.name.lower()}, {details}"
    return CallError(kind, text, untouched=any(key == UNTOUCHED_METADATA for key, _ in call.trailing_metadata() or ()))
