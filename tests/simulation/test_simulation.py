"""Simulated lives keep every promise, and a seed names one history."""

import logging
from collections import Counter

import pytest

from tests.examples import slow_after
from tests.simulation.lending import live_lending
from tests.simulation.lives import live
from tests.simulation.plan import Plan
from tests.simulation.ranks import live_in_ranks
from tests.simulation.world import Flag, World

SEEDS = 24
MORE = 92
ONCE_BROKEN = (376,)
"""Seeds of lives in which something broke once."""


def few_and_more(few, more):
    return pytest.mark.parametrize("seeds", slow_after(1, [few, more]), ids=["few", "more"])


@pytest.fixture(autouse=True)
def quiet():
    """Stores warn of every fault that is made for them here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@few_and_more((*range(SEEDS), *ONCE_BROKEN), range(SEEDS, MORE))
def test_simulated_lives_keep_every_promise(seeds):
    counts = Counter()
    for seed in seeds:
        counts.update(live(seed).counts)
    # What never happens proves nothing.
    assert counts.keys() >= {"restored tokens", "outages", "kills", "parks", "resumed", "no room"}
    assert all(counts[f"router {what}"] for what in ("events", "replays", "snapshots"))


@few_and_more(range(4), range(4, 28))
def test_ranks_begin_every_request_at_one_depth_whatever_happens_to_messages_stores_and_copies(seeds):
    counts = Counter()
    for seed in seeds:
        counts.update(live_in_ranks(seed))
    assert counts["served"]
    assert counts["restored tokens"]
    assert counts["again"]


@few_and_more(range(10), range(10, 50))
def test_engines_that_lend_their_slots_lose_none_and_read_what_they_wrote(seeds):
    counts = Counter()
    for seed in seeds:
        counts.update(live_lending(seed))
    assert all(counts[what] for what in ("fetched", "restored", "handed over", "evicted"))


def test_a_seed_names_one_history():
    digests = [live(seed).world.digest for seed in (7, 7, 8)]
    assert digests[0] == digests[1] != digests[2]


def test_seeds_draw_calm_lives_and_lives_with_every_fault():
    plans = [Plan.drawn(World(seed).random) for seed in range(SEEDS)]
    assert any(plan.calm for plan in plans)
    faults = [plan.faults for plan in plans]
    assert all(any(getattr(f, name) for f in faults) for name in ("fails", "partly", "breaks", "hangs"))


def test_a_wait_ends_with_the_flag_or_the_time_and_ends_no_later_wait():
    world, times = World(0), []
    flag = Flag(world)

    def wait():
        flag.wait(1.0)
        times.append(world.now)
        flag.wait(5.0)
        times.append(world.now)
        world.sleep(100.0)
        times.append(world.now)

    def set_it():
        world.sleep(0.25)
        flag.set()
        flag.clear()

    world.spawn(wait, "one")
    world.spawn(set_it, "other")
    world.run()
    assert times == [0.25, 5.25, 105.25]


def test_a_kill_ends_what_waits():
    world, ended = World(0), []
    world.spawn(lambda: (world.sleep(10.0), ended.append("victim")), "victim")
    world.spawn(lambda: (world.sleep(1.0), world.kill("victim"), ended.append("killer")), "killer")
    world.run()
    assert ended == ["killer"]
