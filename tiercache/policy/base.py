"""The contract of an eviction policy, which ranks evictable units by numbers alone and never sees the objects themselves.

The owner of a policy (the index or a store) decides *what may* be evicted: nothing that is pinned, leaves before their ancestors, dead
weight before everything else. The policy decides *what goes first* among those units.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[Any]
"""Integers or flags, one entry per unit: shape (len(units),)."""
Ranks: TypeAlias = npt.NDArray[np.float64]
"""Ranks, one entry per unit: shape (len(units),)."""


class UnitKind(enum.IntEnum):
    """Objects that the eviction of a unit frees."""

    NONE = 0
    """Nothing: the unit may not be evicted."""
    LEAF = 1
    """The KV of an edge below which the tier holds nothing, and the state at its end, if any."""
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
    """The depth at which a prompt departed from the known sequences."""
    GHOST = 4
    """The depth up to which a prompt repeated a sequence that had been known and was evicted."""
    INTERVAL = 5
    """A regular interval of tokens."""

    def __str__(self) -> str:
        return self.name.lower()


class Units(Protocol):
    """A set of units, as columns with one entry per unit. Valid only during the call that it is passed to.

    Depths are in pages of `page_tokens` tokens. Times are ticks of the owner's logical clock, which advances by one per insert or hit.
    """

    def __len__(self) -> int: ...

    @property
    def now(self) -> int:
        """The current tick, never less than any `last_access`."""

    @property
    def page_tokens(self) -> int:
        """Tokens per page; 1 where the owner does not know."""

    @property
    def kind(self) -> Column:
        """`UnitKind` of each unit."""

    @property
    def last_access(self) -> Column:
        """Tick at which each unit was last hit, or else made."""

    @property
    def hits(self) -> Column:
        """Number of hits that ended at the unit."""

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end."""

    @property
    def children(self) -> Column:
        """Number of known continuations: 0, 1, or 2 and more at a branch."""

    @property
    def replay(self) -> Column:
        """Pages that must be computed to have the unit again, from the nearest restorable depth above it to its end; at least 1."""

    @property
    def nbytes(self) -> Column:
        """Bytes that the unit's eviction frees; at least 1."""

    @property
    def checkpoint(self) -> Column:
        """`CheckpointKind` of the state at the unit's end."""

    @property
    def lineage(self) -> Column:
        """Number of requests, each continuing where the last had ended, that led to the one that made the unit; 0 for the first."""

    @property
    def grown(self) -> Column:
        """Pages up to the unit's end that were new with the request that made it."""

    @property
    def digest(self) -> Column:
        """Number for the prefix that ends with the unit, as int64; 0 where the owner has none. For policies that know the future."""

    @property
    def covered(self) -> Column:
        """Whether the tier below holds all that would be evicted, so that a miss costs a load and no computation."""


class Reuse(NamedTuple):
    """A hit on a unit, or a miss that an evicted unit would have answered.

    The fields are as in `Units`, as of before the hit; `age` is the number of ticks since the unit's last access.
    """

    depth: int
    replay: int
    children: int
    hits: int
    checkpoint: int
    lineage: int
    grown: int
    age: int
    digest: int
    evicted: bool


class Policy(ABC):
    """Base of eviction policies, which rank evictable units.

    Thread safety: called by the owner's thread only.
    """

    name: ClassVar[str]
    """Name of the policy in configuration and reports."""
    steady: ClassVar[bool] = False
    """Whether a rank depends on its unit alone and never falls while the unit is untouched, so that the owner may keep an eviction order by
    it. Otherwise the owner asks again before it evicts, and takes the lowest of the ranks that it asked for together."""
    needs_states: ClassVar[bool] = False
    """Whether the policy has no meaning without recurrent states; owners refuse it (ConfigError) for pools that have none."""

    @abstractmethod
    def rank(self, units: Units) -> Ranks:
        """Return the worth of each unit, float64 of shape (len(units),); the lowest goes first, and among equal ranks any unit.

        The caller guarantees that `units` are evictable now, belong to one tier, and are not empty.
        The implementation must not keep `units`, must be a function of them and of the policy's own history, and must not return NaN.
        """

    def evicted(self, rank: float) -> None:  # noqa: B027  optional, as are the next two
        """Note that a unit of this rank was evicted."""

    def reused(self, reuse: Reuse) -> None:  # noqa: B027
        """Note that a unit answered a hit, or was missed because it had been evicted."""

    def learn(self, live: Units, gone: Units) -> None:  # noqa: B027
        """Learn from all units: `live` could answer a hit, `gone` are remembered and no longer can. Called every `LEARN_EVERY` requests.

        The columns about what an eviction would free (`kind`, `nbytes`, `covered`) have no meaning here.
        """


LEARN_EVERY = 64
"""Number of requests between two calls of `learn`."""
