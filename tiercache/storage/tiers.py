"""Tiers of a chain: the settings that belong to a tier, its name, and the contract for changes of tiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from tiercache.core import ObjectKey
from tiercache.errors import ConfigError
from tiercache.settings import FLAG
from tiercache.storage.base import ScanEntry, ScanPage, StorageBackend
from tiercache.storage.wrappers import unwrap

PREFIX: Final = "tier_"
"""Prefix of the settings that belong to a tier instead of its store."""

SET_READ_ONLY: Final = "tier_read_only is set"
LEAVING: Final = "it is being removed"
DELIBERATE: Final = (SET_READ_ONLY, LEAVING)
"""Reasons why a tier is not serving that an operator has chosen."""

NO_CHAIN: Final = (
    "this daemon serves one store without tiers; start it with chain = true (tiercache serve --chain), or"
    " with a list of stores, to change tiers while it serves"
)
"""Sentence for a daemon whose tiers cannot change."""


def free_name(kind: str, taken: Collection[str]) -> str:
    """Return the name of a tier without `tier_name`: its type, with a number if that is taken."""
    names = (kind if n == 1 else f"{kind}-{n}" for n in count(1))
    return next(name for name in names if name not in taken)


def is_read_only(section: Mapping[str, Any]) -> bool:
    """Return whether a tier's section has `tier_read_only` set, to a value that is possible."""
    with suppress(ConfigError):
        return bool(FLAG.parse(section.get(f"{PREFIX}read_only", False)))
    return False


@dataclass(frozen=True, slots=True)
class Progress:
    """Objects that only a leaving tier had, and how many of them have been copied."""

    copied_objects: int
    copied_bytes: int
    objects: int
    nbytes: int


Report = Callable[[Progress], None]
"""Function that is called from time to time during a change; an exception that it raises ends the change."""


def ignore_progress(_: Progress) -> None:
    """Report progress to nobody."""


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


class TierControl(ABC):
    """Store whose tiers can change while it serves.

    A tier is a URL or a section of a configuration, with the settings of a tier under their `PREFIX`.
    `usage().tiers` lists the tiers, with their URLs.

    The implementation must:
    - check a change before its first effect, and leave the tiers as they were if it fails;
    - make one change at a time, and refuse others meanwhile;
    - serve calls during a change, each with the tiers that it began with.

    Each method returns when its change is over. It raises ConfigError for a change that is not possible,
    RefusedError during another change or for a caller who may not change tiers, and StorageError for a store
    that fails. It waits for calls that began before the change.

    Thread safety: any thread.
    """

    def observed_tiers(self) -> Sequence[ObservedTier] | None:
        """Return the tiers that answer now; None if only the whole can be observed (the default)."""
        return None

    @abstractmethod
    def add_tier(self, spec: str | Mapping[str, Any], position: int | None = None) -> None:
        """Add the tier `spec` at `position` (0 is the first; None: the last).

        Objects that the tier has already become objects of the store.
        """

    @abstractmethod
    def remove_tier(
        self, name: str, *, keep_contents: bool = True, progress: Report = ignore_progress
    ) -> None:
        """Remove a tier, after what only it has was copied to the others; the files of its store stay.

        With `keep_contents` False nothing is copied. If `progress` raises an exception, the tier stays.
        Raises RefusedError if the others cannot take all objects.
        """

    @abstractmethod
    def replace_tier(
        self,
        name: str,
        spec: str | Mapping[str, Any],
        *,
        keep_contents: bool = True,
        progress: Report = ignore_progress,
    ) -> None:
        """Replace a tier by the tier `spec`, in the same place of the order.

        The same directory or address is closed and opened again. Until it is open, what only this tier has is
        a miss. Another directory or address is added with a name of its own, and the old tier is then removed
        as in `remove_tier`.
        """

    @abstractmethod
    def reorder(self, names: Sequence[str]) -> None:
        """Bring the tiers into the order of `names`, the fastest first."""

    @abstractmethod
    def change_tier(self, name: str, /, **settings: Any) -> None:
        """Change settings of a tier, named without the prefix, or of its store, such as `capacity`.

        `write`, `write_after`, `promote`, `read_only` and `write_per_day` change at once. For the others, the
        tier is closed and opened again, as in `replace_tier`. Values are as in a URL;
        `write_per_day="unlimited"` ends a limit.
        """


def tier_control(store: StorageBackend) -> TierControl:
    """Return the store inside all wrappers, whose tiers can change; raises ConfigError if it has no tiers."""
    found = unwrap(store)
    if not isinstance(found, TierControl):
        raise ConfigError(
            f"a {type(found).__name__} has no tiers that could change; open the store as a list of one URL,"
            " which makes a chain of one tier"
        )
    return found
