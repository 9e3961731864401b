"""Wrong arguments and broken surroundings have a defined answer, and the cache works on as before."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.controller.harness import IDENTITY, KV, MAMBA, PAGES, STATES, Engine, P, evict_checked, prompt
from tests.faults import FaultEnv
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
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend

FIRST = [*prompt(1, 2, 3), 5]


def is_closed(engine):
    try:
        engine.controller.tick()
    except ClosedError:
        return True
    return False


@pytest.fixture
def engine():
    """An engine that still holds its conversation after any test, without leaks."""
    engine = Engine(open_backend("memory://"), pages=24, states=12)
    engine.keep(FIRST)
    yield engine
    if not is_closed(engine):
        engine.settle()
        engine.check()
        assert engine.serve(FIRST) == 3 * P
        engine.settle()
        evict_checked(engine, Tier.DEVICE, Tier.HOST)
        assert all(pool.available == pool.capacity for pool in engine.pools.values())
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


def test_a_page_size_of_zero():
    with pytest.raises(GeometryError):
        kv_geometry([0], kv_heads=1, head_dim=1, dtype="float32", page_size=0)
    with pytest.raises(InputError, match="page size 0"):
        replace(IDENTITY, page_size=0)


@pytest.mark.parametrize(
    ("identity", "geometries", "sentence"),
    [
        (replace(IDENTITY, page_size=2 * P), {KV: PAGES, MAMBA: STATES}, "pages of 4 tokens"),
        (IDENTITY, {}, "no pool is registered"),
        (
            IDENTITY,
            {PoolName.INDEXER: replace(PAGES, pool=PoolName.INDEXER), MAMBA: STATES},
            r"page pools \(indexer\), and none is named kv",
        ),
        (IDENTITY, {KV: PAGES, MAMBA: PAGES}, "by its own kind"),
    ],
)
def test_pools_that_are_not_the_identity_s_or_not_enough(identity, geometries, sentence):
    pools, arena = parts(geometries)
    with pytest.raises(GeometryError, match=sentence):
        HybridCacheController(identity, pools, arena)


@pytest.mark.parametrize(
    ("slots", "sentence"), [({0: 4}, "layer 2"), ({0: 4, 2: 6}, "slots")], ids=["layers", "slots"]
)
def test_a_pool_whose_layers_are_missing_or_differ(slots, sentence):
    tensors = {
        (s.layer, s.name): torch.zeros(slots[s.layer], *s.shape) for s in PAGES.segments if s.layer in slots
    }
    with pytest.raises(GeometryError, match=sentence):
        DevicePool.from_tensors(PAGES, tensors)


@pytest.mark.parametrize(
    ("option", "values", "range_"),
    [
        ("read_threads", [0], "1 or more"),
        ("write_threads", [0], "1 or more"),
        ("write_retries", [-1, 9], "0 to 8"),
        ("write", ["back"], "write_through or write_back"),
        ("write_chance", [1.5, math.nan], "a probability from 0 to 1"),
        ("pin_share", [-0.1, 1.0, math.nan], "a share from 0, and below 1"),
        ("park_share", [-0.1, 1.0, math.nan], "a share from 0, and below 1"),
        ("piece_bytes", [0], "a positive number of bytes"),
        ("belief_checks", [-1], "a number of objects from 0"),
        ("storage_deadline", [-1.0, math.inf], "a finite number of seconds"),
    ],
)
def test_an_option_that_is_not_possible(option, values, range_):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{option}=.* is not possible; use {range_}"):
            ControllerOptions(**{option: value})


def test_pages_for_states_alone():
    engine = Engine(kv=False)
    with pytest.raises(InputError, match="this index has only states"):
        engine.context.index.insert(np.arange(8, dtype=np.uint64), {KV: np.arange(2)})
    engine.check()


# -- prompts


@pytest.mark.parametrize(
    "tokens",
    [
        [], *([1, 2, token] for token in (-1, 2**64, 1.5, True, "a", None)), np.array([1, -1]),
        np.array([1.0]), np.array([[1]]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt(engine, tokens):
    with pytest.raises(TokenError):
        engine.controller.lookup(tokens)


def test_a_token_buffer_that_is_used_again(engine):
    buffer = np.array(FIRST, np.uint64)
    lookup = engine.controller.lookup(buffer)
    buffer[:] = 77
    admission = engine.controller.admit(lookup, states=1)
    assert engine.restore(admission, np.array(FIRST)) == 3 * P
    engine.controller.release(admission)


# -- admissions


def test_fewer_than_there_are(engine, running):
    lookup = engine.controller.lookup(FIRST)
    with pytest.raises(InputError, match="cannot hold the prompt"):
        engine.controller.admit(lookup, tokens=len(FIRST) - 1)
    with pytest.raises(InputError, match="-1 states"):
        engine.controller.admit(lookup, states=-1)
    with pytest.raises(InputError, match="-1 more states"):
        running[0].extend(99, states=-1)


def test_more_states_than_were_admitted(running):
    admission, _ = running
    for _ in range(3):
        admission.take_states()
    with pytest.raises(PoolFullError, match="no spare state slot"):
        admission.take_states()


def test_using_a_released_admission(engine, running):
    admission = running[0]
    engine.controller.release(admission)
    again = lambda: engine.controller.release(admission)  # noqa: E731
    for call in (again, admission.poll, admission.start, admission.wait, admission.take_states):
        with pytest.raises(AdmissionError, match="released already"):
            call()


def test_releasing_the_admission_of_another_controller(engine):
    other = Engine()
    admission = other.controller.admit(other.controller.lookup([1]))
    with pytest.raises(AdmissionError, match="another controller"):
        engine.controller.release(admission)
    other.controller.release(admission)


def test_using_what_is_not_ready_yet(tmp_path):
    env = FaultEnv()
    engine = Engine(open_backend(f"file://{tmp_path}/store?capacity=16MiB", env=env))
    engine.keep(FIRST, Tier.DEVICE, Tier.HOST)
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


def test_a_commit_that_does_not_fit(engine, running):
    admission, tokens = running
    commit = engine.controller.commit
    for slot in (0, 11, 12, -1):
        with pytest.raises(SlotError, match="not this admission's"):
            commit(admission, tokens, {4 * P: {MAMBA: slot}})
    with pytest.raises(SlotError, match="a slot of each"):
        commit(admission, tokens, {4 * P: {}})
    slots = admission.take_states()
    for depth in (4 * P - 1, 0, -P, 6 * P):
        with pytest.raises(InputError, match="cannot be committed"):
            commit(admission, tokens, {depth: slots})
    with pytest.raises(InputError, match="begin as"):
        commit(admission, tokens + np.uint64(1))


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


def test_tokens_that_do_not_start_with_what_was_committed_before(engine):
    """The slots of the first commit are the index's, under its tokens; no others may get them as well."""
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
