"""Storage tiers of a replay: what each one holds, answers and costs, and that one tier is a plain store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.integrity import check_controller
from tests.lab.replay.test_drive import CHATS, HYBRID, disk, ran
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.chain import NullChain
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.results import TierUse
from tiercache_lab.replay.sources import open_source
from tiercache_lab.replay.store import NullStore

SMALL = Tiers(host_bytes=400_000)


def tier(name: str, nbytes: int, bandwidth: float | None = None, **settings: str) -> StorageTier:
    return StorageTier(name, nbytes, bandwidth, settings=settings)


def uses(tiers: Sequence[StorageTier], policy: str = "lru", seed: int = 1) -> dict[str, TierUse]:
    return dict(ran(open_source(CHATS, seed=seed), replace(SMALL, storage=tuple(tiers)), policy).uses())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hvd"])
def test_one_tier_is_a_plain_null_store(policy, monkeypatch) -> None:
    """The chain of one tier makes the calls that the controller makes, and no other."""
    source, tiers = open_source(CHATS, seed=4), replace(SMALL, storage=disk(1_500_000))
    chained = ran(source, tiers, policy)

    class Plain(NullStore):
        """Null store in the place of a chain of one."""

        def __init__(self, settings: object, stores: Sequence[NullStore], clock: object) -> None:
            super().__init__(1_500_000)
            self.stores = [self]
            self.taken = 0

        def take_reads(self) -> dict[str, int]:
            read, self.taken = self.read_bytes - self.taken, self.read_bytes
            return {"disk": read}

    monkeypatch.setattr("tiercache_lab.replay.cache.NullChain", Plain)
    plain = ran(source, tiers, policy)
    assert plain.uses() == chained.uses()
    assert plain.tally.ttft_ms() == chained.tally.ttft_ms()
    assert plain.tally.flops_saved == chained.tally.flops_saved


LINEUPS = [
    (tier("a", 500_000), tier("b", 900_000, promote="always"), tier("c", 1_500_000, write="write_back")),
    (tier("a", 700_000),),
    (tier("a", 700_000), tier("b", 1_500_000)),
    (tier("a", 700_000), tier("b", 1_500_000, write="write_back")),
    (tier("a", 700_000), tier("b", 1_500_000, write="write_through_selective", write_after="1")),
    (tier("a", 500_000, write_per_day="1GB"), tier("b", 900_000, promote="never"), tier("c", 1_500_000)),
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hvd"])
@pytest.mark.parametrize("storage", LINEUPS, ids=str)
def test_no_tier_holds_more_than_it_has_and_answers_add_up(storage, policy) -> None:
    source, tiers = open_source(CHATS, seed=3), replace(SMALL, storage=storage)
    run = Run(source, measure(source), Setup(policy, HYBRID, tiers))

    def step() -> None:
        chain = run._store  # private: the stores are counted after each request
        assert isinstance(chain, NullChain)
        for store, one in zip(chain.stores, storage, strict=True):
            assert store.usage().used_bytes <= store.peak <= one.nbytes

    run.go(step)
    check_controller(run.controller)
    found = run.uses()
    assert [*found] == ["host", *(one.name for one in storage)]
    prompts = sum(len(request.prompt) for request in source)
    assert sum(use.tokens for use in found.values()) == pytest.approx(run.tally.token_hit_rate * prompts)
    assert 0 < run.tally.token_hit_rate < 1
    if policy == "hvd":
        again = Run(source, measure(source), Setup(policy, HYBRID, tiers))
        again.go()
        assert again.uses() == found
        assert again.tally.ttft_ms() == run.tally.ttft_ms()


def test_a_second_tier_answers_what_the_first_has_lost() -> None:
    one, two = uses([tier("a", 700_000)]), uses([tier("a", 700_000), tier("b", 6_000_000)])
    assert two["b"].tokens > 0
    assert two["b"].read_bytes > 0
    assert sum(use.tokens for use in two.values()) > sum(use.tokens for use in one.values())
    # All that comes to the first tier is written through to the second.
    assert two["b"].written_bytes > 0.8 * two["a"].peak


@pytest.mark.slow
def test_a_budget_of_writes_is_obeyed_in_the_time_of_the_replay() -> None:
    free, tight = (
        uses([tier("a", 700_000), tier("b", 6_000_000, **settings)])["b"].written_bytes
        for settings in ({}, {"write_per_day": "10MB"})
    )
    assert 0 < tight < free / 2


@pytest.mark.slow
def test_a_slow_tier_costs_time_and_nothing_else() -> None:
    source = open_source(CHATS, seed=2)
    storage = (tier("a", 700_000, 1e9), tier("b", 6_000_000, 1e8))
    fast = ran(source, replace(SMALL, storage=storage), "hvd")
    for n in range(2):
        slower = tuple(replace(one, bandwidth=1e5) if i == n else one for i, one in enumerate(storage))
        slow = ran(source, replace(SMALL, storage=slower), "hvd")
        assert slow.uses() == fast.uses()
        assert slow.tally.ttft_ms()[0] > fast.tally.ttft_ms()[0]
    # A tier without a bandwidth has that of the machine.
    plain = tuple(replace(one, bandwidth=None) for one in storage)
    machine = ReplayMachine(disk_bandwidth=1e5)
    late = ran(source, replace(SMALL, storage=plain), "hvd", machine=machine).tally.ttft_ms()[0]
    assert late > slow.tally.ttft_ms()[0]
