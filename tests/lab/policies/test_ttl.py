"""TTL beside a plain model on objects of one size, and its times to live."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.policy.rig import BYTES, COSTS, KV, PAGE, Flat, reuse_of, units
from tiercache.policy import LEARN_EVERY, CheckpointKind, policy_named
from tiercache_lab.policies.ttl import Ttl

pytestmark = pytest.mark.slow

TIMES = [2 ** (n / 2) for n in range(48)]
WORTH = COSTS.profile.flops(0, PAGE)


class Plain:
    """Cache of `size` equal objects, of which each pause is kept in a list, with its weight."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.now = self.requests = self.opened = 0
        self.waiting: list[tuple[int, float]] = []
        self.pauses: list[tuple[int, float]] = []
        self.saved = self.elapsed = 0.0

    def ask(self, name: int) -> int | None:
        self.requests += 1
        if self.requests % LEARN_EVERY == 0:
            self.learn()
        if name in self.used:
            self.waiting.append((self.now - self.used[name], WORTH))
            self.now += 1
            self.used[name] = self.now
            return None
        if name in self.lost:
            self.waiting.append((self.now - self.lost.pop(name), 0.0))
        gone = None
        if len(self.used) == self.size:
            best = self.time()
            gone = min(self.used, key=lambda one: (self.now - self.used[one] <= best, self.used[one]))
            self.lost[gone] = self.used.pop(gone)
        self.now += 1
        self.used[name] = self.now
        return gone

    def learn(self) -> None:
        self.pauses = [(age, 0.95 * weight) for age, weight in self.pauses]
        self.pauses += [(age, 1.0) for age, _ in self.waiting]
        self.saved = 0.95 * self.saved + sum(worth for _, worth in self.waiting)
        self.elapsed = 0.95 * self.elapsed + self.now - self.opened
        self.opened, self.waiting = self.now, []

    def time(self) -> float:
        if not self.saved:
            return float("inf")
        price = self.saved / self.elapsed / (BYTES[KV] * self.size)
        best, highest, held, before, chance = 0.0, 0.0, 0.0, 0.0, 0.0
        total = sum(weight for _, weight in self.pauses)
        for time in TIMES:
            held += (1 - chance) * (time - before)
            chance = sum(weight for age, weight in self.pauses if age <= time) / total
            before = time
            worth = chance * WORTH / BYTES[KV] - price * held
            if worth > highest + 1e-15:
                best, highest = time, worth
        return best


@pytest.mark.parametrize("seed", range(2))
def test_the_order_is_that_of_a_plain_model(seed: int) -> None:
    """Tools that answer within some ticks, prompts that come again much later, and others that never do."""
    random = Random(seed)
    due: dict[int, list[int]] = {}
    flat, plain = Flat(Ttl(COSTS), 40), Plain(40)
    kinds = []
    for turn in range(1500):
        name = due[turn].pop() if due.get(turn) else turn + 1
        if random.random() < 0.7:
            due.setdefault(turn + (random.randint(5, 15) if name % 3 else random.randint(60, 90)), []).append(
                name
            )
        ours, theirs = flat.ask(name), plain.ask(name)
        assert ours == theirs, turn
        kinds.append(ours)
    assert 0 < plain.time() < 200, "times run out"
    assert sum(one is not None for one in kinds) > 300


def learned(pauses: int = 20, age: int = 10) -> Ttl:
    """A policy that has seen pauses of this age after the first turn of as many sessions, and none later."""
    policy = Ttl(COSTS)
    turn = units(checkpoint=CheckpointKind.END, lineage=0, depth=4, replay=4, last_access=0, now=age)
    for _ in range(pauses):
        policy.reused(reuse_of(turn))
    policy.learn(units(0, now=4 * LEARN_EVERY), units(0))
    return policy


def test_what_is_out_of_time_goes_first_and_then_the_least_recently_used():
    policy = learned()
    # A second turn was never followed by another: its time is 0, so it goes before older units.
    asked = units(
        now=1000,
        last_access=[995, 990, 999, 900],
        checkpoint=CheckpointKind.END,
        lineage=[0, 0, 1, 0],
        depth=4,
        replay=4,
        nbytes=1000,
    )
    assert np.argsort(policy.rank(asked)).tolist() == [3, 2, 1, 0]
    assert policy.times(asked).tolist()[2] < 1 < policy.times(asked).tolist()[0] < 100


def test_before_anything_is_known_it_is_lru():
    asked = units(now=1000, last_access=[5, 900, 1], lineage=[0, 3, 0], checkpoint=2)
    assert np.argsort(Ttl(COSTS).rank(asked)).tolist() == [2, 0, 1]
    assert np.isinf(Ttl(COSTS).times(asked)).all()


def test_a_dearer_unit_lives_no_shorter_and_a_larger_one_no_longer():
    times = learned().times(
        units(now=50, checkpoint=2, lineage=1, depth=4, replay=[1, 4, 4], nbytes=[2000, 1, 10**7])
    )
    assert times[1] >= times[0] > 0
    assert times[2] == 0


def test_an_expected_hit_keeps_a_unit_alive():
    asked = units(now=1000, last_access=10, expected=[0, 1010], checkpoint=2, depth=4, replay=4, nbytes=1000)
    low, high = learned().rank(asked)
    assert high > low + 2**40


def test_it_is_made_by_name():
    assert isinstance(policy_named("ttl", COSTS), Ttl)
