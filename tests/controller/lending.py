"""An engine that keeps the slots of its requests itself, and lends what they have computed to the cache."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.controller.harness import KV, MAMBA, Engine, Fence, P, content
from tests.integrity import check_index, owned
from tiercache.controller.lent_slots import Taken
from tiercache.core import ABSENT, Tier, as_tokens
from tiercache.errors import PoolFullError, TransferError

CAPACITY = {KV: 12, MAMBA: 6}


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

    def __init__(self, storage=None, *, hybrid=True, blocks=32, **more):
        sizes = {"pages": CAPACITY[KV], "states": CAPACITY[MAMBA], "blocks": blocks}
        self.cache = Engine(storage, **sizes, hybrid=hybrid, **more)
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
        fence = Fence()
        try:
            load = self.lent.load(node, depth, given if gives else None, fence=fence)
        except PoolFullError:
            assert not gives
            return False
        # private: nothing else tells whether a copy has ended
        assert not any(copy.ticket.done() for copy in load._loads), "slots are written behind the fence"
        fence.open()
        self.pass_fences()  # the copy may wait for work on the device
        whole = True
        try:
            for layer in range(4):
                load.wait_layer(layer)
        except TransferError:
            whole = False
        while self.lent.copies:
            self.controller.tick(0.01)
        return whole

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
