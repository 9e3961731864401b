"""Tiers of a chain: the settings that belong to a tier, its name, and how the list of tiers changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from tiercache.core import ObjectKey
from tiercache.errors import ConfigError
from tiercache.settings import FLAG
from tiercache.storage.base import ScanEntry, ScanPage, StorageBackend

PREFIX: Final = "tier_"
"""Prefix of the settings that belong to a tier instead of its store."""

SET_READ_ONLY: Final = "tier_read_only is set"
LEAVING: Final = "it is leaving the chain"
STUCK: Final = "it cannot leave the chain"
DELIBERATE: Final = (SET_READ_ONLY, LEAVING)
"""Begins of the reasons why a tier is not serving that an operator has chosen."""


def free_name(kind: str, taken: Collection[str]) -> str:
    """Return the name of a tier without `tier_name`: its type, with a number if that is taken."""
    names = (kind if n == 1 else f"{kind}-{n}" for n in count(1))
    return next(name for name in names if name not in taken)


def is_read_only(section: Mapping[str, Any]) -> bool:
    """Return whether a tier's section has `tier_read_only` set, to a value that is possible."""
    with suppress(ConfigError):
        return bool(FLAG.parse(section.get(f"{PREFIX}read_only", False)))
    return False


class Residence(Protocol):
    """Store, or tier of a chain, that is asked for its objects; the methods are those of a store."""

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return the entry of each object, or None."""

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        """Return a part of all objects."""


class ObservedTier(NamedTuple):
    """Tier whose changes can be told."""

    name: str
    store: StorageBackend
    """Open store of the tier. Another store under the same name is another tier."""
    residence: Residence
    """Way to ask the store; for a tier of a chain, with the tier's deadline."""


class TierChange(NamedTuple):
    """Change of a chain's tiers that was made, apart from tiers that leave."""

    what: Sequence[str]
    """The differences in words, such as "tier ssd joins"; empty if there were none."""
    left: Future[None]
    """Done when all tiers that are not in the list have left.

    It raises RefusedError if another list, or the end of the store, comes before.
    """
