"""The maker of status documents: it samples the daemon's figures, and tells each reader what it may know."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from threading import Lock
from typing import Final, Literal, TypeVar

import tiercache
from tiercache.core import PoolName
from tiercache.daemon.access import Access, Budgets, Permissions
from tiercache.daemon.call_log import CallLog, in_words
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.node_metrics import UsageFigures
from tiercache.daemon.status.document import (
    HistoryStatus,
    HitStatus,
    LimitStatus,
    LookupStatus,
    MissStatus,
    PoolStatus,
    PrincipalStatus,
    Readiness,
    StatusDocument,
    StoreStatus,
    TenantStatus,
    TierStatus,
)
from tiercache.metrics.table import BUDGETS, HEALTHS, HIT, OUT
from tiercache.storage.base import TierReport, Usage
from tiercache.storage.hits import Hits
from tiercache.storage.shares import COMMON
from tiercache.storage.tiers import DELIBERATE

_SILENT_SECONDS: Final = 30.0
"""Age of the store's figures from which the store is taken not to answer."""
_POINTS: Final = 120
"""Maximum number of points of a history."""
_SLOWEST: Final = 10
"""Number of slow calls in a document."""
_WINDOW_SECONDS: Final = 3600.0
_SAMPLE_SECONDS: Final = 10.0
"""Seconds between two samples, so that the window has 360 of them."""
_MIN_SECONDS: Final = 1.0
"""Minimum age of a sample that is compared with the present, so that a rate is not that of a moment."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """Counters and gauges of the daemon at one moment."""

    time: float
    """Seconds since 1970."""
    at: float
    """Reading of the monotonic clock."""
    lookups: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """Objects by operation, reason and pool; the reason of a hit is empty."""
    hits: Mapping[str, Hits] = field(default_factory=dict)
    """Prompt tokens by tenant."""
    tier_reads: Mapping[str, float] = field(default_factory=dict)
    """Objects that clients got, by tier."""
    read: float = 0.0
    written: float = 0.0
    """Payload bytes to and from clients."""
    calls: float = 0.0
    used_bytes: float = 0.0


class SampleRing:
    """The samples of one window, the oldest of which make room for new ones.

    Thread safety: any thread.
    """

    def __init__(self, window: float = _WINDOW_SECONDS, every: float = _SAMPLE_SECONDS) -> None:
        self._window: Final = window
        self._samples: Final[deque[CounterSample]] = deque(maxlen=round(window / every) + 1)
        self._lock: Final = Lock()

    def add(self, sample: CounterSample) -> None:
        """Add the newest sample."""
        with self._lock:
            self._samples.append(sample)

    def within(self, now: CounterSample) -> list[CounterSample]:
        """Return the samples that are at most one window older than `now`, and `now` as the last.

        If there is none, the difference is that to the first sample, however short ago that was.
        """
        oldest, newest = now.at - self._window, now.at - _MIN_SECONDS
        with self._lock:
            found = [sample for sample in self._samples if oldest <= sample.at <= newest]
            return [*(found or [s for s in self._samples if s.at < now.at][:1]), now]


def lookups_of(samples: Sequence[CounterSample]) -> LookupStatus:
    """Return what clients looked up between the first and the last of the samples."""
    first, last = samples[0], samples[-1]
    grown = {key: round(_grown(first.lookups, last.lookups, key)) for key in last.lookups}

    def count(wanted: str, pool: str = "", *, only_hits: bool = False) -> int:
        return sum(
            n
            for (operation, reason, of), n in grown.items()
            if operation == wanted and pool in ("", of) and not (only_hits and reason)
        )

    missed: Counter[tuple[Literal["exists", "get"], str]] = Counter()
    for (operation, reason, _), n in grown.items():
        if reason and n:
            missed["exists" if operation == "exists" else "get", reason] += n
    pools = [
        PoolStatus(
            pool, count("exists", pool), count("exists", pool, only_hits=True), count("get", pool),
            count("get", pool, only_hits=True),
        )
        for pool in dict.fromkeys(pool for (_, _, pool), n in grown.items() if n)
    ]  # fmt: skip
    return LookupStatus(
        last.at - first.at, count("exists"), count("exists", only_hits=True), count("get"),
        [MissStatus(*kind, n) for kind, n in missed.most_common()], pools,
    )  # fmt: skip


def hits_of(samples: Sequence[CounterSample]) -> dict[str, Hits]:
    """Return the prompt tokens of each tenant between the first and the last of the samples."""
    first, last = samples[0].hits, samples[-1].hits
    grown = {tenant: hits - first.get(tenant, Hits()) for tenant, hits in last.items()}
    return {tenant: hits for tenant, hits in sorted(grown.items()) if hits != Hits()}


def tier_hits(samples: Sequence[CounterSample], tier: str) -> int:
    """Return the number of objects that clients got from a tier between the first and the last sample."""
    return round(_grown(samples[0].tier_reads, samples[-1].tier_reads, tier))


def history_of(samples: Sequence[CounterSample], points: int) -> HistoryStatus:
    """Return rates between samples as at most `points` points, each at the end of its interval."""
    step = max(1, -(-(len(samples) - 1) // points))
    # Count from the newest sample, so that the last interval is as long as the others.
    chosen = samples[::-1][::step][::-1]
    history = HistoryStatus([], [], [], [], [], [])
    for before, after in pairwise(chosen):
        seconds = after.at - before.at
        history.times.append(after.time)
        history.token_hit_rate.append(Hits.rated(hits_of([before, after]).values()).token_hit_rate)
        history.read.append((after.read - before.read) / seconds)
        history.written.append((after.written - before.written) / seconds)
        history.calls.append((after.calls - before.calls) / seconds)
        history.used_bytes.append(after.used_bytes)
    return history


def share(part: float, whole: float) -> float | None:
    """Return a fraction; None of nothing."""
    return part / whole if whole else None


def _grown(before: Mapping[K, float], after: Mapping[K, float], key: K) -> float:
    """Return by how much a counter has grown; a counter that is smaller than before has begun anew."""
    was, now = before.get(key, 0.0), after.get(key, 0.0)
    return now - was if now >= was else now


class StatusBoard:
    """Status of one daemon, for any number of readers.

    Thread safety: any thread.
    """

    def __init__(
        self,
        kind: str,
        instance: bytes,
        calls: CallLog,
        figures: UsageFigures,
        budgets: Budgets,
        access: Access,
        certificates: Certificates | None = None,
        hits: Callable[[], Mapping[str, Hits]] = dict,
        every: float = _SAMPLE_SECONDS,
    ) -> None:
        """Read the figures of these parts; `kind` is the type of the store.

        `hits` returns the prompt tokens of each tenant since the start.
        `every`: seconds between two samples.
        """
        self._kind: Final = kind
        self._instance: Final = instance.hex()
        self._metrics: Final = calls.metrics
        self._slowest: Final = calls.slowest
        self._figures: Final = figures
        self._budgets: Final = budgets
        self._hits: Final = hits
        self._every: Final = every
        self._access: Final = access
        self._samples: Final = SampleRing(every=every)
        self._journal: Final = calls.journal
        self._host: Final = socket.gethostname()
        self._started: Final = time.time()
        self._journal.add(f"tiercache {tiercache.__version__} serves a store of type {kind}")
        self._certificates: Final = certificates
        self._draining = False
        self.sample()  # before the first call, or what that counts would be missing

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(self._every)

    def sample(self) -> None:
        """Take one sample."""
        usage = self._figures.latest()
        self._samples.add(self._counters(usage))
        self._journal.compare(self._tiers(usage, []), self._mishaps(usage))

    def drain(self) -> None:
        """Say from now on that the daemon is not ready, because it shuts down."""
        self._draining = True
        self._journal.add("the daemon shuts down")

    def readiness(self) -> Readiness:
        """Return whether the daemon can serve calls now."""
        tiers, age = self._figures.latest().tiers, self._figures.age
        reasons = ["the daemon shuts down"] if self._draining else []
        if age > _SILENT_SECONDS:
            reasons.append(f"the store has not answered for {age:.0f} s")
        if tiers and all(tier.health == OUT for tier in tiers):
            reasons.append(f"no tier answers: {', '.join(tier.name for tier in tiers)}")
        if reasons:
            return Readiness(False, reasons, "not ready")
        reasons = [in_words(tier) for tier in tiers if _is_unwell(tier)]
        return Readiness(True, reasons, "degraded" if reasons else "ready")

    def document(self, reader: Permissions | None) -> StatusDocument:
        """Return the status as `reader` may know it; None stands for someone who may know everything."""
        whole = reader is None or reader.observes
        ready, usage = self.readiness(), self._figures.latest()
        document = StatusDocument(
            version=tiercache.__version__, host=self._host, instance=self._instance, time=time.time(),
            started=self._started,
            reader="" if reader is None else reader.name, whole=whole,
            readiness=ready if whole else Readiness(ready.ready, [], "ready" if ready.ready else "not ready"),
            tiers=[], tenant_hits=[], limits=[], slowest=[], principals=[], tenants=[], journal=[],
        )  # fmt: skip
        everyone = {**self._access.removed, **self._access.tenants}
        own = set(everyone) if reader is None or whole else _beside(reader, everyone)
        document.principals.extend(row for row in self._principals(everyone) if row.name in own)
        document.tenants.extend(
            row for row in self._tenants(usage) if reader is None or whole or row.name == reader.tenant
        )
        samples = self._samples.within(self._counters(usage))
        hits = hits_of(samples)
        if reader is not None and not whole:  # as in `Inquiries.report`
            alone = reader.store.is_narrow
            hits = {name: one for name, one in hits.items() if name == reader.tenant and not alone}
        document.tenant_hits.extend(_hit_status(name, one, one) for name, one in hits.items())
        document.slowest.extend(self._slowest.latest(own)[:_SLOWEST])
        total = _hit_status("", Hits.rated(hits.values()), Hits.total(hits.values()))
        return self._completed(document, usage, samples, total) if whole else document

    def encoded(self, reader: Permissions | None) -> bytes:
        """Return `document` as JSON."""
        return json.dumps(asdict(self.document(reader)), allow_nan=False).encode()

    def _completed(
        self, document: StatusDocument, usage: Usage, samples: list[CounterSample], hits: HitStatus
    ) -> StatusDocument:
        """Return a document with the figures of the whole store."""
        return replace(
            document,
            store=self._store(usage),
            tiers=self._tiers(usage, samples),
            hits=hits,
            lookups=lookups_of(samples),
            history=history_of(samples, _POINTS),
            limits=self._limits(),
            certificate_expires=None if self._certificates is None else self._certificates.end,
            journal=self._journal.latest(),
        )

    def _store(self, usage: Usage) -> StoreStatus:
        restorable, dead, orphans, corrupt = (
            value if isinstance(value := usage.details.get(name), int) else None
            for name in ("restorable_bytes", "dead_bytes", "orphans", "corrupt")
        )
        return StoreStatus(
            self._kind, usage.objects, usage.payload_bytes, usage.used_bytes, usage.capacity_bytes,
            restorable, dead, orphans, corrupt,
            self._figures.age,
        )  # fmt: skip

    def _tiers(self, usage: Usage, samples: list[CounterSample]) -> list[TierStatus]:
        fetched = lookups_of(samples).fetched if samples else 0

        def hits(name: str) -> tuple[int, float | None]:
            found = tier_hits(samples, name) if samples else 0
            return found, share(found, fetched)

        if not usage.tiers:
            last = self._metrics.gauge("node_last_read_seconds").value
            return [
                TierStatus(
                    self._kind, self._kind, HEALTHS[0], "", usage.objects, usage.used_bytes,
                    usage.capacity_bytes, 0, 0, 0, last or None, *hits(self._kind),
                )
            ]  # fmt: skip
        return [
            TierStatus(
                tier.name, tier.kind, tier.health, tier.why, tier.objects, tier.used_bytes,
                tier.capacity_bytes, tier.waiting, tier.dropped, tier.lost_calls, tier.last_read,
                *hits(tier.name),
            )
            for tier in usage.tiers
        ]  # fmt: skip

    def _limits(self) -> list[LimitStatus]:
        budgets = self._budgets
        held = zip(BUDGETS, (budgets.payload, budgets.transfers, budgets.requests), strict=True)
        rows = [*held, ("calls", budgets.streams), ("threads", budgets.workers)]
        return [LimitStatus(name, budget.held, budget.limit) for name, budget in rows]

    def _principals(self, tenants: Mapping[str, str]) -> list[PrincipalStatus]:
        calls = self._summed("node_principal_calls_total", "principal")
        moved = self._summed("node_principal_bytes_total", "principal", "direction")
        return [
            PrincipalStatus(
                name, tenant, round(calls.get((name,), 0)), round(moved.get((name, "out"), 0)),
                round(moved.get((name, "in"), 0)), name in self._access.removed,
            )
            for name, tenant in tenants.items()
        ]  # fmt: skip

    def _tenants(self, usage: Usage) -> list[TenantStatus]:
        return [
            TenantStatus(
                name, use.used_bytes, use.quota_bytes, use.guarantee_bytes, use.evicted_objects,
                use.throttled_objects,
            )
            for name, use in sorted(usage.owners.items())
            if name != COMMON
        ]  # fmt: skip

    def _mishaps(self, usage: Usage) -> Mapping[str, float]:
        refused = self._summed("node_refused_total", "reason")
        found = {f"calls or connections refused ({reason})": n for (reason,), n in refused.items()}
        corrupt = usage.details.get("corrupt")
        if isinstance(corrupt, int):
            found["corrupt objects"] = corrupt
        return found

    def _counters(self, usage: Usage) -> CounterSample:
        lookups = {
            (operation, "" if result == HIT else reason, pool): count
            for (operation, result, reason, pool), count in self._summed(
                "node_lookups_total", "operation", "result", "reason", "pool"
            ).items()
        }
        reads: dict[str, float] = {tier.name: tier.read_objects for tier in usage.tiers}
        moved = self._summed("node_payload_bytes_total", "direction")
        return CounterSample(
            time=time.time(),
            at=time.monotonic(),
            lookups=lookups,
            tier_reads=reads or {self._kind: sum(lookups.get(("get", "", pool), 0.0) for pool in PoolName)},
            hits=dict(self._hits()),
            read=moved["out",],
            written=moved["in",],
            calls=self._summed("node_calls_total").get((), 0.0),
            used_bytes=usage.used_bytes,
        )

    def _summed(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a metric, added up over all labels but the given ones."""
        found: dict[tuple[str, ...], float] = {}
        for sample in self._metrics.samples(self._metrics.rows[name]):
            key = tuple(sample.labels[label] for label in labels)
            found[key] = found.get(key, 0.0) + sample.value
        return found


def _beside(reader: Permissions, tenants: Mapping[str, str]) -> set[str]:
    """Return the names of a principal and of the other principals of its tenant."""
    return {name for name, tenant in tenants.items() if name == reader.name or reader.tenant == tenant != ""}


def _is_unwell(tier: TierReport) -> bool:
    """Return whether a tier does less than the operator wants of it."""
    return tier.health != HEALTHS[0] and not tier.why.startswith(DELIBERATE)


def _hit_status(tenant: str, rated: Hits, hits: Hits) -> HitStatus:
    return HitStatus(
        tenant, rated.asked_tokens, rated.restored_tokens, rated.token_hit_rate, rated.why_no_rate,
        hits.saved_seconds, hits.why_not_saved,
    )  # fmt: skip
