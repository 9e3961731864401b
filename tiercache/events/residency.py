"""`ResidencyMap`: what a subscriber knows of where objects lie."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from tiercache.core import PoolName
from tiercache.events.base import EventKind, KVEvent, Place


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

    def where(self, key: bytes, pool: PoolName) -> list[Place]:
        """Return the places that have an object of `pool` with this page key, in any layout."""
        return [
            place
            for place, held in self._places.items()
            if any(found.key == key and found.pool is pool for found in held)
        ]
