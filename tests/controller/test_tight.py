"""Restores of overlapping prompts at once, over a device and a host that have just enough room.

Nothing that a request was promised is taken away by the restores of others, or by its own: a request that is
alone always gets its slots, and no restore runs into its deadline while storage answers.
"""

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import Engine, P, prompt
from tests.controller.test_interleavings import Gated, ask, evict
from tests.examples import example_count
from tiercache.controller import ControllerOptions
from tiercache.core import Outcome, Reason, Tier
from tiercache.errors import PoolFullError
from tiercache.transfer import CopyEngine

PROMPTS = [
    np.array([*prompt(*ids), 5])
    for ids in ((1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 3, 8), (9, 8, 7, 6))
]
CALLS = ["admit"] * 5 + ["poll"] * 8 + ["tick"] * 5 + ["serve"] * 2 + ["start", "release"]
WORLD = ["shut"] * 2 + ["open", "evict", "lose", "copies fail"]


def test_a_prompt_shorter_than_a_page_reserves_no_slot_for_a_restored_state():
    """A longer one does, and the device has no third slot."""
    engine = Engine(states=2)
    admission = ask(engine, [1, 2], states=2, tokens=3 * P)
    assert len({slot for _ in range(2) for slot in admission.take_states().values()}) == 2
    engine.controller.release(admission)
    with pytest.raises(PoolFullError):
        ask(engine, prompt(1, 2), states=2)
    engine.check()


def serve(engine, admission, tokens, others):
    """Restore, compute and commit. If there is no room to fall back, others have it."""
    while True:
        try:
            depth = engine.restore(admission, tokens)
            break
        except PoolFullError:
            if not engine.controller.tick(0.01):
                assert others, "a request that is alone has its slots"
                engine.controller.release(admission)
                return
    assert admission.reason is not Reason.TIMEOUT
    whole, states = len(tokens) // P * P, {}
    if engine.hybrid:
        states[whole] = engine.take_state(admission, tokens[:whole])
    engine.compute(admission, tokens, depth, whole)
    engine.controller.commit(admission, tokens, states)
    engine.verify(admission, tokens, whole // P)
    engine.controller.release(admission)


@given(
    hybrid=st.booleans(),
    stored=st.sets(st.sampled_from(range(6)), min_size=2),
    pages=st.sampled_from([7, 9, 14]),
    states=st.sampled_from([2, 4]),
    blocks=st.sampled_from([4, 5, 7, 14]),
    share=st.sampled_from([0.25, 1.0]),
    threads=st.sampled_from([1, 4]),
    steps=st.lists(st.tuples(st.sampled_from(CALLS + WORLD), st.integers(0, 11)), max_size=40),
)
@settings(
    max_examples=example_count(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_restores_side_by_side(hybrid, stored, pages, states, blocks, share, threads, steps):
    store, failing, requests = Gated(), [], []
    before = Engine(store, pages=24, blocks=80, hybrid=hybrid)
    for number in sorted(stored):
        before.serve(PROMPTS[number])
    assert before.settle()
    before.controller.close()

    def copier(*columns):
        if failing and failing.pop():
            raise OSError("a bad layer")
        copy_segments(*columns)

    def open_gates():
        while store.gates:
            store.gates.popitem()[1].set()

    engine = Engine(
        store,
        hybrid=hybrid,
        pages=pages,
        states=states,
        blocks=blocks,
        options=ControllerOptions(
            restore_deadline=20.0, piece_bytes=1, in_flight_share=share, read_threads=threads, write_retries=0
        ),
        engine=lambda d, h: CopyEngine(d, h, copier=copier),
    )
    for step, number in steps:
        tokens = PROMPTS[number % 6]
        if step == "admit" and len(requests) < 3:
            with contextlib.suppress(PoolFullError):
                requests.append((ask(engine, tokens, states=int(hybrid)), tokens))
        elif step == "shut":
            store.gates.setdefault(number % 6 + 1, threading.Event())
        elif step == "open":
            open_gates()
        elif step == "evict":
            engine.controller.evict(Tier.DEVICE if number % 2 else Tier.HOST)
        elif step == "lose":
            store.gets = [Outcome.MISS if number % 2 else Outcome.ERROR, *[None] * (number // 2)]
        elif step == "copies fail":
            failing[:] = [True] * (number + 1)
        elif step == "tick":
            engine.controller.tick(0.002)
        elif requests:
            admission, tokens = requests.pop(number % len(requests))
            if step == "serve":
                open_gates()
                serve(engine, admission, tokens, requests)
            elif step == "release":
                engine.controller.release(admission)
            else:
                requests.append((admission, tokens))
                with contextlib.suppress(PoolFullError):
                    admission.start() if step == "start" else admission.poll()
        engine.check()
    open_gates()
    failing.clear()
    while requests:
        serve(engine, *requests.pop(), requests)
    engine.settle()
    evict(engine)
    engine.check()
    assert all(pool.available == pool.capacity for pool in engine.pools.values())
    assert engine.arena.available == engine.arena.blocks
    assert engine.context.index.holds_only([])
    assert engine.controller.close()
