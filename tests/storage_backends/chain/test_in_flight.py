"""Bytes under way in a slow tier: they are bounded, callers go on to the next tier, and copies wait."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.chain.stores import Hanging, health, held
from tests.waiting import until
from tiercache.errors import UnavailableError
from tiercache.storage.guard import Guard, NoThreadError
from tiercache.testing.conformance.hooks import STORED, THROTTLED
from tiercache.testing.objects import fetch, key, payload, put, to_set

SIZE = 5000
TWO = {"in_flight": 2 * SIZE, "promote": Promotion.NEVER, "threads": 2}
ALONE = {"write": WritePolicy.SELECTIVE}


class Callers:
    """Threads, each of which makes one call; `outcomes` are those of the calls that are over."""

    def __init__(self):
        self.outcomes = []
        self.threads = []

    def start(self, call, *args):
        thread = threading.Thread(target=lambda: self.outcomes.append(call(*args)))
        thread.start()
        self.threads.append(thread)

    def join(self):
        for thread in self.threads:
            thread.join(60)
        return self.outcomes


def test_gets_go_on_to_the_next_tier_while_the_first_is_busy(chain_over):
    slow, below = Hanging(MemoryBackend(), "get"), MemoryBackend()
    for store, names in ((slow, "abc"), (below, "b")):
        for name in names:
            put(store, key(name), payload(name, SIZE))
    chain = chain_over(slow, below, settings={0: TWO, 1: ALONE})
    slow.hang()
    callers = Callers()
    for name in "aa":
        callers.start(fetch, chain, key(name), SIZE)
    until(lambda: chain.tiers[0].is_busy)
    assert fetch(chain, key("b"), SIZE) == payload("b", SIZE), "the tier below has it"
    assert fetch(chain, key("c"), SIZE) is THROTTLED, "only the busy tier has it"
    assert health(chain) == ["serving", "serving"], "a busy tier is not sick"
    slow.release()
    assert callers.join() == [payload("a", SIZE)] * 2
    assert fetch(chain, key("c"), SIZE) == payload("c", SIZE)
    assert not chain.tiers[0].is_busy


def test_sets_go_on_to_the_next_tier_while_the_first_is_busy(chain_over):
    first, below = MemoryBackend(), MemoryBackend()
    slow = Hanging(first, "set")
    chain = chain_over(slow, below, settings={0: TWO, 1: ALONE})
    slow.hang()
    callers = Callers()
    for name in "ab":
        callers.start(put, chain, key(name), payload(name, SIZE))
    until(lambda: chain.tiers[0].is_busy)
    assert put(chain, key("c"), payload("c", SIZE)) is STORED
    slow.release()
    assert callers.join() == [STORED] * 2
    assert (held(first, "a", "b", "c"), held(below, "a", "b", "c")) == (
        [True, True, False],
        [False, False, True],
    )


def test_one_call_may_be_larger_than_what_may_be_under_way(chain_over):
    chain = chain_over(MemoryBackend(), settings={0: TWO})
    names = range(20)
    assert chain.set([to_set(key(n), payload(n, SIZE)) for n in names]) == [STORED] * 20


def test_copies_wait_while_their_tier_is_busy(chain_over):
    upper, inner = MemoryBackend(), MemoryBackend()
    slow = Hanging(inner, "get")
    chain = chain_over(upper, slow, settings={1: {**TWO, "threads": 4}})
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    upper.delete([key("a")])
    slow.hang()
    callers = Callers()
    for _ in range(2):
        callers.start(fetch, chain, key("a"), SIZE)
    until(lambda: chain.tiers[1].is_busy)
    put(chain, key("b"), payload("b", SIZE))
    until(lambda: chain.usage().tiers[1].waiting == 1)
    assert held(inner, "b") == [False]
    slow.release()
    until(lambda: held(inner, "b") == [True])
    assert chain.usage().tiers[1].dropped == 0
    callers.join()


def test_a_call_that_was_given_up_counts_until_it_has_returned(chain_over):
    slow = Hanging(MemoryBackend(), "get")
    chain = chain_over(slow, MemoryBackend(), settings={0: {**TWO, "in_flight": SIZE, "deadline": 0.2}})
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    slow.hang()
    assert fetch(chain, key("a"), SIZE) == payload("a", SIZE), "the tier below has it"
    assert chain.tiers[0].is_busy
    slow.release()
    until(lambda: not chain.tiers[0].is_busy)
    until(lambda: health(chain) == ["serving", "serving"])


def test_a_call_that_waited_for_one_that_hangs_gets_no_time_anew():
    free = threading.Event()
    calls = Guard("tier t", 1, 0.5)
    hung, waiting = calls.begin("get", free.wait), calls.begin("get", partial(time.sleep, 0.5), seconds=0.8)
    for call in (hung, waiting):
        with pytest.raises(UnavailableError):
            call.result()
    free.set()
    calls.close()


def test_a_call_whose_time_is_over_before_it_begins_is_not_made():
    free, made, over = threading.Event(), [], threading.Event()
    guard = Guard("tier t", 1, 30.0)
    first = guard.begin("get", free.wait)
    late = guard.begin("get", lambda: made.append(1), seconds=0.01, strict=True, over=over.set)
    time.sleep(0.05)
    free.set()
    assert first.result()
    assert over.wait(30)
    with pytest.raises(NoThreadError):
        late.result()
    assert (made, guard.hung, guard.lost) == ([], 0, 0)
    guard.close()
