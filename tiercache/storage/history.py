"""History of objects: which tiers have them, and when and why objects that were there went."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Cause(enum.StrEnum):
    """Cause of a removal."""

    EVICTED = "evicted"
    """The store has removed the object by itself, to make room."""
    DELETED = "deleted"
    """A client has deleted the object."""
    CORRUPT = "corrupt"
    """The object's bytes were not those that were stored."""


class PastRemoval(NamedTuple):
    """Object that was removed from a tier; it may have been stored again since."""

    page: int
    """Position of the object's page among the pages that were asked for."""
    layout: bytes
    """Layout digest of the object; empty if it is not remembered."""
    tier: str
    """Name of the tier; empty for a store without tiers, and for all tiers at once."""
    cause: Cause
    at: float
    """Time in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class TierHistory:
    """Presence of objects in one tier."""

    name: str
    """Name of the tier; empty for a store without tiers."""
    present: Sequence[bool]
    """Whether the tier has each of the objects that were asked for; empty if it cannot be asked."""
    since: float | None = None
    """Time from which on removals are remembered, in seconds since 1970; None if none are."""
    why: str = ""
    """Reason why the tier cannot be asked."""


@dataclass(frozen=True, slots=True)
class History:
    """History of some objects and pages."""

    tiers: Sequence[TierHistory]
    """Tiers of a chain in their order; one without a name for any other store."""
    removals: Sequence[PastRemoval] = ()
    """Latest removal of each object from each tier, the newest first."""
    forgotten: float | None = None
    """Time of the newest removal that is not remembered any more; None if none was forgotten."""

    def without_tiers(self) -> History:
        """Return the history of the store as a whole, as a caller may know it that must not know tiers."""
        asked = [tier for tier in self.tiers if not tier.why]
        times = [tier.since for tier in asked]
        # What only a tier has that cannot be asked is neither there nor removed.
        is_known = len(asked) == len(self.tiers) and None not in times
        since = max((time for time in times if time is not None), default=None) if is_known else None
        present = [any(there) for there in zip(*(tier.present for tier in asked), strict=True)]
        latest: dict[tuple[int, bytes], PastRemoval] = {}
        for removal in self.removals:
            latest.setdefault((removal.page, removal.layout), removal._replace(tier=""))
        return replace(
            self, tiers=[TierHistory("", present, since)], removals=list(latest.values()), forgotten=None
        )
