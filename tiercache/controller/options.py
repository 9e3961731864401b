"""Options of a controller, and the rules that say how long a request waits for storage."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.events.settings import EventSettings
from tiercache.index import CheckpointRules, checkpoints_named


class PrefetchPolicy(enum.StrEnum):
    """Name of the way in which a request waits while storage is at work."""

    BEST_EFFORT = "best_effort"
    """The first poll after `admit` ends the wait."""
    WAIT_COMPLETE = "wait_complete"
    """The request waits until all fetches have landed."""
    TIMEOUT = "timeout"
    """The request waits for a time that depends on the length of its prompt (see `PrefetchRules`)."""


@dataclass(frozen=True, slots=True)
class PrefetchRules:
    """A prefetch policy, and the settings of the policy `timeout`. Times are in seconds.

    The time that a request may wait is `base` + `per_1024_tokens` for every 1,024 tokens that device and host
    lack, and at most `most`. It counts from the first poll that finds storage at work, which is usually that
    of `admit`. Under every policy, the deadline of the admission ends the wait as well.

    `policy` may be given by its name. Raises ConfigError for an unknown name, and for a time that is negative
    or not finite.
    """

    policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    base: float = 1.0
    per_1024_tokens: float = 0.25
    most: float = 10.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "policy", PrefetchPolicy(self.policy))
        except ValueError:
            raise ConfigError(
                f"there is no prefetch policy {self.policy!r}; use {', '.join(PrefetchPolicy)}"
            ) from None
        for name in ("base", "per_1024_tokens", "most"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not possible; use a finite number of seconds from 0"
                )

    def patience(self, tokens: int) -> float:
        """Return for how many seconds a request may wait that lacks `tokens` tokens of its prompt."""
        match self.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return 0.0
            case PrefetchPolicy.WAIT_COMPLETE:
                return math.inf
            case PrefetchPolicy.TIMEOUT:
                return min(self.base + self.per_1024_tokens * tokens / 1024, self.most)


WRITE_THROUGH: Final = "write_through"
"""Value of `ControllerOptions.write`: objects go to storage at their commit."""


WRITE_BACK: Final = "write_back"
"""Value of `ControllerOptions.write`: objects go to storage ahead of their eviction from the host."""


WRITE_CHANCE: Final = 0.02
"""Default of `ControllerOptions.write_chance`."""


_RANGES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "load_flops_per_byte": (lambda flops: 0.0 <= flops < math.inf, "a finite number from 0"),
    "storage_deadline": (lambda time: 0.0 <= time < math.inf, "a finite number of seconds from 0"),
    "join_deadline": (lambda time: 0.0 <= time < math.inf, "a finite number of seconds from 0"),
    "write_chance": (lambda chance: 0.0 <= chance <= 1.0, "a probability from 0 to 1"),
    "in_flight_share": (lambda share: 0.0 < share <= 1.0, "a share above 0, and 1 at most"),
    "pin_share": (lambda share: 0.0 <= share < 1.0, "a share from 0, and below 1"),
    "park_share": (lambda share: 0.0 <= share < 1.0, "a share from 0, and below 1"),
    "piece_bytes": (lambda count: count >= 1, f"a positive number of bytes, such as {32 << 20}"),
    "belief_checks": (lambda count: count >= 0, "a number of objects from 0"),
    "min_fetch_tokens": (lambda count: count >= 0, "a number of tokens from 0"),
    "write_retries": (lambda count: 0 <= count <= 8, "0 to 8"),
    "query_threads": (lambda count: count >= 1, "1 or more, or storage is left unserved"),
    "read_threads": (lambda count: count >= 1, "1 or more, or storage is left unserved"),
    "write_threads": (lambda count: count >= 1, "1 or more, or storage is left unserved"),
}
"""Whether a value of a numeric option is possible, and which ones are."""


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Limits and settings of a controller. Times are in seconds."""

    restore_deadline: float = 5.0
    """Time that an admission may wait for storage.

    After this time, the admission restores what device and host have.
    """
    storage_deadline: float = 0.0
    """Time that a store call may take before it counts as hung.

    After a hang, store calls are suspended for a while. 0 stands for `restore_deadline`, but at least 1 s.
    """
    in_flight_share: float = 0.25
    """Maximum share of the host's blocks that all fetches may hold at a time.

    The same maximum applies to all writes to storage, and to all copies that end on the host.
    """
    pin_share: float = 0.25
    """Maximum share of the host's blocks that pinned prefixes may keep; 0 for no pins."""
    park_share: float = 0.25
    """Maximum share of the host's blocks that parked requests may keep; 0 for no parking."""
    belief_checks: int = 512
    """Approximate number of objects that one check asks the store about; 0 for no checks.

    A check finds out whether the store still has objects that the index notes as stored. Two checks are at
    least 0.05 s apart. In an index so small that one check covers it whole, this pause is skipped after a
    write to storage.
    """
    write_retries: int = 3
    """Number of times that objects are offered to storage again if storage does not take them.

    The pause before the first retry is 0.1 s, and each further pause is four times as long.
    """
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    """Rules that say how long an admission waits for fetches, within its deadline.

    `HybridCacheController.admit` takes other rules for one request.
    """
    min_fetch_tokens: int = 0
    """Minimum number of tokens that a fetch must add to those that device and host can restore.

    A smaller number of tokens is computed instead, with the reason `not_worth`.
    """
    close_deadline: float = 10.0
    """Time that `close` may wait for operations to end."""
    piece_bytes: int = 32 << 20
    """Approximate number of bytes of one piece of a restore from storage.

    The reads of a restore are cut into pieces. A piece that lies verified on the host is copied to the device
    while the next pieces are read. A smaller amount is copied together with the rest. Each piece costs
    hand-overs between threads: with 8 MiB, a restore of 265 MiB on two cores takes a tenth longer.
    """
    load_or_recompute: bool = True
    """Whether tokens are computed that would take longer to restore, by the speeds measured so far.

    The speed of the prefill is known from `note_prefill`; without it, all that can be restored is restored.
    With False, what is restored does not depend on how fast anything is.
    """
    check_order: bool = False
    """Whether the ranks of a group compare the calls of their engines, to find one that differs.

    For debugging: each call costs a message, and a digest of its tokens.
    """
    join_deadline: float = 60.0
    """Time in which all ranks of a group must be there, from the start of this one."""
    max_queries: int = 64
    """Maximum number of storage queries in flight. At the maximum, a lookup does not ask storage."""
    query_threads: int = 2
    """Threads for queries of the store. With two threads, a slow query does not delay every restore."""
    read_threads: int = 2
    """Threads for reads from the store."""
    write_threads: int = 1
    """Threads for writes to the store."""
    events: EventSettings | None = None
    """Publisher of KV events of device, host and storage; None: none. `docs/events.md` has more."""
    write: str = WRITE_THROUGH
    """When objects are written to storage: `write_through` at their commit, or `write_back` ahead of their
    eviction from the host.

    With `write_back`, what only the host holds is lost if the process ends without `flush` or `close`. A
    sequence that does not fit on the host is written through.
    """
    write_chance: float = WRITE_CHANCE
    """With `write_back`, the least chance of a hit with which a unit is written; from 0, for all units, to 1.

    A higher value spares the medium. On the conversation trace, 0.02 writes 7.6 bytes for each byte that is
    read, and 0.18 writes 3.0; where prefixes are shared, it costs hits (docs/benchmarks.md).
    """
    policy: str = "hvd"
    """Name of the eviction policy; see `policy_named`."""
    checkpoints: str | CheckpointRules = "rules"
    """Rules that choose where prefills leave states, or their name; see `checkpoints_named`."""
    seed: int = 0
    """Seed of the index's random draws."""
    load_flops_per_byte: float = 0.0
    """FLOPs that the device computes in the time in which it loads one byte from the host.

    For example, the value is 5,000 for 250 TFLOP/s and 50 GB/s. A state that is cheaper to compute again than
    to load is not copied to the host. With 0, every state is copied, and the eviction policy assumes 5,000.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoints, str | CheckpointRules):
            raise ConfigError(
                f"checkpoints={self.checkpoints!r} is not possible; use the name of a checkpoint policy, or"
                " CheckpointRules(...)"
            )
        checkpoints_named(self.checkpoints)  # a wrong name raises here
        if not isinstance(self.prefetch, PrefetchRules):
            raise ConfigError(f"prefetch={self.prefetch!r} is not possible; use PrefetchRules(policy=...)")
        if not isinstance(self.events, EventSettings | None):
            raise ConfigError(f"events={self.events!r} is not possible; use EventSettings(endpoint=...)")
        if self.write not in (WRITE_THROUGH, WRITE_BACK):
            raise ConfigError(f"write={self.write!r} is not possible; use {WRITE_THROUGH} or {WRITE_BACK}")
        for name, (is_possible, range_) in _RANGES.items():
            if not is_possible(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)} is not possible; use {range_}")
