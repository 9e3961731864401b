"""The fields of the status document, which docs/status.md lists.

Times are in seconds since 1970, sizes in bytes. A value that is not measured is None. Fields are only added:
a reader ignores those that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Contents of the whole store. In a chain, every copy of an object counts."""

    kind: str
    objects: int
    payload_bytes: int
    used_bytes: int
    capacity_bytes: int
    """0: no limit."""
    restorable_bytes: int | None
    """Payload that a restore can use."""
    dead_bytes: int | None
    """Payload that no restore can use."""
    orphans: int | None
    """Objects whose parent is not stored."""
    corrupt: int | None
    """Objects whose checksum was wrong."""
    age: float
    """Seconds since the store gave these figures; it grows while the store does not answer."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier of the store, and what clients got from it. A store that is no chain is one tier."""

    name: str
    kind: str
    health: str
    """`serving`, `read-only` or `out`: a breaker keeps calls away from a tier that is out."""
    why: str
    """Reason why the tier is not serving."""
    objects: int
    used_bytes: int
    capacity_bytes: int
    """0: no limit."""
    waiting: int
    """Objects that wait to be copied to this tier."""
    dropped: int
    """Objects that should have been copied to this tier, and were not."""
    lost_calls: int
    """Calls that were given up after their deadline."""
    last_read: float | None
    """Time when a client last got an object from this tier."""
    hits: int
    """Objects that clients got from this tier within the window."""
    read_share: float | None
    """Fraction of the objects fetched within the window that came from this tier."""


@dataclass(frozen=True, slots=True)
class MissStatus:
    """Objects that clients did not get within the window."""

    operation: Literal["exists", "get"]
    reason: str
    objects: int


@dataclass(frozen=True, slots=True)
class HitStatus:
    """Prompt tokens that clients asked for and got within the window, and the time that this saved."""

    tenant: str
    """Empty: the callers without a tenant; in the total, all callers."""
    asked_tokens: int
    """Tokens of pages that clients looked up."""
    restored_tokens: int
    """Tokens of pages that clients read."""
    token_hit_rate: float | None
    """Restored / asked."""
    why_no_rate: str
    """Reason why the rate is None."""
    saved_seconds: float | None
    """Time that the prefill of the restored tokens would have taken, less that of their reads."""
    why_not_saved: str
    """Reason why some or all restored tokens do not count in `saved_seconds`."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Objects of one pool within the window: KV against states."""

    pool: str
    asked: int
    """Objects that clients looked up."""
    found: int
    fetched: int
    """Objects that clients then asked to read."""
    got: int


@dataclass(frozen=True, slots=True)
class LookupStatus:
    """Objects within the window. To find one is no hit: the hit rate is that of `HitStatus`."""

    window: float
    """Seconds: an hour, or the time since the start."""
    asked: int
    """Objects that clients looked for."""
    found: int
    fetched: int
    """Objects that clients then fetched."""
    misses: list[MissStatus]
    """The most frequent first."""
    pools: list[PoolStatus]
    """Pools of which clients asked for an object."""


@dataclass(frozen=True, slots=True)
class HistoryStatus:
    """Figures over the window, as columns of equal length, the oldest first."""

    times: list[float]
    token_hit_rate: list[float | None]
    read: list[float]
    """Payload bytes per second to clients."""
    written: list[float]
    """Payload bytes per second from clients."""
    calls: list[float]
    """Calls per second."""
    used_bytes: list[float]


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """Something that clients can make the daemon hold, and its limit."""

    name: str
    held: int
    limit: int


@dataclass(frozen=True, slots=True)
class CallStatus:
    """One of the slowest calls within the window."""

    time: float
    """Time when the call ended."""
    method: str
    principal: str
    seconds: float
    """Duration, including the time in which the client sends and reads."""
    failed: bool


@dataclass(frozen=True, slots=True)
class PrincipalStatus:
    """Calls and payload of one principal since the start."""

    name: str
    tenant: str
    calls: int
    read_bytes: int
    written_bytes: int
    removed: bool
    """Whether a reload has removed this principal."""


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """Share of one tenant in the store, in bytes that its objects take in all tiers that keep quotas."""

    name: str
    used_bytes: int
    quota_bytes: int | None
    """None: no limit."""
    guarantee_bytes: int
    """Bytes that the sets of others do not evict."""
    evicted_objects: int
    """Objects that the tenant's own sets evicted because of its quota, since the start."""
    throttled_objects: int
    """Objects that were not stored because of its quota, since the start."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Something that has happened in the daemon."""

    time: float
    level: Literal["info", "warning"]
    text: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the daemon can serve calls, and the reasons why not, or why only in part."""

    ready: bool
    reasons: list[str]
    state: Literal["ready", "degraded", "not ready"] = "ready"
    """`degraded`: ready, but a tier is out, or takes no new objects although it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDocument:
    """State of one daemon, as one principal may know it.

    A reader that is limited to a tenant or to namespaces, or from whom tenants are hidden, gets its own rows
    of `principals` and `slowest`, and that of its tenant of `tenants`. What concerns the whole store is None
    or empty for it.
    """

    version: str
    """Version of tiercache."""
    host: str
    """Name of the daemon's host."""
    instance: str
    """Hex digits that are different in each run of the daemon."""
    time: float
    started: float
    reader: str
    """Principal for which this document was made."""
    whole: bool
    """Whether the reader may know everything."""
    readiness: Readiness
    store: StoreStatus | None = None
    tiers: list[TierStatus]
    hits: HitStatus | None = None
    """All callers together."""
    tenant_hits: list[HitStatus]
    """Tenants that asked for or got something; a reader of a tenant learns its own."""
    lookups: LookupStatus | None = None
    history: HistoryStatus | None = None
    limits: list[LimitStatus]
    certificate_expires: float | None = None
    """Time when the daemon's certificate ends; None without TLS."""
    slowest: list[CallStatus]
    principals: list[PrincipalStatus]
    tenants: list[TenantStatus]
    """Tenants of a store that counts what each has; empty for other stores."""
    journal: list[JournalEntry]
    """The newest first."""
