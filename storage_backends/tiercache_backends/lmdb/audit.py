"""Walks over a whole store, which check whether its databases agree and count the objects that have lost their page."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final, NamedTuple

from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import FACTS, HALF, Facts, Record, count_of, number_of, tick_of

_AT_ONCE: Final = 4096
"""Entries of `objects` that one transaction looks at."""


class Stretch(NamedTuple):
    """Result for one part of the store.

    `lost`: objects that have lost their page. `following`: the key at which the next part begins; empty at the end.
    """

    lost: int
    following: bytes


def check(environment: Environment) -> None:
    """Raise AssertionError unless all databases agree; in one read transaction, so that other processes may go on. Raises OSError."""
    environment.read(partial(_check, environment))


def orphans(environment: Environment) -> int:
    """Return the number of objects whose page is known and not stored, because a deletion left them behind. Raises OSError."""
    lost = 0
    position = b"\0"
    while position:
        some = environment.read(partial(_orphans, environment, position))
        lost += some.lost
        position = some.following
    return lost


def _check(environment: Environment, txn: Any) -> None:
    facts = Facts.unpack(txn.get(FACTS, db=environment.facts))
    records: dict[bytes, Record] = {}
    counts: dict[bytes, int] = {}
    for raw, value in txn.cursor(environment.objects):
        key = bytes(raw)
        if len(key) == HALF:
            counts[key] = count_of(value)
        else:
            record = Record.unpack(value)
            assert record is not None, f"{key.hex()} has no record"
            records[key] = record
    assert facts.objects == len(records), "every object is counted"
    assert facts.payload_bytes == sum(record.length for record in records.values()), "every byte is counted"
    assert counts == Counter(record.depends_on for record in records.values() if record.depends_on), "dependents are counted"
    sizes: Counter[int] = Counter()
    for raw, value in txn.cursor(environment.parts):
        sizes[number_of(raw)] += len(value)
    assert sizes == {record.number: record.length for record in records.values()}, "every object has its parts, and every part its object"
    assert max(sizes, default=0) < facts.next_number, "numbers are never used again"
    ages = {tick_of(raw): bytes(value) for raw, value in txn.cursor(environment.ages)}
    assert all(records[place].tick == tick for tick, place in ages.items()), "every age is an object's"
    assert max((record.tick for record in records.values()), default=0) < facts.next_tick, "no tick is from the future"
    assert all(ages.get(record.tick) == place for place, record in records.items()), "every object has an age"


def _orphans(environment: Environment, position: bytes, txn: Any) -> Stretch:
    """Count the orphans among the next objects from the key `position` on."""
    lost = 0
    with txn.cursor(environment.objects) as walk, txn.cursor(environment.objects) as look:
        found = walk.set_range(position)
        for _ in range(_AT_ONCE):
            if not found:
                return Stretch(lost, b"")
            place = bytes(walk.key())
            record = Record.unpack(walk.value()) if len(place) > HALF else None
            lost += record is not None and bool(record.depends_on) and not _is_there(look, record.depends_on, place)
            found = walk.next()
        return Stretch(lost, bytes(walk.key()) if found else b"")


def _is_there(look: Any, page: bytes, beside: bytes) -> bool:
    """Return whether an object of the page is stored other than the one at `beside`."""
    found = look.set_range(page)
    while found and look.key()[:HALF] == page:
        if len(look.key()) > HALF and look.key() != beside:
            return True
        found = look.next()
    return False
