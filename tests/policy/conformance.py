"""Conformance suite for eviction policies: tests of `Policy`'s contract, and of an index that ranks by the
policy.

    class TestMyPolicy(PolicyConformance):
        def make(self): return MyPolicy()

`policy_rig` has the columns and the index that the suite works with; `PolicyMachine` drives an index at
random. Sizes are small, and no test waits on a clock.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Final

import numpy as np
import pytest

from tests.integrity import check_index, owned
from tests.policy.rig import BLOCKS, EXTREMES, HUGE, KV, SETUPS, STATE, Rig, hostile, random_units, ranked
from tiercache.core import Tier
from tiercache.errors import ConfigError, PoolFullError
from tiercache.index import Eviction
from tiercache.policy import LEARN_EVERY, Policy
from tiercache_lab.policies import RIVALS, VARIANTS

_PINNED: Final = {(1, 1, 1): (Tier.DEVICE,), (2, 0, 1): (Tier.HOST,), (3, 2): (Tier.DEVICE, Tier.HOST)}


class PolicyConformance:
    """Conformance tests of an eviction policy: subclass it and supply `make`, and pytest runs the contract
    over the policy.

    Thread safety: pytest makes one instance per test.
    """

    def make(self) -> Policy:
        """Make a new policy that has learned nothing yet."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests that ask for `states` with each kind of index that the policy allows."""
        if "states" in metafunc.fixturenames:
            kinds = {
                name: states for name, states in SETUPS.items() if states or not self.make().needs_states
            }
            # The main policies show all kinds in every run, the others one of them.
            quick = {"states"} if self.make().name in (*RIVALS, *VARIANTS) else set(kinds)
            metafunc.parametrize(
                "states",
                [
                    pytest.param(states, id=name, marks=() if name in quick else pytest.mark.slow)
                    for name, states in kinds.items()
                ],
            )
        if "sequences" in metafunc.fixturenames:
            # How many are ranked at once is the index's affair: the plainest policy shows it, and hvd.
            marks = () if self.make().name in ("lru", "hvd") else pytest.mark.slow
            metafunc.parametrize("sequences", [pytest.param(850, marks=marks)])

    def test_ranks_are_numbers_whatever_the_columns(self) -> None:
        policy = self.make()
        for given in EXTREMES.values():
            fresh = ranked(self.make(), given)
            np.testing.assert_array_equal(
                ranked(self.make(), given), fresh, "the same question, another answer"
            )
        for given in EXTREMES.values():
            ranked(policy, given)

    def test_a_chance_is_a_probability_that_grows_with_time(self) -> None:
        policy = self.make()
        for _ in range(2):
            for given in EXTREMES.values():
                chances = [policy.chance(given, ticks) for ticks in (0.0, 1.0, 1e3, 1e30)]
                assert all(chance.shape == (len(given),) for chance in chances)
                assert all(((chance >= 0) & (chance <= 1)).all() for chance in chances)
                assert all((a <= b).all() for a, b in pairwise(chances))
            hostile(policy)

    def test_whatever_it_was_told_it_still_answers(self) -> None:
        policy, twin = self.make(), self.make()
        for _ in range(3):
            hostile(policy)
            hostile(twin)
            for given in EXTREMES.values():
                np.testing.assert_array_equal(ranked(policy, given), ranked(twin, given))

    def test_the_order_of_the_question_does_not_matter(self) -> None:
        policy, many = self.make(), EXTREMES["many"]
        shuffled = np.random.default_rng(1).permutation(len(many))
        np.testing.assert_allclose(
            ranked(policy, many.take(shuffled)), ranked(policy, many)[shuffled], rtol=1e-12
        )

    def test_a_steady_rank_is_that_of_the_unit_alone_and_does_not_fall(self) -> None:
        policy = self.make()
        if not policy.steady:
            pytest.skip("the policy is not steady")
        many = random_units(500)
        before = ranked(policy, many)
        some = np.arange(0, 500, 7)
        np.testing.assert_array_equal(ranked(policy, many.take(some)), before[some])
        for later in (1, 100, HUGE):
            hostile(policy)
            now = ranked(policy, many.take(np.arange(500), many.now + later))
            assert (now >= before).all()
            before = now

    def test_it_is_refused_without_states_if_and_only_if_it_needs_them(self) -> None:
        policy = self.make()
        Rig(policy)
        if policy.needs_states:
            with pytest.raises(ConfigError, match=policy.name):
                Rig(policy, states=False)
        else:
            Rig(policy, states=False)

    def test_what_is_pinned_stays_until_it_is_released(self, states: bool) -> None:
        rig = self._filled(states=states)
        for path, tiers in _PINNED.items():
            rig.pin(path, *tiers)
        assert all(max(map(int, was.pages[tier])) >= 0 for was in rig.held for tier in was.pages), "a pin"
        for _ in range(2):
            self._drain(rig)
            rig.check_pins()
            check_index(rig.index)
            assert [len(owned(rig.index, tier, KV)) > 0 for tier in (Tier.DEVICE, Tier.HOST)] == [True, True]
            rig.request((1, 1, 1, 5), (2, 4))
        while rig.held:
            rig.unpin()
        self._drain(rig)
        assert not rig.left()

    @pytest.mark.parametrize("step", [1, 3, 10, 10_000])
    def test_what_is_asked_for_is_freed(self, states: bool, step: int) -> None:
        rig = self._filled(states=states)
        while any((there := rig.index.evictable(Tier.DEVICE)).values()):
            rig.evict_device(min(step, there[KV]), min(step // 3, there.get(STATE, 0)))
        while blocks := rig.host_blocks():
            rig.evict_host(min(step, blocks))
        check_index(rig.index)

    def test_more_than_there_is_frees_nothing(self, states: bool) -> None:
        rig = self._filled(states=states)
        rig.pin((1, 1, 1), Tier.DEVICE, Tier.HOST)
        before, there = rig.snapshot(), rig.index.evictable(Tier.DEVICE)
        for pool in there:
            with pytest.raises(PoolFullError):
                rig.index.evict_device({**there, pool: there[pool] + 1})
        with pytest.raises(PoolFullError):
            rig.index.evict_host(rig.host_blocks() + 1, BLOCKS)
        assert rig.snapshot() == before
        self._drain(rig)

    def test_dead_weight_goes_first(self) -> None:
        rig = self._filled(states=True)
        for turn in range(3):
            rig.evict_device(1)  # fixes what goes next; pages that die after it must still go before that
            path = (7, turn, 1, 2)
            rig.request(path, (2,))
            rig.copy(path)
            rig.touch(path[:2])
            rig.request(path, ())
            dead = rig.index.locations(rig.match(path), 4).pages[KV]
            assert rig.evict_device(1).freed[KV].tolist() == dead.device[2:].tolist()
            assert rig.evict_host(1).freed[KV].tolist() == dead.host[2:].tolist()

    def test_the_same_sequence_evicts_the_same_in_the_same_order(self, states: bool) -> None:
        first, second = (self._history(Rig(self.make(), states=states, seed=3), Random(5)) for _ in range(2))
        assert first == second
        assert len(first) > 300

    def test_so_it_does_with_more_candidates_than_it_ranks_at_once(self, sequences: int) -> None:
        first, second = (self._crowd(Rig(self.make(), seed=3), Random(5), sequences) for _ in range(2))
        assert first == second
        assert len(first) > 500

    # -- histories ---------------------------------------------------------------------------------

    def _filled(self, *, states: bool) -> Rig:
        """Return a rig with branches, superseded states and dead ends, half of them on the host as well."""
        rig = Rig(self.make(), states=states)
        for group in range(6):
            for branch in range(5):
                path = (group, branch % 3, branch)[: 2 + branch % 2]
                rig.request(path, (1, len(path)) if branch else (1,))
                if branch % 2:
                    rig.copy(path)
                if branch == 4:
                    rig.touch(path)
        for pinned in _PINNED:
            rig.request(pinned)
            rig.copy(pinned)
        return rig

    def _drain(self, rig: Rig) -> None:
        there = rig.index.evictable(Tier.DEVICE)
        rig.evict_device(there[KV], there.get(STATE, 0))
        rig.evict_host(rig.host_blocks())
        assert not any(rig.index.evictable(Tier.DEVICE).values())
        assert not rig.host_blocks()

    def _history(self, rig: Rig, random: Random) -> list[int]:
        """Return the freed locations, in order, of a history long enough for the policy to learn."""
        gone: list[int] = []
        for turn in range(4 * LEARN_EVERY):
            path = [random.randrange(8) for _ in range(random.randrange(1, 5))]
            rig.request(path, [depth for depth in range(1, 5) if random.random() < 0.5])
            if random.random() < 0.5:
                rig.copy(path)
            if turn % 4 == 3:
                there = rig.index.evictable(Tier.DEVICE)
                gone += _order(rig.evict_device(min(4, there[KV]), min(4, there.get(STATE, 0))))
                gone += _order(rig.index.evict_host(min(5, rig.host_blocks()), BLOCKS))
        check_index(rig.index)
        return gone

    def _crowd(self, rig: Rig, random: Random, sequences: int) -> list[int]:
        gone: list[int] = []
        for turn in range(sequences):
            rig.request((turn, 1, 2, 3, 4), (1, 2, 3, 4, 5))
        assert rig.index.evictable(Tier.DEVICE)[STATE] > 4096
        for _ in range(3):
            gone += _order(rig.index.evict_device({STATE: 100}))
            for _ in range(30):
                rig.touch((random.randrange(sequences), 1, 2))
            gone += _order(rig.index.evict_device({KV: 100}))
        return gone


def _order(eviction: Eviction) -> list[int]:
    return [location for freed in eviction.freed.values() for location in freed.tolist()]
