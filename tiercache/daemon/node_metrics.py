"""The metrics of a storage server: the rows of `metrics.table.NODE`.

Values that other objects hold (units taken from a budget, number of sessions, contents of the store) are read
at scrape time, in the scraper's thread. Events of calls are counted when they happen. The counter of each
combination of labels is looked up once, at construction.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, Literal

import tiercache
from tiercache.config.rules import is_exposed
from tiercache.core import ObjectKey, Outcome, PoolName, Tier
from tiercache.events.publisher import EventPublisher
from tiercache.metrics import HIT, MISS, NODE, Families
from tiercache.metrics.instruments import Counter
from tiercache.metrics.table import ANSWERS, BUDGETS, CODES, HEALTHS, METHODS, OUT, REFUSALS
from tiercache.storage.base import GetItem, StorageBackend, TierReport, Usage
from tiercache.storage.hits import Hits
from tiercache.storage.shares import OwnerUse
from tiercache.wire.methods import METHODS as SERVED

if TYPE_CHECKING:
    from tiercache.config.models import Settings
    from tiercache.daemon.access import Budgets
    from tiercache.daemon.certificates import Certificates
    from tiercache.daemon.payload.attachments import Attachments
    from tiercache.daemon.payload.port import DataSessions

_log = logging.getLogger(__name__)

assert tuple(SERVED) == METHODS, "the table of metrics must list every call"

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_REFRESH_SECONDS: Final = 5.0
"""Seconds from one `usage` call of the store to the next."""

_ABSENT_IF_OUT: Final = {"objects", "used_bytes", "capacity_bytes"}
"""Figures that are not known of a tier that does not answer."""

Direction = Literal["in", "out"]
Plane = Literal["stream", "data", "shared"]
"""Way of the payload: in messages of a stream, on connections of its own, or through shared memory."""
_PLANES: Final[tuple[Plane, ...]] = ("stream", "data", "shared")
_DIRECTIONS: Final[tuple[Direction, ...]] = ("in", "out")


class NodeMetrics(Families):
    """Metrics of one server.

    Thread safety: any thread.
    """

    def __init__(self, principals: Iterable[str] = ()) -> None:
        """Make all counters; `principals` are the names of all principals that may call the server."""
        super().__init__(NODE, version=[tiercache.__version__])
        self.gauge("node_build_info", tiercache.__version__).set(1)
        self._seconds: Final = {method: self.histogram("node_call_seconds", method) for method in METHODS}
        self._under_way: Final = {method: self.gauge("node_calls_under_way", method) for method in METHODS}
        self._codes: Final = {
            method: {code: self.counter("node_calls_total", method, code) for code in CODES}
            for method in METHODS
        }
        self._refused: Final = {reason: self.counter("node_refused_total", reason) for reason in REFUSALS}
        self._callers: Final[dict[str, Counter]] = {}
        self._by_caller: Final[dict[tuple[str, Direction], Counter]] = {}
        self.add_principals(principals)
        self._moved: Final = {
            (plane, way): self.counter("node_payload_bytes_total", plane, way)
            for plane in _PLANES
            for way in _DIRECTIONS
        }
        self._audit_lost: Final = self.counter("node_audit_lost_total")
        self._account_failed: Final = self.counter("node_account_failed_total")
        self._damaged: Final = self.counter("node_damaged_objects_total")
        self._last_read: Final = self.gauge("node_last_read_seconds")
        self._lookups: Final = {
            (operation, outcome): self._lookup_counters(operation, outcome)
            for operation in ("exists", "get")
            for outcome in ANSWERS[operation]
        }

    def add_principals(self, names: Iterable[str]) -> None:
        """Count the calls of these principals from now on; those that are known keep their counts."""
        for name in names:
            self.add(principal=name)
            self._callers[name] = self.counter("node_principal_calls_total", name)
            for way in _DIRECTIONS:
                self._by_caller[name, way] = self.counter("node_principal_bytes_total", name, way)

    def begin_call(self, method: str) -> None:
        """Count a call that is under way from now on; `end_call` must follow."""
        self._under_way[method].inc()

    def end_call(self, method: str, code: str, seconds: float) -> None:
        """Count a call that ended with this status; codes that the table does not have are UNKNOWN."""
        self._under_way[method].dec()
        self._seconds[method].observe(seconds)
        codes = self._codes[method]
        (codes.get(code) or codes["UNKNOWN"]).inc()

    def count_refusal(self, reason: str) -> None:
        """Count a refusal that the client has caused; `reason` is one of `metrics.table.REFUSALS`."""
        self._refused[reason].inc()

    def count_audit_lost(self) -> None:
        """Count a record of the audit log that was not written."""
        self._audit_lost.inc()

    def count_account_failed(self) -> None:
        """Count a time that the account could not be written."""
        self._account_failed.inc()

    def count_call(self, principal: str) -> None:
        """Count a call of this principal; a name that is not known (`add_principals`) is ignored."""
        if (counter := self._callers.get(principal)) is not None:
            counter.inc()

    def count_payload(self, principal: str, plane: Plane, direction: Direction, nbytes: int) -> None:
        """Count payload bytes that moved between a client of `principal` and the server."""
        if nbytes:
            self._moved[plane, direction].inc(nbytes)
            if (counter := self._by_caller.get((principal, direction))) is not None:
                counter.inc(nbytes)

    def count_damaged(self, objects: int) -> None:
        """Count objects that did not arrive as they were sent."""
        if objects:
            self._damaged.inc(objects)

    def count_exists(self, keys: Sequence[ObjectKey], answers: Sequence[bool]) -> None:
        """Count the answers of an Exists call."""
        pools = [key.pool for key in keys]
        self._count_lookups("exists", Outcome.HIT, list(compress(pools, answers)))
        self._count_lookups("exists", Outcome.MISS, list(compress(pools, map(not_, answers))))

    def count_reads(
        self, principal: str, plane: Plane, items: Sequence[GetItem], outcomes: Sequence[Outcome]
    ) -> None:
        """Count the outcomes of a Get or GetInto call, and its payload bytes by principal and plane."""
        pools = [item.key.pool for item in items]
        for outcome in ANSWERS["get"]:
            if outcome in outcomes:
                self._count_lookups(
                    "get",
                    outcome,
                    [pool for pool, answer in zip(pools, outcomes, strict=True) if answer is outcome],
                )
        if Outcome.HIT in outcomes:
            self._last_read.set(time.time())
        answers = zip(items, outcomes, strict=True)
        self.count_payload(
            principal, plane, "out", sum(i.length for i, outcome in answers if outcome is Outcome.HIT)
        )

    def watch(
        self,
        settings: Settings,
        budgets: Budgets,
        attachments: Attachments,
        sessions: DataSessions,
        figures: UsageFigures,
        certificates: Certificates | None,
        hits: Callable[[], Mapping[str, Hits]],
    ) -> None:
        """Let later scrapes read these objects. Call this when the server begins to serve."""
        self.gauge("node_start_time_seconds").set(time.time())
        self.gauge("node_insecure_bind").set(is_exposed(settings))
        self.gauge("node_calls_limit").set(budgets.streams.limit)
        self.gauge("node_workers").set(budgets.workers.limit)
        held = dict(zip(BUDGETS, (budgets.payload, budgets.transfers, budgets.requests), strict=True))
        for name, budget in held.items():
            self.gauge("node_held_limit_bytes", name).set(budget.limit)
        self.tell("node_held_bytes", lambda: {(name,): budget.held for name, budget in held.items()})
        told: dict[str, Callable[[], float | None]] = {
            "node_workers_busy": lambda: budgets.workers.held,
            "node_certificate_expires_seconds": lambda: certificates.now.end if certificates else None,
            "node_sessions": lambda: len(attachments),
            "node_attached_bytes": lambda: attachments.attached,
            "node_data_connections": lambda: sessions.connections,
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
            self.tell(name, partial(_alone, read))
        self.tell("node_tier_health", partial(_healths, figures))
        # The other rows of tiers and tenants are named after the figures of `TierReport` and `OwnerUse`.
        for name in self.rows.keys() - {"node_tier_health"}:
            figure = name.removesuffix("_total").removesuffix("_seconds")
            figure = figure.replace("waiting_objects", "waiting").replace("dropped_objects", "dropped")
            if name.startswith("node_tier_"):
                self.tell(name, partial(_by_tier, figures, figure.removeprefix("node_tier_")))
            elif name.startswith("node_tenant_"):
                tenants = sorted(settings.tenants)
                self.tell(name, partial(_by_tenant, figures, tenants, figure.removeprefix("node_tenant_")))
        known = dict.fromkeys(["", *settings.tenants], Hits())

        def seconds(figure: str) -> dict[tuple[str, ...], float | None]:
            return {(name,): getattr(one, figure) for name, one in {**known, **hits()}.items()}

        self.tell(
            "node_tokens_total",
            lambda: {
                (name, how): getattr(one, f"{how}_tokens")
                for name, one in {**known, **hits()}.items()
                for how in ("asked", "restored")
            },
        )
        for figure in ("prefill_seconds", "read_seconds"):
            self.tell(f"node_{figure}_total", partial(seconds, figure))

    def watch_events(self, publisher: EventPublisher) -> None:
        """Let later scrapes read the counters of a publisher of KV events."""
        for name in publisher.figures():
            self.tell(f"node_{name}", partial(publisher.figure, name))

    def _lookup_counters(
        self, operation: str, outcome: Outcome
    ) -> list[tuple[PoolName, Callable[[float], None]]]:
        result, reason = HIT if outcome is Outcome.HIT else MISS, str(outcome.reason)
        return [
            (pool, self.counter("node_lookups_total", str(Tier.STORAGE), pool, operation, result, reason).inc)
            for pool in PoolName
        ]

    def _count_lookups(self, operation: str, outcome: Outcome, pools: list[PoolName]) -> None:
        # A call may have thousands of keys. `list.count` compares enums by identity in C; a dict would hash
        # each of them in Python.
        if pools:
            for pool, count in self._lookups[operation, outcome]:
                if n := pools.count(pool):
                    count(n)


class UsageFigures:
    """The newest usage figures of a store, which a thread fetches every few seconds.

    If the store hangs, readers get the last figures, whose age grows.

    Thread safety: any thread.
    """

    def __init__(self, store: StorageBackend, every: float = _REFRESH_SECONDS) -> None:
        self._store: Final = store
        self._every: Final = every
        self._closing: Final = Event()
        self._newest = Usage(0, 0, 0, 0), time.monotonic()
        self._thread: Final = Thread(target=self._run, name="tiercache-figures", daemon=True)
        self._thread.start()

    def latest(self) -> Usage:
        """Return the newest figures; all are 0 until the store has answered once."""
        return self._newest[0]

    def detail(self, name: str) -> int | None:
        """Return the number called `name` from the store's details; None if the store does not give it."""
        value = self.latest().details.get(name)
        return value if isinstance(value, int) else None

    @property
    def age(self) -> float:
        """Seconds since the newest figures arrived, or since construction if none have arrived."""
        return time.monotonic() - self._newest[1]

    def close(self, seconds: float) -> bool:
        """Stop fetching; return False if a pending call of the store does not end within `seconds`."""
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                self._newest = self._store.usage(), time.monotonic()
            except Exception as error:  # noqa: BLE001  a bug in a store must not end this
                _log.warning("the usage figures of the store could not be read: %s", error)
            if self._closing.wait(self._every):
                return


def _alone(read: Callable[[], float | None]) -> dict[tuple[str, ...], float | None]:
    """Return the value of a row without labels."""
    return {(): read()}


def _by_tier(figures: UsageFigures, figure: str) -> dict[tuple[str, ...], float | None]:
    def value(tier: TierReport) -> float | None:
        is_known = tier.health != OUT or figure not in _ABSENT_IF_OUT
        return getattr(tier, figure) or 0.0 if is_known else None

    return {(tier.name,): value(tier) for tier in figures.latest().tiers}


def _by_tenant(
    figures: UsageFigures, tenants: Sequence[str], figure: str
) -> dict[tuple[str, ...], float | None]:
    owners = figures.latest().owners
    return {(name,): getattr(owners.get(name, OwnerUse()), figure) for name in tenants}


def _healths(figures: UsageFigures) -> dict[tuple[str, ...], float | None]:
    tiers = figures.latest().tiers
    return {(tier.name, health): float(tier.health == health) for tier in tiers for health in HEALTHS}


def disk_written_bytes() -> int | None:
    """Return the bytes that this process wrote to block devices (proc(5)); None if they cannot be read."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text("ascii").splitlines():
            if line.startswith("write_bytes:"):
                return int(line.partition(":")[2])
    return None


def resident_bytes() -> int | None:
    """Return the resident bytes of this process (proc(5), `statm`); None if they cannot be read."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    return None
