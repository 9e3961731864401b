"""Options of a controller."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.events.settings import EventSettings
from tiercache.index import CheckpointRules, checkpoints_named

WRITE_THROUGH: Final = "write_through"
"""Value of `ControllerOptions.write`: objects go to storage at their commit."""
WRITE_BACK: Final = "write_back"
"""Value of `ControllerOptions.write`: objects go to storage ahead of their eviction from the host."""
WRITE_CHANCE: Final = 0.02
"""Default of `ControllerOptions.write_chance`."""
_RANGES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "storage_deadline": (lambda time: 0.0 <= time < math.inf, "a finite number of seconds from 0"),
    "join_deadline": (lambda time: 0.0 <= time < math.inf, "a finite number of seconds from 0"),
    "write_chance": (lambda chance: 0.0 <= chance <= 1.0, "a probability from 0 to 1"),
    "in_flight_share": (lambda share: 0.0 < share <= 1.0, "a share above 0, and 1 at most"),
    "pin_share": (lambda share: 0.0 <= share < 1.0, "a share from 0, and below 1"),
    "park_share": (lambda share: 0.0 <= share < 1.0, "a share from 0, and below 1"),
    "piece_bytes": (lambda count: count >= 1, f"a positive number of bytes, such as {32 << 20}"),
    "belief_checks": (lambda count: count >= 0, "a number of objects from 0"),
    "write_retries": (lambda count: 0 <= count <= 8, "0 to 8"),
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
    least 0.05 s apart.
    """
    write_retries: int = 3
    """Number of times that objects are offered to storage again if storage does not take them.

    The pause before the first retry is 0.1 s, and each further pause is four times as long.
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
    join_deadline: float = 60.0
    """Time in which all ranks of a group must be there, from the start of this one."""
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

    def __post_init__(self) -> None:
        if not isinstance(self.checkpoints, str | CheckpointRules):
            raise ConfigError(
                f"checkpoints={self.checkpoints!r} is not possible; use the name of a checkpoint policy, or"
                " CheckpointRules(...)"
            )
        checkpoints_named(self.checkpoints)  # a wrong name raises here
        if not isinstance(self.events, EventSettings | None):
            raise ConfigError(f"events={self.events!r} is not possible; use EventSettings(endpoint=...)")
        if self.write not in (WRITE_THROUGH, WRITE_BACK):
            raise ConfigError(f"write={self.write!r} is not possible; use {WRITE_THROUGH} or {WRITE_BACK}")
        for name, (is_possible, range_) in _RANGES.items():
            if not is_possible(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)} is not possible; use {range_}")
