"""Requests to an S3 service, on threads of the store's own, each with a deadline over obstore's retries.

The blocking requests of obstore are used, and not those for asyncio: with obstore 0.11 the latter abort the
process now and then when the interpreter ends. No caller's buffer is ever passed to obstore, so a request
that is given up can end whenever it likes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any, Final, Generic, NamedTuple, TypeVar

import obstore
from obstore.store import S3Store

from tiercache.errors import ConfigError, UnavailableError
from tiercache.storage.guard import MIN_BYTES_PER_SECOND, BytesInFlight, Guard, PendingCall
from tiercache_backends.s3.failures import DeniedError, RequestError, UnreachableError, classify
from tiercache_backends.s3.settings import S3Settings

_log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 16
"""Number of requests of a store at one time."""
_PAUSE: Final = 1.0
"""Seconds from a refusal, or from the failure that leaves the service out, to the next request."""
_RETRIES: Final = 3
"""Number of times that obstore repeats a request, and tries of a put that meets conflicts."""
_CONFLICT_PAUSE: Final = 0.05
"""Seconds from a put that was answered with a conflict to the next try."""
_LIST_CHUNK: Final = 1000
"""Names of one page of a listing."""


class Listed(NamedTuple):
    """One name of a listing."""

    name: str
    size: int
    modified: float
    """Seconds since 1970 on the clock of the service."""


class PendingRequest(Generic[T]):
    """A request that has been queued; `result` waits for its end, or gives it up.

    Thread safety: one thread.
    """

    def __init__(self, client: BucketClient, call: PendingCall[T]) -> None:
        self._client = client
        self._call = call

    def result(self) -> T:
        """Return the answer; raise RequestError if the request failed or took too long."""
        try:
            answer = self._call.result()
        except RequestError as error:
            failure = error
        except UnavailableError:
            failure = UnreachableError(
                f"{self._client.where} does not answer in time; correct endpoint=, or wait"
            )
        else:
            self._client.guard.succeeded()
            return answer
        self._client.failed(failure)
        raise failure


class BucketClient:
    """The bucket of a store, with deadlines, a breaker and a budget of bytes in flight.

    Thread safety: any thread may call.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self.where: Final = f"{settings} at {settings.endpoint or 'amazonaws.com'}"
        """The bucket and the service, for messages."""
        self.guard: Final = Guard(self.where, THREADS, settings.deadline, pause=_PAUSE, max_hung=2 * THREADS)
        self.in_flight: Final = BytesInFlight(settings.in_flight)
        self._lock = Lock()  # guards the fields from here on
        self._store: S3Store | None = None
        self._refusal: tuple[float, RequestError] | None = None
        self.requests = 0
        """Number of requests that were queued so far."""
        self.unanswered = 0
        """Number of requests without an answer so far."""

    def deadline(self, nbytes: int = 0) -> float:
        """Return the time on the monotonic clock by which a call that moves so many bytes must be over."""
        return time.monotonic() + self._settings.deadline + nbytes / MIN_BYTES_PER_SECOND

    def check(self) -> None:
        """Raise RequestError if no request would be made now; start a probe if it is time for one."""
        if not self.guard.may_call(self._probe):
            raise UnreachableError(f"{self.where} has not answered; it is asked again in a moment")
        refusal = self._refusal
        if refusal is not None and time.monotonic() < refusal[0]:
            raise DeniedError(str(refusal[1]))

    def has_room(self, nbytes: int, until: float, *, wait: bool) -> bool:
        """Take a share of the bytes in flight; with `wait`, wait for it until that time.

        The request that moves them gives it back.
        """
        return self.in_flight.enter(nbytes, max(0.0, until - time.monotonic()) if wait else 0.0)

    def begin(self, work: Callable[[S3Store], T], until: float, nbytes: int = 0) -> PendingRequest[T]:
        """Queue a request for which `has_room` has taken `nbytes`. Raises RequestError."""
        try:
            self.check()
            store = self._client()
        except RequestError:
            self.in_flight.leave(nbytes)
            raise
        with self._lock:
            self.requests += 1

        def request() -> T:
            try:
                return self._twice(work, store)
            except Exception as error:  # noqa: BLE001  obstore raises many types
                raise self._known(error) from None

        call = self.guard.begin(
            "a request",
            request,
            over=partial(self.in_flight.leave, nbytes),
            seconds=until - time.monotonic(),
            strict=True,
        )
        return PendingRequest(self, call)

    def ask(self, work: Callable[[S3Store], T], until: float | None = None) -> T:
        """Return the answer to a request that moves few bytes. Raises RequestError."""
        return self.begin(work, until or self.deadline()).result()

    def _twice(self, work: Callable[[S3Store], T], store: S3Store) -> T:
        """Make a request; if it is refused, make it once more, with credentials that are read again.

        So one answer that was a mistake of the service, or came just before new credentials, refuses nothing.
        """
        try:
            return work(store)
        except Exception as error:
            if not isinstance(self._known(error), DeniedError):
                raise
        with self._lock:
            if self._store is store:
                self._store = None
        return work(self._client())

    # --- requests
    # --------------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes, until: float) -> PendingRequest[None]:
        """Begin to write an object that must not exist; `has_room` was asked for its bytes."""
        place = self._settings.place(name)

        def work(store: S3Store) -> None:
            # The name is ours alone: if it exists, an attempt whose answer was lost has written it. But a
            # service may also answer a conflict (409) and keep nothing, so look before it counts as written.
            for left in reversed(range(_RETRIES)):
                try:
                    obstore.put(store, place, data, mode="create", use_multipart=False)
                    return
                except obstore.exceptions.AlreadyExistsError:
                    with suppress(FileNotFoundError):
                        if obstore.head(store, place)["size"] == len(data):
                            return
                    if not left or time.monotonic() > until:
                        raise
                    time.sleep(_CONFLICT_PAUSE)

        return self.begin(work, until, len(data))

    def read(self, name: str, start: int, stop: int, until: float) -> PendingRequest[memoryview]:
        """Begin to read the bytes [start, stop) of an object; `has_room` was asked for them.

        The answer is shorter if the object is.
        """
        place = self._settings.place(name)
        return self.begin(
            lambda store: memoryview(obstore.get_range(store, place, start=start, end=stop)),
            until,
            stop - start,
        )

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a small object, whether it exists or not. Raises RequestError."""
        place = self._settings.place(name)
        self.ask(lambda store: obstore.put(store, place, data, use_multipart=False))

    def contents(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a small object. Raises RequestError."""
        place = self._settings.place(name)
        return bytes(self.ask(lambda store: memoryview(obstore.get_range(store, place, start=0, end=size))))

    def delete(self, names: list[str], until: float) -> None:
        """Remove objects; those that are absent are no failure."""
        places = [self._settings.place(name) for name in names]

        def work(store: S3Store) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(store, places[0] if len(places) == 1 else places)

        if places:
            self.ask(work, until)

    def pages(self, folder: str, after: str = "") -> Iterator[list[Listed]]:
        """Return what lies in a folder after the name `after`, ordered by name, a thousand at a time.

        Raises RequestError. Each page has a deadline of its own.
        """
        prefix = self._settings.place(folder)
        last = f"{prefix}/{after}" if after else None
        stream: Any = None

        def page(store: S3Store) -> Any:
            nonlocal stream
            # A listing that has failed is over, which must not look like its end: the next try begins anew.
            listing, stream = stream, None
            if listing is None:
                listing = iter(obstore.list(store, prefix, offset=last, chunk_size=_LIST_CHUNK))
            found = next(listing, None)
            stream = listing
            return found

        while (chunk := self.ask(page)) is not None:
            last = chunk[-1]["path"]
            yield [
                Listed(
                    str(entry["path"])[len(prefix) + 1 :], entry["size"], entry["last_modified"].timestamp()
                )
                for entry in chunk
            ]

    # --- ends of requests
    # --------------------------------------------------------------------------------------------------------

    def failed(self, failure: RequestError) -> None:
        """Note how a request failed."""
        if not isinstance(failure, UnreachableError):
            self.guard.succeeded()
            if isinstance(failure, DeniedError):
                self._refused(failure)
            return
        with self._lock:
            self.unanswered += 1
        self.guard.failed(str(failure))

    def close(self) -> None:
        """End the threads, those with a request under way when it ends."""
        self.guard.close()

    def _refused(self, failure: RequestError) -> None:
        with self._lock:
            new = self._refusal is None or str(self._refusal[1]) != str(failure)
            self._refusal = (time.monotonic() + _PAUSE, failure)
            self._store = None  # the credentials are read again
        if new:
            _log.warning("%s", failure)

    def _client(self) -> S3Store:
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _connect(self) -> S3Store:
        settings = self._settings
        limit = timedelta(seconds=settings.deadline + settings.in_flight / MIN_BYTES_PER_SECOND)
        try:
            given: dict[str, Any] = settings.credentials()
            if settings.endpoint:
                given["endpoint"] = settings.endpoint
            return S3Store(
                settings.bucket,
                region=settings.region,
                virtual_hosted_style_request=settings.virtual_host,
                client_options={
                    "allow_http": settings.endpoint.startswith("http://"),
                    "timeout": limit,
                    "connect_timeout": timedelta(seconds=settings.deadline),
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": limit},
                **given,
            )
        except ConfigError as error:
            raise DeniedError(str(error)) from None
        except Exception as error:  # noqa: BLE001  obstore raises many types; their texts may quote settings
            raise DeniedError(
                f"{self.where}: obstore refuses the settings ({type(error).__name__})"
            ) from None

    def _probe(self) -> None:
        try:
            next(iter(obstore.list(self._client(), self._settings.place("packs"), chunk_size=1)), None)
        except Exception as error:  # noqa: BLE001  whatever it is, the probe has a result
            self.guard.probed(not isinstance(self._known(error), UnreachableError))
            return
        self.guard.probed(True)

    def _known(self, error: Exception) -> RequestError:
        return error if isinstance(error, RequestError) else classify(error, self.where)
