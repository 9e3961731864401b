"""What policies see and in which order units go: the table, the queue, the ghosts, and the digests that they are found by."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import Tier
from tiercache.index import Node
from tiercache.index.eviction import UNIT_KINDS
from tiercache.index.ghosts import Ghosts
from tiercache.index.prefixes import _BASE, _MIX, Prefixes
from tiercache.index.queue import Victim
from tiercache.index.units import UnitTable
from tiercache.policy import CheckpointKind, Lru, Policy, Reuse, UnitKind, Units
from tiercache.policy.base import Ranks
from tiercache.testing.policy_rig import BYTES, KV, SETUPS, STATE, PlainUnits, Rig, random_units, tokens_of, units

DEVICE_PAGES, DEVICE_STATES, HOST_UNITS, STORED_LEAVES = range(4)
WORD = 2**64


# -- prefixes ----------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, WORD - 1) | st.integers(0, 3), max_size=40).map(lambda values: np.array(values, np.uint64))


def recurrence(prefixes: Prefixes, sequence: np.ndarray, before: int) -> list[int]:
    """The digests one page after the other, with Python's integers."""
    size = prefixes._page_size
    weights = [int(weight) for weight in prefixes._weights]
    out = []
    for page in range(len(sequence) // size):
        own = sum(int(t) * w for t, w in zip(sequence[page * size : (page + 1) * size], weights, strict=True)) % WORD
        own = (own ^ own >> 32) * int(_MIX) % WORD
        before = (before * _BASE + own) % WORD
        out.append(before)
    return out


@settings(deadline=None)
@given(sequence=tokens, size=st.integers(1, 5), before=st.integers(0, WORD - 1))
def test_a_digest_is_its_predecessor_s_times_the_base_plus_its_page(sequence: np.ndarray, size: int, before: int):
    prefixes = Prefixes(size)
    assert prefixes.of(sequence, before).tolist() == recurrence(prefixes, sequence, before)
    assert prefixes.of(sequence, before).dtype == np.uint64


@settings(deadline=None)
@given(sequence=tokens, size=st.integers(1, 5), cut=st.integers(0, 40), extra=st.binary(max_size=4))
def test_going_on_from_a_digest_is_as_one_pass(sequence: np.ndarray, size: int, cut: int, extra: bytes):
    prefixes = Prefixes(size)
    whole = prefixes.of(sequence, prefixes.start(extra))
    cut = min(cut, len(whole))
    first = prefixes.of(sequence[: cut * size], prefixes.start(extra))
    rest = prefixes.of(sequence[cut * size :], int(first[-1]) if cut else prefixes.start(extra))
    assert np.concatenate([first, rest]).tolist() == whole.tolist()


def test_digests_of_large_arrays():
    """A sequence long enough that the table of powers grows, in an object that knew few of them and in one that knew more."""
    sequence = np.random.default_rng(1).integers(0, WORD, 4 * 100_001 + 3, np.uint64)
    whole = Prefixes(4).of(sequence, 7)
    assert len(whole) == 100_001
    prefixes, parts, before = Prefixes(4), [], 7
    for start in range(0, len(sequence), 4 * 7919):
        parts.append(prefixes.of(sequence[start : start + 4 * 7919], before))
        before = int(parts[-1][-1])
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole[-3:].tolist() == recurrence(prefixes, sequence[-15:-3], int(whole[-4]))
    assert len(np.unique(whole)) == len(whole)


def test_other_sequences_have_other_digests():
    prefixes = Prefixes(2)
    base = np.arange(12, dtype=np.uint64)
    digests = {tuple(prefixes.of(base, prefixes.start(extra)).tolist()) for extra in (b"", b"a", b"b", b"\0")}
    assert len(digests) == 4
    plain = prefixes.of(base, prefixes.start(b""))
    for at in range(12):
        for by in (1, 2**32, 2**63):
            other = base.copy()
            other[at] ^= np.uint64(by)
            found = prefixes.of(other, prefixes.start(b""))
            assert ((found == plain) == (np.arange(6) < at // 2)).all(), "the same up to the change and not again after it"
    swapped = base.reshape(6, 2)[[0, 2, 1, 3, 4, 5]].ravel()
    assert prefixes.of(swapped, prefixes.start(b""))[2] != plain[2]


def test_a_change_in_one_page_cannot_be_taken_back_in_the_next():
    """In a polynomial alone, a page that is more by 1 and a next one that is less by the base give the same."""
    prefixes = Prefixes(2)
    plain = np.full(4, 2**63, np.uint64)
    other = plain + np.array([1, 0, -_BASE % WORD, 0], np.uint64)
    assert (prefixes.of(other, 3) != prefixes.of(plain, 3)).all()


def test_the_same_extra_starts_the_same_everywhere():
    assert Prefixes.start(b"adapter") == Prefixes.start(b"adapter") != Prefixes.start(b"")
    base = np.arange(8, dtype=np.uint64)
    assert Prefixes(4).of(base, 5).tolist() == Prefixes(4).of(base, 5).tolist()


# -- ghosts ------------------------------------------------------------------------------------


def pages(*digests: int) -> np.ndarray:
    return np.array(digests, np.uint64)


def lost(**given: int) -> Reuse:
    """A unit that is lost; all that is known of it differs."""
    return Reuse(**({name: 10 + n for n, name in enumerate(Reuse._fields[:-1])} | given), evicted=False)


def test_pages_are_known_for_so_many_requests():
    ghosts = Ghosts(requests=3, pages=100)
    ghosts.begin()
    ghosts.note_pages(pages(1, 2))
    ghosts.begin()
    ghosts.note_pages(pages(3))
    assert ghosts.repeated(pages(1, 2, 3, 4)) == 3
    ghosts.begin()
    assert (ghosts.repeated(pages(1, 2)), len(ghosts)) == (2, 3)
    ghosts.begin()
    assert (ghosts.repeated(pages(1, 2)), ghosts.repeated(pages(3)), len(ghosts)) == (0, 1, 1)
    ghosts.begin()
    assert len(ghosts) == 0


def test_a_page_that_is_lost_again_is_known_anew():
    ghosts = Ghosts(requests=2)
    ghosts.note_pages(pages(1, 2))
    ghosts.begin()
    ghosts.note_pages(pages(2))
    ghosts.begin()
    assert (ghosts.repeated(pages(1)), ghosts.repeated(pages(2))) == (0, 1)


def test_so_many_pages_are_known_at_most():
    ghosts = Ghosts(requests=1000, pages=10)
    for first in range(0, 100, 4):
        ghosts.note_pages(pages(*range(first, first + 4)))
        ghosts.begin()
        assert len(ghosts) <= 10
        assert ghosts._held == sum(len(edge) for _, edge in ghosts._edges) <= 10
    assert ghosts.repeated(pages(96, 97, 98, 99)) == 4
    ghosts.note_pages(pages(*range(1000, 1050)))
    ghosts.begin()
    assert len(ghosts) <= 10
    assert ghosts.repeated(pages(*range(1000, 1050))) == 10, "of a long edge the beginning, without which the rest is no use"


def test_a_repetition_is_counted_from_the_first_page_on():
    ghosts = Ghosts()
    assert ghosts.repeated(pages(1)) == 0
    ghosts.note_pages(pages(1, 2, 2**64 - 1, 5))
    asked = [(1,), (1, 2), (1, 2, 2**64 - 1, 5), (1, 9, 2), (9, 1, 2), (), (2, 5)]
    assert [ghosts.repeated(pages(*digests)) for digests in asked] == [1, 2, 4, 1, 0, 0, 2]


def test_a_lost_unit_is_told_once_as_it_was():
    ghosts = Ghosts()
    unit = lost(age=60, digest=-5)
    ghosts.note_unit(WORD - 5, unit, now=100)
    assert ghosts.has_units
    assert ghosts.reuse(WORD - 5, now=130) == unit._replace(age=90, evicted=True)
    assert not ghosts.has_units
    assert ghosts.deepest(pages(WORD - 5)) is None
    ghosts.restored(WORD - 5)


def test_the_deepest_lost_unit_of_a_path():
    ghosts = Ghosts()
    assert ghosts.deepest(pages(1, 2, 3)) is None
    ghosts.note_unit(1, lost(), 0)
    ghosts.note_unit(3, lost(), 0)
    assert [ghosts.deepest(pages(*path)) for path in [(1, 2, 3, 4), (1, 2), (4, 1), (2, 4), ()]] == [2, 0, 1, None, None]
    ghosts.restored(3)
    assert ghosts.deepest(pages(1, 2, 3, 4)) == 0
    ghosts.restored(7)
    ghosts.restored(1)
    assert not ghosts.has_units


def test_a_full_ring_forgets_the_oldest():
    ghosts = Ghosts(units=4)
    for digest in range(6):
        ghosts.note_unit(digest, lost(depth=digest), 0)
    assert [ghosts.deepest(pages(digest)) for digest in range(6)] == [None, None, 0, 0, 0, 0]
    ghosts.note_unit(4, lost(depth=40), 0)  # again: the former entry is void
    assert ghosts.deepest(pages(2)) is None
    table = UnitTable(UNIT_KINDS, [1], 1, 64)
    assert sorted(ghosts.view(table).depth.tolist()) == [3, 5, 40]
    assert ghosts.reuse(4, 0).depth == 40
    assert sorted(ghosts.view(table).depth.tolist()) == [3, 5]


operations = st.lists(st.tuples(st.sampled_from(["note", "note", "restored", "reuse"]), st.integers(0, 7)), max_size=60)


@settings(deadline=None)
@given(operations=operations, size=st.integers(1, 5))
def test_the_ring_against_a_list(operations: list[tuple[str, int]], size: int):
    ghosts, table = Ghosts(units=size), UnitTable(UNIT_KINDS, [1], 1, 64)
    ring: list[tuple[int, int] | None] = []  # digest and serial number, as noted
    for serial, (what, digest) in enumerate(operations):
        held = {entry[0]: entry[1] for entry in ring[-size:] if entry}
        if what == "note":
            ring = [entry if entry and entry[0] != digest else None for entry in ring]
            ring.append((digest, serial))
            ghosts.note_unit(digest, lost(depth=serial), 0)
        elif digest in held:
            ring = [entry if entry and entry[0] != digest else None for entry in ring]
            if what == "reuse":
                assert ghosts.reuse(digest, 0).depth == held[digest]
            else:
                ghosts.restored(digest)
        elif what == "restored":
            ghosts.restored(digest)
        held = {entry[0]: entry[1] for entry in ring[-size:] if entry}
        assert {d for d in range(8) if ghosts.deepest(pages(d)) is not None} == set(held)
        assert sorted(ghosts.view(table).depth.tolist()) == sorted(held.values())
        assert ghosts.has_units == bool(held)


def test_lost_units_are_units_of_which_nothing_may_go():
    ghosts, table = Ghosts(), UnitTable(UNIT_KINDS, [1], 1, 64)
    table.now = 77
    noted = [lost(digest=n, hits=n) for n in range(3)]
    for n, each in enumerate(noted):
        ghosts.note_unit(n, each, now=70)
    view: Units = ghosts.view(table)
    assert (len(view), view.now, view.page_tokens) == (3, 77, 64)
    for name in set(Reuse._fields) - {"age", "evicted"}:
        assert getattr(view, name).tolist() == [getattr(each, name) for each in noted]
    assert view.last_access.tolist() == [70 - each.age for each in noted]
    assert view.kind.tolist() == [UnitKind.NONE] * 3
    assert view.covered.tolist() == [0] * 3
    assert (view.nbytes >= 1).all()
    assert len(copied(Ghosts().view(table))) == 0


# -- the table ---------------------------------------------------------------------------------


class Seen(Policy):
    """LRU that keeps what it saw."""

    name = "seen"

    def __init__(self) -> None:
        self.seen: list[PlainUnits] = []
        self.told: list[Reuse] = []
        self.learned: list[tuple[PlainUnits, PlainUnits]] = []

    def rank(self, asked: Units) -> Ranks:
        self.seen.append(copied(asked))
        return asked.last_access.astype(np.float64)

    def reused(self, reuse: Reuse) -> None:
        self.told.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        self.learned.append((copied(live), copied(gone)))


def copied(asked: Units) -> PlainUnits:
    names = PlainUnits.__annotations__.keys() - {"count", "now", "page_tokens"}
    columns = {name: np.array(getattr(asked, name), np.int64) for name in names}
    assert all(column.shape == (len(asked),) for column in columns.values())
    return PlainUnits(len(asked), asked.now, asked.page_tokens, **columns)


def at_depth(asked: PlainUnits, depth: int) -> dict[str, int]:
    (row,) = np.flatnonzero(asked.depth == depth)
    return {name: int(column[row]) for name, column in asked.columns.items()}


def test_a_policy_sees_what_the_tree_is():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3, 4, 5), (2, 5))
    rig.request((1, 2, 8), (3,))
    rig.touch((1, 2, 8))
    rig.touch((1, 2, 8))
    rig.copy((1, 2, 8))
    rig.evict_device(1)
    leaves = policy.seen[-1]
    assert (len(leaves), leaves.now, leaves.page_tokens) == (2, 5, 2)
    long, short = at_depth(leaves, 5), at_depth(leaves, 3)
    node = rig.match((1, 2, 8)).node
    expected = {
        "kind": UnitKind.LEAF, "last_access": 5, "hits": 2, "children": 0, "replay": 1, "nbytes": BYTES[KV] + BYTES[STATE], "covered": 1,
        "depth": 3, "digest": int(node.digests[-1].view(np.int64)), "checkpoint": CheckpointKind(1 + (1 + 3) % 5),
    }  # fmt: skip
    assert {name: short[name] for name in expected} == expected
    assert [long[name] for name in ("hits", "replay", "nbytes", "covered")] == [0, 3, 3 * BYTES[KV] + BYTES[STATE], 0]
    rig.evict_device(0, 1)
    states = policy.seen[-1]
    inner = at_depth(states, 2)
    expected = {"kind": UnitKind.STATE, "children": 1, "replay": 2, "nbytes": BYTES[STATE], "covered": 0, "hits": 1}
    assert {name: inner[name] for name in expected} == expected
    assert at_depth(states, 3)["covered"] == 1


def test_a_unit_is_covered_when_a_lower_tier_holds_all_that_goes():
    policy = Seen()
    rig = Rig(policy)
    for path in ((1, 1), (2, 2), (3, 3), (4, 4)):
        rig.request(path, (2,))
    rig.copy((1, 1))
    rig.store((2, 2))
    rig.copy((3, 3))
    span = rig.match((3, 3)).node
    assert rig.index.drop_state(span, STATE, Tier.HOST) >= 0
    rig.evict_device(1)
    covered = dict(zip(policy.seen[-1].digest, policy.seen[-1].covered, strict=True))
    assert [covered[digest_of(rig, (n, n))] for n in (2, 3, 4)] == [1, 0, 0]
    rig.evict_host(1)
    assert policy.seen[-1].covered.tolist() == [0, 0], "of the host's two, the store has none"


def digest_of(rig: Rig, path: tuple[int, ...]) -> int:
    return int(rig.match(path).node.digests[-1].view(np.int64))


def test_without_states_replay_is_the_edge():
    policy = Seen()
    rig = Rig(policy, SETUPS["stateless"])
    rig.request((1, 2, 3))
    rig.request((1, 2, 4, 5))
    rig.evict_device(1)
    assert sorted(zip(policy.seen[-1].depth, policy.seen[-1].replay, strict=True)) == [(3, 1), (4, 2)]


def test_rows_are_used_again():
    rig = Rig(Lru())
    for n in range(3000):
        rig.request((n, 1, 2), (1, 3))
        if n >= 20:
            there = rig.index.evictable(Tier.DEVICE)
            rig.index.evict_device({KV: max(0, there[KV] - 60), STATE: max(0, there[STATE] - 40)})
    assert len(rig.index._units.nodes) < 200
    rig.index.check_integrity()


def test_a_policy_is_told_of_hits_before_they_count():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3), (2, 3))
    now = rig.index._units.now
    rig.touch((1, 2, 3))
    rig.touch((9,))
    rig.touch((1, 2, 3))
    first, second = policy.told
    assert (first.depth, first.replay, first.hits, first.age, first.evicted) == (3, 1, 0, 0, False)
    assert (second.hits, second.age) == (1, rig.index._units.now - now - 2)
    assert first.digest == digest_of(rig, (1, 2, 3))


def test_a_policy_is_told_of_the_deepest_miss_of_what_was_lost():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3, 4), (2, 4))
    digest = digest_of(rig, (1, 2, 3, 4))
    rig.evict_device(4, 2)
    assert not any(rig.index.evictable(Tier.DEVICE).values())
    rig.touch((1, 2, 3))
    (missed,) = policy.told
    assert (missed.depth, missed.evicted) == (2, True)
    rig.touch((1, 2, 3, 4, 5))
    assert policy.told[1].digest == digest
    rig.touch((1, 2, 3, 4, 5))
    assert len(policy.told) == 2, "once"


def test_what_came_back_is_lost_no_more():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2), (2,))
    rig.evict_device(2)
    assert rig.index._ghosts.has_units
    rig.index.insert(tokens_of((1, 2)), {KV: rig.fresh(2)}, {2: {STATE: 77}})
    assert not rig.index._ghosts.has_units
    rig.evict_device(2)
    rig.request((1, 2), (2,))
    assert [reuse.evicted for reuse in policy.told] == [True]
    rig.touch((1, 2))
    assert [reuse.evicted for reuse in policy.told] == [True, False]


def test_a_policy_learns_of_all_that_could_answer_and_of_what_was_lost():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3), (2, 3))
    rig.request((4, 5), (2,))
    rig.request((6,), ())
    rig.evict_device(2)
    assert sorted(policy.seen[-1].depth.tolist()) == [2, 3], "dead weight is not ranked"
    while not policy.learned:
        rig.touch((7,))
    live, gone = policy.learned[-1]
    pinned = {(int(depth), int(checkpoint)) for depth, checkpoint in zip(live.depth, live.checkpoint, strict=True)}
    lost = [int(depth) for depth in gone.depth]
    assert len(live) + len(gone) == 3
    assert all(checkpoint for _, checkpoint in pinned)
    assert len(lost) == 1


# -- the queue ---------------------------------------------------------------------------------


class Steady(Policy):
    """Ranks at random once and for all, and higher with every hit."""

    name = "steady"
    steady = True
    asked = 0

    def rank(self, asked: Units) -> Ranks:
        self.asked += 1
        return ((asked.digest >> 40) % 50 + 20.0 * asked.hits).astype(np.float64)


class Unsteady(Steady):
    """The same, said otherwise."""

    name = "unsteady"
    steady = False


def candidates(rig: Rig, number: int) -> list[tuple[Node, tuple[bool, float, int]]]:
    """Every unit of a kind by the tree alone: its node, and its place in the order."""
    kind_of = UNIT_KINDS[number].of
    nodes = [node for node in rig.index.nodes() if node.parent is not None and kind_of(node)]
    if not nodes:
        return []
    alive = [not node.state_pools or node.is_alive for node in nodes]
    asked = units(
        now=rig.index._units.now,
        digest=[int(node.digests[-1].view(np.int64)) for node in nodes],
        hits=[node.hits for node in nodes],
        last_access=[node.last_access for node in nodes],
    )
    ranks = type(rig.policy)().rank(asked)
    places = [(a, float(r) if a else node.last_access, node.end) for a, r, node in zip(alive, ranks, nodes, strict=True)]
    return list(zip(nodes, places, strict=True))


def pop(rig: Rig, number: int) -> Victim | None:
    """What would be evicted next, taken out of the queue; `back` returns it."""
    return rig.index._queues[number].pop()


def back(rig: Rig, victim: Victim) -> None:
    rig.index._units.mark(victim.node)


def evict_one(rig: Rig, number: int) -> None:
    if number == HOST_UNITS:
        rig.evict_host(1)
    else:
        rig.evict_device(int(number == DEVICE_PAGES), int(number == DEVICE_STATES))


def some_path(random: Random) -> list[int]:
    return [random.randrange(6) for _ in range(random.randrange(1, 5))]


@pytest.mark.parametrize("policy", [Lru, Steady], ids=["lru", "steady"])
@pytest.mark.parametrize("states", [True, False], ids=["states", "stateless"])
def test_a_steady_policy_s_order_is_exact(policy: type[Policy], states: bool):
    """Each victim is the least of all units, recomputed from the tree, through random requests, hits, pins and evictions."""
    rig, random = Rig(policy(), SETUPS["states" if states else "stateless"]), Random(2)
    popped = dead = 0
    for _ in range(150):
        for _ in range(random.randrange(6)):
            path = some_path(random)
            rig.request(path, [depth for depth in range(1, 5) if random.random() < 0.3])
            if random.random() < 0.4:
                rig.copy(path)
            rig.touch(some_path(random))
        if random.random() < 0.3 and len(rig.held) < 4:
            rig.pin(some_path(random), *random.sample([Tier.DEVICE, Tier.HOST], random.randrange(3)))
        if random.random() < 0.3 and rig.held:
            rig.unpin(random.randrange(4))
        number = random.choice([DEVICE_PAGES, DEVICE_STATES, HOST_UNITS])
        for _ in range(random.randrange(8)):
            expected = dict(candidates(rig, number))
            victim = pop(rig, number)
            if victim is None:
                assert not expected
                break
            assert expected[victim.node] == min(expected.values())
            assert victim.kind is UNIT_KINDS[number].of(victim.node)
            popped, dead = popped + 1, dead + (not expected[victim.node][0])
            back(rig, victim)
            if random.random() < 0.7:
                evict_one(rig, number)
        rig.index.check_integrity()
    assert popped > 300
    assert bool(dead) == states


def test_a_steady_policy_s_order_is_exact_over_many_fronts():
    """More units than the front takes at once; while they go, some are hit, some are pinned, and others come."""
    policy = Steady()
    rig, random = Rig(policy), Random(4)
    ranks: dict[int, float] = {}
    paths: dict[int, tuple[int, ...]] = {}

    def add(n: int) -> None:
        rig.request((n, 1))
        slot = int(rig.index.locations(rig.match((n, 1)), 2).pages[KV].device[0])
        ranks[slot], paths[slot] = rank_of(digest_of(rig, (n, 1)), 0), (n, 1)

    for n in range(1500):
        add(n)
    pinned: list[int] = []
    for turn in range(1400):
        if turn % 3 == 0:
            lucky = random.choice([slot for slot in ranks if slot not in pinned])
            rig.touch(paths[lucky])
            ranks[lucky] += 20
        if turn % 10 == 0:
            add(1500 + turn)
        if turn % 50 == 0:
            pinned.append(min((slot for slot in ranks if slot not in pinned), key=ranks.__getitem__))
            rig.pin(paths[pinned[-1]], Tier.DEVICE)
        if turn % 100 == 25:
            rig.unpin()
            pinned.pop(0)
        free = {slot: rank for slot, rank in ranks.items() if slot not in pinned}
        gone = int(rig.index.evict_device({KV: 1}).freed[KV][0])
        assert free[gone] == min(free.values())
        del ranks[gone]
    rig.index.check_integrity()


def rank_of(digest: int, hits: int) -> float:
    return float(Steady().rank(units(digest=digest, hits=hits))[0])


@pytest.mark.parametrize("count", [60, 700, 3000])
def test_an_unsteady_policy_s_victim_is_among_the_least_of_the_last_pass(count: int):
    policy = Unsteady()
    rig, random = Rig(policy), Random(6)
    ranks: dict[int, float] = {}
    paths: dict[int, tuple[int, ...]] = {}
    for n in range(count):
        rig.request((n, 1))
        slot = int(rig.index.locations(rig.match((n, 1)), 2).pages[KV].device[0])
        ranks[slot], paths[slot] = rank_of(digest_of(rig, (n, 1)), 0), (n, 1)
    changed = set[int]()
    passes, wanted = 0, 0
    for turn in range(min(count // 2, 400)):
        if turn % 3 == 0:
            lucky = random.choice(list(ranks))
            rig.touch(paths[lucky])
            ranks[lucky] += 20
            changed.add(lucky)
        gone = int(rig.index.evict_device({KV: 1}).freed[KV][0])
        if policy.asked > passes:
            passes, wanted = policy.asked, max(1, len(ranks) // 64)
            changed.clear()
        assert gone not in changed, "what changed waits for the next pass"
        assert sum(rank < ranks[gone] for slot, rank in ranks.items() if slot not in changed) < wanted
        del ranks[gone]
    assert passes > 5


def test_of_many_an_unsteady_policy_s_victims_are_among_the_least():
    rig = Rig(Unsteady())
    for n in range(2000):
        rig.request((n, 1, 2), (1, 2, 3))
    every = sorted(place[1] for _, place in candidates(rig, DEVICE_STATES))
    assert len(every) == 6000
    taken = [pop(rig, DEVICE_STATES) for _ in range(60)]
    assert len({victim.node for victim in taken if victim}) == 60
    ranks = [rank_of(int(victim.node.digests[-1].view(np.int64)), 0) for victim in taken if victim]
    assert max(ranks) <= every[len(every) // 32], "drawn from a sample, half as good as from all in the worst case"
    for victim in taken:
        assert victim is not None
        back(rig, victim)


def test_a_pass_is_repeated_when_time_has_passed():
    policy = Unsteady()
    rig = Rig(policy)
    for n in range(640):
        rig.request((n, 1))
    rig.evict_device(1)
    asked = policy.asked
    rig.evict_device(1)
    assert policy.asked == asked, "the front of the last pass still holds"
    for n in range(100):
        rig.touch((600 + n % 40, 1))
    rig.evict_device(1)
    assert policy.asked == asked + 1


def test_of_equal_units_the_shallower_goes_first():
    class Equal(Policy):
        name = "equal"

        def rank(self, asked: Units) -> Ranks:
            return np.zeros(len(asked))

    class EqualAndSteady(Equal):
        steady = True

    for policy in (Equal(), EqualAndSteady()):
        rig = Rig(policy)
        for depth in (3, 1, 5, 2, 4):
            rig.request((depth,) * depth)
        for gone in range(1, 6):
            rig.evict_device(1)
            assert [bool(rig.match((depth,) * depth).depth) for depth in range(1, 6)] == [depth > gone for depth in range(1, 6)]


@pytest.mark.parametrize("policy", [Lru, Unsteady], ids=["steady", "unsteady"])
def test_what_waits_is_bounded_while_nothing_is_evicted(policy: type[Policy]):
    rig, random = Rig(policy()), Random(1)
    for n in range(100):
        rig.request((n % 50, n), (1, 2))
        rig.copy((n % 50, n))
    rig.evict_device(2, 1)
    rig.evict_host(5)
    index = rig.index
    for turn in range(4000):
        rig.request((random.randrange(50), 50), (1, 2))
        if turn % 20 == 0:
            index._units.sync()
            rows = 2 * len(index._units.nodes)
            assert all(len(waiting or ()) <= rows + 1024 for waiting in index._units._listeners)
            assert len(index._units._marked) <= rows
            assert all(len(queue._front) <= rows + 512 for queue in index._queues)
    rig.evict_device(2, 1)
    index.check_integrity()


@pytest.mark.parametrize("policy", [Lru, Unsteady], ids=["steady", "unsteady"])
def test_the_front_is_bounded_while_what_is_in_it_changes(policy: type[Policy]):
    """The same unit goes and comes back each time, all others are hit: each hit leaves an entry that no longer counts."""
    rig = Rig(policy())
    paths = [(n, 1) for n in range(30)]
    for path in paths:
        rig.request(path)
    for turn in range(1500):
        for by in (1, 2, 3):
            rig.touch(paths[1 + (turn * by) % 29])
        gone = pop(rig, DEVICE_PAGES)
        assert gone is not None
        assert gone.node is rig.match(paths[0]).node or policy is Unsteady
        back(rig, gone)
        assert len(rig.index._queues[DEVICE_PAGES]._front) <= 2 * len(rig.index._units.nodes) + 600
    rig.index.check_integrity()


def test_dead_weight_goes_by_its_last_access_and_before_all_else():
    rig = Rig(Unsteady())
    for n in range(10):
        rig.request((n, 1, 2), (1,) if n % 2 else (3,))
    rig.evict_device(1)
    for n in range(1, 10, 2):
        rig.touch((n,))
    left = [n for n in range(1, 10, 2) if rig.match((n, 1, 2)).path_depth == 3]
    assert left == [3, 5, 7, 9], "of those without a state at the end the oldest"
    rig.evict_device(1)
    assert [n for n in left if rig.match((n, 1, 2)).path_depth == 3] == [5, 7, 9]


def test_what_was_taken_out_is_not_found_again_until_it_is_marked():
    rig = Rig(Lru())
    for n in range(3):
        rig.request((n, 1))
    assert pop(rig, DEVICE_PAGES)
    for _ in range(2):
        rig.touch((2, 1))
        rig.index._units.sync()
    taken = [pop(rig, DEVICE_PAGES) for _ in range(3)]
    assert [victim and victim.node.end for victim in taken] == [2, 2, None]


def test_an_empty_index_has_nothing_to_evict():
    for policy in (Lru(), Unsteady()):
        rig = Rig(policy)
        assert [pop(rig, number) for number in range(4)] == [None] * 4


def test_ranked_units_are_those_that_policies_are_tested_with():
    """`units` and `random_units` have every column of `Units`."""
    for asked in (units(3), random_units(3)):
        assert copied(asked).columns.keys() == asked.columns.keys()
