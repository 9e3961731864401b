"""Ranks that decide alike, each by its own cache, though copies, stores and clocks differ."""

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier, Timer

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA
from tests.controller.lending import LendingEngine, tokens_of
from tests.examples import slow_after
from tests.faulty import Faulty, Rates
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.controller.ranks.landings import ENDED, UNDONE, AgreedLandings, answer_codes
from tiercache.core import Outcome, Reason, Tier
from tiercache.errors import TransferError
from tiercache.memory import address_of


class Ill(Faulty):
    """Store of one rank: calls fail, hang, or leave the memory in use after they have returned."""

    def __init__(self, seed, ills):
        super().__init__(MemoryBackend(1 << 22), Rates(*[ills] * 4), seed)
        self.draw, self.ills = Random(seed), ills

    def attach(self, memory):
        self.memory = memory

    def _perform(self, verb, call, *given):
        if verb in ("exists", "get", "set"):
            time.sleep(0.2 if self.draw.random() < self.ills / 2 else self.draw.choice([0, 0, 0.001, 0.004]))
        return super()._perform(verb, call, *given)

    def get(self, items):
        if self.draw.random() >= self.ills:
            return super().get(items)
        views = [view for item in items for view in item.buffers]
        ranges = [(address_of(view) - self.memory.address, view.nbytes) for view in views]
        Timer(self.draw.choice([0.01, 0.2]), self.memory.quarantine(ranges)).start()
        return [Outcome.UNAVAILABLE] * len(items)


def state_of(engine, tickets):
    """All that an engine can see of its cache, and more."""
    nodes = [(n.end, n.where.tolist(), [n.state(t, 0) for t in Tier]) for n in engine.lent.index.nodes()]
    pools = [engine.cache.pools[pool].available for pool in (KV, MAMBA)]
    waiting = [(ticket.done, ticket.tokens) for ticket in tickets]
    return engine.lent.now(), engine.lent.copies, nodes, waiting, engine.cache.arena.available, pools


@pytest.mark.parametrize("seed", slow_after(2, range(16)))
@pytest.mark.parametrize("ills", [None, (0, 0), (0, 0.04), (0.04, 0.04)], ids=["none", "well", "ill", "both"])
def test_ranks_stay_alike_whatever_their_stores_do(seed, ills):
    met, given = Barrier(2, timeout=60), {}

    def live(rank):
        def agree(ends):
            given[rank] = ends.copy()
            met.wait()
            least = np.minimum(given[0], given[1])
            met.wait()
            return least

        draw, pause, told, tickets = Random(seed), Random(rank), [], []
        engine = LendingEngine(
            ills and Ill(2 * seed + rank, ills[rank]),
            blocks=24,
            clock=lambda: 1000 * rank + (20 + rank) * time.monotonic(),
            options=ControllerOptions(load_or_recompute=False, storage_deadline=1.0, belief_checks=8),
        )
        engine.lent.agree_by(agree)
        for _ in range(100):
            path = [draw.randrange(2) for _ in range(draw.randrange(1, 5))]
            tickets.append(engine.controller.prefetch(tokens_of(path)))
            for _ in range(draw.choice([0, 5, 100])):
                if not tickets[-1].done:
                    engine.controller.tick(0.001)
            if draw.random() < 0.1:
                tickets[draw.randrange(len(tickets))].cancel()
            request = engine.begin([*tokens_of(path), 9])
            engine.compute(request, tokens_of(path)[len(request.tokens) :])
            time.sleep(pause.choice([0, 0, 0.002]))
            engine.hand_over(request)
            told.append((request.row.tolist(), request.state))
            engine.end(request)
            if draw.random() < 0.2:
                engine.lent.clear()
            told.append(state_of(engine, tickets))
        while engine.cache.context.under_way or engine.cache.context.in_flight.stranded:
            engine.controller.tick(0.01)
        told.append(state_of(engine, tickets))
        check_controller(engine.controller)
        engine.controller.close()
        return told, engine.controller.metrics.value("storage_gets_total", "kv", "hit")

    with ThreadPoolExecutor(2) as ranks:
        (one, hits), (other, others) = ranks.map(live, range(2))
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine == theirs, step
    assert hits == others
    assert hits or ills != (0, 0)


def test_a_copy_that_failed_on_one_rank_has_failed_and_waits_for_all():
    told, given = [], []
    others = np.array([9, 1, 0, 2, 2])

    def agree(mine):
        given.extend(mine[1:].tolist())
        return np.minimum(mine, others)

    landings = AgreedLandings(agree, time.monotonic, list)
    for error in (None, None, None, TransferError("failed")):
        landings.expect_copy(told.append)(error)
    landings.apply(busy=False)
    assert given == [ENDED, ENDED, ENDED, UNDONE]
    assert [error is None for error in told] == [False, True, False], "the second is under way elsewhere"


def test_the_worse_answer_counts_and_one_rank_without_an_answer_is_none():
    codes = answer_codes({KV: 2})
    good, bad = ({KV: [True, True]}, Reason.NONE), ({KV: [True, False]}, Reason.TIMEOUT)
    packed = [np.array(codes.pack(answer)) for answer in (good, bad)]
    assert codes.unpack(np.minimum(*packed)) == bad
    assert codes.unpack(packed[0] * 0) is None
