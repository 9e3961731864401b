"""Requests to an S3 service, on threads of the store's own, each with a deadline over obstore's retries.

The blocking requests of obstore are used, and not those for asyncio: with obstore 0.11 the latter abort the
process now and then when the interpreter ends. No caller's buffer is ever passed to obstore, so a request
that is given up can end whenever it likes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Condition, Event, Lock, get_ident
from typing import Any, Final, Generic, NamedTuple, TypeVar

import obstore
from obstore.store import S3Store

from tiercache.errors import ConfigError
from tiercache.storage.breaker import Breaker, Verdict
from tiercache.threads import IoThreads
from tiercache_backends.s3.failures import FailureKind, RequestError, classify
from tiercache_backends.s3.settings import S3Settings
from tiercache_backends.s3.throughput import WireSpeed

_log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 16
"""Number of requests of a store at one time."""
_MIN_BYTES_PER_SECOND: Final = 32 << 20
"""Throughput that a deadline allows for, on top of its fixed part."""
_FAILURES: Final = 3
"""Number of requests in a row without an answer after which the breaker opens."""
_PAUSE: Final = 1.0
"""First pause of the breaker in seconds."""
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

    Thread safety: `run` on a thread of the service, `result` on the caller's.
    """

    def __init__(self, service: BucketClient, work: Callable[[], T], nbytes: int, until: float) -> None:
        self._service = service
        self._work: Callable[[], T] | None = work
        self._nbytes = nbytes
        self._until = until
        self._lock = Lock()  # guards `_work` and `_thread`
        self._ended = Event()
        self._thread = 0
        self._value: T | None = None
        self._error: RequestError | None = None

    def run(self) -> None:
        """Make the request, unless it was given up before it began."""
        with self._lock:
            work = self._work
            self._thread = get_ident()
        wire, nbytes = self._service.wire, self._nbytes if work is not None else 0
        wire.begin(nbytes)
        try:
            if work is not None:
                self._value = work()
        except Exception as error:  # noqa: BLE001  obstore raises many types; the thread must live on
            self._error = classify(error, self._service.where)
        finally:
            wire.end(nbytes, nbytes if self._error is None else 0)
            self._service.ended(self._nbytes)
            self._work = work = None  # the bytes of a put go with it
            self._ended.set()

    def result(self) -> T:
        """Return the answer; raise RequestError if the request failed or took too long."""
        if not self._ended.wait(max(0.0, self._until - time.monotonic())):
            with self._lock:
                if not self._thread:
                    self._work = None
            failure = RequestError(
                FailureKind.UNREACHABLE,
                f"{self._service.where} does not answer in time; correct endpoint=, or wait",
            )
        elif self._error is not None:
            failure = self._error
        else:
            self._service.answered()
            return self._value  # type: ignore[return-value]  # a request without an error has its value
        self._service.failed(failure)
        raise failure


class BucketClient:
    """The bucket of a store, with deadlines, a breaker and a budget of bytes in flight.

    Thread safety: any thread may call.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self.where: Final = f"{settings} at {settings.endpoint or 'amazonaws.com'}"
        """The bucket and the service, for messages."""
        self._threads = IoThreads("s3", THREADS)
        self._breaker = Breaker(_FAILURES, _PAUSE, clock=time.monotonic, random=random.random)
        self._room = Condition()  # guards the fields from here on
        self._in_flight = 0
        self._store: S3Store | None = None
        self._refusal: tuple[float, RequestError] | None = None
        self.requests = 0
        """Number of requests that were queued so far."""
        self.unanswered = 0
        """Number of requests without an answer so far."""
        self.wire: Final = WireSpeed(time.monotonic)
        """Throughput of this process's large requests."""

    def deadline(self, nbytes: int = 0) -> float:
        """Return the time on the monotonic clock by which a call that moves so many bytes must be over."""
        return time.monotonic() + self._settings.deadline + nbytes / _MIN_BYTES_PER_SECOND

    def check(self) -> None:
        """Raise RequestError if no request would be made now; start a probe if it is time for one."""
        verdict = self._breaker.ask()
        if verdict is Verdict.PROBE:
            self._threads.submit(self._probe)
        if verdict is not Verdict.PASS:
            raise RequestError(
                FailureKind.UNREACHABLE, f"{self.where} has not answered; it is asked again in a moment"
            )
        refusal = self._refusal
        if refusal is not None and time.monotonic() < refusal[0]:
            raise refusal[1]

    def has_room(self, nbytes: int, until: float, *, wait: bool) -> bool:
        """Take a share of the bytes in flight; with `wait`, wait for it until that time.

        More bytes than the whole budget are let through alone. `ended` gives the share back.
        """

        def fits() -> bool:
            return not self._in_flight or self._in_flight + nbytes <= self._settings.in_flight

        with self._room:
            if not fits() and not (wait and self._room.wait_for(fits, max(0.0, until - time.monotonic()))):
                return False
            self._in_flight += nbytes
            return True

    def resize(self, taken: int, nbytes: int) -> int:
        """Make a share of `nbytes` of one that was taken for another number; return the new share."""
        with self._room:
            self._in_flight += nbytes - taken
            self._room.notify_all()
            return nbytes

    def begin(self, work: Callable[[S3Store], T], until: float, nbytes: int = 0) -> PendingRequest[T]:
        """Queue a request for which `has_room` has taken `nbytes`. Raises RequestError."""
        try:
            self.check()
            store = self._client()
        except RequestError:
            self.ended(nbytes)
            raise
        with self._room:
            self.requests += 1
        request = PendingRequest(self, lambda: self._twice(work, store), nbytes, until)
        self._threads.submit(request.run)
        return request

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
            if classify(error, self.where).kind is not FailureKind.REFUSED:
                raise
        with self._room:
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

    def versioned(self, name: str, size: int) -> tuple[bytes, str]:
        """Return the content of an object of at most `size` bytes, and its etag. Raises RequestError."""
        place = self._settings.place(name)

        def work(store: S3Store) -> tuple[bytes, str]:
            answer = obstore.get(store, place)
            if answer.meta["size"] > size:
                return b"", answer.meta["e_tag"] or ""
            return bytes(answer.bytes()), answer.meta["e_tag"] or ""

        return self.ask(work)

    def replace(self, name: str, data: bytes, etag: str | None) -> str:
        """Write an object that has this etag, or is absent (None), and return its new etag.

        Raises RequestError, of the kind EXISTS if the object is another.
        """
        place = self._settings.place(name)
        mode: Any = "create" if etag is None else {"e_tag": etag}
        return self.ask(lambda store: obstore.put(store, place, data, mode=mode)["e_tag"] or "")

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

    def ended(self, nbytes: int) -> None:
        """Give back a share of the bytes in flight."""
        with self._room:
            self._in_flight -= nbytes
            if nbytes:
                self._room.notify_all()

    def answered(self) -> None:
        """Note that the service has served a request."""
        self._breaker.succeeded()

    def failed(self, failure: RequestError) -> None:
        """Note how a request failed."""
        if failure.kind is not FailureKind.UNREACHABLE:
            self._breaker.succeeded()
            if failure.kind is FailureKind.REFUSED:
                self._refused(failure)
            return
        with self._room:
            self.unanswered += 1
        self._breaker.failed()

    def close(self) -> None:
        """End the threads, those with a request under way when it ends."""
        self._threads.close(self._settings.deadline)

    def _refused(self, failure: RequestError) -> None:
        with self._room:
            new = self._refusal is None or self._refusal[1].text != failure.text
            self._refusal = (time.monotonic() + _PAUSE, failure)
            self._store = None  # the credentials are read again
        if new:
            _log.warning("%s", failure.text)

    def _client(self) -> S3Store:
        with self._room:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def _connect(self) -> S3Store:
        settings = self._settings
        limit = timedelta(seconds=settings.deadline + settings.in_flight / _MIN_BYTES_PER_SECOND)
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
            raise RequestError(FailureKind.REFUSED, str(error)) from None
        except Exception as error:  # noqa: BLE001  obstore raises many types; their texts may quote settings
            raise RequestError(
                FailureKind.REFUSED, f"{self.where}: obstore refuses the settings ({type(error).__name__})"
            ) from None

    def _probe(self) -> None:
        try:
            next(iter(obstore.list(self._client(), self._settings.place("packs"), chunk_size=1)), None)
        except Exception as error:  # noqa: BLE001  whatever it is, the probe has an answer for the breaker
            known = error if isinstance(error, RequestError) else classify(error, self.where)
            self._breaker.probed(known.kind is not FailureKind.UNREACHABLE)
            return
        self._breaker.probed(True)
        _log.warning("%s answers again", self.where)
