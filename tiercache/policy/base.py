"""Contract of an eviction policy, which ranks evictable units by numbers and never sees the objects; `Lru`.

The owner of a policy (the index) decides which units *may* be evicted. The owner offers neither a
pinned unit nor a unit on which another unit depends. The owner also evicts dead weight (KV without a
surviving state at its end or below) before everything else. The policy decides in which order the other units
are evicted.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.models.profile import ModelProfile

Column: TypeAlias = npt.NDArray[Any]
"""Integers or flags, one entry per unit: shape (len(units),)."""
Ranks: TypeAlias = npt.NDArray[np.float64]
"""Ranks, one entry per unit: shape (len(units),)."""


class UnitKind(enum.IntEnum):
    """Objects that the eviction of a unit frees."""

    NONE = 0
    """Nothing: the unit may not be evicted."""
    LEAF = 1
    """The KV of an edge below which the tier holds nothing, and the state at the edge's end, if any.

    An edge is a run of pages.
    """
    STATE = 2
    """One state alone; the KV stays."""


class CheckpointKind(enum.IntEnum):
    """Reason why a state was taken at its depth."""

    NONE = 0
    """No state, or no reason given."""
    END = 1
    """The end of a request, answer included."""
    PROMPT = 2
    """The end of a prompt."""
    BRANCH = 3
    """The depth at which a prompt left the known sequences."""
    GHOST = 4
    """The depth up to which a prompt repeated an evicted sequence."""
    INTERVAL = 5
    """A multiple of a fixed number of tokens."""

    def __str__(self) -> str:
        return self.name.lower()


class Ending(enum.IntEnum):
    """How a request ended, as far as its engine knows. Policies learn what follows each; none is believed."""

    UNKNOWN = 0
    """The engine does not say."""
    TURN = 1
    """The answer is complete: the next request waits for a person, if one comes at all."""
    CALL = 2
    """The answer calls a tool: the next request comes when the tool has returned."""
    LAST = 3
    """No request will continue this one, for example because a sub-agent has reported its result."""

    def __str__(self) -> str:
        return self.name.lower()


class Units(Protocol):
    """A set of units, as columns with one entry per unit. The set is valid only during the policy call.

    A *unit* is what one eviction frees (see `UnitKind`).

    Depths are in pages of `page_tokens` tokens. Times are *ticks* of the owner's logical clock. The clock
    advances by one per insert or hit.
    """

    def __len__(self) -> int: ...

    @property
    def now(self) -> int:
        """Current tick; no `last_access` is later."""

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""

    @property
    def kind(self) -> Column:
        """`UnitKind` of each unit."""

    @property
    def last_access(self) -> Column:
        """Tick of each unit's last hit, or of its creation if it has had none."""

    @property
    def created(self) -> Column:
        """Tick at which the unit's state was taken or, without a state, its edge was made; 0 if not known."""

    @property
    def hits(self) -> Column:
        """Number of hits that ended at the unit."""

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end."""

    @property
    def children(self) -> Column:
        """Number of known continuations. An owner may report 2 for every larger number."""

    @property
    def replay(self) -> Column:
        """Number of pages from the nearest shallower restorable depth to the unit's end; at least 1.

        If the unit is lost, these pages must be computed again.
        """

    @property
    def nbytes(self) -> Column:
        """Bytes that the unit's eviction frees; at least 1. Of a leaf on the device, only its pages count."""

    @property
    def checkpoint(self) -> Column:
        """`CheckpointKind` of the state at the unit's end."""

    @property
    def lineage(self) -> Column:
        """Number of earlier turns in the session of the request that made the unit.

        A *session* is a chain of requests, each continuing the one before. Its requests are called *turns*.
        """

    @property
    def grown(self) -> Column:
        """Number of pages, up to the unit's end, that were unknown before the request that made the unit."""

    @property
    def ending(self) -> Column:
        """`Ending` of the request that last ended at the unit."""

    @property
    def expected(self) -> Column:
        """Tick at which a hit on the unit is expected, in the future or overdue; 0 if none is expected."""

    @property
    def digest(self) -> Column:
        """Digest of the prefix that ends with the unit, as int64; 0 where the owner has none.

        A policy finds by it what it remembers of the unit. The name lasts longer than the unit: a unit that
        is made again later has the same digest.
        """

    @property
    def covered(self) -> Column:
        """Whether a lower tier has a copy of all objects of the unit, so that a miss costs only a load."""


def last_use(units: Units) -> Column:
    """Return the tick of each unit's last access or, if that is later, of the hit that is expected of it.

    Policies that rank by recency count an expected hit as if it had happened at that tick.
    """
    later: Column = np.maximum(units.last_access, units.expected)
    return later


class Reuse(NamedTuple):
    """A hit on a unit, or a miss that would have been a hit on a unit if the unit had not been evicted.

    A field with the name of a column of `Units` means the same as the column. Its value is the value that the
    unit had before the hit or the miss.
    """

    depth: int
    replay: int
    children: int
    hits: int
    checkpoint: int
    lineage: int
    grown: int
    ending: int
    age: int
    """Ticks since the unit's last access."""
    digest: int
    evicted: bool
    """False for a hit, True for a miss."""


def columns_of(reused: Sequence[Reuse]) -> Mapping[str, Column]:
    """Return the fields of some hits and misses as columns, by name; int64, shape (len(reused),)."""
    rows = np.array(reused, np.int64).reshape(-1, len(Reuse._fields))
    return dict(zip(Reuse._fields, rows.T, strict=True))


class Policy(ABC):
    """Base of eviction policies, which rank evictable units.

    Thread safety: only the thread of the owner (the index or the store) calls it.

    A policy that keeps what was made first, in an index that has three sequences of one page:

        >>> from tiercache.core import PoolName, as_tokens
        >>> from tiercache.index import HybridIndex
        >>> class First(Policy):
        ...     name = "first"
        ...     steady = True
        ...
        ...     def rank(self, units: Units) -> Ranks:
        ...         return -units.created.astype(np.float64)
        >>> index = HybridIndex(
        ...     page_size=2, namespace=bytes(32), page_pools=[PoolName.KV], state_pools=[], policy=First()
        ... )
        >>> for slot in (0, 1, 2):
        ...     _ = index.insert(as_tokens([slot, 7]), {PoolName.KV: np.array([slot])})
        >>> index.evict_device({PoolName.KV: 1}).freed[PoolName.KV]
        array([2])
    """

    name: ClassVar[str]
    """Name of the policy in configuration and reports."""
    steady: ClassVar[bool] = False
    """Whether the rank of a unit depends on that unit alone, and does not fall while the unit stays the same.

    If True, the owner may compare ranks of different calls of `rank`. If False, only ranks of one call can be
    compared, so the owner ranks all units anew from time to time (see `order`).
    """
    needs_states: ClassVar[bool] = False
    """Whether the policy is only for models with recurrent states.

    If True, an owner without state pools refuses the policy (ConfigError).
    """

    @abstractmethod
    def rank(self, units: Units) -> Ranks:
        """Return the worth of each unit, float64 of shape (len(units),).

        The unit with the lowest rank is evicted first; among equal ranks, any unit may be first.

        The caller guarantees that there is at least one unit, that all of them can be evicted now, and that
        they belong to one tier. The implementation must not keep `units`, must compute the ranks from `units`
        and the policy's own history alone, and must not return NaN.
        """

    def value(self, units: Units) -> Ranks:
        """Return the work that keeping each unit is expected to save, in FLOPs per byte and tick.

        At least 0, and comparable over time and between owners: stores rank by these numbers (see
        `ObjectMeta.value`). The default knows the units' ages only: 1 / (1 + age).
        """
        return np.asarray(1.0 / (1.0 + (units.now - units.last_access)), np.float64)

    def chance(self, units: Units, ticks: float) -> Ranks:
        """Return the probability that each unit is hit within the next `ticks` ticks; 1 if not known."""
        return np.ones(len(units))

    def reused(self, reuse: Reuse) -> None:  # noqa: B027  a policy may ignore this and the next method
        """Record that a unit was hit, or was missed because it had been evicted."""

    def learn(self, live: Units, gone: Units) -> None:  # noqa: B027
        """Learn from all units: the `live` ones can be hit, the `gone` ones are evicted but remembered.

        The owner calls this every `LEARN_EVERY` requests. Do not use the columns `kind`, `nbytes` and
        `covered` here: they describe the effect of an eviction, and no unit is evicted in this call.
        """


class Lru(Policy):
    """Policy that first evicts the unit whose last hit, or creation, is longest ago. Stateless."""

    name: ClassVar[str] = "lru"
    steady: ClassVar[bool] = True

    def rank(self, units: Units) -> Ranks:
        """Return the tick of each unit's last access, or of the hit that is expected of it."""
        return last_use(units).astype(np.float64)


LEARN_EVERY = 64
"""Number of requests between two calls of `learn`."""
LOAD_FLOPS_PER_BYTE: Final = 5_000.0
"""Cost of loading one byte, in FLOPs.

A device that computes 250 TFLOP/s and loads 50 GB/s from the host computes 5,000 FLOPs while it loads a byte.
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of bringing units of one model back."""

    profile: ModelProfile

    def saved(self, units: Units) -> Ranks:
        """Return the FLOPs that a hit on each unit saves.

        Without the unit, the hit would be at the nearest shallower restorable depth.
        """
        end = units.depth * units.page_tokens
        return np.asarray(
            self.profile.flops(end - np.minimum(units.replay * units.page_tokens, end), end), np.float64
        )

    def density(self, units: Units) -> Ranks:
        """Return the cost of a miss of each unit, in FLOPs per byte that its eviction frees."""
        # If a lower tier has a copy, a miss costs a load. A load is proportional to the bytes that the
        # eviction frees, so its cost per byte is the same for all units.
        return np.where(units.covered, LOAD_FLOPS_PER_BYTE, self.saved(units) / units.nbytes)
