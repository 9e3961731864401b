"""Nouns of KV events: what happened, in which tier, and to which objects."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiercache.core import PoolName, Tier


class EventKind(enum.StrEnum):
    """Kind of a change."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Nothing that was told of this place holds any more."""


class Medium(enum.StrEnum):
    """Kind of memory in which objects lie, in vLLM's words."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"
    """Every tier below the host's memory; `Place.tier` says which."""

    @classmethod
    def of(cls, tier: Tier) -> Medium:
        """Return the medium of a tier of the controller."""
        return (cls.GPU, cls.CPU, cls.STORAGE)[tier]


class Place(NamedTuple):
    """One tier of one publisher."""

    medium: Medium
    tier: str = ""
    """Name of a tier of a chain, or of a store; empty for the device and the host."""

    def __str__(self) -> str:
        return f"{self.medium}/{self.tier}" if self.tier else str(self.medium)


class ObjectGroup(NamedTuple):
    """Group to which all objects of one event belong.

    An object is named by its place, pool, layout and page key. Objects of two layouts (two ranks, for
    example) with one page key are different objects.
    """

    pool: PoolName
    namespace: bytes = b""
    """Namespace of the objects; empty if the publisher does not know it."""
    layout: bytes = b""
    """Layout digest, 32 bytes; empty if the publisher does not know it."""
    page_size: int = 0
    """Tokens per page; 0 if the publisher does not know it."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Something that happened to objects of one group in one place.

    The keys of a STORED event are a run: each page follows the one before it in the sequence. The keys of a
    REMOVED event are in any order. A CLEARED event has neither group nor keys.
    """

    kind: EventKind
    place: Place | None
    """None: all places of the publisher, in a CLEARED event only."""
    group: ObjectGroup | None = None
    keys: Sequence[bytes] = ()
    """Page keys, 32 bytes each (the last 32 bytes of an object key's digest)."""
    parent: bytes | None = None
    """Page key before the first key of a STORED event; None if there is none, or it is not known."""
    depth: int | None = None
    """Pages from the sequence's start to the end of the first page of a STORED event; None if not known."""
    tokens: Sequence[int] = ()
    """Token ids of the pages of a STORED event; empty unless the publisher is told to reveal them."""


class StoredObject(NamedTuple):
    """One object that was stored, as `runs_of` joins it to runs."""

    group: ObjectGroup
    key: bytes
    parent: bytes | None = None
    """Page key of the page before; the object's own key for a state."""
    depth: int | None = None


def runs_of(place: Place, objects: Iterable[StoredObject]) -> list[KVEvent]:
    """Return the STORED events of these objects. Neighbours of which each follows the other share an event.

        objects   a1 -> a2 -> a3   state of a3   b1         events   [a1 a2 a3]  [state of a3]  [b1]

    A state, whose parent is its own page, is an event of its own, with no parent.
    """
    events: list[KVEvent] = []
    run: list[StoredObject] = []
    for found in objects:
        if run and not (found.group == run[-1].group and found.parent == run[-1].key != found.key):
            events.append(_stored(place, run))
            run = []
        run.append(found)
    if run:
        events.append(_stored(place, run))
    return events


def _stored(place: Place, run: Sequence[StoredObject]) -> KVEvent:
    first = run[0]
    parent = None if first.parent == first.key else first.parent
    return KVEvent(EventKind.STORED, place, first.group, [o.key for o in run], parent, first.depth)
