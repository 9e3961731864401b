"""An engine that keeps the slots of its requests itself, and lends what they have computed to the cache."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine, Fence, P, content
from tests.examples import example_count, slow_after
from tests.integrity import check_index, owned
from tiercache.controller.lent_slots import Taken
from tiercache.core import ABSENT, Tier, as_tokens
from tiercache.errors import InputError, PoolFullError, SlotError

CAPACITY = {KV: 12, MAMBA: 6}
draws = st.integers(0, 2**16)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def tokens_of(path):
    """A page of tokens for each letter of the path."""
    return [token for at in path for token in range(100 * at, 100 * at + P)]


class Request:
    """A sequence whose first `held` pages are the cache's; the slots of all others are the engine's."""

    def __init__(self, tokens, pin, held, row):
        self.tokens, self.pin, self.held, self.row = tokens, pin, held, row
        self.state: int | None = None
        """Slot of the state at the end of the tokens."""


class LendingEngine:
    """Serves requests from slots that it takes from the pools' own allocators, as SGLang does."""

    def __init__(self, storage=None, *, hybrid=True, blocks=32):
        self.cache = Engine(storage, pages=CAPACITY[KV], states=CAPACITY[MAMBA], blocks=blocks, hybrid=hybrid)
        self.controller, self.hybrid = self.cache.controller, hybrid
        self.lent = self.controller.lent
        self.running: list[Request] = []
        self.fences: list[Fence] = []

    def take(self, pool, count):
        """Slots for a request, after the cache has made room; None if there are too few."""
        source = self.cache.pools[pool].source
        short = count - source.available
        if short > 0:
            evictable = self.lent.index.evictable(Tier.DEVICE)[pool]
            freed = self.lent.make_room({pool: short}).get(pool, 0)
            assert freed >= min(short, evictable)
            if not self.hybrid:
                assert freed <= short, "no more than was asked for"
        return source.alloc(count) if count <= source.available else None

    def begin(self, tokens, *, gives=False):
        """Begin a request at the depth that device and host restore, loaded into its own slots if `gives`."""
        index, sequence = self.lent.index, as_tokens(tokens)
        match = index.match(sequence)
        index.touch(match, sequence)
        depth = match.near_depth
        node = index.node_at(match, depth)
        with index.pinned(node):
            if not self._load(node, depth, gives=gives):
                match = index.match(sequence)
                depth = self.lent.device_depth(match)
                node = index.node_at(match, depth)
            if node.end > depth:
                node = index.extend_path(sequence, depth)
            pin, at = index.pin(node, Tier.DEVICE), index.locations(node, depth)
        request = Request(list(tokens[: depth * P]), pin, depth, at.pages[KV].device.copy())
        self.running.append(request)
        if depth and self.hybrid:
            self.cache.verify_state(at.states[MAMBA].device, request.tokens)
        return request

    def _load(self, node, depth, *, gives):
        """Bring a prefix to the device; False if there are too few slots."""
        at = self.lent.index.locations(node, depth)
        need = {KV: int((at.pages[KV].device == ABSENT).sum())}
        if self.hybrid and depth:
            need[MAMBA] = int(at.states[MAMBA].device == ABSENT)
        if gives:
            with self.lent.index.pinned(node, Tier.DEVICE, Tier.HOST):
                given = {pool: self.take(pool, count) for pool, count in need.items()}
            if any(slots is None for slots in given.values()):
                for pool, slots in given.items():
                    self.cache.pools[pool].free([] if slots is None else slots)
                return False
        try:
            load = self.lent.load(node, depth, given if gives else None)
        except PoolFullError:
            assert not gives
            return False
        self.pass_fences()  # the copy may wait for work on the device
        for layer in range(4):
            load.wait_layer(layer)
        while self.lent.copies:
            self.controller.tick(0.01)
        return True

    def pass_fences(self):
        while self.fences:
            self.fences.pop().open()

    def compute(self, request, more):
        """Compute whole pages of `more`, and the state behind them; False if there is no room."""
        slots = self.take(KV, len(more) // P)
        if slots is None:
            return False
        request.row = np.concatenate([request.row, slots])
        first, request.tokens = len(request.tokens) // P, [*request.tokens, *more]
        for page in range(first, len(request.row)):
            self.cache.fill(SimpleNamespace(pages={KV: request.row}), page, request.tokens[: (page + 1) * P])
        if self.hybrid:
            state = [request.state] if request.state is not None else self.take(MAMBA, 1)
            request.state = None if state is None else int(state[0])
            if request.state is not None:
                for segment in self.cache.attached[MAMBA].segments:
                    held = self.cache.tensors[MAMBA][segment.layer, segment.name][request.state]
                    held.copy_(content(request.tokens, segment).view(held.dtype).view(segment.shape))
        return True

    def hand_over(self, request, fence=None):
        """Let the cache have the request's pages and its state."""
        depth, states = len(request.row), {}
        if not depth or (self.hybrid and request.state is None):
            return
        if request.state is not None:
            states[depth * P] = {MAMBA: request.state}
        after = request.pin.node
        made = self.lent.adopt(
            request.tokens, {KV: request.row}, states, taken=Taken(after=after), fence=fence
        )
        at = made.pages[KV]
        given = request.row[made.start :]
        assert not at.private.any()
        self.cache.pools[KV].free(given[at.duplicate])
        request.row = np.concatenate([request.row[: made.start], at.table])
        request.held = depth
        if made.adopted_states:
            request.state = None
        index, before = self.lent.index, request.pin
        node = index.node_at(made.node, depth)
        if node.end > depth:
            node = index.extend_path(as_tokens(request.tokens), depth)
        request.pin = index.pin(node, Tier.DEVICE)
        before.release()

    def end(self, request):
        self.running.remove(request)
        self.cache.pools[KV].free(request.row[request.held :])
        if request.state is not None:
            self.cache.pools[MAMBA].free([request.state])
        request.pin.release()

    def check(self):
        """No slot is lost, held twice or free and held; every row and every page holds its tokens' bytes."""
        check_index(self.lent.index)
        for name, pool in self.cache.pools.items():
            mine = [request.row[request.held :] for request in self.running]
            if name is MAMBA:
                mine = [np.array([r.state]) for r in self.running if r.state is not None]
            held = np.concatenate([owned(self.lent.index, Tier.DEVICE, name), *mine]).astype(np.int64)
            assert len(np.unique(held)) == len(held), f"a slot of {name} is held twice"
            assert pool.source.allocated(held).all(), f"a slot of {name} is free and held"
            assert len(held) + pool.available == pool.capacity, f"a slot of {name} is lost"
        for request in self.running:
            self.cache.verify(SimpleNamespace(pages={KV: request.row}), request.tokens, len(request.row))


class LentSlots(RuleBasedStateMachine):
    hybrid = True

    @initialize(blocks=st.sampled_from([1, 8, 64]), stores=st.booleans())
    def start(self, blocks, stores):
        self.engine = LendingEngine(
            MemoryBackend(1 << 20) if stores else None, hybrid=self.hybrid, blocks=blocks
        )

    @rule(path=paths, more=paths, gives=st.booleans())
    def begin(self, path, more, gives):
        """Begin a request, and compute what follows on the prefix that is there."""
        request = self.engine.begin([*tokens_of(path), 9], gives=gives)
        rest = [*tokens_of(path), *tokens_of(more)][len(request.tokens) :]
        if len(self.engine.running) > 3 or not self.engine.compute(request, rest):
            self.engine.end(request)

    @rule(which=draws, more=paths)
    def compute(self, which, more):
        for request in self._chosen(which):
            self.engine.compute(request, tokens_of(more))

    @rule(which=draws, fenced=st.booleans(), ends=st.booleans())
    def hand_over(self, which, fenced, ends):
        for request in self._chosen(which):
            fence = Fence() if fenced else None
            self.engine.fences += [fence] if fenced else []
            self.engine.hand_over(request, fence)
            if ends:
                self.engine.end(request)

    def _chosen(self, which):
        running = self.engine.running
        return [running[which % len(running)]] if running else []

    @rule(pages=st.integers(0, 12), states=st.integers(0, 6))
    def make_room(self, pages, states):
        need = {KV: pages} | ({MAMBA: states} if self.hybrid else {})
        before = {p: pool.available for p, pool in self.engine.cache.pools.items()}
        there = self.engine.lent.index.evictable(Tier.DEVICE)
        freed = self.engine.lent.make_room(need)
        for pool, count in need.items():
            assert freed.get(pool, 0) >= min(count, there[pool])
            assert self.engine.cache.pools[pool].available == before[pool] + freed.get(pool, 0)

    @rule()
    def land(self):
        """Let the device pass everything, and copies end."""
        self.engine.pass_fences()
        self.engine.controller.tick(0.01)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.pass_fences()
        while self.engine.running:
            self.engine.end(self.engine.running[0])
        self.engine.cache.settle()
        self.engine.controller.evict(Tier.DEVICE)
        self.engine.check()
        assert all(pool.available == pool.capacity for pool in self.engine.cache.pools.values())
        self.engine.controller.close()


class LentPagesAlone(LentSlots):
    hybrid = False


TestLentSlots = LentSlots.TestCase
TestLentSlots.settings = settings(max_examples=example_count(40), stateful_step_count=30, deadline=None)
TestLentPagesAlone = LentPagesAlone.TestCase
TestLentPagesAlone.settings = TestLentSlots.settings


@pytest.mark.parametrize("seed", slow_after(2, range(10)))
def test_ranks_that_agree_stay_alike_whenever_their_copies_end(seed):
    met, given = Barrier(2, timeout=60), {}

    def live(rank):
        def agree(ends):
            given[rank] = ends.copy()
            met.wait()
            least = np.minimum(given[0], given[1])
            met.wait()
            return least

        draw, pause, told = Random(seed), Random(rank), []
        engine = LendingEngine(blocks=24)
        engine.lent.agree_by(agree)
        for _ in range(80):
            path = [draw.randrange(2) for _ in range(draw.randrange(1, 5))]
            request = engine.begin([*tokens_of(path), 9])
            engine.compute(request, tokens_of(path)[len(request.tokens) :])
            time.sleep(pause.choice([0, 0, 0.002]))
            engine.hand_over(request)
            told.append((request.row.tolist(), request.state, engine.lent.copies))
            engine.end(request)
            if draw.random() < 0.6:
                engine.controller.tick()
        engine.controller.close()
        return told, engine.controller.metrics.value("written_objects_total", "host", "kv")

    with ThreadPoolExecutor(2) as ranks:
        one, other = ranks.map(live, range(2))
    assert one == other
    assert one[1] > 20


def test_what_a_lending_engine_computed_comes_back_in_another_process():
    """Adopted slots are written through like committed ones."""
    store = MemoryBackend(1 << 20)
    engine = LendingEngine(store)
    tokens = list(range(3 * P))
    request = engine.begin([*tokens, 9])
    assert engine.compute(request, tokens)
    engine.hand_over(request)
    engine.end(request)
    assert engine.cache.settle()
    engine.controller.evict(Tier.DEVICE)
    assert Engine(store).serve([*tokens, 9]) == len(tokens)


def test_a_load_into_slots_that_do_not_fit_changes_nothing():
    engine = LendingEngine()
    tokens = list(range(2 * P))
    request = engine.begin([*tokens, 9])
    assert engine.compute(request, tokens)
    engine.hand_over(request)
    engine.end(request)
    assert engine.cache.settle()
    engine.controller.evict(Tier.DEVICE)
    match = engine.lent.index.match(as_tokens([*tokens, 9]))
    assert (match.near_depth, engine.lent.device_depth(match)) == (2, 0)
    source = engine.cache.pools[KV].source
    for count in (1, 3):
        slots = source.alloc(count)
        with pytest.raises(SlotError, match="exactly"):
            engine.lent.load(match, 2, {KV: slots, MAMBA: np.empty(0, np.int64)})
        source.free(slots)
        engine.check()


def test_a_page_that_is_on_its_way_into_another_slot_is_waited_for():
    """A request computes what another one loads: its slots become duplicates, which it frees."""
    engine = LendingEngine(hybrid=False)
    tokens = list(range(3 * P))
    first, second = engine.begin([*tokens, 9]), engine.begin([*tokens, 9])
    assert engine.compute(first, tokens)
    assert engine.compute(second, tokens)
    engine.hand_over(first)
    engine.end(first)
    assert engine.cache.settle()
    engine.controller.evict(Tier.DEVICE)
    match = engine.lent.index.match(as_tokens([*tokens, 9]))
    engine.lent.load(match, 3)
    engine.hand_over(second)
    engine.check()
    engine.end(second)


def test_bad_slots_change_nothing():
    engine = LendingEngine()
    request = engine.begin([*range(2 * P), 9])
    assert engine.compute(request, list(range(2 * P)))
    adopt, row = engine.lent.adopt, request.row
    for error, pages, states in [
        (SlotError, {KV: row + 100}, {}),
        (SlotError, {KV: row}, {2 * P: {MAMBA: 99}}),
        (InputError, {KV: row}, {P + 1: {MAMBA: 0}}),
        (InputError, {KV: row}, {2 * P: {"swa": 0}}),
        (InputError, {MAMBA: row}, {}),
        (InputError, {KV: np.concatenate([row, row])}, {}),
    ]:
        with pytest.raises(error):
            adopt(request.tokens, pages, states)
        engine.check()
    with pytest.raises(InputError, match="no such pool"):
        engine.lent.make_room({"swa": 1})
    assert engine.lent.make_room({KV: 5}) == {}
    with pytest.raises(PoolFullError):
        engine.cache.pools[KV].source.alloc(100)
