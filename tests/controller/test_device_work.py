"""An engine whose device works behind its back: everything that it computes lands late, and reads late, in a
stream of its own.

The controller is told by fences. With them every page and state is right wherever it comes from; without them
it is not, which shows that the device is late enough to tell.
"""

from __future__ import annotations

import time
from functools import partial
from threading import Event

import numpy as np
import pytest
import torch

from tests.controller.harness import KV, MAMBA, PAGES, STATES, Engine, P, as_bytes, content, prompt
from tests.examples import slow_after
from tests.transfer.machines import always
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import Tier, as_tokens
from tiercache.errors import ConfigError
from tiercache.pools import DevicePool
from tiercache.storage.registry import open_backend
from tiercache.transfer.cuda import CudaEngine

LATE = 0.004


class LateEngine(Engine):
    """An `Engine` whose device is simulated and late; without `fenced` commits and releases pass no fence."""

    def __init__(self, storage=None, *, fenced=True, seed=0, **kwargs):
        self.device = SimulatedDevice(seed=seed, jitter=0.001)
        self.stream = self.new_stream()
        self.fenced, self.wrong = fenced, []
        super().__init__(storage, engine=self.transfer_engine, **kwargs)

    def transfer_engine(self, devices, hosts):
        memory = [
            tensor.view(torch.uint8).numpy()
            for tensors in self.tensors.values()
            for tensor in tensors.values()
        ]
        self.memory = [self.device.adopt(array) for array in memory]
        pools = {
            name: DevicePool(p.geometry, p.segments, p.capacity, "cuda:0", self.tensors[name])
            for name, p in devices.items()
        }
        return CudaEngine(pools, hosts, device=self.device, choose=always(None))

    def new_stream(self):
        with self.device.current():
            return self.device.create_stream(urgent=False)

    def fence(self):
        return self.device.event(self.stream) if self.fenced else None

    def later(self, kernel):
        self.device.run(self.stream, kernel)

    def hold(self):
        """Keep the stream from going on until the function that is returned is called."""
        held = Event()
        self.later(partial(held.wait, 60))
        return held.set

    def serve(self, prompt, answer=()):
        tokens = as_tokens(list(prompt) + list(answer))
        admission = self.admit(self.controller.lookup(tokens[: len(prompt)]), tokens=len(tokens), states=5)
        try:
            poll = admission.wait()
            depth = restored = poll.depth
            for layer in range(4):
                admission.wait_layer(layer, stream=self.stream)
            if depth:
                self.check_later(admission, tokens, depth, admission.restored_states[MAMBA])
            self.later(partial(time.sleep, LATE))
            for end in dict.fromkeys([*admission.checkpoints, len(tokens)]):
                self.compute(admission, tokens, depth, end)
                depth, states = end, {}
                if end % P == 0:
                    states[end] = self.take_state(admission, tokens[:end])
                self.controller.commit(admission, tokens[:end], states, fence=self.fence())
            self.check_later(admission, tokens, len(tokens) // P * P, None)
        finally:
            self.controller.release(admission, fence=self.fence())
        return restored

    def compute(self, admission, tokens, start, end):
        for page in range(start // P, end // P):
            slot = int(admission.pages[KV][page])
            for segment in PAGES.segments:
                rows = self.tensors[KV][segment.layer, segment.name][slot * P : (slot + 1) * P]
                value = content(tokens[: (page + 1) * P], segment).view(torch.float32).view(segment.shape)
                self.later(partial(rows.copy_, value))

    def take_state(self, admission, tokens):
        slots = admission.take_states()
        for segment in STATES.segments:
            value = content(tokens, segment).view(getattr(torch, segment.dtype)).view(segment.shape)
            self.later(partial(self.tensors[MAMBA][segment.layer, segment.name][slots[MAMBA]].copy_, value))
        return slots

    def check_later(self, admission, tokens, depth, state):
        slots = admission.pages[KV][: depth // P].tolist()

        def kernel():
            for page, slot in enumerate(slots):
                for segment in PAGES.segments:
                    rows = self.tensors[KV][segment.layer, segment.name][slot * P : (slot + 1) * P]
                    if not torch.equal(as_bytes(rows), content(tokens[: (page + 1) * P], segment)):
                        self.wrong.append(("page", depth, page))
            for segment in STATES.segments if state is not None else ():
                if not torch.equal(
                    as_bytes(self.tensors[MAMBA][segment.layer, segment.name][state]),
                    content(tokens[:depth], segment),
                ):
                    self.wrong.append(("state", depth, segment.layer))

        self.later(kernel)

    def finish(self):
        self.settle()
        self.device.event(self.stream).synchronize()
        self.controller.tick()
        self.check()


def live(engine, rounds, seed):
    """Serve conversations that come back, in pools that hold two of them; return the depths restored."""
    rng, depths = np.random.default_rng(seed), []
    for turn in range(rounds):
        who = int(rng.integers(5))
        depths.append(engine.serve(prompt(who, 10 + who, 20 + turn // 12), prompt(int(rng.integers(30, 33)))))
    engine.finish()
    return depths


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_with_fences_every_byte_is_right(seed, tmp_path):
    engine = LateEngine(
        open_backend(f"file://{tmp_path}/s?capacity=64MiB"), pages=12, states=7, blocks=24, seed=seed
    )
    depths = live(engine, 40, seed)
    assert engine.wrong == []
    assert sum(d > 0 for d in depths) >= 5, "something is restored (usually 30, on a busy machine 19)"
    assert engine.metrics.value("storage_gets_total", "kv", "hit") > 0
    assert engine.device.lost is None
    engine.controller.close()


def test_without_fences_it_is_not(tmp_path):
    wrong = []
    for seed in range(8):
        engine = LateEngine(
            open_backend("memory://?capacity=64MiB"), fenced=False, pages=12, states=7, blocks=24, seed=seed
        )
        live(engine, 40, seed)
        wrong += engine.wrong
        engine.controller.close()
        if wrong:
            break
    assert wrong


def test_a_load_waits_for_who_had_its_slots_before():
    """A's slots are given away while A is still being computed, for the host has no room for it."""
    engine = LateEngine(pages=6, states=7, blocks=4)
    index = engine.context.index
    a, b = as_tokens(prompt(1, 2, 3, 4, 5, 6)), [*prompt(9), 7, 8]
    engine.serve(b)
    engine.finish()
    engine.controller.evict(Tier.DEVICE)
    pin = index.pin(index.node_at(index.match(as_tokens(b)), 1), Tier.HOST)
    admission = engine.controller.admit(engine.controller.lookup(a), tokens=len(a), states=4)
    assert admission.wait().depth == 0
    go_on = engine.hold()
    engine.compute(admission, a, 0, len(a))
    engine.controller.commit(admission, a, {len(a): engine.take_state(admission, a)}, fence=engine.fence())
    engine.controller.release(admission)  # it reads no more, and what it writes is behind the commit's fence
    engine.controller.evict(Tier.DEVICE)
    assert engine.pools[KV].available == 6
    pin.release()
    # In a stream that does not wait for the one that computes, or there would be nothing to see.
    compute, engine.stream = engine.stream, engine.new_stream()
    assert engine.serve(b) == P
    other = engine.controller.admit(engine.controller.lookup(as_tokens(b)), tokens=len(b), states=0)
    assert (other.poll().depth, min(other.pages[KV]) >= 0) == (P, True), "a slot that is being filled counts"
    engine.controller.release(other, fence=engine.fence())
    time.sleep(0.2)  # in which a load that does not wait is made
    go_on()
    engine.device.event(compute).synchronize()
    assert engine.serve(b) == P, "what it restores now is what the load left there, or A"
    engine.finish()
    assert engine.wrong == []
    engine.controller.close()


@pytest.mark.parametrize("fenced", [True, pytest.param(False, id="control")])
def test_a_device_hit_is_behind_the_commit_that_made_it(fenced):
    """Two requests compute in two streams; the second reads, at once, what the first has yet to write."""
    engine = LateEngine(pages=20, states=12, fenced=fenced)
    tokens = [*prompt(1, 2, 3), 7]
    go_on = engine.hold()
    engine.serve(tokens)
    first, engine.stream = engine.stream, engine.new_stream()
    assert engine.serve([*tokens, 8]) == 3 * P
    if not fenced:
        engine.device.event(engine.stream).synchronize()
    go_on()
    for stream in (first, engine.stream):
        engine.device.event(stream).synchronize()
    assert (engine.wrong == []) is fenced
    if fenced:
        engine.finish()
    engine.controller.close()


@pytest.mark.parametrize("fenced", [True, pytest.param(False, id="control")])
def test_a_copy_of_pages_that_another_request_computes_waits_for_them(fenced):
    """The host had no room at the first commit: a second request, in another stream, takes the pages down."""
    engine = LateEngine(pages=20, states=12, fenced=fenced)
    a, b = as_tokens([*prompt(1, 2, 3), 7]), as_tokens([*prompt(1, 2, 3, 4), 7])
    taken = engine.arena.alloc(engine.arena.available)
    go_on = engine.hold()
    engine.serve(a)
    engine.arena.free(taken)
    first, engine.stream = engine.stream, engine.new_stream()
    admission = engine.admit(engine.controller.lookup(b), tokens=len(b), states=5)
    depth = admission.wait().depth
    assert depth == 3 * P
    engine.compute(admission, b, depth, len(b))
    engine.controller.commit(
        admission, b, {4 * P: engine.take_state(admission, b[: 4 * P])}, fence=engine.fence()
    )
    engine.controller.release(admission, fence=engine.fence())
    if fenced:
        time.sleep(0.2)  # in which a copy that does not wait is made
    else:
        engine.settle()
    go_on()
    for stream in (first, engine.stream):
        engine.device.event(stream).synchronize()
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve([*b.tolist(), 9]) == 4 * P
    engine.device.event(engine.stream).synchronize()
    assert (engine.wrong == []) is fenced
    engine.controller.close()


def test_a_fence_that_was_never_recorded_changes_nothing():
    class Unrecorded:
        cuda_event = 0

        def query(self):
            return True

        def synchronize(self): ...

    engine = LateEngine()
    tokens = as_tokens(prompt(1, 2, 3))
    admission = engine.admit(engine.controller.lookup(tokens), tokens=len(tokens), states=1)
    admission.wait()
    engine.compute(admission, tokens, 0, len(tokens))
    with pytest.raises(ConfigError, match="never recorded"):
        engine.controller.commit(admission, tokens, fence=Unrecorded())
    with pytest.raises(ConfigError, match="never recorded"):
        engine.controller.release(admission, fence=Unrecorded())
    assert not any(node.resident_mask for node in engine.context.index.nodes())
    engine.controller.release(admission, fence=engine.fence())
    engine.finish()
    assert engine.pools[KV].available == engine.pools[KV].capacity
    engine.controller.close()


def test_a_lost_device_ends_in_order(caplog):
    """Fences that cannot be asked any more are not taken for passed, and the controller closes."""

    class Broken:
        lost = False

        def query(self):
            if self.lost:
                raise RuntimeError("an illegal memory access was encountered")
            return False

        def synchronize(self): ...

    engine, fence = Engine(open_backend("memory://?capacity=64MiB")), Broken()
    tokens = as_tokens(prompt(1, 2, 3))
    admission = engine.controller.admit(engine.controller.lookup(tokens), tokens=len(tokens), states=2)
    engine.restore(admission, tokens)
    engine.compute(admission, tokens, 0, len(tokens))
    engine.controller.commit(
        admission, tokens, {len(tokens): engine.take_state(admission, tokens)}, fence=fence
    )
    free = engine.pools[KV].available
    engine.controller.release(admission, fence=fence)
    fence.lost = True
    assert engine.controller.tick()
    assert engine.pools[KV].available == free
    assert "illegal memory access" in caplog.text
    engine.check()
    assert engine.controller.close(0.5) in (True, False)
    assert engine.controller.close()


def test_a_state_stays_until_the_device_has_read_it():
    """A goes on from a restored state that the device has not read yet, and commits deeper."""
    engine = LateEngine(pages=10, states=6, blocks=40)
    a, b = as_tokens(prompt(1, 2, 3)), [*prompt(9), 7, 8]
    for tokens in ([*prompt(1), 7, 8], b):
        engine.serve(tokens)
    engine.finish()
    engine.controller.evict(Tier.DEVICE)
    admission = engine.controller.admit(engine.controller.lookup(a), tokens=len(a), states=2)
    depth = admission.wait().depth
    assert depth == P
    for layer in range(4):
        admission.wait_layer(layer, stream=engine.stream)
    state = admission.restored_states[MAMBA]
    engine.device.event(engine.stream).synchronize()
    while engine.controller.tick(0.01):
        pass
    engine.later(partial(time.sleep, 0.2))  # the next request waits for it
    engine.check_later(admission, a, depth, state)
    engine.compute(admission, a, depth, len(a))
    engine.controller.commit(admission, a, {len(a): engine.take_state(admission, a)}, fence=engine.fence())
    # Everything else is taken, so that what is evictable now is what the next request gets.
    engine.controller.evict(Tier.DEVICE)
    pool = engine.pools[MAMBA]
    others = pool.alloc(pool.available)
    mine = np.isin(others, [state])
    pool.free(others[mine])
    compute, engine.stream = engine.stream, engine.new_stream()
    try:
        second = engine.admit(engine.controller.lookup(as_tokens(b)), tokens=len(b), states=0)
        second.wait()
        engine.controller.release(second)
    finally:
        pool.free(others[~mine])
    engine.device.event(compute).synchronize()
    assert engine.wrong == []
    engine.controller.release(admission)
    engine.finish()
    engine.controller.close()
