"""The status document, whose fields docs/status.md describes; each reader is told what it may know.

    counters ── a sample every ten seconds ──▶ ring of one hour ──▶ differences between its samples
    figures of the store, health of the tiers, limits, journal  ──▶ as they are now

Times are in seconds since 1970, sizes in bytes. A value that is not measured is None. Fields are only added:
a reader ignores those that it does not know.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

import tiercache
from tiercache.core import PoolName
from tiercache.daemon.access import Access, Budgets, Permissions
from tiercache.daemon.call_log import CallLog, in_words
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.node_metrics import UsageFigures
from tiercache.metrics.table import BUDGETS, HEALTHS, HIT, OUT
from tiercache.storage.base import TierReport, Usage
from tiercache.storage.hits import Hits
from tiercache.storage.shares import COMMON
from tiercache.storage.tiers import DELIBERATE

_SILENT_SECONDS: Final = 30.0
"""Age of the store's figures from which the store is taken not to answer."""
_POINTS: Final = 120
"""Maximum number of points of a history."""
_WINDOW_SECONDS: Final = 3600.0
_SAMPLE_SECONDS: Final = 10.0
"""Seconds between two samples, so that the window has 360 of them."""
_MIN_SECONDS: Final = 1.0
"""Minimum age of a sample that is compared with the present, so that a rate is not that of a moment."""
_DETAILS: Final = ("restorable_bytes", "dead_bytes", "orphans", "corrupt")
"""Figures that only some stores count."""
_OF_TIER: Final = (
    "name", "kind", "health", "why", "objects", "used_bytes", "capacity_bytes", "waiting", "dropped",
    "lost_calls", "last_read",
)  # fmt: skip
"""Fields of a tier that are those of `TierReport`."""

Fields = dict[str, Any]
K = TypeVar("K")


class Readiness(NamedTuple):
    """Whether the daemon can serve calls, and the reasons why not, or why only in part."""

    ready: bool
    reasons: list[str]
    state: str
    """`ready`, `degraded` (a tier is out, or takes no new objects although it should) or `not ready`."""


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


def lookups_of(samples: Sequence[CounterSample]) -> Fields:
    """Return `lookups`: what clients looked up between the first and the last of the samples."""
    first, last = samples[0], samples[-1]
    grown = {key: round(_grown(first.lookups, last.lookups, key)) for key in last.lookups}

    def count(wanted: str, pool: str = "", *, only_hits: bool = False) -> int:
        return sum(
            n
            for (operation, reason, of), n in grown.items()
            if operation == wanted and pool in ("", of) and not (only_hits and reason)
        )

    missed: Counter[tuple[str, str]] = Counter()
    for (operation, reason, _), n in grown.items():
        if reason and n:
            missed[operation, reason] += n
    return {
        "window": last.at - first.at,
        "asked": count("exists"),
        "found": count("exists", only_hits=True),
        "fetched": count("get"),
        "misses": [
            {"operation": operation, "reason": reason, "objects": n}
            for (operation, reason), n in missed.most_common()
        ],
        "pools": [
            {
                "pool": pool, "asked": count("exists", pool), "found": count("exists", pool, only_hits=True),
                "fetched": count("get", pool), "got": count("get", pool, only_hits=True),
            }
            for pool in dict.fromkeys(pool for (_, _, pool), n in grown.items() if n)
        ],
    }  # fmt: skip


def hits_of(samples: Sequence[CounterSample]) -> dict[str, Hits]:
    """Return the prompt tokens of each tenant between the first and the last of the samples."""
    first, last = samples[0].hits, samples[-1].hits
    grown = {tenant: hits - first.get(tenant, Hits()) for tenant, hits in last.items()}
    return {tenant: hits for tenant, hits in sorted(grown.items()) if hits != Hits()}


def tier_hits(samples: Sequence[CounterSample], tier: str) -> int:
    """Return the number of objects that clients got from a tier between the first and the last sample."""
    return round(_grown(samples[0].tier_reads, samples[-1].tier_reads, tier))


def history_of(samples: Sequence[CounterSample], points: int) -> dict[str, list[Any]]:
    """Return `history`: rates between samples as at most `points` points, each at the end of its interval."""
    step = max(1, -(-(len(samples) - 1) // points))
    # Count from the newest sample, so that the last interval is as long as the others.
    chosen = samples[::-1][::step][::-1]
    names = ("times", "token_hit_rate", "read", "written", "calls", "used_bytes")
    rows = []
    for before, after in pairwise(chosen):
        seconds = after.at - before.at
        rate = Hits.rated(hits_of([before, after]).values()).token_hit_rate
        rows.append(
            (
                after.time, rate, (after.read - before.read) / seconds,
                (after.written - before.written) / seconds, (after.calls - before.calls) / seconds,
                after.used_bytes,
            )
        )  # fmt: skip
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


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
    ) -> None:
        """Read the figures of these parts; `kind` is the type of the store.

        `hits` returns the prompt tokens of each tenant since the start.
        """
        self._kind: Final = kind
        self._instance: Final = instance.hex()
        self._metrics: Final = calls.metrics
        self._figures: Final = figures
        self._budgets: Final = budgets
        self._hits: Final = hits
        self._access: Final = access
        self._samples: Final = SampleRing()
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
            await asyncio.sleep(_SAMPLE_SECONDS)

    def sample(self) -> None:
        """Take one sample."""
        usage = self._figures.latest()
        self._samples.add(self._counters(usage))
        self._journal.compare(usage.tiers)

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
        unwell = [t for t in tiers if t.health != HEALTHS[0] and not t.why.startswith(DELIBERATE)]
        reasons = [in_words(tier) for tier in unwell]
        return Readiness(True, reasons, "degraded" if reasons else "ready")

    def document(self, reader: Permissions | None) -> Fields:
        """Return the status as `reader` may know it; None stands for someone who may know everything.

        A reader that is limited to a tenant or to namespaces, or from whom tenants are hidden, gets its own
        rows, and that of its tenant. What concerns the whole store is None or empty for it.
        """
        whole = reader is None or reader.observes
        ready, usage = self.readiness(), self._figures.latest()
        if not whole:
            ready = Readiness(ready.ready, [], "ready" if ready.ready else "not ready")
        samples = self._samples.within(self._counters(usage))
        hits, tenants = hits_of(samples), usage.owners
        callers = self._access.tenants
        if reader is not None and not whole:
            alone = reader.store.is_narrow  # as in `StoreCalls.report`
            hits = {name: one for name, one in hits.items() if name == reader.tenant and not alone}
            tenants = {name: use for name, use in tenants.items() if name == reader.tenant}
            callers = {
                name: tenant
                for name, tenant in callers.items()
                if name == reader.name or reader.tenant == tenant != ""
            }
        return {
            "version": tiercache.__version__,
            "host": self._host,
            "instance": self._instance,
            "time": time.time(),
            "started": self._started,
            "reader": "" if reader is None else reader.name,
            "whole": whole,
            "readiness": ready._asdict(),
            "store": self._store(usage) if whole else None,
            "tiers": self._tiers(usage, samples) if whole else [],
            "hits": _hit_fields("", Hits.rated(hits.values()), Hits.total(hits.values())) if whole else None,
            "tenant_hits": [_hit_fields(name, one, one) for name, one in hits.items()],
            "lookups": lookups_of(samples) if whole else None,
            "history": history_of(samples, _POINTS) if whole else None,
            "limits": self._limits() if whole else [],
            "certificate_expires": self._certificates.now.end if whole and self._certificates else None,
            "principals": self._principals(callers),
            "tenants": [
                {"name": name, **asdict(use)} for name, use in sorted(tenants.items()) if name != COMMON
            ],
            "journal": [entry._asdict() for entry in self._journal.latest()] if whole else [],
        }

    def encoded(self, reader: Permissions | None) -> bytes:
        """Return `document` as JSON."""
        return json.dumps(self.document(reader), allow_nan=False).encode()

    def _store(self, usage: Usage) -> Fields:
        details = {
            name: value if isinstance(value := usage.details.get(name), int) else None for name in _DETAILS
        }
        return {
            "kind": self._kind, "objects": usage.objects, "payload_bytes": usage.payload_bytes,
            "used_bytes": usage.used_bytes, "capacity_bytes": usage.capacity_bytes, **details,
            "age": self._figures.age,
        }  # fmt: skip

    def _tiers(self, usage: Usage, samples: Sequence[CounterSample]) -> list[Fields]:
        """Return the tiers of a chain, or one for any other store."""
        last = self._metrics.gauge("node_last_read_seconds").value
        alone = TierReport(
            name=self._kind, kind=self._kind, health=HEALTHS[0], objects=usage.objects,
            used_bytes=usage.used_bytes, capacity_bytes=usage.capacity_bytes, last_read=last or None,
        )  # fmt: skip
        fetched = lookups_of(samples)["fetched"]
        rows = []
        for tier in usage.tiers or [alone]:
            hits = tier_hits(samples, tier.name)
            more = {"hits": hits, "read_share": hits / fetched if fetched else None}
            rows.append({name: getattr(tier, name) for name in _OF_TIER} | more)
        return rows

    def _limits(self) -> list[Fields]:
        budgets = self._budgets
        held = zip(BUDGETS, (budgets.payload, budgets.transfers, budgets.requests), strict=True)
        rows = [*held, ("calls", budgets.streams), ("threads", budgets.workers)]
        return [{"name": name, "held": budget.held, "limit": budget.limit} for name, budget in rows]

    def _principals(self, tenants: Mapping[str, str]) -> list[Fields]:
        calls = self._summed("node_principal_calls_total", "principal")
        moved = self._summed("node_principal_bytes_total", "principal", "direction")
        return [
            {
                "name": name, "tenant": tenant, "calls": round(calls.get((name,), 0)),
                "read_bytes": round(moved.get((name, "out"), 0)),
                "written_bytes": round(moved.get((name, "in"), 0)),
            }
            for name, tenant in tenants.items()
        ]  # fmt: skip

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


def _hit_fields(tenant: str, rated: Hits, hits: Hits) -> Fields:
    return {
        "tenant": tenant, "asked_tokens": rated.asked_tokens, "restored_tokens": rated.restored_tokens,
        "token_hit_rate": rated.token_hit_rate, "why_no_rate": rated.why_no_rate,
        "saved_seconds": hits.saved_seconds, "why_not_saved": hits.why_not_saved,
    }  # fmt: skip
