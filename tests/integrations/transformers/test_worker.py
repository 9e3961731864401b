"""The reference worker, end to end: what it answers out of any tier equals, to the last bit, what its model
computes.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiercache_kernels.reference import copy_segments
from transformers import PreTrainedModel

from tests.examples import slow_after
from tests.faults import FaultEnv
from tests.integrations.transformers.models import EACH, FAMILIES, PAGE, USUAL, build, loaded, prompt
from tests.integrations.transformers.serving import (
    EVICTED,
    LONG,
    SYSTEM,
    context_of,
    evict,
    fill,
    joined,
    objects,
    restored,
    right,
    serve_from,
    serving,
    settle,
    store,
)
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Reason, Tier, as_tokens
from tiercache.errors import ConfigError, InputError
from tiercache.integrations.transformers import ModelRunner
from tiercache.integrations.transformers.watch import identity_of
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.transfer import CopyEngine
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWED = ("inkling", "gpt_oss", "llama4")
"""Windows beside recurrent tensors, with sinks, and as chunks."""
SLOWEST = pytest.param("jamba", marks=pytest.mark.slow)
"""The family that is fed token by token."""


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_after(
        2,
        [
            ("qwen3_next", "memory"),
            ("llama", "file"),
            *((name, "file") for name in (*USUAL, *WINDOWED, "bloom") if name != "llama"),
        ],
    ),
)
def test_every_state_comes_back_from_every_tier(name: str, kind: str, tmp_path: Path) -> None:
    """Branch point, prompt end and decode snapshot, from device, host, disk, and disk after a restart."""
    storage: StorageBackend = store(tmp_path) if kind == "file" else open_backend("memory://?capacity=64MiB")
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name, storage) as worker:
        prompts = fill(worker, audit)
        for tier in Tier:
            for depth, tokens in prompts.items():
                serve_from(worker, audit, tier, depth, tokens)
        check_controller(worker.controller)
    if kind == "memory":
        return
    for depth, tokens in prompts.items():
        with serving(name, store(tmp_path)) as worker:
            serve_from(worker, audit, Tier.STORAGE, depth, tokens)
            check_controller(worker.controller)


@pytest.mark.parametrize(
    "name", ["qwen3_next", SLOWEST, "llama", pytest.param("inkling", marks=pytest.mark.slow)]
)
def test_conversations_with_pools_too_small_for_all_of_them(name: str, tmp_path: Path) -> None:
    """Three conversations, three turns and one after a restart; the pools decide what comes from where."""
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=128)
    histories = [SYSTEM.tolist() for _ in range(3)]
    geometries = loaded(name)[0].layout.geometries
    states = [geometries[pool] for pool in FAMILIES[name].states]
    sizes = {
        "device_bytes": 18 * geometries[PoolName.KV].nbytes + 12 * sum(g.nbytes for g in states),
        "host_bytes": 16 * geometries[PoolName.KV].padded_nbytes + 8 * sum(g.padded_nbytes for g in states),
    }
    seen: set[Tier | None] = set()
    for turns in (range(3), range(3, 4)):
        with serving(name, store(tmp_path), **sizes) as worker:
            for turn in turns:
                for n, history in enumerate(histories):
                    history += prompt(12, seed=100 + 10 * n + turn).tolist()
                    generation = worker.serve(history, 14, audit=True)
                    history += generation.answer.tolist()
                    right(audit, worker, generation)
                    seen.add(generation.tier)
                    assert generation.restored > 0 or turn == 0, (generation.reason, n, turn)
                    settle(worker)
            check_controller(worker.controller)
    assert Tier.STORAGE in seen


# -- a wrong cache is noticed


@pytest.mark.parametrize("tier", slow_after(1, [Tier.HOST, Tier.DEVICE]))
@pytest.mark.parametrize("name", EACH)
def test_a_cache_that_is_tampered_with_moves_the_logits_and_is_called_wrong(name: str, tier: Tier) -> None:
    """Negative controls: what these checks see if a tier gives back something else than it was given."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name) as worker:
        for tokens in LONG.values():
            right(audit, worker, worker.serve(tokens, 1))
        expected = restored(worker, tier)
        right(audit, worker, expected)
        evict(worker, *EVICTED[tier])
        page, other = (objects(worker, tier, LONG[seed], PoolName.KV)[3] for seed in (1, 2))
        wrong = {"page": [(page, other)]}
        for pool in FAMILIES[name].states:
            state, another = (objects(worker, tier, LONG[seed], pool)[0] for seed in (1, 2))
            wrong |= {
                f"{pool} zeroed": [(state, [torch.zeros_like(part) for part in state])],
                f"{pool} swapped": [(state, another), (another, state)],
            }
        for what, replaced in wrong.items():
            kept = [[part.clone() for part in parts] for parts, _ in replaced]
            for parts, by in [(parts, [part.clone() for part in by]) for parts, by in replaced]:
                overwrite(parts, by)
            generation = restored(worker, tier)
            verdict = audit.check(generation)
            assert not verdict.same_bytes, what
            moved = float((generation.first_logits - expected.first_logits).abs().max())
            assert min(moved, verdict.max_logit_diff) >= 100 * worker.probe.tolerance, what
            for (parts, _), by in zip(replaced, kept, strict=True):
                overwrite(parts, by)
        right(audit, worker, restored(worker, tier))


def overwrite(parts: list[torch.Tensor], by: list[torch.Tensor]) -> None:
    for mine, theirs in zip(parts, by, strict=True):
        mine.copy_(theirs)


LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE)


# -- requests of every kind


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *product(("qwen3_next", "llama"), LENGTHS),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in product(("bamba", "falcon_h1", "jamba"), LENGTHS)
        ),
    ],
)
def test_prompts_of_every_length(name: str, tokens: int) -> None:
    """Twice, and then as the beginning of a longer prompt."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name) as worker:
        for asked, depth in (
            (prompt(tokens, 1), 0),
            (prompt(tokens, 1), (tokens - 1) // PAGE * PAGE),
            (joined(prompt(tokens, 1), prompt(3, 2)), tokens // PAGE * PAGE),
        ):
            generation = worker.serve(asked, 1, audit=True)
            assert generation.restored == depth
            assert len(generation.answer) == 1
            right(audit, worker, generation)
        check_controller(worker.controller)


def test_an_answer_ends_behind_a_stop_token() -> None:
    audit = Audit(loaded("jamba")[0], page_slots=64, state_slots=16)
    with serving("jamba") as worker:
        answer = worker.serve(LONG[1], 8).answer.tolist()
        for at, token in enumerate(answer):
            generation = worker.serve(LONG[1], 8, stop=[token], audit=True)
            assert generation.answer.tolist() == answer[: answer.index(token) + 1], at
        right(audit, worker, worker.serve(LONG[2], 8, stop=range(256)))
        check_controller(worker.controller)


def test_the_audit_refuses_what_it_cannot_judge() -> None:
    audit = Audit(loaded("bamba")[0], page_slots=64, state_slots=16)
    with serving("bamba") as worker:
        right(audit, worker, worker.serve(LONG[1], 1))
        with pytest.raises(InputError, match="audit=True"):
            audit.check(worker.serve(LONG[1], 1))
        worker.serve(LONG[2], 1)
        with pytest.raises(InputError, match="in the order"):
            audit.check(worker.serve(LONG[2], 1, audit=True))


# -- whose bytes these are


def digest(model: PreTrainedModel) -> str:
    return identity_of(model, ModelRunner(model, PAGE), PAGE).revision


def test_every_weight_counts() -> None:
    """Scalars, buffers, and weights of every dtype."""
    model = build("llama")  # it has none of these names itself
    model.register_buffer("scalar", torch.tensor(1.0))
    model.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("empty", torch.empty(0))
    seen = {digest(model)}
    changes = {
        "scalar": (torch.tensor(2.0), torch.ones(1)),
        "narrow": (-torch.ones(3, dtype=torch.bfloat16),),
    }
    for name, value in ((name, value) for name, values in changes.items() for value in values):
        model.register_buffer(name, value)
        seen.add(digest(model))
    with torch.no_grad():
        next(model.parameters()).view(-1)[7] += 1e-6
    seen.add(digest(model))
    assert len(seen) == 5
    assert digest(build("llama")) == digest(build("llama")) not in seen


def test_where_states_are_taken_changes_no_answer() -> None:
    """Questions about one document; each prefill is cut where the rules say, and nowhere else."""
    audit = Audit(loaded("qwen3_next")[0], page_slots=256, state_slots=64)
    options = ControllerOptions(restore_deadline=30.0, checkpoints="every:32")
    with serving("qwen3_next", options=options) as worker:
        found = []
        for number in range(6):
            asked = joined(LONG[1], prompt(PAGE + 3, 10 + number))
            known = worker.preview(asked)
            generation = worker.serve(asked, 4, audit=True)
            assert generation.restored == known.restored
            assert tuple(at for at in generation.states if at <= len(asked)) == known.checkpoints
            assert set(known.checkpoints) <= set(generation.bounds)
            right(audit, worker, generation)
            found.append(generation.restored)
        assert found[-1] >= 4 * PAGE
        check_controller(worker.controller)


# -- damage, hangs, and pools that are too small


Addresses: TypeAlias = npt.NDArray[np.uint64]


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_bits_that_flip_on_the_way_from_disk_never_reach_the_model(name: str, tmp_path: Path) -> None:
    env = FaultEnv(seed=3)
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name, store(tmp_path, env)) as worker:
        right(audit, worker, worker.serve(LONG[1], 4))
        evict(worker, Tier.DEVICE, Tier.HOST)
        env.spoil(times=1000)
        generation = worker.serve(LONG[1], 4, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.CHECKSUM)
        assert worker.controller.metrics.value("restore_failures_total", Reason.CHECKSUM) >= 1
        right(audit, worker, generation)
        env.clear()
        # What was dropped as corrupt has been stored anew behind that request.
        right(audit, worker, restored(worker, Tier.STORAGE))
        check_controller(worker.controller)


@pytest.mark.parametrize("name", ["falcon_h1", "llama"])
def test_a_request_that_does_not_fit_is_computed_without_the_cache(name: str, tmp_path: Path) -> None:
    runner = loaded(name)[0]
    audit = Audit(runner, page_slots=64, state_slots=16)
    least = {pool: geometry.nbytes for pool, geometry in runner.layout.geometries.items()}
    small = 7 * least.get(PoolName.MAMBA, 0) + 4 * least[PoolName.KV]
    with serving(name, store(tmp_path), device_bytes=small) as worker:
        for _ in range(2):
            generation = worker.serve(LONG[1], 3, audit=True)
            assert (generation.restored, generation.tier, generation.reason) == (0, None, Reason.BUSY)
            right(audit, worker, generation)
            check_controller(worker.controller)
        short = LONG[2][: 2 * PAGE + 1]
        right(audit, worker, worker.serve(short, 3))
        again = worker.serve(short, 3, audit=True)
        assert again.restored == 2 * PAGE
        right(audit, worker, again)
        check_controller(worker.controller)


def test_device_pools_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 states and 2 pages"):
        serving("falcon_h1", device_bytes=1 << 12)


def test_writes_that_hang_are_not_waited_for(tmp_path: Path) -> None:
    env = FaultEnv()
    audit = Audit(loaded("falcon_h1")[0], page_slots=64, state_slots=16)
    with serving("falcon_h1", store(tmp_path, env)) as worker:
        hang = env.hang("pwritev", times=1000)
        right(audit, worker, worker.serve(LONG[1], 2))
        assert hang.reached.wait(30)
        right(audit, worker, worker.serve(LONG[1], 2, audit=True))
        hang.release()
        settle(worker)
        check_controller(worker.controller)


class Breaking:
    """A copier that fails at the layer number `at`, which is set while nothing copies."""

    def __init__(self) -> None:
        self.at = -1

    def __call__(self, sources: Addresses, destinations: Addresses, lengths: npt.NDArray[np.int64]) -> None:
        self.at -= 1
        if self.at == -1:
            raise OSError("the device fell off the bus")
        copy_segments(sources, destinations, lengths)


@pytest.mark.parametrize(
    ("name", "layer"), slow_after(2, [("qwen3_next", 2), ("llama", 0), *product(("falcon_h1",), (0, 2))])
)
def test_a_layer_that_cannot_be_loaded(name: str, layer: int) -> None:
    """The request falls back to what the device holds, here two pages with the state of the branch point."""
    copier = Breaking()
    audit = Audit(loaded(name)[0], page_slots=128, state_slots=32)
    with serving(name, engine=partial(CopyEngine, copier=copier)) as worker:
        prompts = fill(worker, audit)
        evict(worker, Tier.DEVICE)
        for near in (0, 2 * PAGE):
            if near:
                evict(worker, Tier.DEVICE)
                serve_from(worker, audit, Tier.HOST, near, prompts[near])
                settle(worker)
            copier.at = layer
            generation = worker.serve(prompts[5 * PAGE], 2, audit=True)
            assert (generation.restored, generation.reason) == (near, Reason.IO_ERROR)
            right(audit, worker, generation)
            assert worker.controller.metrics.value("restore_failures_total", Reason.IO_ERROR) == 1 + bool(
                near
            )
            settle(worker)
            check_controller(worker.controller)


def test_too_few_slots_after_a_load_that_failed() -> None:
    """Two requests share a load that fails late; the first keeps the slots, the second has no cache."""

    def late(sources: Addresses, destinations: Addresses, lengths: npt.NDArray[np.int64]) -> None:
        if not at_once:
            time.sleep(0.3)
            raise OSError("the device fell off the bus")
        copy_segments(sources, destinations, lengths)

    at_once = [True]
    audit = Audit(loaded("llama")[0], page_slots=64, state_slots=16)
    with serving("llama", engine=partial(CopyEngine, copier=late)) as worker:
        tokens = as_tokens(LONG[1])
        right(audit, worker, worker.serve(tokens, 2))
        settle(worker)
        evict(worker, Tier.DEVICE)
        at_once.clear()
        first = worker.controller.admit(worker.controller.lookup(tokens), tokens=len(tokens) + 2)
        pool = context_of(worker).device[PoolName.KV]
        others = pool.alloc(pool.available - 2)
        generation = worker.serve(tokens, 2, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.BUSY)
        at_once.append(True)
        worker.controller.release(first)
        pool.free(others)
        right(audit, worker, generation)
        worker.synchronize()
        check_controller(worker.controller)
        right(audit, worker, worker.serve(tokens, 2, audit=True))
