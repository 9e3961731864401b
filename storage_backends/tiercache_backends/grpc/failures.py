"""Failures of calls to a daemon, and the outcome that an item gets when its call fails."""

from __future__ import annotations

import enum
from typing import Any, Final

import grpc
from grpc import StatusCode

from tiercache.core import Outcome
from tiercache.wire.methods import UNTOUCHED_METADATA


class Kind(enum.Enum):
    """Kinds of failed calls, by their cause and by what the client does next."""

    UNREACHABLE = enum.auto()
    """The daemon did not answer. Only this kind counts as a failure for the breaker."""
    SESSION_ENDED = enum.auto()
    """The daemon does not know the session, or has forgotten it. The client opens another session."""
    REFUSED = enum.auto()
    """The daemon answers, but does not serve this client or this call, now or later."""
    BUSY = enum.auto()
    """The daemon cannot serve the call now, but may be able to serve it later."""
    INVALID = enum.auto()
    """The daemon cannot serve this call, but may serve others."""
    IMPOSSIBLE = enum.auto()
    """The daemon or its store does not have what the call asks for."""


class CallError(Exception):
    """Failure of a call; `text` says what happened, and what to do.

    `untouched`: the daemon has said that it does not touch shared memory for this call, now or later.
    """

    def __init__(self, kind: Kind, text: str, *, untouched: bool = False) -> None:
        super().__init__(text)
        self.kind: Final = kind
        self.text: Final = text
        self.untouched: Final = untouched

    def without_traceback(self) -> CallError:
        """Return a copy of the error that can be stored, or raised in another call.

        The copy has no traceback, because the frames of a traceback keep the caller's buffers alive.
        """
        return CallError(self.kind, self.text, untouched=self.untouched)


_KINDS: Final = {
    StatusCode.UNAVAILABLE: Kind.UNREACHABLE,
    StatusCode.DEADLINE_EXCEEDED: Kind.UNREACHABLE,
    StatusCode.CANCELLED: Kind.UNREACHABLE,
    StatusCode.UNKNOWN: Kind.UNREACHABLE,
    StatusCode.UNAUTHENTICATED: Kind.SESSION_ENDED,
    StatusCode.PERMISSION_DENIED: Kind.REFUSED,
    StatusCode.UNIMPLEMENTED: Kind.REFUSED,
    StatusCode.RESOURCE_EXHAUSTED: Kind.BUSY,
    StatusCode.FAILED_PRECONDITION: Kind.IMPOSSIBLE,
}
_SAID: Final = {StatusCode.PERMISSION_DENIED, StatusCode.FAILED_PRECONDITION}
"""Codes that say no more than the daemon's own sentence."""


def classify(error: grpc.RpcError, what: str, *, session: bool) -> CallError:
    """Return the CallError for an error of gRPC.

    `what`: the daemon's name in the message. `session`: whether the connection has a session. If the daemon
    does not know the client, a client with a session can open another session. A client without a session is
    REFUSED.
    """
    call: Any = error  # the exception that gRPC raises is also the call
    code = call.code()
    kind = _KINDS.get(code, Kind.INVALID)
    if kind is Kind.SESSION_ENDED and not session:
        kind = Kind.REFUSED
    details = " ".join(str(call.details() or "").split())[:500]
    text = (
        f"{what} does not answer in time"
        if code is StatusCode.DEADLINE_EXCEEDED
        else f"{what}: {_sentence(code, details)}"
    )
    return CallError(
        kind, text, untouched=any(key == UNTOUCHED_METADATA for key, _ in call.trailing_metadata() or ())
    )


def error_of_status(number: int, text: str, what: str) -> CallError:
    """Return the CallError for a status code of gRPC that came by another way than gRPC.

    `what`: the daemon's name in the message.
    """
    code = next((code for code in StatusCode if code.value[0] == number), StatusCode.UNKNOWN)
    said = _sentence(code, " ".join(text.split())[:500])
    return CallError(_KINDS.get(code, Kind.INVALID), f"{what}: {said}", untouched=True)


def _sentence(code: StatusCode, details: str) -> str:
    return details if details and code in _SAID else f"{code.name.lower()}, {details}"


_WRONG_PORT: Final = (
    "another service listens there, such as that of http.listen or of payload; give the port for calls"
)
_ADVICE: Final = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of the authority in ca=; give the right one"),
    ("Hostname Verification", "its certificate has another name; use that name, or give it as server_name="),
    ("WRONG_VERSION_NUMBER", "it serves without TLS; leave out ca=, certificate= and tls="),
    ("Failed parsing HTTP/2", _WRONG_PORT),
    ("missing selected ALPN", _WRONG_PORT),
    (
        "Socket closed",
        "if it serves with TLS, give ca=; if this is its port for payload, give its port for calls; otherwise"
        " wait until it is back",
    ),
)
"""Advice by a part of what gRPC says of a connection that could not be made."""


def advice(error: CallError) -> str:
    """Return what to do about a daemon that cannot be reached."""
    known = (text for part, text in _ADVICE if part in error.text)
    return next(known, "start the daemon there, or wait until it is back")


_OUTCOMES: Final = {
    Kind.UNREACHABLE: Outcome.UNAVAILABLE,
    Kind.SESSION_ENDED: Outcome.REFUSED,
    Kind.REFUSED: Outcome.REFUSED,
    Kind.BUSY: Outcome.THROTTLED,
    Kind.INVALID: Outcome.ERROR,
    Kind.IMPOSSIBLE: Outcome.ERROR,
}


def outcome_of(error: CallError) -> Outcome:
    """Return the outcome of an item whose call failed with this error."""
    return _OUTCOMES[error.kind]


def ends_batch(error: CallError) -> bool:
    """Return whether the other calls of the batch would fail in the same way, and so are not made."""
    return error.kind not in (Kind.BUSY, Kind.INVALID, Kind.IMPOSSIBLE)
