"""Every metric that tiercache exposes, as rows of one table: no other module names a family, and none exists without its row.

Names are without their prefix `tiercache_`. The rows make the families (`families`) and the document (`document`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from prometheus_client import Counter, Gauge, Histogram

from tiercache.core import Outcome, PoolName, Reason, Tier

PREFIX: Final = "tiercache_"
HIT: Final = "hit"
MISS: Final = "miss"


@dataclass(frozen=True, slots=True)
class Known:
    """Values that are known only where the metric is made, from then on at 0: `what` they are, and what bounds them."""

    what: str


Labels: TypeAlias = Mapping[str | tuple[str, ...], tuple[str, ...] | tuple[tuple[str, ...], ...] | Known]
"""Label names in order, with the values that each may take. Several names in one entry take these combinations of values only."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row."""

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    labels: Labels = field(default_factory=dict)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of all labels in order."""
        return tuple(name for names in self.labels for name in ((names,) if isinstance(names, str) else names))


SECONDS: Final = (25e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 25e-3, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
"""Upper ends of every histogram: from a dict's answer to the longest deadline that a daemon grants by default."""

METHODS: Final = (
    "Hello", "Exists", "Get", "Set", "GetInto", "SetFrom", "Delete", "Describe", "Scan", "Register", "Namespaces", "Usage", "Flush",
)  # fmt: skip
"""The calls of the wire; `daemon.meters` asserts that these are all."""

CODES: Final = (
    "OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "INTERNAL", "UNAVAILABLE", "UNAUTHENTICATED", "UNKNOWN",
)  # fmt: skip
"""How calls end; what a later version adds is counted as UNKNOWN until it is named here."""

BUDGETS: Final = ("payload", "messages", "requests")
REFUSALS: Final = ("unauthenticated", "permission", "deadline", "busy", "limit", "idle", "malformed")

OPERATIONS: Final = ("exists", "get", "set", "delete", "scan", "describe", "register_namespace", "namespaces", "usage", "flush")
"""The calls of a store; `storage.wrappers.metered` asserts that these are all."""

ANSWERS: Final = {
    "exists": (Outcome.HIT, Outcome.MISS),
    "get": (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR),
    "set": (Outcome.STORED, Outcome.HIT, Outcome.THROTTLED, Outcome.ERROR),
    "delete": (Outcome.HIT, Outcome.MISS),
    "scan": (Outcome.HIT,),
    "describe": (Outcome.HIT, Outcome.MISS),
}
"""Outcomes of an item, by operation; of a deletion HIT means that it is gone now, of a scan that it was listed."""

REASON_OF: Final = {
    Outcome.HIT: Reason.NONE,
    Outcome.MISS: Reason.ABSENT,
    Outcome.CORRUPT: Reason.CHECKSUM,
    Outcome.THROTTLED: Reason.BUSY,
    Outcome.ERROR: Reason.IO_ERROR,
}
"""Why a get of a node gave what it gave."""

_TIERS: Final = tuple(str(t) for t in Tier)
_NEAR: Final = (str(Tier.DEVICE), str(Tier.HOST))
_OUTCOMES: Final = tuple(str(o) for o in Outcome)
_REASONS: Final = tuple(str(r) for r in Reason)
_RESULTS: Final = ((HIT, str(Reason.NONE)), *((MISS, str(r)) for r in Reason if r is not Reason.NONE))
_ASKED: Final = tuple(
    (operation, HIT if outcome is Outcome.HIT else MISS, str(REASON_OF[outcome]))
    for operation in ("exists", "get")
    for outcome in ANSWERS[operation]
)
_ANSWERED: Final = tuple((operation, str(outcome)) for operation, outcomes in ANSWERS.items() for outcome in outcomes)

_POOLS: Final = Known(f"the pools of the model, of {', '.join(PoolName)}")
_STORE: Final = Known("a name for each metered store, given in code; a node has one, named by its kind")
_PRINCIPAL: Final = Known("the names in `principals`, `owner` (the daemon's own user) and `anonymous`")
_VERSION: Final = Known("one: the version")

CONTROLLER: Final = (
    Metric(
        "lookups_total", Counter, "Lookups by what each tier contributed to the restore, and why it did not.",
        {"tier": _TIERS, "pool": _POOLS, ("result", "reason"): _RESULTS},
    ),
    Metric("restored_objects_total", Counter, "Objects restored, by the tier that they came from.", {"tier": _TIERS, "pool": _POOLS}),
    Metric("restored_bytes_total", Counter, "Payload bytes restored, by the tier that they came from.", {"tier": _TIERS, "pool": _POOLS}),
    Metric("tokens_total", Counter, "Prompt tokens, restored or left to compute.", {"how": ("restored", "computed")}),
    Metric("restore_failures_total", Counter, "Restores that were planned and had to be cut short, by reason.", {"reason": _REASONS}),
    Metric("written_objects_total", Counter, "Objects copied down into a tier by write-through.", {"tier": _TIERS, "pool": _POOLS}),
    Metric("storage_sets_total", Counter, "Outcomes of storage sets.", {"pool": _POOLS, "outcome": _OUTCOMES}),
    Metric("storage_gets_total", Counter, "Outcomes of storage gets.", {"pool": _POOLS, "outcome": _OUTCOMES}),
    Metric(
        "write_through_skipped_total", Counter, "Objects whose write-through was skipped; they are tried again when next committed.",
        {"pool": _POOLS, "reason": ("host_full", "transfer_failed", "cheap_to_recompute", "refused", "timeout", "evicted", "too_many")},
    ),
    Metric("evicted_objects_total", Counter, "Objects evicted: demoted or lost.", {"tier": _NEAR, "fate": ("demoted", "lost")}),
    Metric("forgotten_objects_total", Counter, "Objects believed to be stored that storage turned out not to have.", {"pool": _POOLS}),
    Metric(
        "storage_hangs_total", Counter, "Calls of the store that were given up after their deadline; it is left alone for a while then.",
        {"operation": ("query", "fetch", "write")},
    ),
    Metric("in_flight_operations", Gauge, "Operations under way.", {"operation": ("query", "fetch", "load", "write", "check")}),
    Metric("tier_last_read_seconds", Gauge, "When a tier last contributed to a restore, by the wall clock; 0 is never.", {"tier": _TIERS}),
)  # fmt: skip
"""Metrics of one controller, which is one worker's."""

STORE: Final = (
    Metric(
        "store_calls_total", Counter, "Calls of a store that ended.",
        {"store": _STORE, "operation": OPERATIONS, "result": ("returned", "raised")},
    ),
    Metric("store_calls_under_way", Gauge, "Calls inside a store now; one that hangs is counted here and nowhere else.", {"store": _STORE}),
    Metric(
        "store_seconds", Histogram, "How long calls took, those that raised included.", {"store": _STORE, "operation": OPERATIONS},
    ),
    Metric("store_items_total", Counter, "Items of those calls by answer.", {"store": _STORE, ("operation", "outcome"): _ANSWERED}),
    Metric(
        "store_bytes_total", Counter, "Payload bytes read (get: of hits) or stored (set).", {"store": _STORE, "operation": ("get", "set")}
    ),
)  # fmt: skip
"""Metrics of stores inside `Metered`."""

NODE: Final = (
    Metric(
        "node_calls_total", Counter, "Calls that ended, by the status that the client was told; CANCELLED: it went away.",
        {"method": METHODS, "code": CODES},
    ),
    Metric(
        "node_call_seconds", Histogram, "How long calls took, the client's sending and reading included.", {"method": METHODS},
    ),
    Metric("node_calls_under_way", Gauge, "Calls under way.", {"method": METHODS}),
    Metric("node_calls_limit", Gauge, "The most of them; further ones are refused (`limits.streams`)."),
    Metric(
        "node_refused_total", Counter,
        "What was refused for what the client did: calls, and sessions of the attach socket. deadline: a call without one; busy: more at"
        " once than it may; limit: larger than `limits` allow; idle: its stream stood still; malformed: not to be read, or not possible.",
        {"reason": REFUSALS},
    ),
    Metric(
        "node_principal_calls_total", Counter, "Calls by caller, refused ones included once the caller was known.",
        {"principal": _PRINCIPAL},
    ),
    Metric(
        "node_principal_bytes_total", Counter, "Payload bytes by caller; in: from the client.",
        {"principal": _PRINCIPAL, "direction": ("in", "out")},
    ),
    Metric(
        "node_payload_bytes_total", Counter,
        "Payload bytes between clients and the node. stream: in messages; shared: through memory that both map. in: from the client.",
        {"plane": ("stream", "shared"), "direction": ("in", "out")},
    ),
    Metric("node_damaged_objects_total", Counter, "Objects that did not arrive as the client sent them; they were not stored."),
    Metric(
        "node_held_bytes", Gauge,
        "Memory held for clients. payload: objects on their way in or out; messages: what carries them; requests: what is asked.",
        {"budget": BUDGETS},
    ),
    Metric("node_held_limit_bytes", Gauge, "The most of it; who needs more waits.", {"budget": BUDGETS}),
    Metric("node_workers_busy", Gauge, "Threads that work in the store for clients."),
    Metric("node_workers", Gauge, "All of them; who finds none waits."),
    Metric("node_sessions", Gauge, "Clients at the attach socket."),
    Metric("node_attached_bytes", Gauge, "Shared memory that they attached."),
    Metric(
        "node_lookups_total", Counter, "Objects that clients asked the node for, found or not, and why not.",
        {"tier": (str(Tier.STORAGE),), "pool": tuple(map(str, PoolName)), ("operation", "result", "reason"): _ASKED},
    ),
    Metric("node_last_read_seconds", Gauge, "When a client last got an object, by the wall clock; 0 is never."),
    Metric("node_store_objects", Gauge, "Objects stored."),
    Metric("node_store_payload_bytes", Gauge, "Their bytes."),
    Metric("node_store_used_bytes", Gauge, "What the store takes of its capacity, overheads included."),
    Metric("node_store_capacity_bytes", Gauge, "The capacity; 0 is none."),
    Metric("node_store_evicted_objects_total", Counter, "Objects given up to make room. Not there where the store does not count them."),
    Metric("node_store_corrupt_objects_total", Counter, "Objects that failed their check. Not there where the store does not count them."),
    Metric(
        "node_store_restorable_bytes", Gauge,
        "Payload bytes of which a restore can make use: of pages whose path to the first one is stored, with a state on it or below where"
        " the namespace has states. Not there where the store does not count them.",
    ),
    Metric(
        "node_store_dead_bytes", Gauge,
        "Payload bytes of which no restore can make use; they are given up first. Not there where the store does not count them.",
    ),
    Metric("node_store_orphans", Gauge, "Objects whose parent is not stored. Not there where the store does not count them."),
    Metric("node_store_figures_age_seconds", Gauge, "How long ago the store told these figures; they grow old when it hangs."),
    Metric(
        "node_disk_written_bytes_total", Counter,
        "Bytes that the process had the kernel write to disks, for the wear of an SSD. Not there where the kernel does not tell.",
    ),
    Metric("node_resident_bytes", Gauge, "Memory of the process, what clients attached included where it was touched."),
    Metric("node_insecure_bind", Gauge, "1 while an address that other machines reach is served without authentication."),
    Metric("node_start_time_seconds", Gauge, "When the node began to serve, by the wall clock."),
    Metric("node_build_info", Gauge, "Always 1.", {"version": _VERSION}),
)  # fmt: skip
"""Metrics of one storage node."""

TABLE: Final = (*CONTROLLER, *STORE, *NODE)
