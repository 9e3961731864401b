"""The tables of the `file` store against plain models: pages, objects, eviction order, free space, recovery."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tiercache_backends.file.catalog import Loaded
from tiercache_backends.file.eviction import EvictionOrder, StoredUnits
from tiercache_backends.file.objects import Facts, Objects
from tiercache_backends.file.pages import Pages
from tiercache_backends.file.records import PARENT_KNOWN, RECORD
from tiercache_backends.file.recovery import sound_records
from tiercache_backends.file.space import APART_BLOCKS, Extent, Space

from tiercache.policy import Lru, Policy, UnitKind, Units
from tiercache.storage.checksum import Sealed
from tiercache.testing.objects import page_key

LAYOUTS = [page_key(("layout", n)) for n in range(3)]
SEALED = Sealed(bytes(16), bytes(16))


def digest(page: int, layout: int = 0) -> bytes:
    return LAYOUTS[layout] + page_key(page)


def add(objects: Objects, facts: Facts, d: bytes, parent: bytes | None, extents: tuple[Extent, ...]) -> int:
    return objects.add(facts, d, None if parent is None else objects.hold(parent), extents)


class Deepest(Policy):
    """The deepest page first, whatever its age: an order that has nothing to do with recency."""

    name = "deepest"
    steady = True

    def rank(self, units: Units) -> np.ndarray:
        return -units.depth.astype(float)


class OrderMachine(RuleBasedStateMachine):
    """Adding, touching, taking out, bringing back and evicting, against a list that is searched from end to end."""

    policy: Callable[[], Policy] = Lru

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects(with_macs=False)
        self.chosen = type(self).policy()
        self.order = EvictionOrder(self.objects, self.chosen)
        self.objects.exposed = self.order.offer
        self.model: dict[bytes, bytes | None] = {}
        self.rows: dict[bytes, int] = {}
        self.number = 0

    @rule(page=st.integers(0, 14), layout=st.integers(0, 2), above=st.none() | st.integers(0, 14))
    def add(self, page: int, layout: int, above: int | None) -> None:
        """A state (layout 2) hangs on its own page; a page depends on any other, there or not."""
        d = digest(page, layout)
        parent = page_key(page) if layout == 2 else (page_key(above) if above is not None and above < page else None)
        if d in self.model:
            return
        self.number += 1
        row = add(self.objects, Facts(self.number, 100 + page, page, SEALED), d, parent, (Extent(self.number, 1),))
        self.order.offer(row)
        self.model[d], self.rows[d] = parent, row

    @rule(page=st.integers(0, 14), layout=st.integers(0, 2))
    def touch(self, page: int, layout: int) -> None:
        if digest(page, layout) in self.model:
            self.objects.touch(self.rows[digest(page, layout)])

    @rule(page=st.integers(0, 14), layout=st.integers(0, 2), back=st.booleans())
    def take_out(self, page: int, layout: int, back: bool) -> None:
        d = digest(page, layout)
        if d not in self.model:
            return
        row = self.rows[d]
        key = self.objects.leave(row)
        assert key == (d, self.model[d])
        if back:
            self.objects.enter(row, *key)
            self.order.offer(row)
        else:
            self.objects.drop(row)
            del self.model[d], self.rows[d]

    @rule(count=st.integers(1, 4), pinned=st.sets(st.integers(0, 14), max_size=3))
    def evict(self, count: int, pinned: set[int]) -> None:
        held = [row for d, row in self.rows.items() if any(d.endswith(page_key(p)) for p in pinned)]
        for row in held:
            self.objects.pins[row] += 1
        taken: list[bytes] = []

        def enough(row: int) -> bool:
            expected = self.least(held)
            gone = self.objects.leave(row)[0]
            assert self.value(row) == expected, "the least of all leaves goes"
            del self.model[gone], self.rows[gone]
            self.objects.drop(row)
            taken.append(gone)
            return len(taken) == count

        self.order.victims(enough)
        assert len(taken) == count or self.least(held) is None
        for row in held:
            self.objects.pins[row] -= 1

    def value(self, row: int) -> float:
        return float(self.chosen.rank(StoredUnits(self.objects, np.array([row])))[0])

    def least(self, held: list[int]) -> float | None:
        leaves = [
            row
            for d, row in self.rows.items()
            if row not in held and (self.model[d] == d[32:] or not any(parent == d[32:] for parent in self.model.values()))
        ]
        return min((self.value(row) for row in leaves), default=None)

    @invariant()
    def agrees(self) -> None:
        self.objects.check_integrity()
        assert len(self.objects) == len(self.model)
        keys = [digest(page, layout) for page in range(15) for layout in range(3)]
        expected = [self.rows.get(d, -1) for d in keys]
        assert list(self.objects.find_many(keys)) == expected
        assert [self.objects.find(d) for d in keys] == expected
        pages = {d[32:] for d, parent in self.model.items() if parent != d[32:]}
        assert self.objects.orphans() == sum(parent is not None and parent not in pages for parent in self.model.values())


@pytest.mark.parametrize("policy", [Lru, Deepest])
def test_objects_and_their_order_match_a_plain_model(policy: type[Policy]) -> None:
    machine = type("M", (OrderMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(deadline=None, max_examples=80, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    )


def test_thousands_of_leaves_go_in_order() -> None:
    """More than the front holds, so that the horizon moves several times."""
    objects = Objects(with_macs=False)
    order = EvictionOrder(objects, Lru())
    objects.exposed = order.offer
    rows = [add(objects, Facts(n + 1, 1, 0, SEALED), digest(n), None, (Extent(n, 1),)) for n in range(5000)]
    shuffled = rows[:]
    Random(1).shuffle(shuffled)
    for row in shuffled:
        objects.touch(row)
    gone: list[int] = []

    def enough(row: int) -> bool:
        objects.leave(row)
        gone.append(row)
        return len(gone) % 700 == 0

    while len(gone) < 5000:
        order.victims(enough)
    assert gone == shuffled


def test_what_a_policy_sees() -> None:
    objects = Objects(with_macs=False)
    rows = [add(objects, Facts(n + 1, 1, n + 1, SEALED), digest(n), page_key(n - 1) if n else None, (Extent(n, 1),)) for n in range(5)]
    state = add(objects, Facts(9, 1, 2, SEALED), digest(1, 2), page_key(1), (Extent(9, 1),))
    units = StoredUnits(objects, np.array([*rows, state]))
    assert units.depth.tolist() == [1, 2, 3, 4, 5, 2]
    assert units.children.tolist() == [1, 2, 1, 1, 0, 2]
    assert units.replay.tolist() == [1, 2, 1, 2, 3, 2], "from the start, or from the state on page 1"
    assert units.kind.tolist() == [UnitKind.LEAF] * 5 + [UnitKind.STATE]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_loading_all_at_once_is_adding_one_by_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 60))
    pages = data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    layouts = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    parents = data.draw(st.lists(st.none() | st.integers(0, 25), min_size=n, max_size=n))
    wanted = {}
    for page, layout, parent in zip(pages, layouts, parents, strict=True):
        wanted.setdefault(digest(page, layout), None if parent is None else page_key(parent))
    records = np.zeros(len(wanted), RECORD)
    one_by_one, at_once = Objects(with_macs=True), Objects(with_macs=True)
    for i, (d, above) in enumerate(wanted.items()):
        records[i]["number"], records[i]["digest"], records[i]["length"] = i + 1, np.void(d), 10 + i
        records[i]["parent"], records[i]["flags"] = np.void(above or bytes(32)), PARENT_KNOWN * (above is not None)
        records[i]["start"], records[i]["blocks"] = i, 1
        add(one_by_one, Facts(i + 1, 10 + i, 0, SEALED), d, above, (Extent(i, 1),))
    at_once.load(Loaded(records, {}))
    for objects in (one_by_one, at_once):
        objects.check_integrity()
    keys = list(wanted)
    rows = [(objects.find_many(keys), objects) for objects in (one_by_one, at_once)]
    seen = [[(o.placement(r), o.is_leaf(r), o.hangs(r), o.digest(r)) for r in found] for found, o in rows]
    assert seen[0] == seen[1]
    assert one_by_one.orphans() == at_once.orphans()
    for d in keys:
        at_once.drop((row := at_once.find(d), at_once.leave(row))[0])
    at_once.check_integrity()
    assert len(at_once) == at_once.payload == 0


def test_pages_whose_keys_begin_alike_are_told_apart() -> None:
    alike = [bytes(8) + page_key(n)[8:] for n in range(50)]
    words = np.frombuffer(b"".join(alike), np.uint64).reshape(50, 4)
    pages = Pages()
    nodes, _ = pages.load(words, words, np.zeros(0, np.int64))
    assert len(set(nodes.tolist())) == 50
    assert pages.find_many(words).tolist() == nodes.tolist() == [pages.find(key) for key in alike]
    assert pages.find(bytes(32)) == -1


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_space_places_batches_and_takes_all_back(seed: int) -> None:
    random = Random(seed)
    space = Space(64)
    for n in range(4):
        space.grow(Extent(n * 64, 64))
    held: list[tuple[Extent, ...]] = []
    for _ in range(30):
        if held and random.random() < 0.5:
            space.give(held.pop(random.randrange(len(held))))
            continue
        sizes = [random.choice([1, 1, 3, 17, 70]) for _ in range(random.randrange(1, 9))]
        before = space.free
        places = space.allocate_all(sizes)
        assert all(sum(e.blocks for e in place) in (0, size) for place, size in zip(places, sizes, strict=True))
        assert any(not place for place in places) <= (sum(sizes) > before), "what is free can be had"
        held += [place for place in places if place]
        space.check_integrity()
        blocks = [b for place in held for e in place for b in range(e.start, e.start + e.blocks)]
        assert len(blocks) == len(set(blocks)) == space.size - space.free
    for place in held:
        space.give(place)
    space.check_integrity()
    assert space.free == 256


def test_a_batch_lies_side_by_side() -> None:
    space = Space(1024)
    space.grow(Extent(0, 1024))
    assert space.allocate_all([5] * 100) == [(Extent(5 * n, 5),) for n in range(100)]


def test_a_large_batch_lies_in_two_slabs() -> None:
    large = APART_BLOCKS // 4
    space = Space(16 * large)
    space.grow(Extent(0, 16 * large))
    assert space.needs_second_slab(4 * large)
    assert not space.needs_second_slab(APART_BLOCKS - 1)
    assert not space.needs_second_slab(17 * large), "it does not fit anyway"
    assert space.allocate_all([large] * 4) == [(Extent(n * large, large),) for n in range(4)], "there is no other slab"
    space.grow(Extent(16 * large, 16 * large))
    assert not space.needs_second_slab(4 * large)
    places = [place for [place] in space.allocate_all([large] * 6)]
    assert [place.start // space.slab_blocks for place in places] == [0, 0, 0, 1, 1, 1]
    assert all(b.start == a.start + large for half in (places[:3], places[3:]) for a, b in pairwise(half)), "each half side by side"
    assert [len({place.start // space.slab_blocks for [place] in space.allocate_all(sizes)}) for sizes in ([5] * 9, [4 * large])] == [1, 1]
    space.check_integrity()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_large_batches_lose_and_double_no_block(seed: int) -> None:
    random, slab = Random(seed), APART_BLOCKS // 2
    space = Space(slab)
    for n in range(6):
        space.grow(Extent(n * slab, random.choice([slab, slab // 3])))
    held: list[tuple[Extent, ...]] = []
    for _ in range(20):
        if held and random.random() < 0.5:
            space.give(held.pop(random.randrange(len(held))))
            continue
        sizes = [random.choice([1, 17, slab // 3, slab + 5]) for _ in range(random.randrange(1, 12))]
        before = space.free
        places = space.allocate_all(sizes)
        assert all(sum(e.blocks for e in place) in (0, size) for place, size in zip(places, sizes, strict=True))
        assert any(not place for place in places) <= (sum(sizes) > before), "what is free can be had"
        held += [place for place in places if place]
        space.check_integrity()
        extents = sorted(e for place in held for e in place)
        assert all(a.start + a.blocks <= b.start for a, b in pairwise(extents))
        assert sum(e.blocks for e in extents) == space.size - space.free


def test_of_two_records_of_one_object_the_later_one_counts() -> None:
    records = np.zeros(3, RECORD)
    for i, d in enumerate([digest(0), digest(1), digest(0)]):
        records[i]["number"], records[i]["digest"], records[i]["length"] = i + 1, np.void(d), 4096
        records[i]["start"], records[i]["blocks"] = i, 1
    sound, unsound, gaps = sound_records(Loaded(records, {}), [Extent(0, 8)], 8)
    assert (sound.records["number"].tolist(), unsound, gaps) == ([2, 3], [1], [Extent(0, 1), Extent(3, 5)])
