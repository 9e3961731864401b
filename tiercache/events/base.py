"""Nouns of KV events, the contract of those who know where objects lie, and what a reader knows of it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from tiercache.core import PoolName, Tier

MAX_KEYS: Final = 1024
"""Number of keys that one answer of a source has, about."""
ChangeNote = Callable[[Sequence[bytes], bool], None]
"""Function that takes the digests of objects that a store has from now on (True), or no longer has."""


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


class EventSource(ABC):
    """Part of a process that knows what is in some places.

    The implementation must return each change that it knows, in the order in which it happened, from
    `collect`, and begin a snapshot only with what `collect` has not returned yet or has returned before.

    Thread safety: one thread, the publisher's, calls `collect` and `snapshot`.
    """

    @abstractmethod
    def collect(self) -> Sequence[KVEvent]:
        """Return the next changes, with about `MAX_KEYS` keys; nothing if there are none now."""

    @abstractmethod
    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        """Yield STORED events of all that is there, in parts.

        Changes during the iteration may be in it or not; `collect` returns them all the same.
        """

    @abstractmethod
    def follow(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever `collect` may have something new. It does not wait."""

    def close(self) -> None:  # noqa: B027
        """End the source; called once, on the thread that calls `collect`."""


class Resident(NamedTuple):
    """Object in a place, as events name it."""

    pool: PoolName
    layout: bytes
    key: bytes


class ResidencyMap:
    """Objects by place, rebuilt from the events of one publisher.

    Thread safety: one thread.
    """

    def __init__(self) -> None:
        self._places: dict[Place, set[Resident]] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Apply events in their order; an event that is applied twice changes nothing."""
        for event in events:
            place, group = event.place, event.group
            if place is None:
                self._places.clear()
            elif group is None:
                self._places.pop(place, None)
            else:
                named = {Resident(group.pool, group.layout, key) for key in event.keys}
                held = self._places.setdefault(place, set())
                if event.kind is EventKind.STORED:
                    held |= named
                else:
                    held -= named

    def places(self) -> dict[Place, Set[Resident]]:
        """Return the objects of each place that has any."""
        return {place: held for place, held in self._places.items() if held}
