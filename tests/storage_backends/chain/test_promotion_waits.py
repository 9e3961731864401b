"""Promotions that wait for a tier below: faults meanwhile end the wait, and no request waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest
from tiercache_backends.chain import TierChain
from tiercache_backends.chain.settings import Promotion
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.chain.stores import Hanging, chain_over, health
from tests.storage_backends.chain.test_write_back import (
    BACK,
    LOWER,
    PAGE,
    UPPER,
    is_ahead,
    missing,
    report,
    turn,
)
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import fetch, key, payload

PROMOTING = {**BACK, "promote": Promotion.ALWAYS}
OLD = key(("old", 0))
"""Object that only the lower tier has, after `fill`."""


class Mute(MemoryBackend):
    """A store that cannot say what it evicts next while `fault` is set, which is called first."""

    fault: Callable[[], object] | None = None
    asked = 0

    def coldest(self, nbytes):
        self.asked += 1
        if self.fault is not None:
            self.fault()
            raise UnavailableError("not now")
        return super().coldest(nbytes)


def fill(store: TierChain, upper: StorageBackend, lower: StorageBackend) -> None:
    """Store turns until the first one is in the lower tier alone, and everything is copied that must be."""
    store.set(turn("old"))
    for name in count():
        if len(missing(upper, turn("old"))) == len(turn("old")):
            break
        store.set(turn(name))
        until(lambda: is_ahead(upper, lower))
    until(lambda: report(store, 1).waiting == 0)


def promoted(store: TierChain, upper: StorageBackend) -> bool:
    """Read the old object, and return whether the upper tier has it by now."""
    assert fetch(store, OLD, PAGE) == payload(OLD, PAGE)
    return upper.exists([OLD]) == [True]


def test_a_tier_that_cannot_say_what_it_evicts_is_not_asked_in_a_loop() -> None:
    upper, lower = Mute(UPPER), MemoryBackend(LOWER)
    store = chain_over(upper, lower, settings={1: PROMOTING})
    fill(store, upper, lower)
    last = turn("last")
    store.set(last)
    until(lambda: is_ahead(upper, lower))
    # A hit before each failure, so that the tier is not left out.
    upper.fault = lambda: fetch(store, last[0].key, PAGE)
    before, asked = report(store, 0).dropped, upper.asked
    for name in range(1000, 1010):  # enough for the next look to be due
        store.set(turn(name))
    assert fetch(store, OLD, PAGE) == payload(OLD, PAGE)
    until(lambda: report(store, 0).dropped > before)
    assert upper.asked - asked < 100
    assert health(store) == ["serving", "serving"]
    upper.fault = None
    until(lambda: promoted(store, upper))
    until(lambda: is_ahead(upper, lower))
    store.close()


@pytest.mark.parametrize(
    ("tier", "operation"),
    [(0, "coldest"), (0, "usage"), (0, "peek"), (0, "set"), (1, "set"), (1, "exists"), (1, "describe")],
)
def test_a_call_that_hangs_while_a_promotion_waits_holds_up_no_request(tier: int, operation: str) -> None:
    stores: list[StorageBackend] = [MemoryBackend(UPPER), MemoryBackend(LOWER)]
    upper, lower = stores
    slow = stores[tier] = Hanging(stores[tier], operation)
    store = chain_over(*stores, settings={0: {"deadline": 1.0}, 1: {**PROMOTING, "deadline": 1.0}})
    fill(store, upper, lower)
    slow.hang()
    requests: list[Callable[[], object]] = [
        *(lambda name=name: store.set(turn(name)) for name in range(1000, 1010)),
        *(lambda item=item: fetch(store, item.key, item.meta.length) for item in turn("old")),
        lambda: store.exists([OLD]),
        lambda: store.describe([OLD]),
        lambda: store.delete([turn("old")[-1].key]),
        store.usage,
    ]

    def ask() -> None:
        for request in requests:
            request()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert slow.entered.wait(30), "it hangs"
    asking.join(60)
    assert not asking.is_alive()
    assert fetch(store, OLD, PAGE) in (payload(OLD, PAGE), Outcome.MISS, Outcome.UNAVAILABLE)
    slow.release()
    until(lambda: health(store) == ["serving", "serving"])
    until(lambda: promoted(store, upper))
    assert fetch(store, turn("old")[-1].key, turn("old")[-1].meta.length) is Outcome.MISS
    until(lambda: is_ahead(upper, lower))
    store.close()


def test_a_chain_closes_while_a_promotion_waits_for_a_tier_that_hangs() -> None:
    upper, inner = MemoryBackend(UPPER), MemoryBackend(LOWER)
    lower = Hanging(inner, "set")
    store = chain_over(upper, lower, settings={1: {**PROMOTING, "deadline": 1.0}})
    fill(store, upper, inner)
    lower.hang()
    for name in range(1000, 1010):
        store.set(turn(name))
    assert lower.entered.wait(30)
    fetch(store, OLD, PAGE)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    lower.release()
