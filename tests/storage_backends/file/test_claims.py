"""Batches of new pages that a `file` store claims and publishes in columns, beside the same one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_backends.file.claims import Claim, Claims, Shortage
from tiercache_backends.file.records import RECORD, Extent, Records
from tiercache_backends.file.state import StoreState

from tests.examples import example_count
from tests.storage.integrity import check_pages, check_state, nodes_of
from tests.storage.resident_model import HYBRID, KV, LAYOUTS, MORE_KV, PLAIN, STATE
from tests.storage.test_residents import seen
from tiercache.core import Outcome
from tiercache.storage.pages import BROKEN, CUT, SERVED
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import RestorablePages, hold_new
from tiercache.testing.objects import page_key

SEQUENCES, LENGTH = 6, 32
MOST = SEQUENCES * LENGTH
"""Pages of all sequences. Every second sequence is in a namespace that needs states."""
FLAGS = BROKEN | SERVED | CUT


class Watched(StoreState):
    """A state that counts how often it claimed a batch in columns."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(1 << 20, with_macs=False, clock=clock)
        self.at_once = 0
        self.grow(Extent(0, 1 << 20))

    def _claim_new(self, batch: list[Claim], limit: int, claims: Claims) -> bool:
        done = super()._claim_new(batch, limit, claims)
        self.at_once += done
        return done


class Clock:
    """Seconds that pass only when they are told to, so that both states see the same."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Twins:
    """A state that gets batches, and one that gets each of their items alone."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.clock = Clock()
        self.batched, self.single = Watched(self.clock), Watched(self.clock)
        self.next = 1
        self.open: list[tuple[Claims, dict[int, Claims]]] = []
        self.valued = random.random() < 0.5
        for state in (self.batched, self.single):
            state.require_states(HYBRID)
            if self.valued:  # the first hint notes the tick, and the two states are not at the same then
                state._objects.rank(1.0)  # private: begins to rank by values

    def claim(self) -> None:
        wanted = self.draw()
        batch = self.batched.claim([replace(one) for one in wanted], 4096)
        alone: dict[int, Claims] = {}
        missing: set[bytes] = set()
        for at in parents_first([(one.page, one.parent_page) for one in wanted]):
            one = replace(wanted[at])
            alone[one.index] = claims = self.single.claim([one], 4096, missing)
            missing |= claims.missing
        assert {one.index for one in batch.fresh} == {i for i, c in alone.items() if c.fresh}
        assert batch.refused == {i: o for c in alone.values() for i, o in c.refused.items()}
        assert set(batch.refused.values()) <= {Outcome.ERROR, Outcome.THROTTLED}
        assert sorted(batch.hits) == sorted(i for c in alone.values() for i in c.hits)
        assert sorted(batch.later) == sorted(i for c in alone.values() for i in c.later)
        self.open.append((batch, alone))

    def publish(self) -> None:
        batch, alone = self.open.pop(self.random.randrange(len(self.open)))
        failed = {one.index for one in batch.fresh if self.random.random() < 0.02}
        stored: list[Claim] = []
        for one in batch.fresh:
            if one.index not in failed and not (one.parent_page in {c.page for c in batch.fresh} - {
                c.page for c in stored if c.is_page
            } and one.is_page):  # fmt: skip
                stored.append(one)
        self.batched.reserve(stored, len(stored))
        records = self.records(stored)
        self.batched.publish(batch, stored, records)
        for at, one in enumerate(stored):
            claims, record = alone[one.index], records[at : at + 1].copy()
            self.single.reserve(claims.fresh, 1)
            record["start"] = claims.fresh[0].extents[0].start
            self.single.publish(claims, claims.fresh, record)
        left = {one.index for one in batch.fresh} - {one.index for one in stored}
        for i, claims in alone.items():
            if i in left:
                self.single.publish(claims, [], records[:0])
            self.single.release_nodes(claims.held.values())
        self.batched.release_nodes(batch.held.values())

    def claim_and_publish(self, batch: list[Claim]) -> None:
        """Store a batch in the state that gets batches."""
        claims = self.batched.claim(batch, 4096)
        assert [one.index for one in claims.fresh] == [one.index for one in batch]
        self.batched.reserve(claims.fresh, len(claims.fresh))
        self.batched.publish(claims, claims.fresh, self.records(claims.fresh))
        self.batched.release_nodes(claims.held.values())

    def records(self, stored: Sequence[Claim]) -> Records:
        records = np.zeros(len(stored), RECORD)
        for record, one in zip(records, stored, strict=True):
            record["number"], record["length"] = self.next, 10 + self.next
            record["start"], record["blocks"] = one.extents[0]
            record["depth"], record["namespace"] = one.depth, one.namespace_id
            self.next += 1
        return records

    def remove(self, digests: Iterable[bytes]) -> None:
        names = list(digests)
        for state in (self.batched, self.single):
            state.finish_removal(state.take_out(names))

    def evict(self) -> None:
        """Evict some objects from both states. Among objects that came together, the order is free."""
        count = self.random.randrange(1, 9)
        self.single.figures()  # an eviction counts the orphans first, and so does this
        removal = self.batched.evict(Shortage(objects=count), count)
        self.single.finish_removal(self.single.take_out(removal.digests))
        self.batched.finish_removal(removal)

    def draw(self) -> list[Claim]:
        """Return a batch, mostly a sequence that begins or goes on, of objects that no other call writes."""
        random, faulty = self.random, self.random.random() < 0.5
        busy = {one.digest for claims, _ in self.open for one in claims.fresh}
        sequence = random.randrange(SEQUENCES)
        held = self.batched.present([LAYOUTS[KV] + page_key(sequence * LENGTH + n) for n in range(LENGTH)])
        first = held.index(False) if False in held else 0
        if random.random() < 0.2:
            first = LENGTH - held[::-1].index(True) if True in held else 0
        if faulty:
            first = max(0, first + random.randrange(-1, 2))
        count = random.choice((1, 7, 8, 9, 20))
        pages = [(sequence, n) for n in range(first, min(first + count, LENGTH))]
        if random.random() < 0.3:
            pages += [((sequence + 2) % SEQUENCES, n) for n in range(9)]
        space, layout = sequence % 2, KV
        worker, value = random.randrange(2), random.choice((None, 2.0)) if self.valued else None
        batch: list[Claim] = []
        for sequence, n in pages:
            page, depth, mine = sequence * LENGTH + n, n + 1, space
            above: int | None = page - 1 if n else None
            if sequence >= 2:  # these begin after the fourth page of one of the first two
                above, depth = above if n else sequence % 2 * LENGTH + 3, depth + 4
            if faulty:
                layout = random.choices((KV, MORE_KV, STATE), (20, 1, 1))[0]
                above = random.choices((above, None, random.randrange(MOST)), (20, 1, 1))[0]
                depth = random.choices((depth, 0, 3), (20, 1, 1))[0]
                mine = random.choices((space, 1 - space), (20, 1))[0]
                worker = random.choices((worker, 2), (20, 1))[0]
                value = random.choices((value, 4.0), (20, 1))[0] if self.valued else None
            key = page_key(page)
            parent = key if layout == STATE else None if above in (None, page) else page_key(above)
            batch.append(Claim(len(batch), LAYOUTS[layout] + key, key, parent, 1, depth, mine, value, worker))
        if faulty and random.random() < 0.1:
            random.shuffle(batch)
        if batch and faulty and random.random() < 0.1:
            twice = random.choice(batch)
            batch.append(replace(twice, index=len(batch), digest=LAYOUTS[MORE_KV] + twice.page, extents=()))
        return [one for one in {one.digest: one for one in batch}.values() if one.digest not in busy]

    def compare(self) -> None:
        tables = [state._objects for state in (self.batched, self.single)]  # private: columns to compare
        found = []
        for state, table in zip((self.batched, self.single), tables, strict=True):
            check_state(state)
            pages = table.pages
            nodes = [node for node in nodes_of(pages) if pages.first[node] >= 0]
            hints = (
                {
                    pages.key(n): (pages.rank[n], pages.rank[n] and pages.worker[n], pages.state_rank[n])
                    for n in nodes
                }
                if pages.hinted
                else {}
            )
            at = np.array(nodes, np.int64)
            ranks = pages.values.ranks(at, np.zeros(len(at), np.bool_)) if pages.hinted else at
            found.append(
                (
                    seen(table),
                    {pages.key(n): round(r, 9) for n, r in zip(nodes, ranks.tolist(), strict=True)}
                    if pages.hinted
                    else {},
                    {pages.key(n): (pages.flags[n] & FLAGS, pages.children[n], pages.live[n]) for n in nodes},
                    hints,
                    (pages.unproven_bytes, pages.worth(), table.clock, table.newest, table.payload),
                )
            )
        for a, b in zip(*found, strict=True):
            assert a == b


@settings(max_examples=example_count(120), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_batch_in_columns_is_its_items_one_by_one(seed: int) -> None:
    random = Random(seed)
    twins, patience = Twins(random), random.choice((0.3, 0.8))
    for _ in range(30):
        twins.clock.now += random.choice((0.0, 0.5, 2.0))
        if random.random() < 0.2:  # the end of a sequence, and then some pages in the middle of any
            begin, end = sorted(random.choices(range(MOST), k=2))
            gone = [n for n in range(begin, end) if n // LENGTH == begin // LENGTH or random.random() < 0.05]
            twins.remove(LAYOUTS[layout] + page_key(n) for n in gone for layout in (KV, MORE_KV, STATE))
        if not twins.valued and random.random() < 0.1:
            twins.evict()
        twins.claim()
        while twins.open and (len(twins.open) > 2 or random.random() < patience):
            twins.publish()
        if not twins.open:
            twins.compare()
    while twins.open:
        twins.publish()
    twins.compare()
    assert twins.single.at_once == 0


def test_plain_batches_are_claimed_in_columns() -> None:
    """Otherwise the test above would compare one way with itself."""
    twins = Twins(Random(1))
    keys = [page_key(n) for n in range(20)]
    batch = [
        Claim(n, LAYOUTS[KV] + key, key, keys[n - 1] if n else None, 1, n + 1, PLAIN, None, 0)
        for n, key in enumerate(keys)
    ]
    first, rest = batch[:10], batch[10:]
    for part in (first, rest):
        twins.claim_and_publish(part)
    assert twins.batched.at_once == 2
    assert all(twins.batched.present([one.digest for one in batch]))


def test_objects_that_are_being_removed_are_waited_for() -> None:
    twins = Twins(Random(1))
    batch = [Claim(n, LAYOUTS[KV] + page_key(n), page_key(n), None, 1, 0, PLAIN, None, 0) for n in range(9)]
    twins.claim_and_publish(batch)
    removal = twins.batched.take_out([one.digest for one in batch])
    claims = twins.batched.claim([replace(one, extents=()) for one in batch], 4096)
    assert (claims.fresh, len(claims.later), claims.waits) == ([], 9, {removal.done})
    twins.batched.finish_removal(removal)
    assert len(twins.batched.claim([replace(one, extents=()) for one in batch], 4096).fresh) == 9


def test_pages_that_cannot_be_held_at_once_leave_nothing_behind() -> None:
    pages, keys = RestorablePages(Clock()), [page_key(n) for n in range(9)]
    other = pages.hold(keys[5])
    assert hold_new(pages, keys, [None] * 9, [0] * 9, PLAIN) is None
    assert hold_new(pages, [*keys[:4], keys[0]], [None] * 5, [0] * 5, PLAIN) is None
    assert hold_new(pages, keys[:4], [keys[3], *keys[:3]], [0] * 4, PLAIN) is None, "they follow in a circle"
    check_pages(pages)
    assert list(nodes_of(pages)) == [other]
    pages.release(other)
    held = hold_new(pages, keys, [None, *keys[:-1]], [*range(1, 10)], PLAIN)
    assert held is not None
    assert [pages.depth[held[key]] for key in keys] == [*range(1, 10)]
    pages.expected_all([held[key] for key in keys])
    assert not any(pages.depth[node] or pages.coming[node] for node in held.values())
    for node in held.values():
        pages.release(node)
    check_pages(pages)
    assert list(nodes_of(pages)) == []
