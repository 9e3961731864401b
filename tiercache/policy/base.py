"""The contract of an eviction policy: it ranks what could go, and never sees what that is.

Who evicts (the index, a store) decides *what may* go: pins, leaves before their ancestors, dead weight before everything else. The policy
decides *what goes first* among those.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt


class UnitKind(enum.Enum):
    """What goes when a unit is evicted."""

    LEAF = "leaf"
    """The KV of an edge below which the tier holds nothing, and the state at its end, if any."""
    STATE = "state"
    """One state alone; the KV stays."""


class Unit(Protocol):
    """What a policy sees of a unit. Depths are in pages; times are ticks of the owner's logical clock, one per insert or hit.

    A view is valid during the call that it is passed to.
    """

    @property
    def kind(self) -> UnitKind:
        """What would go."""

    @property
    def last_access(self) -> int:
        """When the unit was last hit, or made."""

    @property
    def hits(self) -> int:
        """How often the unit was the last one of a hit."""

    @property
    def depth(self) -> int:
        """Pages from the start of the sequence to the unit's end."""

    @property
    def children(self) -> int:
        """How many known continuations follow it: 0, 1, or more at a branch."""

    @property
    def replay_pages(self) -> int:
        """Pages that must be computed to have the unit again, from the nearest restorable depth above it. Walks the path: O(ancestors)."""


class Units(Protocol):
    """Many units at once, for a policy that can rank them without looking at each. Valid during the call that it is passed to."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Unit: ...

    @property
    def last_access(self) -> npt.NDArray[Any]:
        """As `Unit.last_access`, of all: integers of shape (len(self),)."""


class Policy(ABC):
    """Ranks evictable units. Thread rule: called by the owner's thread only."""

    name: ClassVar[str]
    """How configuration and reports call it."""

    @abstractmethod
    def rank(self, unit: Unit) -> float:
        """How much `unit` is worth; the least goes first, and equal ranks go in the order in which they became evictable.

        The caller guarantees that every unit it compares is evictable now, and that it asks again whenever a unit becomes evictable, is
        about to go, or changes its kind or children.
        The implementation must not keep `unit`, must be a function of the unit and of the policy's own history, and must not let a rank
        fall while its unit is untouched: the order is kept lazily, so that a rise is noticed when the unit comes to the front and a silent
        fall is not. A worth that decays with age is written with a rising base for new units instead (as in GDSF). The answer is not NaN.
        """

    def rank_all(self, units: Units) -> npt.NDArray[np.float64]:
        """The rank of each of many units, shape (len(units),): what `rank` says. A store with a million objects asks this way."""
        return np.fromiter((self.rank(units[i]) for i in range(len(units))), np.float64, len(units))
