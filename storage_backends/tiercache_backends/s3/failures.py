"""Failures of requests to an S3 service, each as one sentence that says what to do.

Texts of obstore are never passed on: they are long, and quote requests.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from obstore import exceptions

from tiercache.core import Outcome
from tiercache.errors import RefusedError, StorageError, UnavailableError

_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")


class FailureKind(enum.Enum):
    """Kinds of failed requests, by what the store does next."""

    UNREACHABLE = enum.auto()
    """The service did not answer as a service does. Only this kind counts as a failure for the breaker."""
    REFUSED = enum.auto()
    """The service answers, but does not serve this caller."""
    BUSY = enum.auto()
    """The service asks to be asked less often."""
    ABSENT = enum.auto()
    """The object is not there."""
    EXISTS = enum.auto()
    """The object is there already, or is another one than was expected."""
    SHORT = enum.auto()
    """The object ends before the range that was asked for."""


class RequestError(Exception):
    """Failure of a request; `text` says what happened, and what to do."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind: Final = kind
        self.text: Final = text

    def as_storage_error(self) -> StorageError:
        """Return the error of the contract for this failure."""
        if self.kind in (FailureKind.REFUSED, FailureKind.BUSY):
            return RefusedError(self.text)
        return (
            UnavailableError(self.text) if self.kind is FailureKind.UNREACHABLE else StorageError(self.text)
        )


_ADVICE: Final = {
    "InvalidAccessKeyId": "does not know this access key; give the key of a user of this service",
    "SignatureDoesNotMatch": "finds the signature wrong; give the secret of this access key, and the right"
    " region",
    "AccessDenied": "denies access; allow this user to get, put, delete and list objects under the prefix",
    "ExpiredToken": "says that the credentials have expired; renew them",
    "InvalidToken": "says that the session token is wrong; renew the credentials",
    "RequestTimeTooSkewed": "finds the clock of this machine wrong; set the clock (NTP)",
    "RequestExpired": "finds the clock of this machine wrong; set the clock (NTP)",
    "NoSuchBucket": "has no such bucket; create the bucket, or name another",
    "PermanentRedirect": "has this bucket in another region; give region= of the bucket",
    "AuthorizationHeaderMalformed": "expects another region; give region= of the bucket",
    "InvalidBucketName": "does not accept the bucket's name; name another bucket",
}  # fmt: skip
_BUSY: Final = {"SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "TooManyRequests", "Throttling"}


def classify(error: Exception, where: str) -> RequestError:
    """Return the failure for an exception of obstore; `where`: the service and the bucket, for messages."""
    text = str(error)[:8192]
    code = found[1] if (found := _CODE.search(text)) else ""
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    if "Received redirect" in text:
        code = "PermanentRedirect"  # the client library does not pass the code on
    if code in _ADVICE:
        return RequestError(FailureKind.REFUSED, f"{where} {_ADVICE[code]}")
    if isinstance(error, FileNotFoundError) and code == "NoSuchKey":
        return RequestError(FailureKind.ABSENT, f"{where} has no such object")
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return RequestError(FailureKind.EXISTS, f"{where} has another object of that name")
    if status == 416:
        return RequestError(FailureKind.SHORT, f"{where} has less of an object than was written")
    if code in _BUSY or status == 429:
        return RequestError(
            FailureKind.BUSY, f"{where} asks to be asked less often; wait, or spread the load"
        )
    if status in (401, 403):
        return RequestError(
            FailureKind.REFUSED, f"{where} refuses the request ({code or status}); check the credentials"
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return RequestError(
            FailureKind.REFUSED, f"{where} is no S3 service with this bucket; correct endpoint= or bucket"
        )
    if 300 <= status < 500:
        return RequestError(
            FailureKind.REFUSED,
            f"{where} refuses the request ({code or status}); correct endpoint= or region=",
        )
    what = f"fails ({code or status})" if status else "cannot be reached"
    return RequestError(
        FailureKind.UNREACHABLE, f"{where} {what}; correct endpoint=, or wait until it is back"
    )


_OUTCOMES: Final = {
    FailureKind.UNREACHABLE: Outcome.UNAVAILABLE,
    FailureKind.REFUSED: Outcome.REFUSED,
    FailureKind.BUSY: Outcome.THROTTLED,
    FailureKind.ABSENT: Outcome.MISS,
    FailureKind.SHORT: Outcome.CORRUPT,
    FailureKind.EXISTS: Outcome.ERROR,
}


def outcome_of(error: RequestError) -> Outcome:
    """Return the outcome of an item of a get whose request failed so."""
    return _OUTCOMES[error.kind]


def outcome_of_set(error: RequestError) -> Outcome:
    """Return the outcome of an item of a set whose request failed so; a set knows no misses."""
    found = _OUTCOMES[error.kind]
    return Outcome.ERROR if found in (Outcome.MISS, Outcome.CORRUPT) else found
