"""ARC beside a textbook model, on objects of one page and one size that share nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.policy.rig import Flat, units
from tiercache.policy import policy_named

pytestmark = pytest.mark.slow


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


def both(size: int, asked: Sequence[int]) -> tuple[list[int | None], list[int | None]]:
    """Return what the policy in an index evicts at each request, and what the textbook's model evicts."""
    flat, model = Flat(policy_named("arc"), size), TextbookArc(size)
    return [flat.ask(one) for one in asked], [model.ask(one) for one in asked]


@pytest.mark.hypothesis
@settings(max_examples=example_count(60), deadline=None)
@given(size=st.integers(1, 12), asked=st.lists(st.integers(1, 20), max_size=120))
def test_the_order_is_that_of_the_paper(size: int, asked: list[int]) -> None:
    ours, theirs = both(size, asked)
    assert ours == theirs


def test_so_it_is_in_tiny_caches_where_every_rule_is_met() -> None:
    random = Random(1)
    for turn in range(80):
        size = 1 + turn % 4
        ours, theirs = both(size, [random.randint(1, 2 * size + 1) for _ in range(40)])
        assert ours == theirs, (turn, size)


def test_so_it_is_over_thousands_of_skewed_requests() -> None:
    random = Random(5)
    asked = [int(random.paretovariate(0.8)) % 400 + 1 for _ in range(3000)]
    asked[1000:1200] = range(1000, 1200)  # a scan
    ours, theirs = both(60, asked)
    assert ours == theirs
    assert sum(one is not None for one in ours) > 200


def test_its_memory_is_bounded() -> None:
    policy = policy_named("arc")
    policy.rank(units(3, digest=[1, 2, 3], now=9))
    for digest in range(1, 200_000, 2):
        policy.evicted(float(digest % 7))
        policy.left(0, digest, 100)
    assert np.isfinite(policy.rank(units(3, digest=[1, 2, 3], now=10))).all()
