"""The order in which units go."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.examples import slow_after
from tests.index.seen import digest_of
from tests.integrity import check_index
from tests.policy.rig import KV, Rig, units
from tiercache.core import Tier
from tiercache.index import Node
from tiercache.index.eviction import UNIT_KINDS
from tiercache.index.eviction_order import Victim
from tiercache.policy import Lru, Policy, Units
from tiercache.policy.base import Ranks

DEVICE_PAGES, DEVICE_STATES, HOST_UNITS, STORED_LEAVES = range(4)


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
        now=rig.index._columns.now,  # private: the index's clock, which a policy is told
        digest=[int(node.digests[-1].view(np.int64)) for node in nodes],
        hits=[node.hits for node in nodes],
        last_access=[node.last_access for node in nodes],
    )
    ranks = type(rig.policy)().rank(asked)
    places = [
        (a, float(r) if a else node.last_access, node.end)
        for a, r, node in zip(alive, ranks, nodes, strict=True)
    ]
    return list(zip(nodes, places, strict=True))


def pop(rig: Rig, number: int) -> Victim | None:
    """Take the next unit to evict out of a queue; `back` returns it to the queue."""
    # private: an eviction takes many units at once, of several queues
    return rig.index._queues[number].pop()


def back(rig: Rig, victim: Victim) -> None:
    rig.index._columns.mark(victim.node)  # private: what an eviction does with a unit that it leaves


def evict_one(rig: Rig, number: int) -> None:
    if number == HOST_UNITS:
        rig.evict_host(1)
    else:
        rig.evict_device(int(number == DEVICE_PAGES), int(number == DEVICE_STATES))


def some_path(random: Random) -> list[int]:
    return [random.randrange(6) for _ in range(random.randrange(1, 5))]


@pytest.mark.parametrize(
    ("policy", "states"), slow_after(1, [(Lru, True), (Steady, False), (Lru, False), (Steady, True)])
)
def test_a_steady_policy_s_order_is_exact(policy: type[Policy], states: bool):
    """Each victim is the least of all units, recomputed from the tree, whatever was asked before."""
    rig, random = Rig(policy(), states=states), Random(2)
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
        check_index(rig.index)
    assert popped > 300
    assert bool(dead) == states


def rank_of(digest: int, hits: int) -> float:
    return float(Steady().rank(units(digest=digest, hits=hits))[0])


@pytest.mark.parametrize("count", slow_after(2, [60, 700, 3000]))
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
    assert max(ranks) <= every[len(every) // 32], "a sample's, half as good as all in the worst case"
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
            assert [bool(rig.match((depth,) * depth).depth) for depth in range(1, 6)] == [
                depth > gone for depth in range(1, 6)
            ]


@pytest.mark.parametrize("policy", [Lru, Unsteady], ids=["steady", "unsteady"])
def test_what_waits_is_bounded_while_nothing_is_evicted(policy: type[Policy]):
    rig, random = Rig(policy()), Random(1)
    for n in range(100):
        rig.request((n % 50, n), (1, 2))
        rig.copy((n % 50, n))
    rig.evict_device(2, 1)
    rig.evict_host(5)
    index = rig.index
    for turn in range(2000):
        rig.request((random.randrange(50), 50), (1, 2))
        if turn % 20 == 0:
            # private: lists that only grow cost memory and show nowhere else
            columns, queues = index._columns, index._queues
            columns.sync()
            rows = 2 * len(columns.nodes)
            listeners, marked = columns._listeners, columns._marked  # private: as above
            assert all(len(waiting or ()) <= rows + 1024 for waiting in listeners)
            assert len(marked) <= rows
            assert all(len(queue._front) <= rows + 512 for queue in queues)  # private: as above
    rig.evict_device(2, 1)
    check_index(index)


@pytest.mark.parametrize("policy", [Lru, Unsteady], ids=["steady", "unsteady"])
def test_the_front_is_bounded_while_what_is_in_it_changes(policy: type[Policy]):
    """The same unit goes and comes back; each hit of another leaves an entry that no longer counts."""
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
        # private: entries that no longer count cost memory and show nowhere else
        assert len(rig.index._queues[DEVICE_PAGES]._front) <= 2 * len(rig.index._columns.nodes) + 600
    check_index(rig.index)


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
        rig.index._columns.sync()  # private: an eviction would do it, and take more than is asked here
    taken = [pop(rig, DEVICE_PAGES) for _ in range(3)]
    assert [victim and victim.node.end for victim in taken] == [2, 2, None]
