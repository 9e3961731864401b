"""Continuations of one prompt, which share its pages and end in any order."""

import itertools
import threading

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import KV, MAMBA, Engine, P, prompt
from tests.controller.test_interleavings import ask, failing
from tests.controller.test_overlap import all_is_free
from tiercache.controller import Status
from tiercache.core import Tier, as_tokens
from tiercache.errors import AdmissionError, InputError, PoolFullError, SlotError, TransferError
from tiercache.transfer import CopyEngine

TAIL = [77, 78]
PROMPT = [*prompt(1, 2, 3), *TAIL]


def sequence(number):
    """The prompt and the answer of one continuation."""
    return [*PROMPT, *prompt(8, 9 + number)][: 5 * P]


def started(engine, tokens=PROMPT, **kwargs):
    """A request whose prompt is computed and committed, with a page that is not full at its end."""
    tokens = as_tokens(tokens)
    admission = ask(engine, tokens, **{"states": 3, **kwargs})
    depth = engine.restore(admission, tokens)
    whole = len(tokens) // P * P
    engine.compute(admission, tokens, depth, whole)
    states = {whole: engine.take_state(admission, tokens[:whole])} if engine.hybrid else {}
    engine.controller.commit(admission, tokens[:whole], states)
    return admission


def fill_tail(engine, admission, page, value):
    """Write a page that is not full: its bytes are no function of whole pages."""
    slot = int(admission.pages[KV][page])
    for tensor in engine.tensors[KV].values():
        tensor[slot * P : (slot + 1) * P] = value


def tail_of(engine, admission, page):
    slot = int(admission.pages[KV][page])
    return {float(t[slot * P : (slot + 1) * P].unique()) for t in engine.tensors[KV].values()}


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_continuations_share_the_prompt_and_end_in_any_order(hybrid, order):
    engine = Engine(MemoryBackend(), pages=16, hybrid=hybrid)
    source = started(engine, tokens=PROMPT)
    states = 2 if hybrid else 0
    forks = [engine.controller.fork(source, tokens=5 * P, states=states) for _ in range(2)]
    requests = [source, *forks]
    engine.check()
    for fork in forks:
        assert fork.poll().status is Status.READY
        assert fork.depth == 3 * P
        assert np.array_equal(fork.pages[KV][:3], source.pages[KV][:3]), "no page is copied"
    own = [set(one.pages[KV][3:].tolist()) for one in requests]
    assert sum(map(len, own)) == len(set().union(*own)), "the page in which the prompt ends is everyone's own"
    for number, fork in enumerate(forks):
        tokens = as_tokens(sequence(number))
        engine.compute(fork, tokens, 3 * P, 5 * P)
        states = {5 * P: engine.take_state(fork, tokens)} if hybrid else {}
        engine.controller.commit(fork, tokens, states)
        engine.verify(fork, tokens, 5)
    for which in order:
        engine.controller.release(requests[which])
        engine.check()
        engine.controller.evict(Tier.DEVICE)
        for other in order[order.index(which) + 1 :]:
            engine.verify(requests[other], as_tokens(PROMPT), 3)
    engine.settle()
    for number in range(2):
        assert engine.serve([*sequence(number), 1]) == 5 * P
    all_is_free(engine)


def test_what_was_written_behind_the_commit_is_copied_and_then_apart():
    engine = Engine(pages=16)
    source = started(engine)
    fill_tail(engine, source, 3, 5.0)
    fork = engine.controller.fork(source, tokens=4 * P, states=1, written=len(PROMPT))
    assert tail_of(engine, fork, 3) == {5.0}
    fill_tail(engine, fork, 3, 6.0)
    assert tail_of(engine, source, 3) == {5.0}
    for one in (source, fork):
        engine.controller.release(one)
    all_is_free(engine)


def test_a_live_state_is_copied_and_then_apart():
    engine = Engine(pages=16)
    source = started(engine)
    live = engine.take_state(source, as_tokens(PROMPT))
    fork = engine.controller.fork(source, states=1, live=live)
    engine.verify_state(fork.live_states[MAMBA], as_tokens(PROMPT))
    assert fork.live_states != live
    with pytest.raises(PoolFullError):
        fork.take_states()
    engine.check()
    for tensor in engine.tensors[MAMBA].values():
        tensor[fork.live_states[MAMBA]] = 0
    engine.verify_state(live[MAMBA], as_tokens(PROMPT))
    for one in (fork, source):
        engine.controller.release(one)
    all_is_free(engine)


def test_the_committed_state_is_copied_when_the_fork_wants_to_write():
    engine = Engine(pages=16)
    source = started(engine)
    fork = engine.controller.fork(source, states=1)
    engine.verify_state(fork.restored_states[MAMBA], as_tokens(PROMPT[: 3 * P]))
    mine = fork.fork_states()
    assert mine != fork.restored_states
    engine.verify_state(mine[MAMBA], as_tokens(PROMPT[: 3 * P]))
    with pytest.raises(PoolFullError):
        fork.fork_states()
    for one in (source, fork):
        engine.controller.release(one)
    all_is_free(engine)


def test_a_fork_at_a_depth_without_a_state_has_restored_none():
    engine = Engine(pages=16)
    source = ask(engine, PROMPT)
    source.start()
    engine.compute(source, as_tokens(PROMPT), 0, 3 * P)
    engine.controller.commit(source, as_tokens(PROMPT))
    fork = engine.controller.fork(source, states=1)
    assert (fork.depth, fork.restored_states) == (3 * P, {})
    fork.take_states()
    for one in (source, fork):
        engine.controller.release(one)
    all_is_free(engine)


def test_forks_of_forks_and_of_a_restored_prompt():
    engine = Engine(MemoryBackend(), pages=16)
    engine.controller.release(started(engine))
    source = ask(engine, PROMPT, states=2)
    assert engine.restore(source, as_tokens(PROMPT)) == 3 * P
    child = engine.controller.fork(source, states=1)
    grandchild = engine.controller.fork(child, states=1)
    engine.controller.release(source)
    engine.controller.release(child)
    engine.controller.evict(Tier.DEVICE)
    engine.verify(grandchild, as_tokens(PROMPT), 3)
    engine.verify_state(grandchild.restored_states[MAMBA], as_tokens(PROMPT[: 3 * P]))
    engine.controller.release(grandchild)
    all_is_free(engine)


@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_waits_for_the_layers_that_its_source_still_loads(fails):
    loading, gate = threading.Event(), threading.Event()

    def copier(*columns):
        if loading.is_set():
            assert gate.wait(30)
            if fails:
                raise OSError("a bad layer")
        copy_segments(*columns)

    engine = Engine(MemoryBackend(), pages=16, engine=lambda d, h: CopyEngine(d, h, copier=copier))
    engine.controller.release(started(engine))
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    loading.set()
    source = ask(engine, PROMPT, states=2)
    assert source.poll().status is Status.READY
    fork = engine.controller.fork(source, states=1)
    engine.check()
    gate.set()
    if fails:
        with pytest.raises(TransferError):
            fork.wait_layer(0)
    depth = 0 if fails else 3 * P
    assert engine.restore(fork, as_tokens(PROMPT)) == engine.restore(source, as_tokens(PROMPT)) == depth
    loading.clear()
    for one in (source, fork):
        engine.compute(one, as_tokens(PROMPT), depth, 3 * P)
        engine.controller.commit(one, as_tokens(PROMPT))
        engine.verify(one, as_tokens(PROMPT), 3)
        engine.controller.release(one)
    all_is_free(engine)


def test_a_fork_of_a_request_that_shares_nothing_has_slots_for_everything():
    engine = Engine(pages=16)
    source = ask(engine, PROMPT, states=1)
    source.start()
    engine.compute(source, as_tokens(PROMPT), 0, 3 * P)
    fill_tail(engine, source, 3, 5.0)
    fork = engine.controller.fork(source, states=1, written=len(PROMPT))
    assert (fork.depth, fork.restored_states) == (0, {})
    engine.controller.release(source)
    engine.verify(fork, as_tokens(PROMPT), 3)
    assert tail_of(engine, fork, 3) == {5.0}
    with pytest.raises(AdmissionError, match="restored no state"):
        fork.fork_states()
    engine.controller.commit(fork, as_tokens(PROMPT))
    engine.controller.release(fork)
    all_is_free(engine)


def test_what_a_fork_cannot_have_is_refused_and_changes_nothing():
    armed = []
    engine = Engine(pages=10, states=6, engine=failing(armed))
    source = started(engine)
    live = engine.take_state(source, as_tokens(PROMPT))
    fork = engine.controller.fork

    def refused(error, match, **kwargs):
        free = {name: pool.available for name, pool in engine.pools.items()}
        with pytest.raises(error, match=match):
            fork(source, **kwargs)
        assert free == {name: pool.available for name, pool in engine.pools.items()}
        engine.check()

    refused(InputError, "cannot hold the 14 tokens", tokens=13)
    refused(InputError, "17 written tokens", tokens=17, written=17)
    refused(InputError, "-1 written tokens", written=-1)
    refused(InputError, "-1 states", states=-1)
    refused(InputError, "1 or more with `live`", live=live)
    refused(SlotError, "is not this admission's", states=1, live={MAMBA: 5 - live[MAMBA]})
    refused(SlotError, "needs a slot of each", states=1, live={})
    refused(PoolFullError, "slots", tokens=40 * P)
    refused(PoolFullError, "slots", states=40)
    for copies in ([True], [True, False]):
        armed[:] = copies
        refused(TransferError, "a fork failed", states=1, written=14, live=live)
    child = fork(source, states=1)
    armed[:] = [True]
    with pytest.raises(TransferError):
        child.fork_states()
    assert child.fork_states(), "the slot was given back"
    engine.controller.release(source)
    with pytest.raises(AdmissionError, match="released already"):
        fork(source)
    other = Engine(pages=10)
    with pytest.raises(AdmissionError, match="belongs to another controller"):
        other.controller.fork(child)
    engine.controller.release(child)
    all_is_free(engine)
