"""S3-FIFO, SIEVE and ARC beside textbook models, on objects of one page and one size that share nothing."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.policy.rig import Flat, units
from tiercache.policy import policy_named
from tiercache_lab.policies.sieve import (
    _Hand,  # private: the bound on its memory shows in no rank of a small index
)

pytestmark = pytest.mark.slow


class Model(Protocol):
    """Cache of `size` equal objects, as a paper describes it."""

    def ask(self, name: int) -> int | None:
        """Return which object is evicted to make room for this one, if any is."""


class TextbookSieve:
    def __init__(self, size: int) -> None:
        self.size = size
        self.queue: list[int] = []  # the newest last
        self.visited: dict[int, bool] = {}
        self.hand: int | None = None  # an object; None for the oldest

    def ask(self, name: int) -> int | None:
        if name in self.visited:
            self.visited[name] = True
            return None
        gone = self.evict() if len(self.queue) == self.size else None
        self.queue.append(name)
        self.visited[name] = False
        return gone

    def evict(self) -> int:
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = (at + 1) % len(self.queue)
        gone = self.queue.pop(at)
        del self.visited[gone]
        self.hand = self.queue[at] if at < len(self.queue) else None
        return gone


class TextbookS3Fifo:
    def __init__(self, size: int) -> None:
        self.size = size
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghosts: deque[int] = deque(maxlen=int(0.9 * size))
        self.uses: dict[int, int] = {}

    def ask(self, name: int) -> int | None:
        if name in self.uses:
            self.uses[name] = min(3, self.uses[name] + 1)
            return None
        was_ghost = name in self.ghosts
        if was_ghost:
            self.ghosts.remove(name)
        gone = None
        if len(self.uses) == self.size:
            while gone is None:
                gone = self.evict_small() if len(self.small) >= 0.1 * self.size else self.evict_main()
            del self.uses[gone]
        (self.main if was_ghost else self.small).append(name)
        self.uses[name] = 0
        return gone

    def evict_small(self) -> int | None:
        while self.small:
            name = self.small.popleft()
            if self.uses[name] < 2:
                self.ghosts.append(name)
                return name
            self.main.append(name)
            self.uses[name] = 0
        return None

    def evict_main(self) -> int | None:
        while self.main:
            name = self.main.popleft()
            if not self.uses[name]:
                return name
            self.main.append(name)
            self.uses[name] -= 1
        return self.evict_small()


class TextbookArc:
    def __init__(self, size: int) -> None:
        self.c = size
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def ask(self, x: int) -> int | None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).pop(x)
            t2[x] = None
            return None
        full, gone = len(t1) + len(t2) == c, None
        if x in b1:
            self.p = min(c, self.p + max(1.0, len(b2) / len(b1)))
            gone = self.replace(in_b2=False)
            del b1[x]
            t2[x] = None
        elif x in b2:
            self.p = max(0.0, self.p - max(1.0, len(b1) / len(b2)))
            gone = self.replace(in_b2=True)
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    gone = self.replace(in_b2=False)
                else:
                    gone = t1.popitem(last=False)[0]
            elif full:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(last=False)
                gone = self.replace(in_b2=False)
            t1[x] = None
        return gone

    def replace(self, *, in_b2: bool) -> int:
        first = self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p) or not self.t2)
        if first:
            name = self.t1.popitem(last=False)[0]
            self.b1[name] = None
        else:
            name = self.t2.popitem(last=False)[0]
            self.b2[name] = None
        return name


MODELS: dict[str, Callable[[int], Model]] = {
    "sieve": TextbookSieve,
    "s3fifo": TextbookS3Fifo,
    "arc": TextbookArc,
}


def both(name: str, size: int, asked: Sequence[int]) -> tuple[list[int | None], list[int | None]]:
    """Return what the policy in an index evicts at each request, and what the textbook's model evicts."""
    flat, model = Flat(policy_named(name), size), MODELS[name](size)
    return [flat.ask(one) for one in asked], [model.ask(one) for one in asked]


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=example_count(60), deadline=None)
@given(size=st.integers(1, 12), asked=st.lists(st.integers(1, 20), max_size=120))
def test_the_order_is_that_of_the_paper(name: str, size: int, asked: list[int]) -> None:
    ours, theirs = both(name, size, asked)
    assert ours == theirs


@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_in_tiny_caches_where_every_rule_is_met(name: str) -> None:
    random = Random(1)
    for turn in range(80):
        size = 1 + turn % 4
        ours, theirs = both(name, size, [random.randint(1, 2 * size + 1) for _ in range(40)])
        assert ours == theirs, (turn, size)


@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_over_thousands_of_skewed_requests(name: str) -> None:
    random = Random(5)
    asked = [int(random.paretovariate(0.8)) % 400 + 1 for _ in range(3000)]
    asked[1000:1200] = range(1000, 1200)  # a scan
    ours, theirs = both(name, 60, asked)
    assert ours == theirs
    assert sum(one is not None for one in ours) > 200


def test_the_mind_of_each_is_bounded() -> None:
    for name in MODELS:
        policy = policy_named(name)
        policy.rank(units(3, digest=[1, 2, 3], now=9))
        for digest in range(1, 200_000, 2):
            policy.evicted(float(digest % 7))
            policy.left(0, digest, 100)
        assert np.isfinite(policy.rank(units(3, digest=[1, 2, 3], now=10))).all()


@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40))
@settings(max_examples=example_count(60), deadline=None)
@pytest.mark.hypothesis
def test_the_hand_remembers_when_it_passed_each_place(moves: list[tuple[int, int]]) -> None:
    hand, passed = _Hand(), [0] * 40
    hand.newest = 29
    for now, (group, place) in enumerate(moves, 1):
        start = hand.place
        ways = {0: range(start, place), 1: [*range(start, 40), *range(place)]}.get(group, range(40))
        hand.move(group, place, now)
        for at in ways:
            passed[at] = now
        assert hand.passed(np.arange(40)).tolist() == passed


def test_a_hand_that_made_many_steps_forgets_to_spare_units_and_not_to_evict_them() -> None:
    hand, passed = _Hand(), np.zeros(9000, np.int64)
    hand.newest = 10_000
    for now, place in enumerate(range(3, 8500, 2), 1):
        passed[hand.place : place] = now
        hand.move(0, place, now)
    found = hand.passed(np.arange(9000))
    assert (found >= passed).all()
    np.testing.assert_array_equal(found[7600:], passed[7600:])
    assert np.diff(found[:8400]).min() >= 0
