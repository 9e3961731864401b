"""The contract of an eviction policy: it ranks what could go, and never sees what that is.

Who evicts (the index, a store) decides *what may* go: pins, leaves before their ancestors, dead weight before everything else. The policy
decides *what goes first* among those.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[Any]
"""Integers or flags, one entry a unit: shape (len(units),)."""
Ranks: TypeAlias = npt.NDArray[np.float64]


class UnitKind(enum.IntEnum):
    """What goes when a unit is evicted."""

    NONE = 0
    """Nothing may go."""
    LEAF = 1
    """The KV of an edge below which the tier holds nothing, and the state at its end, if any."""
    STATE = 2
    """One state alone; the KV stays."""


class CheckpointKind(enum.IntEnum):
    """Why a state was taken where it was."""

    NONE = 0
    """There is none, or nobody said."""
    END = 1
    """The end of a request, answer included."""
    PROMPT = 2
    """The end of a prompt."""
    BRANCH = 3
    """Where a prompt left what was known."""
    GHOST = 4
    """Where a prompt ended to repeat what had been known and was evicted."""
    INTERVAL = 5
    """Every so many tokens."""

    def __str__(self) -> str:
        return self.name.lower()


class Units(Protocol):
    """Some units, as columns. Depths are in pages of `page_tokens` tokens; times are ticks of the owner's logical clock, one per insert or
    hit. Valid during the call that it is passed to.
    """

    def __len__(self) -> int: ...

    @property
    def now(self) -> int:
        """The current tick, never less than any `last_access`."""

    @property
    def page_tokens(self) -> int:
        """Tokens a page; 1 where the owner does not know."""

    @property
    def kind(self) -> Column:
        """`UnitKind` of each."""

    @property
    def last_access(self) -> Column:
        """When each was last hit, or made."""

    @property
    def hits(self) -> Column:
        """How often each was the last one of a hit."""

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end."""

    @property
    def children(self) -> Column:
        """How many known continuations follow: 0, 1, or at a branch any number from 2."""

    @property
    def replay(self) -> Column:
        """Pages that must be computed to have the unit again, from the nearest restorable depth above it; at least 1."""

    @property
    def nbytes(self) -> Column:
        """Bytes that its eviction frees; at least 1."""

    @property
    def checkpoint(self) -> Column:
        """`CheckpointKind` of the state at the unit's end."""

    @property
    def lineage(self) -> Column:
        """How many requests in a row, each going on where the one before had ended, led to the one that made the unit; 0 for the first."""

    @property
    def grown(self) -> Column:
        """Pages up to the unit's end that were new with the request that made it."""

    @property
    def digest(self) -> Column:
        """A number for the prefix that ends with the unit, as int64; 0 where the owner has none. For policies that know the future."""

    @property
    def covered(self) -> Column:
        """Does the tier below hold all that would go, so that a miss costs a load and no computation?"""


class Reuse(NamedTuple):
    """A unit answered a hit, or would have if it had not been evicted. As in `Units`, before the hit; `age` is ticks since the last one."""

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
    """Ranks evictable units. Thread safety: called by the owner's thread only."""

    name: ClassVar[str]
    """How configuration and reports call it."""
    steady: ClassVar[bool] = False
    """A rank depends on its unit alone, never falls while the unit is untouched, and the owner may keep an order by it. Otherwise the owner
    asks again before it evicts, and takes the least of what it asked for together."""
    needs_states: ClassVar[bool] = False
    """The policy has no meaning without recurrent states; owners refuse it (ConfigError) for pools that have none."""

    @abstractmethod
    def rank(self, units: Units) -> Ranks:
        """How much each unit is worth, float64 of shape (len(units),); the least goes first, and of equal ones any.

        The caller guarantees that `units` are evictable now, of one tier, and not none.
        The implementation must not keep `units`, must be a function of them and of the policy's own history, and must not answer NaN.
        """

    def evicted(self, rank: float) -> None:  # noqa: B027  optional, as are the next two
        """A unit of this rank was evicted."""

    def reused(self, reuse: Reuse) -> None:  # noqa: B027
        """A unit answered a hit, or was missed."""

    def learn(self, live: Units, gone: Units) -> None:  # noqa: B027
        """Called every `LEARN_EVERY` requests with all units that could answer a hit, and the remembered ones that no longer can.

        What an eviction would free (`kind`, `nbytes`, `covered`) has no meaning here.
        """


LEARN_EVERY = 64
"""Requests between two calls of `learn`."""
