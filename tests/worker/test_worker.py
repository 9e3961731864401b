"""The reference worker, end to end: what it answers out of any tier equals, to the last bit, what its model computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiercache_kernels.reference import copy_segments
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import EACH, FAMILIES, PAGE, USUAL, build, loaded, prompt
from tests.worker.serving import AMPLE, EVICTED, SYSTEM, evict, fill, joined, objects, right, serve_from, serving, settle, store, tiers_of
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Reason, Tier, as_tokens
from tiercache.errors import ConfigError, InputError, TokenError
from tiercache.integrations.transformers import ModelRunner
from tiercache.integrations.transformers.audit import Audit
from tiercache.integrations.transformers.identity import identity_of
from tiercache.integrations.transformers.request import Generation
from tiercache.integrations.transformers.worker import Worker
from tiercache.keys import page_keys
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.faults import FaultEnv
from tiercache.transfer import CopyEngine

Addresses: TypeAlias = npt.NDArray[np.uint64]

SLOWEST = pytest.param("jamba", marks=pytest.mark.slow)
"""The family that is fed token by token."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "kind"), [("qwen3_next", "memory"), *((name, "file") for name in USUAL)])
def test_every_state_comes_back_from_every_tier(name: str, kind: str, tmp_path: Path) -> None:
    """Branch point, prompt end and decode snapshot, each from device, host, disk, and from disk in a new process's place."""
    storage: StorageBackend = store(tmp_path) if kind == "file" else open_backend("memory://?capacity=64MiB")
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name, storage) as worker:
        prompts = fill(worker, audit)
        for tier in Tier:
            for depth, tokens in prompts.items():
                serve_from(worker, audit, tier, depth, tokens)
        worker.controller.check_integrity()
    if kind == "memory":
        return
    for depth, tokens in prompts.items():
        with serving(name, store(tmp_path)) as worker:
            serve_from(worker, audit, Tier.STORAGE, depth, tokens)
            worker.controller.check_integrity()


@pytest.mark.parametrize("name", ["qwen3_next", SLOWEST, "llama"])
def test_conversations_with_pools_too_small_for_all_of_them(name: str, tmp_path: Path) -> None:
    """Three conversations behind one system prompt, three turns each and one after a restart; the pools decide what comes from where."""
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=128)
    histories = [SYSTEM.tolist() for _ in range(3)]
    geometries = loaded(name)[0].layout.geometries
    states = geometries.get(PoolName.MAMBA)
    sizes = {
        "device_bytes": 18 * geometries[PoolName.KV].nbytes + (12 * states.nbytes if states else 0),
        "host_bytes": 16 * geometries[PoolName.KV].padded_nbytes + (8 * states.padded_nbytes if states else 0),
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
            worker.controller.check_integrity()
    assert Tier.STORAGE in seen


# --- a wrong cache is noticed --------------------------------------------------------------------------------------------------------


LONG = {seed: prompt(6 * PAGE + 1, seed).tolist() for seed in (1, 2)}
"""Two prompts that restore all but their last token."""


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("name", EACH)
def test_a_cache_that_is_tampered_with_moves_the_logits_and_is_called_wrong(name: str, tier: Tier) -> None:
    """Negative controls: what the checks of this module would see if a tier gave back something else than it was given."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name) as worker:
        for tokens in LONG.values():
            right(audit, worker, worker.serve(tokens, 1))
        expected = restored(worker, tier)
        right(audit, worker, expected)
        evict(worker, *EVICTED[tier])
        page, other = (objects(worker, tier, LONG[seed], PoolName.KV)[3] for seed in (1, 2))
        wrong = {"page": [(page, other)]}
        if FAMILIES[name].states:
            state, another = (objects(worker, tier, LONG[seed], PoolName.MAMBA)[0] for seed in (1, 2))
            wrong |= {"zeroed": [(state, [torch.zeros_like(part) for part in state])], "swapped": [(state, another), (another, state)]}
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


def restored(worker: Worker, tier: Tier) -> Generation:
    """All but the last token of the first long prompt, from `tier`."""
    evict(worker, *EVICTED[tier])
    generation = worker.serve(LONG[1], 1, audit=True)
    assert (generation.restored, tiers_of(generation)) == (6 * PAGE, {tier})
    return generation


def overwrite(parts: list[torch.Tensor], by: list[torch.Tensor]) -> None:
    for mine, theirs in zip(parts, by, strict=True):
        mine.copy_(theirs)


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
        worker.controller.check_integrity()


@pytest.mark.parametrize("what", ["zeroed", "swapped", "page"])
def test_bytes_changed_on_disk_are_a_miss(what: str, tmp_path: Path) -> None:
    """The same negative controls on the medium, between two processes: none gets through, each is counted."""
    audit = Audit(loaded("bamba")[0], page_slots=64, state_slots=16)
    with serving("bamba", store(tmp_path)) as worker:
        for tokens in LONG.values():
            worker.serve(tokens, 1)
        worker.controller.flush()
        state, another = (payload(objects(worker, Tier.HOST, LONG[seed], PoolName.MAMBA)[0], worker, PoolName.MAMBA) for seed in (1, 2))
        page, other = (payload(objects(worker, Tier.HOST, LONG[seed], PoolName.KV)[3], worker, PoolName.KV) for seed in (1, 2))
    changes = {"zeroed": {state: bytes(len(state))}, "swapped": {state: another, another: state}, "page": {page: other}}
    assert rewrite(tmp_path, changes[what]) == len(changes[what])
    with serving("bamba", store(tmp_path)) as worker:
        generation = worker.serve(LONG[1], 2, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.CHECKSUM)
        assert worker.controller.metrics.value("restore_failures_total", Reason.CHECKSUM) >= 1
        right(audit, worker, generation)


def payload(parts: list[torch.Tensor], worker: Worker, pool: PoolName) -> bytes:
    """An object's bytes out of its host blocks."""
    return b"".join(part.numpy().tobytes() for part in parts)[: worker.runner.layout.geometries[pool].nbytes]


def rewrite(directory: Path, changes: dict[bytes, bytes]) -> int:
    """Replace objects in the files of a closed store; returns how many were found."""
    places = [
        (path, at, new)
        for path in directory.rglob("*")
        if path.is_file()
        for old, new in changes.items()
        if (at := path.read_bytes().find(old)) >= 0
    ]
    for path, at, new in places:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(new)
    return len(places)


# --- objects that are gone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("name", ["qwen3_next", SLOWEST, "llama"])
def test_any_one_object_may_be_gone(name: str, restart: bool, tmp_path: Path) -> None:
    """Drop each page and each state in turn: the deepest depth that is still whole is restored, and the reason is counted."""
    storage = store(tmp_path)
    audit = Audit(loaded(name)[0], page_slots=1024, state_slots=256)
    worker = serving(name, storage)
    tokens = fill(worker, audit)[5 * PAGE]
    evict(worker, Tier.DEVICE, Tier.HOST)
    entries = on_path(worker, storage, tokens)
    assert {pool: len([e for e in entries if e.key.pool is pool]) for pool in worker.runner.layout.geometries} == (
        {PoolName.KV: 5, PoolName.MAMBA: 3} if FAMILIES[name].states else {PoolName.KV: 5}
    )
    for key in [entry.key for entry in entries]:
        assert storage.delete([key]) == [True]
        left = on_path(worker, storage, tokens)
        if restart:
            worker.close()
            storage = store(tmp_path)
            worker = serving(name, storage)
        before = misses(worker, key.pool)
        generation = worker.serve(tokens, 2, audit=True)
        assert generation.restored == restorable(left, FAMILIES[name].states)
        if generation.restored < 5 * PAGE and not restart:
            assert generation.reason is Reason.ABSENT, "it was known to be there"
        if generation.restored == 0 or (generation.restored < 5 * PAGE and not restart):
            assert misses(worker, key.pool) > before
        right(audit, worker, generation)
        worker.controller.check_integrity()
        evict(worker, Tier.DEVICE, Tier.HOST)
        assert restorable(on_path(worker, storage, tokens), FAMILIES[name].states) == 5 * PAGE, "the request put it back"
    worker.close()


def on_path(worker: Worker, storage: StorageBackend, tokens: list[int]) -> list[ScanEntry]:
    """The stored objects of a prompt, pages first, from its beginning."""
    keys = {key: n for n, key in enumerate(page_keys(worker.controller._state.namespace, as_tokens(tokens), PAGE))}
    found = [entry for entry in storage.scan_all() if entry.key.page_key in keys]
    return sorted(found, key=lambda entry: (entry.key.pool is not PoolName.KV, keys[entry.key.page_key]))


def restorable(entries: list[ScanEntry], states: bool) -> int:
    """The deepest depth, in tokens, at which everything is there."""
    held = {pool: {entry.meta.depth for entry in entries if entry.key.pool is pool} for pool in (PoolName.KV, PoolName.MAMBA)}
    pages = next(n for n in range(len(entries) + 1) if n + 1 not in held[PoolName.KV])
    return PAGE * max((depth for depth in held[PoolName.MAMBA if states else PoolName.KV] if depth <= pages), default=0)


def misses(worker: Worker, pool: PoolName) -> float:
    """Counted reasons why storage did not give everything."""
    metrics = worker.controller.metrics
    failures = sum(metrics.value("restore_failures_total", reason) for reason in Reason)
    return failures + metrics.total("lookups_total", tier="storage", pool=str(pool), result="miss")


# --- requests of every kind ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USUAL)
def test_the_third_conversation_restores_at_the_branch(name: str, tmp_path: Path) -> None:
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name, store(tmp_path)) as worker:
        depths = []
        for seed in (2, 3, 4):
            generation = worker.serve(joined(SYSTEM, prompt(19, seed)), 3, audit=True)
            right(audit, worker, generation)
            depths.append(generation.restored)
        # The second one finds pages, but only leaves the state that makes them restorable.
        assert depths == ([0, 0, 2 * PAGE] if FAMILIES[name].states else [0, 2 * PAGE, 2 * PAGE])


@pytest.mark.parametrize("tokens", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
@pytest.mark.parametrize("name", USUAL)
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
        worker.controller.check_integrity()


def test_an_answer_ends_behind_a_stop_token() -> None:
    audit = Audit(loaded("jamba")[0], page_slots=64, state_slots=16)
    with serving("jamba") as worker:
        answer = worker.serve(LONG[1], 8).answer.tolist()
        for at, token in enumerate(answer):
            generation = worker.serve(LONG[1], 8, stop=[token], audit=True)
            assert generation.answer.tolist() == answer[: answer.index(token) + 1], at
        right(audit, worker, worker.serve(LONG[2], 8, stop=range(256)))
        worker.controller.check_integrity()


def test_the_audit_refuses_what_it_cannot_judge() -> None:
    audit = Audit(loaded("bamba")[0], page_slots=64, state_slots=16)
    with serving("bamba") as worker:
        right(audit, worker, worker.serve(LONG[1], 1))
        with pytest.raises(InputError, match="audit=True"):
            audit.check(worker.serve(LONG[1], 1))
        worker.serve(LONG[2], 1)
        with pytest.raises(InputError, match="in the order"):
            audit.check(worker.serve(LONG[2], 1, audit=True))


def test_no_new_tokens_is_refused() -> None:
    with serving("llama") as worker:
        with pytest.raises(InputError, match="at least one"):
            worker.serve([1], 0)
        worker.controller.check_integrity()


@pytest.mark.parametrize("tokens", [[], [3, 256], [-1], LONG[1] + [1 << 40]], ids=["empty", "outside", "negative", "far outside"])
def test_bad_tokens_change_nothing(tokens: list[int], tmp_path: Path) -> None:
    with serving("bamba", store(tmp_path)) as worker:
        worker.serve(LONG[1], 1)
        with pytest.raises(TokenError):
            worker.serve(tokens, 4)
        assert worker.controller.metrics.total("lookups_total", tier="device") == 2, "one request, two pools"
        worker.controller.check_integrity()
        assert worker.serve(LONG[1], 1).restored == 6 * PAGE


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
            worker.controller.check_integrity()
        short = LONG[2][: 2 * PAGE + 1]
        right(audit, worker, worker.serve(short, 3))
        again = worker.serve(short, 3, audit=True)
        assert again.restored == 2 * PAGE
        right(audit, worker, again)
        worker.controller.check_integrity()


def test_device_pools_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 states and 2 pages"):
        serving("falcon_h1", device_bytes=1 << 12)


# --- failures below ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_storage_that_hangs_costs_the_deadline_and_nothing_else(name: str, tmp_path: Path) -> None:
    env = FaultEnv()
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name, store(tmp_path, env), options=ControllerOptions(restore_deadline=0.2)) as worker:
        right(audit, worker, worker.serve(LONG[1], 2))
        evict(worker, Tier.DEVICE, Tier.HOST)
        hang = env.hang("preadv", times=1000)
        generation = worker.serve(LONG[1], 2, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.TIMEOUT)
        assert 0.2 <= generation.restore_seconds < 1.0
        right(audit, worker, generation)
        hang.release()
        right(audit, worker, worker.serve(LONG[1], 2, audit=True))
        settle(worker)
        worker.controller.check_integrity()


def test_writes_that_hang_are_not_waited_for(tmp_path: Path) -> None:
    env = FaultEnv()
    audit = Audit(loaded("falcon_h1")[0], page_slots=64, state_slots=16)
    with serving("falcon_h1", store(tmp_path, env)) as worker:
        hang = env.hang("pwritev", times=1000)
        started = time.monotonic()
        right(audit, worker, worker.serve(LONG[1], 2))
        assert hang.reached.wait(5)
        right(audit, worker, worker.serve(LONG[1], 2, audit=True))
        too_long = joined(LONG[1], prompt(8 << 10, 3))
        assert worker._admit(worker.controller.lookup(too_long), AMPLE, 5) is None
        assert time.monotonic() - started < 5
        hang.release()
        settle(worker)
        worker.controller.check_integrity()


class Breaking:
    """A copier that fails when it is to copy the layer number `at` from now on. Thread safety: `at` is set while nothing copies."""

    def __init__(self) -> None:
        self.at = -1

    def __call__(self, sources: Addresses, destinations: Addresses, lengths: npt.NDArray[np.int64]) -> None:
        self.at -= 1
        if self.at == -1:
            raise OSError("the device fell off the bus")
        copy_segments(sources, destinations, lengths)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "llama"])
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
            assert worker.controller.metrics.value("restore_failures_total", Reason.IO_ERROR) == 1 + bool(near)
            settle(worker)
            worker.controller.check_integrity()


def test_too_few_slots_after_a_load_that_failed() -> None:
    """Two requests share a load that fails, late; the slots stay with the first, and the second is computed without the cache."""

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
        pool = worker.controller._state.device[PoolName.KV]
        others = pool.alloc(pool.available - 2)
        generation = worker.serve(tokens, 2, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.BUSY)
        at_once.append(True)
        worker.controller.release(first)
        pool.free(others)
        right(audit, worker, generation)
        worker.synchronize()
        worker.controller.check_integrity()
        right(audit, worker, worker.serve(tokens, 2, audit=True))


def test_copies_to_the_host_that_fail_are_skipped(tmp_path: Path) -> None:
    copier = Breaking()
    audit = Audit(loaded("bamba")[0], page_slots=64, state_slots=16)
    with serving("bamba", store(tmp_path), engine=partial(CopyEngine, copier=copier)) as worker:
        copier.at = 1
        right(audit, worker, worker.serve(LONG[1], 1))
        evict(worker, Tier.DEVICE)
        generation = worker.serve(LONG[1], 1, audit=True)
        right(audit, worker, generation)
        assert worker.controller.metrics.total("write_through_skipped_total", reason="transfer_failed") > 0
        right(audit, worker, restored(worker, Tier.STORAGE))
        worker.controller.check_integrity()


# --- whose bytes these are -----------------------------------------------------------------------------------------------------------


def digest(model: PreTrainedModel) -> str:
    return identity_of(model, ModelRunner(model, PAGE), PAGE).revision


def test_two_models_on_one_directory_share_nothing(tmp_path: Path) -> None:
    """Equal layouts; other weights, or only another constant in the configuration."""
    for n, model in enumerate((build("llama"), build("llama", seed=1), build("llama", rms_norm_eps=1e-3))):
        with Worker(model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(tmp_path), page_size=PAGE) as worker:
            audit = Audit(worker.runner, page_slots=64, state_slots=0)
            for depth in (0, 6 * PAGE):
                generation = worker.serve(LONG[1], 2, audit=True)
                assert generation.restored == depth, n
                right(audit, worker, generation)
            settle(worker)
    with store(tmp_path) as storage:
        assert len(storage.namespaces()) == len({entry.meta.namespace for entry in storage.scan_all()}) == 3


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [("bamba", torch.float32, {}), ("llama", torch.bfloat16, {"tie_word_embeddings": True}), ("qwen3_next", torch.float32, {})],
    ids=["bamba", "llama, tied, bfloat16", "qwen3_next"],
)
def test_a_model_that_was_saved_and_loaded_again_hits(name: str, dtype: torch.dtype, options: dict[str, object], tmp_path: Path) -> None:
    # A cast rounds the frequencies of rotary embeddings as well, loading does not: the model to start from was loaded.
    build(name, **options).to(dtype).save_pretrained(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", local_files_only=True)
    for directory in (None, "here", "there"):
        if directory:
            model.save_pretrained(tmp_path / directory)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / directory, local_files_only=True)
            assert model.dtype == dtype
        with Worker(model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(tmp_path), page_size=PAGE) as worker:
            generation = worker.serve(LONG[1], 2, audit=True)
            assert generation.tier is (Tier.STORAGE if directory else None)
            if not directory:
                first = generation
            assert generation.answer.tolist() == first.answer.tolist()
            settle(worker)


def test_every_weight_counts() -> None:
    """Scalars, buffers, and weights of every dtype."""
    model = build("llama")  # it has none of these names itself
    model.register_buffer("scalar", torch.tensor(1.0))
    model.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))
    model.register_buffer("empty", torch.empty(0))
    seen = {digest(model)}
    changes = {"scalar": (torch.tensor(2.0), torch.ones(1)), "narrow": (-torch.ones(3, dtype=torch.bfloat16),)}
    for name, value in ((name, value) for name, values in changes.items() for value in values):
        model.register_buffer(name, value)
        seen.add(digest(model))
    with torch.no_grad():
        next(model.parameters()).view(-1)[7] += 1e-6
    seen.add(digest(model))
    assert len(seen) == 5
    assert digest(build("llama")) == digest(build("llama")) not in seen
