"""Orders of events that are rare and would be costly: each test names what went wrong, or would."""

import threading
import time

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, Engine, Fence, Flaky, P, prompt
from tiercache.controller import ControllerOptions, Status
from tiercache.controller.operations import Fetch
from tiercache.core import Reason, Tier, as_tokens
from tiercache.errors import AdmissionError, PoolFullError, TransferError
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
    engine.serve(prompt)
    engine.settle()


def evict(engine):
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)


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


def test_a_fetch_that_ends_does_not_take_the_claims_of_the_next_one(monkeypatch):
    """Handles of the part that missed are free, and filled by another fetch, before the rest of the first one
    lands.
    """
    monkeypatch.setattr(Fetch, "part", 1)
    store = Gated()
    first, second = [*prompt(1, 2, 3), 5], [*prompt(8), 5]
    engine = Engine(
        store,
        hybrid=False,
        blocks=4,
        options=ControllerOptions(restore_deadline=20.0, read_threads=4, in_flight_share=1.0),
    )
    stored(engine, first)
    missing = store.page(1)
    stored(engine, second)
    evict(engine)
    store.lose(missing)
    deep = [shut(store, 2), shut(store, 3)]
    one = ask(engine, first)
    until(engine, lambda: one.poll() and engine.metrics.value("storage_gets_total", "kv", "miss") == 1)
    page = shut(store, 1)
    two = ask(engine, second)
    until(engine, lambda: two.poll() and fetching(two))
    for gate in deep:
        gate.set()
    until(engine, lambda: one.poll().status is not Status.PENDING)
    three = ask(engine, second)
    for _ in range(20):
        assert three.poll().status is Status.PENDING
        engine.controller.tick(0.005)
    page.set()
    assert [two.wait().depth, three.wait().depth] == [P, P]
    wind_up(engine, one, two, three)


def test_a_shared_fetch_that_fails_for_another_path_leaves_this_one_whole():
    """The third page is missing for one prompt; the other shares the first two, and has a third page of its
    own.
    """
    store = Gated()
    first, second = [*prompt(1, 2, 3), 5], [*prompt(1, 2, 9), 5]
    engine = Engine(store, hybrid=False)
    stored(engine, first)
    missing = store.page(3)
    stored(engine, second)
    evict(engine)
    store.lose(missing)
    gate = shut(store)
    one = ask(engine, first)
    until(engine, lambda: one.poll() and fetching(one))
    two = ask(engine, second)
    until(engine, lambda: two.poll() and fetching(two))
    gate.set()
    assert (one.wait().depth, one.reason) == (2 * P, Reason.ABSENT)
    assert (two.wait().depth, two.reason) == (3 * P, Reason.NONE)
    wind_up(engine, one, two)


def test_the_slots_of_a_failed_load_stay_with_their_request():
    """Else another request takes them before this one can compute what it did not get."""
    armed = []
    engine = Engine(Gated(), pages=8, engine=failing(armed))
    stored(engine, [*prompt(1, 2, 3), 5])
    engine.controller.evict(Tier.DEVICE)
    armed[:] = [True]
    tokens = np.array(prompt(1, 2, 3, 4))
    admission = ask(engine, tokens, tokens=8 * P, states=1)
    until(engine, lambda: not engine.context.in_flight.operations)
    with pytest.raises(PoolFullError):
        ask(engine, prompt(6, 7))
    assert admission.wait() == admission.poll()
    assert (admission.status, admission.depth, admission.reason) == (Status.FAILED, 0, Reason.IO_ERROR)
    engine.compute(admission, tokens, 0, 4 * P)
    engine.controller.commit(admission, tokens)
    engine.verify(admission, tokens, 4)
    wind_up(engine, admission)


def test_nothing_is_committed_on_a_load_that_failed():
    """The loaded slots are no longer the index's: a commit of the old table would put slots into it that are
    free.
    """
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


def test_a_fall_back_for_want_of_slots_is_tried_again():
    """Two requests share a load that fails: the second had counted on the first one's slots."""
    armed = []
    gate = threading.Event()

    def copier(*columns):
        if armed:
            assert gate.wait(30)
            raise OSError("a bad layer")
        copy_segments(*columns)

    engine = Engine(Gated(), pages=6, hybrid=False, engine=lambda d, h: CopyEngine(d, h, copier=copier))
    tokens = np.array([*prompt(1, 2, 3), 5])
    stored(engine, tokens)
    engine.controller.evict(Tier.DEVICE)
    armed.append(True)
    one, two, three = ask(engine, tokens), ask(engine, tokens), ask(engine, [1])
    gate.set()
    until(engine, lambda: one.poll().status is Status.FAILED)
    for _ in range(2):
        with pytest.raises(PoolFullError):
            two.poll()
        engine.check()
    engine.controller.release(one)
    assert two.poll().status is Status.FAILED
    assert engine.metrics.value("restore_failures_total", "io_error") == 2
    armed.clear()
    engine.compute(two, tokens, 0, 3 * P)
    engine.controller.commit(two, tokens)
    engine.verify(two, tokens, 3)
    wind_up(engine, two, three)


def test_without_states_a_failed_load_keeps_what_the_device_has():
    armed = []
    engine = Engine(Gated(), hybrid=False, engine=failing(armed))
    engine.serve([*prompt(1, 2), 5])
    engine.serve([*prompt(1, 2, 3, 4), 5])
    engine.settle()
    engine.serve([*prompt(1, 2, 9), 5])
    engine.settle()
    holder = ask(engine, [*prompt(1, 2), 5])
    engine.controller.evict(Tier.DEVICE)
    armed[:] = [True]
    tokens = [*prompt(1, 2, 3, 4), 6]
    admission = ask(engine, tokens)
    assert engine.restore(admission, np.array(tokens)) == 2 * P
    wind_up(engine, holder, admission)


def test_a_shorter_commit_does_not_let_go_of_deeper_pages():
    engine = Engine(Gated(), pages=8)
    tokens = np.array([*prompt(1, 2, 3), 5])
    stored(engine, tokens)
    admission = ask(engine, tokens, states=1)
    assert engine.restore(admission, tokens) == 3 * P
    engine.controller.commit(admission, tokens[:P])
    for i in range(20, 26):
        engine.serve(prompt(i, i + 1))
        engine.settle()
    engine.verify(admission, tokens, 3)
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
    assert engine.pools[KV].allocator.allocated(np.array(shared)).all()
    engine.check()
    fence.open()
    engine.controller.evict(Tier.DEVICE)
    assert engine.pools[KV].available == 8
    wind_up(engine)


def test_slots_that_a_fallback_does_not_need_go_with_the_request():
    """A layer fails; before its request looks, another has brought the pages.

    What was computed from the layer may still be under way.
    """
    armed = []
    engine = Engine(MemoryBackend(), engine=failing(armed))
    tokens = [*prompt(1, 2, 3), 5]
    stored(engine, tokens)
    engine.controller.evict(Tier.DEVICE)
    armed.append(True)
    one = ask(engine, tokens, states=1)
    assert one.depth == 3 * P
    # private: a poll would react to the failed load, and another request is to come before that
    until(engine, lambda: one._restore.has_landed)
    assert engine.serve(tokens) == 3 * P
    engine.settle()
    before = engine.pools[KV].available
    assert one.poll().depth == 3 * P
    assert engine.pools[KV].available == before
    engine.check()
    engine.controller.release(one)
    assert engine.pools[KV].available > before
    engine.check()


def test_what_waits_for_room_is_decided_when_a_fence_has_passed():
    """No operation lands then; a commit that found the host full while the device was busy would wait for
    ever.
    """
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
    assert not controller.unstored, "the flush ended in time, and nothing waits any more"
    assert controller.close()


def test_a_host_that_holds_one_state_and_nothing_beside_it_lets_everything_through():
    """Less is tried where a wave finds no room, down to one object; what cannot go down keeps nobody else
    waiting.
    """
    engine = Engine(MemoryBackend(), blocks=3, states=40)  # no state is evicted before its copy
    for turn in range(4):
        engine.serve([*prompt(turn), 7])
    assert engine.settle()
    for turn in range(4):
        engine.controller.evict(Tier.DEVICE)
        engine.controller.evict(Tier.HOST)
        query = engine.controller.lookup([*prompt(turn), 7]).query
        while not query.done:
            engine.controller.tick(0.01)
        assert 1 in query.result.restorable_prefix_pages
    engine.check()
