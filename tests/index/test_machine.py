"""The index against a plain dictionary, through everything that can be done to it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.controller.told import Told
from tests.examples import example_count
from tests.index.model import PAGE, Model, Path, Prefix, path_of, tokens_of
from tests.index.states import ONE, cancel_state, publish_state, reserve_state, span_of
from tests.integrity import check_index
from tiercache.core import ABSENT, Locations, Mask, PoolName, Tier, pending
from tiercache.errors import PoolFullError
from tiercache.index import Eviction, HybridIndex, Match, Pin, Span
from tiercache.keys import page_keys

KV, INDEXER, MAMBA, SWA = PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA
NAMESPACE = bytes(range(32))
COST = {KV: 1, INDEXER: 2, MAMBA: 5, SWA: 3}

paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
extras = st.sampled_from([b"", b"", b"adapter"])
near_tiers = st.sampled_from([Tier.DEVICE, Tier.HOST])
draws = st.integers(0, 2**32 - 1)


@dataclass
class Hold:
    """A pin, and for which pages it stands."""

    pin: Pin
    extra: bytes
    path: Path

    def covers(self, at: Prefix) -> bool:
        return at[0] == self.extra and at[1] == self.path[: len(at[1])]


@dataclass
class Flight:
    """Places that were reserved: pages of a span by pool, and states at its end."""

    hold: Hold
    tier: Tier
    span: Span
    pages: dict[PoolName, tuple[Locations, Mask]]
    states: dict[PoolName, tuple[int, bool]]


class IndexMachine(RuleBasedStateMachine):
    page_pools: tuple[PoolName, ...] = (KV, INDEXER)
    state_pools: tuple[PoolName, ...] = (MAMBA, SWA)

    @initialize()
    def start(self) -> None:
        self.index = HybridIndex(
            page_size=PAGE, namespace=NAMESPACE, page_pools=self.page_pools, state_pools=self.state_pools
        )
        self.told = Told(
            SimpleNamespace(index=self.index, pools=self.index.pools, namespace=NAMESPACE, page_size=PAGE)
        )
        self.model = Model(self.page_pools, self.state_pools)
        self.holds: list[Hold] = []
        self.flights: list[Flight] = []
        self.matches: dict[tuple[bytes, Path], Match] = {}
        self.next = 0

    def fresh(self, count: int) -> Locations:
        self.next += count
        return np.arange(self.next - count, self.next)

    def hold(self, node_or_match, extra: bytes, *tiers: Tier) -> Hold:
        pin = self.index.pin(node_or_match, *tiers)
        return Hold(pin, extra, path_of(pin.node))

    def is_pinned(self, at: Prefix, tier: Tier, pool: PoolName) -> bool:
        """A pin holds all pages of its path, and the state at its end."""
        holds = [
            hold for hold in self.holds + [flight.hold for flight in self.flights] if tier in hold.pin.tiers
        ]
        if pool in self.state_pools:
            return any(at == (hold.extra, hold.path) for hold in holds)
        return any(hold.covers(at) for hold in holds)

    # -- inserting and matching ----------------------------------------------------------------

    @rule(
        path=paths | st.just(()),  # of a prompt shorter than a page nothing is entered
        extra=extras,
        own=st.booleans(),
        depths=st.sets(st.integers(1, 6), max_size=3),
        partial=st.booleans(),
    )
    def insert(self, path: Path, extra: bytes, own: bool, depths: set[int], partial: bool) -> None:
        prefixes = [(extra, path[: page + 1]) for page in range(len(path))]
        given = {pool: self.fresh(len(path)) for pool in self.page_pools}
        if own:  # as a request does that was admitted on the index's own slots
            for pool, slots in given.items():
                held = np.array([self.model.page(at, pool)[Tier.DEVICE] for at in prefixes])
                slots[held >= 0] = held[held >= 0]
        pools = self.state_pools[: 1 if partial else None]
        states = {
            depth: {pool: int(self.fresh(1)[0]) for pool in pools} for depth in depths if depth <= len(path)
        }
        answer = self.index.insert(tokens_of(path, tail=1), given, states, extra)
        assert answer.depth == len(path)
        assert path_of(answer.node)[: len(path)] == path
        if not self.page_pools:  # the pages behind the deepest state stay for as long as a pin is on them
            self.index.pin(answer.node).release()
        for pool in self.page_pools:
            self._check_inserted(
                answer.pages[pool], given[pool], [self.model.page(at, pool) for at in prefixes]
            )
        adopted, rejected = set(), set()
        whole = 0
        while whole < len(path) and self.model.whole(prefixes[whole]):
            whole += 1
        for depth, by_pool in states.items():
            for pool, slot in by_pool.items():
                tiers = self.model.state((extra, path[:depth]), pool)
                if depth <= whole and tiers[Tier.DEVICE] == ABSENT:
                    tiers[Tier.DEVICE] = slot
                    adopted.add((depth, pool, slot))
                else:
                    rejected.add((depth, pool, slot))
        assert (set(answer.adopted_states), set(answer.rejected_states)) == (adopted, rejected)

    def _check_inserted(self, answer, given: Locations, entries: list[list[int]]) -> None:
        for page, tiers in enumerate(entries):
            held, slot = tiers[Tier.DEVICE], given[page]
            verdict = (answer.adopted[page], answer.duplicate[page], answer.private[page])
            assert verdict == (held == ABSENT, held >= 0 and held != slot, held < ABSENT)
            assert answer.table[page] == (held if held >= 0 else slot)
            if held == ABSENT:
                tiers[Tier.DEVICE] = int(slot)

    @rule(
        path=paths,
        extra=extras,
        tail=st.integers(0, 1),
        limit=st.none() | st.integers(0, 7),
        touch=st.booleans(),
    )
    def match(self, path: Path, extra: bytes, tail: int, limit: int | None, touch: bool) -> None:
        match = self.index.match(tokens_of(path, tail), extra, limit=limit)
        bound = (len(path) * PAGE + tail - 1) // PAGE if limit is None else limit
        depths = self.model.restorable(extra, path, bound, tuple(Tier))
        near = self.model.restorable(extra, path, bound, (Tier.DEVICE, Tier.HOST))
        assert match.depth == max(depths, default=0)
        assert match.near_depth == max(near, default=0)
        assert match.restorable == tuple(depths if self.state_pools else depths[-1:])
        held = self.model.held_prefixes()
        assert match.path_depth >= sum((extra, path[:depth]) in held for depth in range(1, len(path) + 1))
        assert path_of(match.node)[: match.path_depth] == path[: match.path_depth]
        if touch:
            self.index.touch(match)

    @rule(path=paths, extra=extras)
    def locate(self, path: Path, extra: bytes) -> None:
        match = self.index.match(tokens_of(path), extra)
        depth = match.path_depth
        pages, states = self.index.locations(match, depth)
        for pool in self.page_pools:
            expected = np.array(
                [self.model.page((extra, path[: page + 1]), pool) for page in range(depth)]
            ).reshape(depth, 3)
            np.testing.assert_array_equal(pages[pool].device, expected[:, Tier.DEVICE])
            np.testing.assert_array_equal(pages[pool].host, expected[:, Tier.HOST])
            np.testing.assert_array_equal(pages[pool].stored, expected[:, Tier.STORAGE] >= 0)
        for pool in self.state_pools:
            tiers = self.model.state((extra, path[:depth]), pool)
            assert (states[pool].device, states[pool].host, states[pool].stored) == (
                *tiers[:2],
                tiers[Tier.STORAGE] >= 0,
            )
        assert self.index.page_keys(match, depth) == page_keys(
            NAMESPACE, tokens_of(path[:depth]), PAGE, extra=extra
        )

    # -- pins ----------------------------------------------------------------------------------

    @rule(path=paths, extra=extras, tiers=st.sets(st.sampled_from(Tier)))
    def pin(self, path: Path, extra: bytes, tiers: set[Tier]) -> None:
        if len(self.holds) < 3:
            self.holds.append(self.hold(self.index.match(tokens_of(path), extra), extra, *tiers))

    @precondition(lambda self: self.holds)
    @rule(which=draws)
    def unpin(self, which: int) -> None:
        self.holds.pop(which % len(self.holds)).pin.release()

    @invariant()
    def pinned_nodes_stay(self) -> None:
        for hold in getattr(self, "holds", []):
            assert path_of(hold.pin.node) == hold.path

    # -- transfers -----------------------------------------------------------------------------

    @rule(path=paths, extra=extras, tier=near_tiers, start=st.integers(0, 5), skip=draws)
    def begin(self, path: Path, extra: bytes, tier: Tier, start: int, skip: int) -> None:
        """Write-through when the objects are there, else a load from below: the same to the index."""
        if len(self.flights) >= 3:
            return
        node = self.index.extend_path(tokens_of(path), len(path), extra)
        assert path_of(node) == path
        span = Span(node, min(start, len(path)), len(path))
        flight = Flight(self.hold(node, extra, tier), tier, span, {}, {})
        for pool in self.page_pools:
            offered = self.fresh(len(span))
            offered[[bool(skip >> bit & 1) for bit in range(len(span))]] = ABSENT
            entered = self.index.residency.reserve(span, pool, tier, offered)
            for at, location, mark in zip(self._prefixes(span, extra, path), offered, entered, strict=True):
                tiers = self.model.page(at, pool)
                assert mark == (location >= 0 and tiers[tier] == ABSENT)
                if mark:
                    tiers[tier] = int(pending(location))
            flight.pages[pool] = (offered, entered)
        for pool in self.state_pools:
            slot = int(self.fresh(1)[0])
            tiers = self.model.state((extra, path), pool)
            entered = reserve_state(self.index, node, pool, tier, slot)
            assert entered == (tiers[tier] == ABSENT)
            if entered:
                tiers[tier] = -2 - slot
            flight.states[pool] = (slot, entered)
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule(which=draws, publish=st.booleans())
    def finish(self, which: int, publish: bool) -> None:
        flight = self.flights.pop(which % len(self.flights))
        tier, span, hold = flight.tier, flight.span, flight.hold
        settle_pages = self.index.residency.publish if publish else self.index.residency.cancel
        settle_state = publish_state if publish else cancel_state
        for pool, (offered, entered) in flight.pages.items():
            done = settle_pages(span, pool, tier, offered)
            np.testing.assert_array_equal(done, entered)
            for at, location in zip(
                self._prefixes(span, hold.extra, hold.path), np.where(entered, offered, ABSENT), strict=True
            ):
                if location >= 0:
                    self.model.page(at, pool)[tier] = int(location) if publish else ABSENT
        for pool, (slot, entered) in flight.states.items():
            assert settle_state(self.index, span.node, pool, tier, slot) == entered
            if entered:
                self.model.state((hold.extra, hold.path), pool)[tier] = slot if publish else ABSENT
        hold.pin.release()

    def _prefixes(self, span: Span, extra: bytes, path: Path) -> list[Prefix]:
        return [(extra, path[: page + 1]) for page in range(span.start, span.end)]

    @rule(path=paths, extra=extras, bits=draws, stored=st.booleans(), start=st.integers(0, 5))
    def mark(self, path: Path, extra: bytes, bits: int, stored: bool, start: int) -> None:
        match = self.index.match(tokens_of(path), extra)
        span = Span(match.node, min(start, match.path_depth), match.path_depth)
        mask = np.array([bool(bits >> page & 1) for page in range(len(span))], np.bool_)
        with self.index.pinned(match):
            node = match.node
            note = self.index.residency.mark_stored if stored else self.index.forget_stored
            for pool in self.page_pools:
                note(span, pool, mask)
                for at, chosen in zip(self._prefixes(span, extra, path), mask, strict=True):
                    if chosen:
                        self.model.page(at, pool)[Tier.STORAGE] = 0 if stored else ABSENT
            for pool in self.state_pools if node.pages else ():
                note(span_of(node), pool, ONE)
                self.model.state((extra, path_of(node)), pool)[Tier.STORAGE] = 0 if stored else ABSENT

    # -- evicting ------------------------------------------------------------------------------

    def free_now(self, tier: Tier) -> dict[PoolName, dict[int, Prefix]]:
        """By pool, what may be evicted: location -> prefix."""
        pools = self.page_pools + self.state_pools
        return {
            pool: {
                e[tier]: at
                for at, e in self.model.entries(pool)
                if e[tier] >= 0 and not self.is_pinned(at, tier, pool)
            }
            for pool in pools
        }

    @rule(wants=st.tuples(*[st.integers(0, 3)] * 4), beyond=st.booleans())
    def evict_device(self, wants: tuple[int, ...], beyond: bool) -> None:
        free = self.free_now(Tier.DEVICE)
        pools = self.page_pools + self.state_pools
        if beyond:
            with pytest.raises(PoolFullError):
                self.index.evict_device({pools[-1]: len(free[pools[-1]]) + 1})
            return
        need = {pool: min(want, len(free[pool])) for pool, want in zip(pools, wants, strict=False)}
        eviction = self.index.evict_device(need)
        assert all(len(eviction.freed.get(pool, ())) >= count for pool, count in need.items())
        if not any(need[pool] for pool in self.page_pools):
            assert not set(eviction.freed) & set(self.page_pools), "a need for states frees no pages"
        if not any(need.values()):
            assert not eviction.freed
        if len(pools) == 1:
            assert len(eviction.freed.get(KV, ())) == need[KV], "a leaf gives what is needed"
        self._check_eviction(eviction, Tier.DEVICE, free)

    @rule(share=st.floats(0, 1), beyond=st.booleans())
    def evict_host(self, share: float, beyond: bool) -> None:
        free = self.free_now(Tier.HOST)
        there = sum(COST[pool] * len(at) for pool, at in free.items())
        if beyond:
            with pytest.raises(PoolFullError):
                self.index.evict_host(there + 1, COST)
            return
        blocks = int(there * share)
        eviction = self.index.evict_host(blocks, COST)
        assert sum(COST[pool] * len(at) for pool, at in eviction.freed.items()) >= blocks
        self._check_eviction(eviction, Tier.HOST, free)

    def _check_eviction(
        self, eviction: Eviction, tier: Tier, free: dict[PoolName, dict[int, Prefix]]
    ) -> None:
        dead = self.model.dead()
        taken: set[Prefix] = set()
        demoted = lost = 0
        for pool, locations in eviction.freed.items():
            assert len(set(locations.tolist())) == len(locations)
            for location in locations.tolist():
                tiers = self.model.entry(free[pool][location], pool)
                tiers[tier] = ABSENT
                demoted, lost = demoted + (max(tiers) >= 0), lost + (max(tiers) < 0)
                if pool in self.page_pools:
                    taken.add(free[pool][location])
        assert (eviction.demoted, eviction.lost) == (demoted, lost)
        was_there = {at for pool in self.page_pools for at in free[pool].values()}
        if taken - dead:
            assert dead & was_there <= taken, "dead weight goes before anything that a state can use"

    # -- always --------------------------------------------------------------------------------

    @rule(reads=st.sampled_from([False, False, True]))
    def tell(self, reads: bool) -> None:
        """Post some nodes, or read all events, which agree with the index."""
        if reads:
            self.told.check()
        else:
            self.told.source.post(0.0, everything=True)

    @invariant()
    def a_current_match_would_come_out_the_same(self) -> None:
        if not hasattr(self, "index"):
            return
        for extra in (b"", b"adapter"):
            for path in ((0, 0, 0), (0, 1), (1, 0, 1, 0, 1, 1), (1, 1, 1)):
                match = self.index.match(tokens_of(path), extra)
                before = self.matches.get((extra, path), match)
                # Where nothing is known the node is a root, which may be made anew.
                assert (
                    before == match
                    or (not match.path_depth and not before.path_depth)
                    or not self.index.is_current(before)
                )
                self.matches[extra, path] = match

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "index"):
            check_index(self.index)
            for tier in (Tier.DEVICE, Tier.HOST):
                assert self.index.evictable(tier) == {
                    pool: len(free) for pool, free in self.free_now(tier).items()
                }

    def teardown(self) -> None:
        """Whatever happened, everything can be taken back, and then nothing is left."""
        if not hasattr(self, "index"):
            return
        self.told.check()
        while self.flights:
            self.finish(0, publish=False)
        while self.holds:
            self.unpin(0)
        self.index.evict_device(self.index.evictable(Tier.DEVICE))
        self.index.evict_host(
            sum(COST[pool] * count for pool, count in self.index.evictable(Tier.HOST).items()), COST
        )
        while leaves := [node for node in self.index.nodes() if not node.children]:
            with self.index.pinned(leaves[0]):
                for pool in self.page_pools:
                    self.index.forget_stored(
                        Span(leaves[0], 0, leaves[0].end), pool, np.ones(leaves[0].end, np.bool_)
                    )
                for pool in self.state_pools:
                    self.index.forget_stored(span_of(leaves[0]), pool, ONE)
            check_index(self.index)
        assert not list(self.index.nodes())
        self.told.check()


class StatelessMachine(IndexMachine):
    page_pools = (KV,)
    state_pools = ()


class StatesAloneMachine(IndexMachine):
    page_pools = ()
    state_pools = (MAMBA, SWA)


limits = settings(
    max_examples=example_count(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTwoStates = IndexMachine.TestCase
TestTwoStates.settings = limits
TestStateless = StatelessMachine.TestCase
TestStateless.settings = limits
TestStatesAlone = StatesAloneMachine.TestCase
TestStatesAlone.settings = limits
