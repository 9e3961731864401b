"""Notes of a process on packs, and on objects that it writes or removes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache_backends.s3.pack import PackEntry, PackIndex


@dataclass(slots=True, eq=False)
class Pack:
    """A pack in the bucket."""

    name: str
    size: int
    stored_at: float
    """Seconds since 1970 on the clock of its writer."""
    index: PackIndex
    number: int = -1
    live: int = 0
    """Number of entries that are the object of their key."""
    dead: set[int] = field(default_factory=set)
    """Entries that were removed, as tombstones say or as this process will say."""
    condemned: bool = False
    """Whether the pack is being removed, so that no entry of it may become live again."""


class ObjectPlace(NamedTuple):
    """ObjectPlace of an object in the bucket."""

    pack: Pack
    number: int
    """Number of the entry in the pack."""
    entry: PackEntry


class RemovedObject(NamedTuple):
    """An object that was taken out of the directory."""

    row: int
    digest: bytes
    parent: bytes | None
    places: list[tuple[Pack, int]]
    """All of its entries, the one that was read first."""


class PackRemoval(NamedTuple):
    """Objects that were taken out, and what has to be done in the bucket."""

    objects: list[RemovedObject]
    packs: list[Pack]
    """Packs without a live entry, which can be removed as a whole."""
    dead: dict[str, set[int]]
    """Dead entries of packs that stay: what a tombstone has to say."""
    rubbish: Sequence[str] = ()
    """Other names to remove: packs that cannot be read, or of which this process knows no object."""

    @property
    def names(self) -> list[str]:
        """All names to remove."""
        return [*(pack.name for pack in self.packs), *self.rubbish]


class Writing:
    """Note that a call of this process is writing an object; others wait for its outcome.

    Thread safety: one thread ends it, any may wait.
    """

    __slots__ = ("ended", "outcome")

    def __init__(self) -> None:
        self.ended = Event()
        self.outcome = Outcome.UNAVAILABLE


@dataclass(slots=True)
class PackClaim:
    """An item of a batch that its call may write."""

    index: int
    item: SetItem
    node: int
    parent: int | None
    writing: Writing

    @property
    def is_page(self) -> bool:
        """Whether the object is the page itself, which others can follow."""
        return self.parent != self.node


@dataclass(slots=True)
class WritePlan:
    """Items of a set, sorted by what is to be done with them."""

    outcomes: list[Outcome | None]
    claims: list[PackClaim] = field(default_factory=list)
    """Objects to write, parents first."""
    waits: list[tuple[int, Writing]] = field(default_factory=list)
    """Items that another call is writing."""
    held: list[int] = field(default_factory=list)
