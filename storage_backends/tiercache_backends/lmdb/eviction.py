"""Which objects go when the map fills up: the least recently used that nothing depends on (see `tiercache.storage.residents`).

The walk goes through `ages`, oldest first. A page that others depend on is taken out of `ages` when the walk meets it, instead of being
met again by every eviction, and comes back with its own old tick when the last of its dependents goes: then it is the next victim.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tiercache_backends.lmdb.ledger import Ledger
from tiercache_backends.lmdb.records import HALF


class Spared(NamedTuple):
    """What an eviction must leave: the places of the running batch's own objects, and the pages on which it is about to depend."""

    places: AbstractSet[bytes]
    pages: AbstractSet[bytes]


class Evicted(NamedTuple):
    """How an eviction went. `exhausted`: there is nothing left that could go."""

    objects: int
    exhausted: bool


def evict(ledger: Ledger, enough: Callable[[], bool], spared: Spared, at_most: int) -> Evicted:
    """Remove up to `at_most` objects until there is `enough` room."""
    position = 0
    gone = parked = 0
    while gone + parked < at_most and not enough():
        found = ledger.oldest(position)
        if found is None:
            break
        tick, place = found
        position = tick + 1
        record = ledger.find(place)
        if record is None or record.tick != tick:
            ledger.park(tick)  # an age without an object: only damage leaves one
        elif place in spared.places:
            continue
        elif ledger.is_inner(place, record):
            ledger.park(tick)
            parked += 1
        elif record.hangs_on(place) or place[:HALF] not in spared.pages:
            back = ledger.remove(place, record)
            position = position if back is None else min(position, back)
            gone += 1
    else:
        return _noted(ledger, gone, exhausted=False)
    return _noted(ledger, gone, exhausted=True)


def _noted(ledger: Ledger, gone: int, *, exhausted: bool) -> Evicted:
    ledger.facts = ledger.facts._replace(evicted=ledger.facts.evicted + gone)
    return Evicted(gone, exhausted)
