"""The tables of the `file` store against plain models: objects, free space, recovery."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_backends.file.extents import ExtentAllocator
from tiercache_backends.file.objects import ObjectTable
from tiercache_backends.file.opening import sound_records
from tiercache_backends.file.records import DEPTH_KNOWN, PARENT_KNOWN, RECORD, CatalogContents, Extent

from tests.examples import example_count
from tests.storage.integrity import check_extents, check_residents
from tiercache.storage.checksum import Checksums
from tiercache.testing.objects import page_key

LAYOUTS = [page_key(("layout", n)) for n in range(3)]


def digest(page: int, layout: int = 0) -> bytes:
    return LAYOUTS[layout] + page_key(page)


@settings(max_examples=example_count(60), deadline=None)
@given(
    objects=st.dictionaries(
        st.tuples(st.integers(0, 20), st.integers(0, 2)), st.none() | st.integers(0, 25), max_size=40
    )
)
def test_loading_a_catalog_is_storing_one_by_one(objects: dict[tuple[int, int], int | None]) -> None:
    records = np.zeros(len(objects), RECORD)
    one_by_one, at_once = ObjectTable(with_macs=True), ObjectTable(with_macs=True)
    further = {}
    for i, ((page, layout), above) in enumerate(objects.items()):
        d, parent, depth = (
            digest(page, layout),
            None if above is None or above >= page else page_key(above),
            i % 3,
        )
        checksums = Checksums(bytes([i]) * 16, bytes([i + 1]) * 16)
        extents = (Extent(4 * i, 1), Extent(4 * i + 2, 1))[: 1 + i % 2]
        records[i]["number"], records[i]["digest"], records[i]["length"], records[i]["depth"] = (
            i + 1, np.void(d), 10 + i, depth,
        )  # fmt: skip
        records[i]["parent"], records[i]["namespace"] = np.void(parent or bytes(32)), 7
        records[i]["flags"] = PARENT_KNOWN * (parent is not None) | DEPTH_KNOWN * (depth > 0)
        records[i]["start"], records[i]["blocks"], records[i]["more"] = *extents[0], len(extents) - 1
        records[i]["checksum"], records[i]["mac"] = np.void(checksums.checksum), np.void(checksums.mac)
        further.update({i + 1: extents[1:]} if extents[1:] else {})
        nodes = [one_by_one.pages.hold(key) for key in (d[32:], parent) if key]
        above_node = nodes[1] if parent else None
        beyond = {0: extents[1:]} if extents[1:] else {}
        one_by_one.store(records[i : i + 1], [d], nodes[:1], [above_node], beyond)
        for node in nodes:
            one_by_one.pages.release(node)
    at_once.load_catalog(CatalogContents(records, further))
    seen = []
    for table in (one_by_one, at_once):
        check_residents(table)
        rows = table.rows_of_all([digest(*place) for place in objects])
        facts = [
            (table.extents(row), table.blocks(row), table.digest(row), table.number[row], table.length[row])
            for row in rows
        ]
        places = table.places(rows)
        assert [places.extents(i) for i in range(len(rows))] == [table.extents(row) for row in rows]
        seen.append(
            (
                facts,
                table.checksums(rows),
                [table.pages.depth[table.page[row]] for row in rows],
                table.pages.worth(),
            )
        )
    assert seen[0] == seen[1]
    for row in at_once.residents().tolist():
        at_once.leave(row)
        at_once.drop(row)
    check_residents(at_once)
    assert len(at_once) == at_once.payload == 0
    assert len(at_once._further) == 0  # private: what is kept of objects that are gone costs memory only


@settings(max_examples=example_count(150), deadline=None)
@given(slab=st.integers(1, 64), seed=st.integers(0, 10_000))
def test_space_places_objects_and_takes_all_back(slab: int, seed: int) -> None:
    random = Random(seed)
    space = ExtentAllocator(slab)
    for n in range(5):
        space.grow(Extent(n * slab, random.choice((slab, max(1, slab // 3)))))
    held: list[tuple[Extent, ...]] = []
    for _ in range(30):
        if held and random.random() < 0.5:
            space.give(held.pop(random.randrange(len(held))))
            continue
        wanted = [random.choice((1, 1, 3, 17, 70)) for _ in range(random.randrange(1, 10))]
        before = space.free
        if len(wanted) == 1:
            alone = space.allocate(wanted[0])
            assert (alone is None) == (wanted[0] > before), "what is free can be had"
            places = [alone or ()]
        else:
            places = space.allocate_all(wanted)
        assert all(
            sum(e.blocks for e in place) in (0, size) for place, size in zip(places, wanted, strict=True)
        )
        assert any(not place for place in places) <= (sum(wanted) > before), "what is free can be had"
        held += [place for place in places if place]
        check_extents(space)
        extents = sorted(e for place in held for e in place)
        assert all(a.start + a.blocks <= b.start for a, b in pairwise(extents)), "no block is had twice"
        assert sum(e.blocks for e in extents) == space.size - space.free
    for place in held:
        space.give(place)
    check_extents(space)
    assert space.free == space.size


def test_a_batch_lies_side_by_side() -> None:
    space = ExtentAllocator(1024)
    space.grow(Extent(0, 1024))
    assert space.allocate_all([5] * 100) == [(Extent(5 * n, 5),) for n in range(100)]


def test_of_two_records_of_one_object_the_later_one_counts() -> None:
    records = np.zeros(3, RECORD)
    for i, d in enumerate([digest(0), digest(1), digest(0)]):
        records[i]["number"], records[i]["digest"], records[i]["length"] = i + 1, np.void(d), 4096
        records[i]["start"], records[i]["blocks"] = i, 1
    sound, unsound, gaps = sound_records(CatalogContents(records, {}), [Extent(0, 8)], 8)
    assert (sound.records["number"].tolist(), unsound, gaps) == ([2, 3], [1], [Extent(0, 1), Extent(3, 5)])


@settings(max_examples=example_count(100), deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_of_records_that_claim_the_same_blocks_the_newest_counts(places: list[tuple[int, int]]) -> None:
    records = np.zeros(len(places), RECORD)
    for i, (start, blocks) in enumerate(places):
        records[i]["number"], records[i]["digest"] = i + 1, np.void(digest(i))
        records[i]["start"], records[i]["blocks"], records[i]["length"] = start, blocks, blocks * 4096
    owner = {block: i for i, (start, blocks) in enumerate(places) for block in range(start, start + blocks)}
    lost = [
        i + 1
        for i, (start, blocks) in enumerate(places)
        if any(owner[block] != i for block in range(start, start + blocks))
    ]
    _, unsound, gaps = sound_records(CatalogContents(records, {}), [Extent(0, 32)], 32)
    assert unsound == lost
    free = {block for gap in gaps for block in range(gap.start, gap.start + gap.blocks)}
    assert free == set(range(32)) - {block for block, i in owner.items() if i + 1 not in lost}
