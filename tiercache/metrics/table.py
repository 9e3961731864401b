"""Table of all metrics that tiercache exposes, one row for each.

Names in the table have no prefix; the exposed names begin with `tiercache_`. `families` makes instruments
from the rows, and `__main__` makes the page docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tiercache.core import Outcome, PoolName, Reason, Tier
from tiercache.metrics.instruments import Counter, Gauge, Histogram

PREFIX: Final = "tiercache_"
OUT: Final = "out"
HEALTHS: Final = ("serving", "read-only", OUT)
"""Health of a tier of a chain, see `storage.base.TierReport`."""
HIT: Final = "hit"
MISS: Final = "miss"


@dataclass(frozen=True, slots=True)
class Known:
    """Label values that only the code that makes the metric knows; `what` describes them."""

    what: str


Labels: TypeAlias = Mapping[str | tuple[str, ...], tuple[str, ...] | tuple[tuple[str, ...], ...] | Known]
"""Label names in order, each with all of its values.

An entry may have several names, if only some combinations of the values of these labels can occur. The values
of the entry are then these combinations."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Row of the table."""

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    labels: Labels = field(default_factory=dict)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, in order."""
        return tuple(
            name for names in self.labels for name in ((names,) if isinstance(names, str) else names)
        )


METHODS: Final = (
    "Hello", "Exists", "Get", "Set", "GetInto", "SetFrom", "Delete", "Describe", "Scan", "Advise",
    "Register", "Namespaces", "Usage", "Flush", "Status", "History", "Report", "Reload",
)  # fmt: skip
"""Calls of the daemon's gRPC service; `daemon.node_metrics` asserts that the list is complete."""

CODES: Final = (
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED", "UNKNOWN",
)  # fmt: skip
"""Status codes of calls; a code that is not listed here is counted as UNKNOWN."""

BUDGETS: Final = ("payload", "messages", "requests")
REFUSALS: Final = ("unauthenticated", "permission", "deadline", "busy", "limit", "idle", "malformed")

OPERATIONS: Final = (
    "exists",
    "get",
    "peek",
    "set",
    "delete",
    "scan",
    "describe",
    "register_namespace",
    "namespaces",
    "usage",
    "coldest",
    "advise",
    "flush",
)
"""Calls of a store that go through `storage.wrappers.Wrapper`."""

_FAILURES: Final = (Outcome.THROTTLED, Outcome.ERROR, Outcome.UNAVAILABLE, Outcome.REFUSED)
ANSWERS: Final = {
    "exists": (Outcome.HIT, Outcome.MISS),
    "get": (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, *_FAILURES),
    "set": (Outcome.STORED, Outcome.HIT, *_FAILURES),
    "delete": (Outcome.HIT, Outcome.MISS),
    "scan": (Outcome.HIT,),
    "describe": (Outcome.HIT, Outcome.MISS),
}
"""Outcomes of an item, by operation.

In `delete`, HIT means that the object was deleted. In `scan`, HIT means that the object was listed."""

_TIERS: Final = tuple(str(t) for t in Tier)
_LOCAL_TIERS: Final = (str(Tier.DEVICE), str(Tier.HOST))
_OUTCOMES: Final = tuple(str(o) for o in Outcome)
_REASONS: Final = tuple(str(r) for r in Reason)
_RESULTS: Final = ((HIT, str(Reason.NONE)), *((MISS, str(r)) for r in Reason if r is not Reason.NONE))
_LOOKUP_RESULTS: Final = tuple(
    (operation, HIT if outcome is Outcome.HIT else MISS, str(outcome.reason))
    for operation in ("exists", "get")
    for outcome in ANSWERS[operation]
)
_ITEM_OUTCOMES: Final = tuple(
    (operation, str(outcome)) for operation, outcomes in ANSWERS.items() for outcome in outcomes
)

_POOLS: Final = Known(f"the pools of the model, out of {', '.join(PoolName)}")
_STORE: Final = Known("the name given to the store; a server's store has its kind as its name")
_TENANT: Final = Known("the names in `tenants`")
_TENANT_OR_NONE: Final = Known("the names in `tenants`, and none for the callers without a tenant")
_PRINCIPAL: Final = Known("the names in `principals`, `owner` (the daemon's own user) and `anonymous`")
_STORE_TIER: Final = Known("the names of the tiers of the server's store; absent unless it is a chain")
_VERSION: Final = Known("the version of tiercache")


def _events(prefix: str) -> tuple[Metric, ...]:
    """Return the rows of a publisher of KV events, which are absent where none is published."""
    return (
        Metric(f"{prefix}events_batches_total", Counter, "Batches of KV events that were published."),
        Metric(f"{prefix}events_total", Counter, "KV events that were published."),
        Metric(
            f"{prefix}events_replays_total", Counter,
            "Replays that subscribers asked for: because of a gap, to begin, or because there was a pause.",
        ),
        Metric(f"{prefix}events_snapshots_total", Counter, "Replays that began with a snapshot."),
        Metric(f"{prefix}events_malformed_total", Counter,
         "Requests for replays that were not understood."),
    )  # fmt: skip


CONTROLLER: Final = (
    *_events(""),
    Metric(
        "lookups_total", Counter,
        "Tiers consulted for a restore: whether the tier contributed to it, and the reason if it did not.",
        {"tier": _TIERS, "pool": _POOLS, ("result", "reason"): _RESULTS},
    ),
    Metric("restored_objects_total", Counter, "Objects restored, by the tier that they came from.",
     {"tier": _TIERS, "pool": _POOLS}),
    Metric("restored_bytes_total", Counter, "Payload bytes restored, by the tier that they came from.",
     {"tier": _TIERS, "pool": _POOLS}),
    Metric("tokens_total", Counter, "Prompt tokens, restored or computed.",
     {"how": ("restored", "computed")}),
    Metric("prefill_seconds_total", Counter,
     "Time that the prefill of restored tokens would have taken, by the speeds measured so far. Less "
     "restore_seconds_total, it is the saved time."),
    Metric("restore_seconds_total", Counter,
     "Time that reads and loads of these tokens took, by the same measure."),
    Metric("restore_failures_total", Counter,
     "Planned restores that ended early, by reason.", {"reason": _REASONS}),
    Metric(
        "prefetches_total", Counter,
        "Requests that asked storage, and prefetches without a request (hint). complete: storage answered "
        "and all fetches landed or failed; cut_short: a deadline or the caller ended them before; refused: "
        "too many waited.",
        {("by", "outcome"): (
            ("request", "complete"), ("request", "cut_short"),
            ("hint", "complete"), ("hint", "cut_short"), ("hint", "refused"),
        )},
    ),
    Metric("prefetch_aborted_bytes_total", Counter,
     "Payload bytes whose fetch was cancelled before it began, because nobody waited for it any more."),
    Metric("pins_total", Counter,
     "Pins of prefixes, and what became of them. refused: they would have exceeded `pin_share`.",
     {"outcome": ("taken", "renewed", "refused", "released", "expired")}),
    Metric("pinned_bytes", Gauge,
     "Bytes of the host that the pinned prefixes take once the host has all of them."),
    Metric("parked_requests_total", Counter,
     "Parked requests, and what became of them. refused: they would have exceeded `park_share`; stored: they "
     "left the host for storage; missed: they could not be resumed; lost: a copy failed.",
     {"outcome": ("parked", "refused", "stored", "resumed", "missed", "lost", "released", "expired")}),
    Metric("parked_bytes", Gauge, "Bytes of the host that parked requests keep."),
    Metric("hints_total", Counter,
     "Hints at continuations. taken: the hint was noted; honoured: a request hit what a hint was noted for; "
     "unknown: nothing of the prefix could be restored.",
     {"outcome": ("taken", "honoured", "unknown")}),
    Metric("written_objects_total", Counter, "Objects that write-through copied into a tier.",
     {"tier": _TIERS, "pool": _POOLS}),
    Metric("written_bytes_total", Counter, "Payload bytes that write-through copied into a tier.",
     {"tier": _TIERS, "pool": _POOLS}),
    Metric("storage_sets_total", Counter, "Objects written to storage, by outcome.",
     {"pool": _POOLS, "outcome": _OUTCOMES}),
    Metric("storage_gets_total", Counter, "Objects read from storage, by outcome.",
     {"pool": _POOLS, "outcome": _OUTCOMES}),
    Metric(
        "write_through_skipped_total", Counter,
        "Objects whose write-through was skipped. The next commit of such an object tries again.",
        {"pool": _POOLS,
         "reason": ("host_full", "transfer_failed", "refused", "timeout", "evicted",
          "too_many")},
    ),
    Metric("evicted_objects_total", Counter, "Evicted objects, demoted (still in a lower tier) or lost.",
     {"tier": _LOCAL_TIERS, "fate": ("demoted", "lost")}),
    Metric("forgotten_objects_total", Counter,
     "Objects that were expected in storage, but are not there.", {"pool": _POOLS}),
    Metric(
        "storage_hangs_total", Counter,
        "Calls of the store that exceeded their deadline. After such a call the store is not called for a "
        "while.",
        {"operation": ("query", "fetch", "write")},
    ),
    Metric("in_flight_operations", Gauge, "Operations under way.",
     {"operation": ("query", "fetch", "load", "write", "check", "park", "resume")}),
    Metric("tier_last_read_seconds", Gauge,
     "Time when a tier last contributed to a restore, by the wall clock; 0: never.", {"tier": _TIERS}),
)  # fmt: skip
"""Metrics of the controller of one worker."""

STORE: Final = (
    Metric(
        "store_calls_total", Counter, "Calls of a store that have ended.",
        {"store": _STORE, "operation": OPERATIONS, "result": ("returned", "raised")},
    ),
    Metric("store_calls_under_way", Gauge,
     "Calls of a store that have not ended. A call that hangs is counted only here.", {"store": _STORE}),
    Metric(
        "store_seconds", Histogram, "Duration of calls, including those that raised an error.",
        {"store": _STORE, "operation": OPERATIONS},
    ),
    Metric("store_items_total", Counter, "Items of calls, by outcome.",
     {"store": _STORE, ("operation", "outcome"): _ITEM_OUTCOMES}),
    Metric(
        "store_bytes_total", Counter, "Payload bytes of objects that were read (get) or stored (set).",
        {"store": _STORE, "operation": ("get", "set")}
    ),
)  # fmt: skip
"""Metrics of stores inside `Metered`."""

NODE: Final = (
    *_events("node_"),
    Metric(
        "node_calls_total", Counter,
        "Calls that have ended, by the status that the client got. CANCELLED means that the client "
        "disconnected.",
        {"method": METHODS, "code": CODES},
    ),
    Metric(
        "node_call_seconds", Histogram,
        "Duration of calls, including the time in which the client sends and reads.",
        {"method": METHODS},
    ),
    Metric("node_calls_under_way", Gauge, "Calls under way.", {"method": METHODS}),
    Metric("node_calls_limit", Gauge,
     "Maximum number of calls under way; further calls are refused (`limits.streams`)."),
    Metric(
        "node_refused_total", Counter,
        "Calls, connections and sessions that were refused because of the client. unauthenticated: the "
        "caller is not known; permission: the caller may not use this verb or namespace; deadline: the call "
        "has no deadline; busy: there are too many at once; limit: the call is larger than `limits` allow; "
        "idle: the client makes no progress; malformed: the message cannot be read.",
        {"reason": REFUSALS},
    ),
    Metric("node_account_failed_total", Counter,
     "Times that the account of `tiercache report` could not be written; it is kept in memory until it can."),
    Metric("node_audit_lost_total", Counter,
     "Records of the audit log that could not be written (`audit`)."),
    Metric(
        "node_principal_calls_total", Counter,
        "Calls by principal, including refused calls whose caller was known.",
        {"principal": _PRINCIPAL},
    ),
    Metric(
        "node_principal_bytes_total", Counter,
        "Payload bytes by principal. in: from the client; out: to the client.",
        {"principal": _PRINCIPAL, "direction": ("in", "out")},
    ),
    Metric(
        "node_payload_bytes_total", Counter,
        "Payload bytes between clients and the server. stream: in messages; data: on data connections; "
        "shared: through shared memory; in: from the client; out: to the client.",
        {"plane": ("stream", "data", "shared"), "direction": ("in", "out")},
    ),
    Metric("node_damaged_objects_total", Counter,
     "Objects that were damaged on the way from the client, and were not stored."),
    Metric(
        "node_held_bytes", Gauge,
        "Memory held for clients. payload: blocks with objects on their way in or out; messages: messages "
        "with payload; requests: messages without payload.",
        {"budget": BUDGETS},
    ),
    Metric("node_held_limit_bytes", Gauge,
     "Maximum of node_held_bytes; a call whose memory does not fit waits.", {"budget": BUDGETS}),
    Metric("node_workers_busy", Gauge, "Store threads that work for clients now."),
    Metric("node_workers", Gauge, "Number of store threads; a call waits while none is free."),
    Metric("node_sessions", Gauge, "Sessions of the attach socket."),
    Metric("node_attached_bytes", Gauge, "Shared memory that clients have attached."),
    Metric("node_data_connections", Gauge, "Connections for payload of clients on TCP."),
    Metric(
        "node_lookups_total", Counter,
        "Objects that clients asked for: whether the object was found, and the reason if it was not. To be "
        "found by exists is no hit in the sense of the hit rate (node_tokens_total).",
        {"tier": (str(Tier.STORAGE),), "pool": tuple(map(str, PoolName)),
         ("operation", "result", "reason"): _LOOKUP_RESULTS},
    ),
    Metric("node_tokens_total", Counter,
     "Prompt tokens of pages that clients looked up (asked) or read (restored). The hit rate is restored / "
     "asked. A page counts once for all ranks. Pages of namespaces without a record count nowhere.",
     {"tenant": _TENANT_OR_NONE, "how": ("asked", "restored")}),
    Metric("node_prefill_seconds_total", Counter,
     "Time that the prefill of restored tokens would have taken, by the FLOPs and the speed that workers "
     "have registered; other tokens count nowhere. Less node_read_seconds_total, it is the saved time.",
     {"tenant": _TENANT_OR_NONE}),
    Metric("node_read_seconds_total", Counter,
     "Time that the store took to read the tokens of node_prefill_seconds_total.",
     {"tenant": _TENANT_OR_NONE}),
    Metric("node_last_read_seconds", Gauge,
     "Time when a client last got an object, by the wall clock; 0: never."),
    Metric("node_store_objects", Gauge, "Stored objects."),
    Metric("node_store_payload_bytes", Gauge, "Payload bytes of the stored objects."),
    Metric("node_store_used_bytes", Gauge, "Bytes of its capacity that the store uses, including overhead."),
    Metric("node_store_capacity_bytes", Gauge, "Capacity of the store; 0: unlimited."),
    Metric("node_store_evicted_objects_total", Counter,
     "Objects evicted to make room. Absent if the store does not count them."),
    Metric("node_store_corrupt_objects_total", Counter,
     "Objects whose checksum was wrong. Absent if the store does not count them."),
    Metric(
        "node_store_restorable_bytes", Gauge,
        "Payload bytes that a restore can use. All ancestors of their page are stored. If the namespace has "
        "states, a state is stored on the page or below it. Absent in a chain, and if the store does not "
        "count them.",
    ),
    Metric(
        "node_store_dead_bytes", Gauge,
        "Payload bytes that no restore can use; they are evicted first. Absent in a chain, and if the store "
        "does not count them.",
    ),
    Metric("node_store_orphans", Gauge,
     "Objects whose parent is not stored. Absent if the store does not count them."),
    Metric(
        "node_tier_health", Gauge,
        "1 for the health that a tier has, else 0. serving: it is read and written; read-only: it is read, "
        "but takes no new objects; out: it does not answer, and its objects are misses until it does.",
        {"tier": _STORE_TIER, "health": HEALTHS},
    ),
    Metric("node_tier_objects", Gauge, "Objects in a tier. Absent while the tier is out.",
     {"tier": _STORE_TIER}),
    Metric("node_tier_used_bytes", Gauge,
     "Bytes of its capacity that a tier uses, including overhead. Absent while the tier is out.",
     {"tier": _STORE_TIER}),
    Metric("node_tier_capacity_bytes", Gauge,
     "Capacity of a tier; 0: unlimited. Absent while the tier is out.", {"tier": _STORE_TIER}),
    Metric("node_tier_read_objects_total", Counter, "Objects that clients got from a tier.",
     {"tier": _STORE_TIER}),
    Metric("node_tier_read_bytes_total", Counter, "Payload bytes that clients got from a tier.",
     {"tier": _STORE_TIER}),
    Metric("node_tier_written_objects_total", Counter,
     "Objects that were stored in a tier, by clients or from another tier.", {"tier": _STORE_TIER}),
    Metric("node_tier_written_bytes_total", Counter,
     "Payload bytes that were stored in a tier, by clients or from another tier.", {"tier": _STORE_TIER}),
    Metric("node_tier_waiting_objects", Gauge, "Objects that wait to be copied to a tier.",
     {"tier": _STORE_TIER}),
    Metric("node_tier_dropped_objects_total", Counter,
     "Objects that should have been copied to a tier, and were not.", {"tier": _STORE_TIER}),
    Metric("node_tier_lost_calls_total", Counter,
     "Calls of a tier that were given up after their deadline.", {"tier": _STORE_TIER}),
    Metric("node_tier_last_read_seconds", Gauge,
     "Time when a client last got an object from a tier, by the wall clock; 0: never.",
     {"tier": _STORE_TIER}),
    Metric("node_tenant_used_bytes", Gauge,
     "Bytes that a tenant's objects take; every copy in a tier that keeps quotas counts. 0 if the store "
     "keeps none.", {"tenant": _TENANT}),
    Metric("node_tenant_quota_bytes", Gauge, "Quota of a tenant. Absent if it has none.",
     {"tenant": _TENANT}),
    Metric("node_tenant_guarantee_bytes", Gauge,
     "Bytes of a tenant that the sets of others do not evict.", {"tenant": _TENANT}),
    Metric("node_tenant_evicted_objects_total", Counter,
     "Objects of a tenant that its own sets evicted because of its quota.", {"tenant": _TENANT}),
    Metric("node_tenant_throttled_objects_total", Counter,
     "Objects of a tenant that were not stored because of its quota.", {"tenant": _TENANT}),
    Metric("node_store_figures_age_seconds", Gauge,
     "Age of the figures of the store; it grows while the store does not answer."),
    Metric(
        "node_disk_written_bytes_total", Counter,
        "Bytes that this process wrote to disks; every write wears out an SSD. Absent if the kernel does not "
        "report them.",
    ),
    Metric("node_resident_bytes", Gauge,
     "Resident memory of the process. Memory that clients attached counts as soon as it is touched."),
    Metric("node_insecure_bind", Gauge,
     "1 if an address that other machines can reach is served without authentication."),
    Metric("node_certificate_expires_seconds", Gauge,
     "Time when the daemon's certificate ends, in seconds since 1970; without TLS there is none."),
    Metric("node_start_time_seconds", Gauge, "Time when the server began to serve, by the wall clock."),
    Metric("node_build_info", Gauge, "Always 1.", {"version": _VERSION}),
)  # fmt: skip
"""Metrics of one storage server."""

TABLE: Final = (*CONTROLLER, *STORE, *NODE)
