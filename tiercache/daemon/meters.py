"""The metrics of a node: the rows of `metrics.table.NODE`.

Values that other objects know (units held of a budget, number of sessions, contents of the store) are read from them at scrape time, in the
scraper's thread. Events of calls are counted when they happen, through metric children that were looked up once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, Final, Literal

from grpc import StatusCode
from grpc.aio import AbortError
from prometheus_client import CollectorRegistry

import tiercache
from tiercache.core import ObjectKey, Outcome, PoolName, Tier
from tiercache.daemon.access import Bounds, Refusal
from tiercache.errors import TierCacheError, WireError
from tiercache.metrics import HIT, MISS, NODE, Families
from tiercache.metrics.table import ANSWERS, BUDGETS, CODES, METHODS, REASON_OF, REFUSALS
from tiercache.storage.base import StorageBackend, Usage
from tiercache.wire.methods import METHODS as SERVED

if TYPE_CHECKING:
    from tiercache.config.settings import Settings
    from tiercache.daemon.sessions import Attachments

_log = logging.getLogger(__name__)

assert tuple(SERVED) == METHODS, "the table of metrics knows every call"

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_EVERY: Final = 5.0
"""Least seconds between two `usage` calls of the store."""
_PATIENCE: Final = 0.25
"""Seconds that a scrape waits for the store's figures before it goes on with the previous ones."""

_CODES: Final[dict[Any, StatusCode]] = {code.value[0]: code for code in StatusCode} | {code: code for code in StatusCode}
"""Status code by its number and by itself: gRPC gives the code of an aborted call as a number."""
_REASONS: Final = {
    StatusCode.UNAUTHENTICATED: "unauthenticated",
    StatusCode.PERMISSION_DENIED: "permission",
    StatusCode.RESOURCE_EXHAUSTED: "busy",
    StatusCode.DEADLINE_EXCEEDED: "idle",
    StatusCode.INVALID_ARGUMENT: "malformed",
    StatusCode.FAILED_PRECONDITION: "malformed",
}
"""Reason of a refusal in the metrics, by its status code, where the refusal names none."""

Direction = Literal["in", "out"]
Plane = Literal["stream", "shared"]


class LimitError(WireError):
    """A request is beyond a limit that the operator may raise; the metrics count it apart from a request that cannot be read."""


class Meters(Families):
    """The metrics of one node, which the named `principals` may call.

    Thread safety: any thread.
    """

    def __init__(self, principals: Iterable[str] = (), registry: CollectorRegistry | None = None) -> None:
        names = tuple(dict.fromkeys(principals))
        super().__init__(NODE, registry, principal=names, version=[tiercache.__version__])
        self.gauge("node_build_info", tiercache.__version__).set(1)
        self._seconds: Final = {method: self.histogram("node_call_seconds", method) for method in METHODS}
        self._under_way: Final = {method: self.gauge("node_calls_under_way", method) for method in METHODS}
        self._codes: Final = {method: {code: self.counter("node_calls_total", method, code) for code in CODES} for method in METHODS}
        self._refused: Final = {reason: self.counter("node_refused_total", reason) for reason in REFUSALS}
        self._callers: Final = {name: self.counter("node_principal_calls_total", name) for name in names}
        directions: tuple[Direction, ...] = ("in", "out")
        self._by_caller: Final = {
            (name, way): self.counter("node_principal_bytes_total", name, way) for name in names for way in directions
        }
        self._moved: Final = {
            (plane, way): self.counter("node_payload_bytes_total", plane, way) for plane in ("stream", "shared") for way in directions
        }
        self._damaged: Final = self.counter("node_damaged_objects_total")
        self._last_read: Final = self.gauge("node_last_read_seconds")
        self._asked: Final = {
            (operation, outcome): self._lookups(operation, outcome) for operation in ("exists", "get") for outcome in ANSWERS[operation]
        }

    @contextmanager
    def call(self, method: str, context: Any) -> Iterator[None]:
        """Measure one call, from before its caller is known until it has ended or was aborted; `context` is gRPC's."""
        under_way, code = self._under_way[method], StatusCode.CANCELLED
        under_way.inc()
        start = time.perf_counter()
        try:
            yield
            code = StatusCode.OK
        except AbortError as abort:
            code = _CODES.get(context.code(), StatusCode.UNKNOWN)
            self.refused_for(abort.__context__)  # the exception that was being handled when the call was aborted
            raise
        finally:
            under_way.dec()
            self._seconds[method].observe(time.perf_counter() - start)
            codes = self._codes[method]
            (codes.get(code.name) or codes["UNKNOWN"]).inc()

    def refused(self, reason: str) -> None:
        """Count a refusal for which the client is the cause; `reason` is one of `metrics.table.REFUSALS`."""
        self._refused[reason].inc()

    def refused_for(self, error: BaseException | None) -> None:
        """Count a refusal if `error` is one for which a client is refused (`reason_of`)."""
        if (reason := reason_of(error)) is not None:
            self.refused(reason)

    def called(self, principal: str) -> None:
        """Count a call of this principal; a name that was not given at construction is ignored."""
        if (counter := self._callers.get(principal)) is not None:
            counter.inc()

    def moved(self, principal: str, plane: Plane, direction: Direction, nbytes: int) -> None:
        """Count payload bytes that moved between a client of `principal` and the node."""
        if nbytes:
            self._moved[plane, direction].inc(nbytes)
            if (counter := self._by_caller.get((principal, direction))) is not None:
                counter.inc(nbytes)

    def damaged(self, objects: int) -> None:
        """Count objects that did not arrive as they were sent."""
        if objects:
            self._damaged.inc(objects)

    def existed(self, keys: Sequence[ObjectKey], answers: Sequence[bool]) -> None:
        """Count the answers of an Exists call."""
        pools = [key.pool for key in keys]
        self._looked_up("exists", Outcome.HIT, list(compress(pools, answers)))
        self._looked_up("exists", Outcome.MISS, list(compress(pools, map(not_, answers))))

    def got(self, keys: Sequence[ObjectKey], outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes of a Get or GetInto call."""
        pools = [key.pool for key in keys]
        for outcome in ANSWERS["get"]:
            if outcome in outcomes:
                self._looked_up("get", outcome, [pool for pool, answer in zip(pools, outcomes, strict=True) if answer is outcome])
        if Outcome.HIT in outcomes:
            self._last_read.set(time.time())

    def watch(self, settings: Settings, bounds: Bounds, attachments: Attachments, figures: Figures) -> None:
        """Report from now on what these objects hold; to be called when the node begins to serve."""
        self.gauge("node_start_time_seconds").set(time.time())
        self.gauge("node_insecure_bind").set(exposed(settings))
        self.gauge("node_calls_limit").set(bounds.streams.limit)
        self.gauge("node_workers").set(bounds.workers.limit)
        budgets = dict(zip(BUDGETS, (bounds.payload, bounds.transfers, bounds.requests), strict=True))
        for name, budget in budgets.items():
            self.gauge("node_held_limit_bytes", name).set(budget.limit)
        self.tell("node_held_bytes", {(name,): partial(getattr, budget, "held") for name, budget in budgets.items()})
        told: dict[str, Callable[[], float | None]] = {
            "node_workers_busy": lambda: bounds.workers.held,
            "node_sessions": lambda: len(attachments),
            "node_attached_bytes": lambda: attachments.attached,
            "node_store_objects": lambda: figures.latest().objects,
            "node_store_payload_bytes": lambda: figures.latest().payload_bytes,
            "node_store_used_bytes": lambda: figures.latest().used_bytes,
            "node_store_capacity_bytes": lambda: figures.latest().capacity_bytes,
            "node_store_evicted_objects_total": lambda: figures.detail("evicted"),
            "node_store_corrupt_objects_total": lambda: figures.detail("corrupt"),
            "node_store_restorable_bytes": lambda: figures.detail("restorable_bytes"),
            "node_store_dead_bytes": lambda: figures.detail("dead_bytes"),
            "node_store_orphans": lambda: figures.detail("orphans"),
            "node_store_figures_age_seconds": lambda: figures.age,
            "node_disk_written_bytes_total": disk_written_bytes,
            "node_resident_bytes": resident_bytes,
        }
        for name, read in told.items():
            self.tell(name, {(): read})

    def _lookups(self, operation: str, outcome: Outcome) -> list[tuple[PoolName, Callable[[float], None]]]:
        result, reason = HIT if outcome is Outcome.HIT else MISS, str(REASON_OF[outcome])
        return [(pool, self.counter("node_lookups_total", str(Tier.STORAGE), pool, operation, result, reason).inc) for pool in PoolName]

    def _looked_up(self, operation: str, outcome: Outcome, pools: list[PoolName]) -> None:
        # A call has thousands of keys. `list.count` compares enums by identity, while a dict would hash each of them in Python.
        if pools:
            for pool, count in self._asked[operation, outcome]:
                if n := pools.count(pool):
                    count(n)


class Figures:
    """The newest usage figures of a store, fetched in the background on demand: at most once in `every` seconds, and one call at a time.

    A store that hangs blocks one background thread and nothing else: its last figures stay, and their age grows. `patience`: most seconds
    that a reader waits for new figures.

    Thread safety: any thread.
    """

    def __init__(self, store: StorageBackend, every: float = _EVERY, patience: float = _PATIENCE) -> None:
        self._store: Final = store
        self._every: Final = every
        self._patience: Final = patience
        self._changed: Final = Condition()
        self._usage = Usage(0, 0, 0, 0)
        self._told = self._asked = time.monotonic()
        self._under_way = False
        self._closed = False
        self._ask()

    def latest(self) -> Usage:
        """Return the newest figures; all 0 until the store has answered for the first time."""
        with self._changed:
            if time.monotonic() - self._asked >= self._every and self._ask():
                self._changed.wait_for(lambda: not self._under_way, self._patience)
            return self._usage

    def detail(self, name: str) -> int | None:
        """Return a number from the details that only some stores give; None if this one does not."""
        value = self.latest().details.get(name)
        return value if isinstance(value, int) else None

    @property
    def age(self) -> float:
        """Seconds since the store gave the newest figures, or since construction if it has given none."""
        self.latest()
        return time.monotonic() - self._told

    def close(self, seconds: float) -> bool:
        """Fetch no more, and wait for the call under way; return False if the store has not answered within `seconds`."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._under_way, seconds)

    def _ask(self) -> bool:
        """Start a fetch and return True, unless one is under way or this is closed; the caller holds the lock, or is the constructor."""
        if self._under_way or self._closed:
            return False
        self._under_way = True
        self._asked = time.monotonic()
        Thread(target=self._work, name="tiercache-figures", daemon=True).start()
        return True

    def _work(self) -> None:
        usage = None
        try:
            usage = self._store.usage()
        except (TierCacheError, OSError) as error:
            _log.warning("the store does not say what it holds: %s", error)
        finally:
            with self._changed:
                if usage is not None:
                    self._usage, self._told = usage, time.monotonic()
                self._under_way = False
                self._changed.notify_all()


def reason_of(error: BaseException | None) -> str | None:
    """Return the reason of a refusal as `metrics.table.REFUSALS` names it; None for an error that is not the client's."""
    if isinstance(error, Refusal):
        return error.reason or _REASONS.get(error.code)
    if isinstance(error, WireError):
        return "limit" if isinstance(error, LimitError) else "malformed"
    return None


def exposed(settings: Settings) -> bool:
    """Return whether a client on another machine can call without credentials."""
    known = any(principal.token_file is not None for principal in settings.principals) or (settings.tls and settings.tls.client_ca)
    return not known and any(not address.loopback for address in settings.addresses)


def disk_written_bytes() -> int | None:
    """Return the bytes that this process caused to be written to block devices, by the kernel's account (proc(5), `write_bytes`).

    None where they cannot be read.
    """
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text("ascii").splitlines():
            if line.startswith("write_bytes:"):
                return int(line.partition(":")[2])
    return None


def resident_bytes() -> int | None:
    """Return the bytes of this process's memory that are resident (proc(5), `statm`); None where they cannot be read."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    return None
