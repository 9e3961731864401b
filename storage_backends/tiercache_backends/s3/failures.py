"""Failures of requests to an S3 service, each as one sentence that says what to do.

Texts of obstore are never passed on: they are long, and quote requests.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from obstore import exceptions

from tiercache.core import Outcome
from tiercache.errors import RefusedError, StorageError, UnavailableError

_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")


class RequestError(StorageError):
    """Failure of a request; the text says what happened, and what to do."""

    outcome_of_get: ClassVar[Outcome] = Outcome.ERROR
    """Outcome of an item of a get whose request failed so."""
    outcome_of_set: ClassVar[Outcome] = Outcome.ERROR
    """Outcome of an item of a set whose request failed so; a set knows no misses."""


class UnreachableError(RequestError, UnavailableError):
    """The service did not answer as a service does. Only this counts as a failure for the breaker."""

    outcome_of_get = outcome_of_set = Outcome.UNAVAILABLE


class DeniedError(RequestError, RefusedError):
    """The service answers, but does not serve this caller."""

    outcome_of_get = outcome_of_set = Outcome.REFUSED


class BusyError(RequestError, RefusedError):
    """The service asks to be asked less often."""

    outcome_of_get = outcome_of_set = Outcome.THROTTLED


class AbsentError(RequestError):
    """The object is not there."""

    outcome_of_get = Outcome.MISS


class ShortError(RequestError):
    """The object ends before the range that was asked for."""

    outcome_of_get = Outcome.CORRUPT


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
        return DeniedError(f"{where} {_ADVICE[code]}")
    if isinstance(error, FileNotFoundError) and code == "NoSuchKey":
        return AbsentError(f"{where} has no such object")
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return RequestError(f"{where} has another object of that name")
    if status == 416:
        return ShortError(f"{where} has less of an object than was written")
    if code in _BUSY or status == 429:
        return BusyError(f"{where} asks to be asked less often; wait, or spread the load")
    if status in (401, 403):
        return DeniedError(f"{where} refuses the request ({code or status}); check the credentials")
    if status == 404 or isinstance(error, FileNotFoundError):
        return DeniedError(f"{where} is no S3 service with this bucket; correct endpoint= or bucket")
    if 300 <= status < 500:
        return DeniedError(f"{where} refuses the request ({code or status}); correct endpoint= or region=")
    what = f"fails ({code or status})" if status else "cannot be reached"
    return UnreachableError(f"{where} {what}; correct endpoint=, or wait until it is back")
