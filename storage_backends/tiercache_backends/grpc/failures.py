"""What can become of a call to a daemon besides an answer."""

from __future__ import annotations

import enum
from typing import Any, Final

import grpc
from grpc import StatusCode

from tiercache.wire.methods import UNTOUCHED_METADATA


class Kind(enum.Enum):
    """Who is to blame, and what follows."""

    AWAY = enum.auto()
    """Nobody answered: the breaker counts it."""
    ENDED = enum.auto()
    """The daemon does not know our session (any more): get another one."""
    REFUSED = enum.auto()
    """The daemon is there, and will not serve us, or not that. No outage: to wait does not help, and asking it costs nobody a deadline."""
    BUSY = enum.auto()
    """It will, later."""
    WRONG = enum.auto()
    """It is this call that cannot be served."""


class CallError(Exception):
    """A call without an answer. `text` says what happened, and what to do.

    `untouched`: nothing on the other side touches shared memory for this call, now or later.
    """

    def __init__(self, kind: Kind, text: str, *, untouched: bool = False) -> None:
        super().__init__(text)
        self.kind: Final = kind
        self.text: Final = text
        self.untouched: Final = untouched

    def again(self) -> CallError:
        """The same to keep, or to raise once more: without a traceback, whose frames would keep somebody's buffers."""
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
    """What an error of gRPC means. `session`: on a connection with a session, which can be renewed."""
    call: Any = error  # what gRPC raises is the call as well
    code = call.code()
    kind = _KINDS.get(code, Kind.WRONG)
    if kind is Kind.ENDED and not session:
        kind = Kind.REFUSED
    details = " ".join(str(call.details() or "").split())[:500]
    text = f"{what} does not answer in time" if code is StatusCode.DEADLINE_EXCEEDED else f"{what}: {code.name.lower()}, {details}"
    return CallError(kind, text, untouched=any(key == UNTOUCHED_METADATA for key, _ in call.trailing_metadata() or ()))
