"""Wrong arguments and broken surroundings: every one has a defined answer, and the cache works on afterwards
as if it had not happened.
"""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.controller.harness import IDENTITY, KV, MAMBA, PAGES, STATES, Engine, P, prompt
from tiercache.controller import ControllerOptions, HybridCacheController, Status
from tiercache.core import PoolName, Tier
from tiercache.errors import (
    AdmissionError,
    ClosedError,
    ConfigError,
    GeometryError,
    InputError,
    PoolFullError,
    SlotError,
    TokenError,
)
from tiercache.geometry import kv_geometry
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend
from tiercache.testing.faults import FaultEnv

FIRST = [*prompt(1, 2, 3), 5]


def is_closed(engine):
    try:
        engine.controller.tick()
    except ClosedError:
        return True
    return False


@pytest.fixture
def engine():
    """An engine that holds one conversation; whatever a test does, it still does afterwards, and nothing has
    leaked.
    """
    engine = Engine(open_backend("memory://"), pages=24, states=12)
    engine.serve(FIRST)
    engine.settle()
    yield engine
    if not is_closed(engine):
        engine.settle()
        engine.check()
        assert engine.serve(FIRST) == 3 * P
        engine.settle()
        engine.controller.evict(Tier.DEVICE)
        engine.controller.evict(Tier.HOST)
        assert all(pool.allocator.used == 0 for pool in engine.pools.values())
        assert engine.arena.available == engine.arena.blocks
        assert engine.controller.close()


@pytest.fixture
def running(engine):
    """A request that is ready, and its tokens."""
    tokens = np.array(prompt(1, 2, 3, 4, 6), np.uint64)
    admission = engine.controller.admit(engine.controller.lookup(tokens), states=3)
    assert engine.restore(admission, tokens) == 3 * P
    engine.compute(admission, tokens, 3 * P, len(tokens))
    yield admission, tokens
    if not admission.released and not is_closed(engine):
        engine.controller.release(admission)


def parts(geometries):
    pools = {}
    for name, geometry in geometries.items():
        tensors = {
            (s.layer, s.name): torch.zeros(4, *s.shape, dtype=getattr(torch, s.dtype))
            for s in geometry.segments
        }
        pools[name] = DevicePool.from_tensors(geometry, tensors)
    return pools, HostArena(8 * 4096, 4096)


# -- making a controller
# -----------------------------------------------------------------------------------------------


def test_a_page_size_of_zero():
    with pytest.raises(GeometryError):
        kv_geometry([0], kv_heads=1, head_dim=1, dtype="float32", page_size=0)
    pools, arena = parts({KV: PAGES})
    with pytest.raises(InputError):
        HybridCacheController(replace(IDENTITY, page_size=0), pools, arena)


def test_an_identity_with_another_page_size_than_the_pools():
    pools, arena = parts({KV: PAGES, MAMBA: STATES})
    with pytest.raises(GeometryError, match="pages of 4 tokens"):
        HybridCacheController(Identity("test", "1", "float32", "float32", "float32", 2 * P), pools, arena)


def test_no_pool_at_all():
    with pytest.raises(GeometryError, match="no pool is registered"):
        HybridCacheController(IDENTITY, {}, parts({KV: PAGES})[1])


def test_pages_without_kv():
    side = replace(PAGES, pool=PoolName.INDEXER)
    pools, arena = parts({PoolName.INDEXER: side, MAMBA: STATES})
    with pytest.raises(GeometryError, match=r"page pools \(indexer\), and none is named kv"):
        HybridCacheController(IDENTITY, pools, arena)


def test_pages_for_states_alone():
    engine = Engine(kv=False)
    with pytest.raises(InputError, match="this index has only states"):
        engine.context.index.insert(np.arange(8, dtype=np.uint64), {KV: np.arange(2)})
    engine.check()


def test_a_pool_under_the_name_of_another():
    pools, arena = parts({KV: PAGES})
    with pytest.raises(GeometryError, match="by its own kind"):
        HybridCacheController(IDENTITY, {KV: pools[KV], MAMBA: pools[KV]}, arena)


def test_a_pool_that_lacks_a_layer():
    tensors = {(s.layer, s.name): torch.zeros(4, *s.shape) for s in PAGES.segments if s.layer == 0}
    with pytest.raises(GeometryError, match="layer 2"):
        DevicePool.from_tensors(PAGES, tensors)


def test_a_pool_whose_layers_differ_in_slots():
    tensors = {(s.layer, s.name): torch.zeros(4 + s.layer, *s.shape) for s in PAGES.segments}
    with pytest.raises(GeometryError, match="slots"):
        DevicePool.from_tensors(PAGES, tensors)


@pytest.mark.parametrize("option", ["read_threads", "write_threads"])
def test_no_threads_for_storage(option):
    with pytest.raises(ConfigError, match=option):
        ControllerOptions(**{option: 0})


# -- prompts
# -----------------------------------------------------------------------------------------------------------


def test_an_empty_prompt(engine):
    with pytest.raises(TokenError, match="empty"):
        engine.controller.lookup([])


@pytest.mark.parametrize("token", [-1, 2**64, 1.5, True, "a", None], ids=str)
def test_a_token_that_is_none(engine, token):
    with pytest.raises(TokenError):
        engine.controller.lookup([1, 2, token])


@pytest.mark.parametrize(
    "tokens", [np.array([1, -1]), np.array([1.0]), np.array([[1]])], ids=["negative", "float", "matrix"]
)
def test_an_array_that_is_no_prompt(engine, tokens):
    with pytest.raises(TokenError):
        engine.controller.lookup(tokens)


def test_a_prompt_shorter_than_a_page(engine):
    assert engine.serve([9] * (P - 1)) == 0
    assert engine.serve([9]) == 0


def test_a_token_buffer_that_is_used_again(engine):
    buffer = np.array(FIRST, np.uint64)
    lookup = engine.controller.lookup(buffer)
    buffer[:] = 77
    admission = engine.controller.admit(lookup, states=1)
    assert engine.restore(admission, np.array(FIRST)) == 3 * P
    engine.controller.release(admission)


# -- admissions
# --------------------------------------------------------------------------------------------------------


def test_fewer_tokens_than_the_prompt_has(engine):
    with pytest.raises(InputError, match="cannot hold the prompt"):
        engine.controller.admit(engine.controller.lookup(FIRST), tokens=len(FIRST) - 1)


def test_fewer_than_no_states(engine, running):
    with pytest.raises(InputError, match="-1 states"):
        engine.controller.admit(engine.controller.lookup(FIRST), states=-1)
    with pytest.raises(InputError, match="-1 more states"):
        running[0].extend(99, states=-1)


def test_more_states_than_were_admitted(running):
    admission, _ = running
    for _ in range(3):
        admission.take_states()
    with pytest.raises(PoolFullError, match="no spare state slot"):
        admission.take_states()


def test_releasing_twice(engine, running):
    engine.controller.release(running[0])
    with pytest.raises(AdmissionError, match="released already"):
        engine.controller.release(running[0])


@pytest.mark.parametrize("call", ["poll", "start", "wait", "take_states"])
def test_using_a_released_admission(engine, running, call):
    engine.controller.release(running[0])
    with pytest.raises(AdmissionError, match="released already"):
        getattr(running[0], call)()


def test_releasing_the_admission_of_another_controller(engine):
    other = Engine()
    admission = other.controller.admit(other.controller.lookup([1]))
    with pytest.raises(AdmissionError, match="another controller"):
        engine.controller.release(admission)
    other.controller.release(admission)


def test_using_what_is_not_ready_yet(tmp_path):
    env = FaultEnv()
    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=env))
    engine.serve(FIRST)
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    hang = env.hang("preadv", times=100)
    admission = engine.controller.admit(engine.controller.lookup(FIRST), states=1)
    assert admission.poll().status is Status.PENDING
    for call in (
        lambda: engine.controller.commit(admission, FIRST),
        lambda: admission.wait_layer(0),
        admission.take_states,
    ):
        with pytest.raises(AdmissionError, match="pending"):
            call()
    with pytest.raises(AdmissionError, match="pending"):
        admission.extend(99)
    hang.release()
    assert admission.wait().depth == 3 * P
    engine.controller.release(admission)
    engine.settle()
    engine.check()


# -- commits
# -----------------------------------------------------------------------------------------------------------


def test_state_slots_that_were_never_taken(engine, running):
    admission, tokens = running
    for slot in (0, 11, 12, -1):
        with pytest.raises(SlotError, match="not this admission's"):
            engine.controller.commit(admission, tokens, {4 * P: {MAMBA: slot}})


def test_state_slots_of_another_admission(engine, running):
    admission, tokens = running
    other = engine.controller.admit(engine.controller.lookup([1, 2]), states=1)
    with pytest.raises(SlotError, match="not this admission's"):
        engine.controller.commit(admission, tokens, {4 * P: other.take_states()})
    engine.controller.release(other)


def test_a_state_slot_twice(engine, running):
    admission, tokens = running
    slots = engine.take_state(admission, tokens[: 4 * P])
    with pytest.raises(SlotError, match="each once"):
        engine.controller.commit(admission, tokens, {4 * P: slots, 5 * P: slots})
    engine.controller.commit(admission, tokens, {4 * P: slots})
    with pytest.raises(SlotError, match="not this admission's"):
        engine.controller.commit(admission, tokens, {5 * P: slots})


def test_a_state_of_no_pool(engine, running):
    with pytest.raises(SlotError, match="a slot of each"):
        engine.controller.commit(*running, {4 * P: {}})


@pytest.mark.parametrize("depth", [4 * P - 1, 0, -P, 6 * P])
def test_a_state_where_no_page_ends(engine, running, depth):
    admission, tokens = running
    with pytest.raises(InputError, match="cannot be committed"):
        engine.controller.commit(admission, tokens, {depth: admission.take_states()})


def test_tokens_that_do_not_start_with_the_prompt(engine, running):
    admission, tokens = running
    with pytest.raises(InputError, match="begin as"):
        engine.controller.commit(admission, tokens + np.uint64(1))


def test_tokens_that_do_not_start_with_what_was_committed_before(engine):
    """The slots of the first commit are the index's, under its tokens; other tokens must not get them as
    well.
    """
    tokens = np.array(prompt(8, 9, 10), np.uint64)
    admission = engine.controller.admit(engine.controller.lookup(tokens[:P]), tokens=3 * P)
    engine.restore(admission, tokens[:P])
    engine.compute(admission, tokens, 0, 3 * P)
    engine.controller.commit(admission, tokens)
    other = tokens.copy()
    other[P:] += 500
    with pytest.raises(InputError, match="earlier commits"):
        engine.controller.commit(admission, other)
    engine.controller.release(admission)


def test_more_tokens_than_were_reserved(engine, running):
    admission, tokens = running
    longer = np.concatenate([tokens, tokens[:P]])
    with pytest.raises(SlotError, match="extend it"):
        engine.controller.commit(admission, longer)
    admission.extend(len(longer))
    engine.compute(admission, longer, len(tokens), len(longer))
    engine.controller.commit(admission, longer)
    engine.verify(admission, longer, 6)


# -- the end
# -----------------------------------------------------------------------------------------------------------


def test_closing_twice_and_using_it_afterwards(engine, running):
    controller, (admission, tokens) = engine.controller, running
    lookup = controller.lookup(FIRST)
    assert controller.close()
    assert controller.close()
    for call in (
        lambda: controller.lookup(FIRST),
        lambda: controller.admit(lookup),
        lambda: controller.commit(admission, tokens),
        lambda: controller.release(admission),
        lambda: controller.evict(Tier.HOST),
        controller.tick,
        controller.flush,
    ):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(AdmissionError):
        admission.poll()


# -- a bad medium
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fallocate"])
def test_a_full_disk(tmp_path, call):
    """Sets fail and are counted, what was stored stays, and when there is space again the next commit of the
    path stores the rest.
    """
    env = FaultEnv()
    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=env))
    if call != "fallocate":
        engine.serve(FIRST)
        engine.settle()
    full = env.fail(call, times=1000, error=errno.ENOSPC)
    second = [*prompt(1, 2, 3, 4, 6), 5]
    engine.serve(second)
    engine.controller.flush(20)
    assert full.fired
    assert (
        engine.metrics.total("storage_sets_total", outcome="throttled")
        + engine.metrics.total("storage_sets_total", outcome="error")
        > 0
    )
    env.clear()
    engine.controller.evict(Tier.DEVICE)
    assert engine.serve(second) == 5 * P
    engine.settle()
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    assert engine.serve(second) == 5 * P
    engine.settle()
    engine.check()
    engine = engine.restart(f"file://{tmp_path}/store?capacity=16MiB")
    assert engine.serve([*second, 5]) == 5 * P
    assert engine.controller.close()
