"""Orders of events that are rare and would be costly: each test names what went wrong, or would."""

import threading
import time

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, Engine, Fence, Flaky, P, evict_checked, prompt
from tiercache.core import Tier, as_tokens
from tiercache.errors import AdmissionError, TransferError
from tiercache.transfer import CopyEngine


class Gated(Flaky):
    """A store whose gets wait while their page's gate is shut. `gates`: by depth in pages; None shuts all."""

    def __init__(self):
        super().__init__(MemoryBackend())
        self.gates = {}
        self.lost = set()
        """Keys that `exists` reports as present although their objects are deleted."""

    def exists(self, keys):
        return [key in self.lost or there for key, there in zip(keys, super().exists(keys), strict=True)]

    def lose(self, key):
        self.lost.add(key)
        self.delete([key])

    def get(self, items):
        depths = {entry.key: entry.meta.depth for entry in self.scan_all()}
        outcomes = super().get(items)
        for gate in {self.gates.get(depths.get(item.key)) for item in items} | {self.gates.get(None)}:
            assert gate is None or gate.wait(30)
        return outcomes

    def page(self, depth):
        """The key of the only page at this depth."""
        [key] = [entry.key for entry in self.scan_all() if entry.key.pool is KV and entry.meta.depth == depth]
        return key


def shut(store, depth=None):
    gate = store.gates[depth] = threading.Event()
    return gate


def stored(engine, prompt):
    engine.keep(prompt)


def evict(engine):
    evict_checked(engine, Tier.DEVICE, Tier.HOST)


def failing(armed):
    def copier(*columns):
        if armed and armed.pop():
            raise OSError("a bad layer")
        copy_segments(*columns)

    return lambda d, h: CopyEngine(d, h, copier=copier)


def until(engine, condition):
    for _ in range(2000):
        if not engine.controller.tick(0.01):  # a call of a store that has been given up is not waited for
            time.sleep(0.001)
        if condition():
            return
    raise AssertionError("it did not come to pass")


def wind_up(engine, *admissions):
    for admission in admissions:
        engine.controller.release(admission)
    engine.settle()
    engine.check()
    assert engine.controller.close()


def ask(engine, prompt, **kwargs):
    return engine.controller.admit(engine.controller.lookup(np.array(prompt)), **kwargs)


def fetching(admission):
    """Whether the admission waits for a fetch."""
    # private: PENDING also means that the query is under way
    return bool(admission._prefetch._fetching)


def test_nothing_is_committed_on_a_load_that_failed():
    """The loaded slots are free again: a commit of the old table would put them into the index."""
    armed = []
    engine = Engine(Gated(), engine=failing(armed))
    stored(engine, [*prompt(1, 2, 3), 5])
    engine.controller.evict(Tier.DEVICE)
    armed[:] = [True]
    tokens = np.array(prompt(1, 2, 3, 4))
    admission = ask(engine, tokens, states=1)
    with pytest.raises(TransferError):
        admission.wait_layer(3)
    until(engine, lambda: not engine.context.in_flight.operations)
    with pytest.raises(AdmissionError, match="lost a layer"):
        engine.controller.commit(admission, tokens)
    assert admission.wait().depth == 0
    wind_up(engine, admission)


def test_a_release_behind_a_fence_keeps_slots_and_pages_until_then():
    engine = Engine(Gated(), pages=8)
    tokens = np.array(prompt(1, 2, 3, 4))
    stored(engine, tokens)
    admission, fence = ask(engine, tokens, tokens=6 * P), Fence()
    engine.restore(admission, tokens)
    shared, free = admission.pages[KV][:3].tolist(), engine.pools[KV].available
    engine.controller.release(admission, fence=fence)
    engine.controller.evict(Tier.DEVICE)
    assert engine.pools[KV].available <= free + 1
    assert engine.pools[KV].source.allocated(np.array(shared)).all()
    engine.check()
    fence.open()
    engine.controller.evict(Tier.DEVICE)
    assert engine.pools[KV].available == 8
    wind_up(engine)


def test_what_waits_for_room_is_decided_when_a_fence_has_passed():
    """No operation lands then, so that a commit that found the host full would wait for ever."""
    engine = Engine(MemoryBackend(), pages=20, states=14, blocks=3)
    controller, tokens = engine.controller, as_tokens(prompt(1, 2, 2, 2, 1, 2))
    fence = Fence()
    admission = controller.admit(controller.lookup(tokens[: 5 * P]), tokens=len(tokens), states=4)
    assert not admission.wait().depth
    engine.compute(admission, tokens, 0, len(tokens))
    for end in (5 * P, 6 * P):
        controller.commit(
            admission, tokens[:end], {end: engine.take_state(admission, tokens[:end])}, fence=fence
        )
    controller.release(admission, fence=fence)
    controller.tick()
    fence.open()
    controller.flush(3)
    assert controller.flush(3), "the first ended in time, and nothing waits any more"
    assert controller.close()


def test_a_host_that_holds_one_state_and_nothing_beside_it_lets_everything_through():
    """Less is tried where a wave finds no room, down to one object; what cannot go down holds up nobody."""
    engine = Engine(MemoryBackend(), blocks=3, states=40)  # no state is evicted before its copy
    for turn in range(4):
        engine.keep([*prompt(turn), 7])
    for turn in range(4):
        evict_checked(engine, Tier.DEVICE, Tier.HOST)
        query = engine.controller.lookup([*prompt(turn), 7]).query
        while not query.done:
            engine.controller.tick(0.01)
        assert 1 in query.result.restorable_prefix_pages
    engine.check()
