"""Speculative decoding with a draft model: `Worker(draft=...)`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from tests.examples import slow_after
from tests.integrations.transformers import serving as serving_module
from tests.integrations.transformers.models import PAGE, build, loaded, prompt
from tests.integrations.transformers.serving import (
    AMPLE,
    EVICTED,
    LONG,
    context_of,
    evict,
    joined,
    right,
    serving,
    settle,
    store,
    tiers_of,
)
from tiercache.core import PoolName, Reason, Tier
from tiercache.errors import ConfigError, InputError, UnsupportedModelError
from tiercache.integrations.transformers import Request, Sampling, differences
from tiercache.integrations.transformers.reach import TailMode
from tiercache.integrations.transformers.requests.task import Task
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.base import StorageBackend
from tiercache_lab.demo.audit import Audit, AuditedRun

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = {"num_hidden_layers": 1, "num_key_value_heads": 1, "max_position_embeddings": 1 << 18}
"""Arguments of a configuration that make a draft unlike its model, with smaller pages and fewer layers."""


@functools.cache
def drafted(name: str, **overrides: Any) -> PreTrainedModel:
    """A model of the family, which tests must not change; with `overrides` it has other random weights."""
    return build(name, 5 if overrides else 0, **overrides)


def drafting(
    name: str, draft: PreTrainedModel, storage: StorageBackend | None = None, **options: Any
) -> Worker:
    """A worker with a draft."""
    return serving(name, storage, draft=draft, **options)


def live_draft(worker: Worker, tokens: Sequence[int], extra: bytes = b"") -> tuple[Task, Any]:
    """A task after its prefill, and the live cache of its draft."""
    # private: no public call lets a test look between two steps
    task = worker.scheduler.begin(worker._checked(Request(tokens, 1, extra=extra)), audit=False, started=0.0)
    task.step()
    # private: as above
    drafted_by = task._commits[0].drafting
    assert drafted_by is not None
    return task, drafted_by.cache


@pytest.mark.parametrize("name", slow_after(2, ["llama", "qwen3", "deepseek_v32"]))
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "other"])
@pytest.mark.parametrize("count", slow_after(1, [4, 1]))
def test_the_answer_is_that_of_plain_decoding(name: str, equal: bool, count: int) -> None:
    """For prompts and answers that end inside a page and at its end; an equal draft is always right."""
    draft = drafted(name) if equal else drafted("llama", **OTHER)
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=1)
    prompts = [prompt(length, seed=length) for length in (3, PAGE, 3 * PAGE + 1)]
    asked = [(one, new) for one in prompts for new in (1, 2, 3, 19)]
    with drafting(name, draft, draft_tokens=count) as worker, serving(name) as plain:
        for n, (tokens, new_tokens) in enumerate(asked):
            extra = str(n).encode()
            expected = plain.serve(tokens, new_tokens, extra=extra)
            found = worker.serve(tokens, new_tokens, extra=extra, audit=True)
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert torch.equal(found.first_logits, expected.first_logits)
            right(audit, worker, found)
            if equal:
                assert found.accepted == found.proposed
                assert len(found.bounds) == 1 + -(-(new_tokens - 1) // (1 + count))
            elif new_tokens == 19:
                assert found.accepted < found.proposed / 2
            assert (found.proposed > 0) == (new_tokens > 2)
            assert sum(map(len, found.rejected)) == found.proposed - found.accepted
        worker.synchronize()
        worker.controller.check_integrity()


@pytest.mark.parametrize("equal", slow_after(1, [True, False]), ids=["equal", "other"])
def test_a_model_that_is_fed_single_tokens_computes_the_bits_of_plain_decoding(equal: bool) -> None:
    token_mode = loaded("llama")[0].like(TailMode.TOKEN)
    draft = drafted("llama") if equal else drafted("llama", **OTHER)
    with drafting("llama", draft, runner=token_mode) as worker, serving("llama", runner=token_mode) as plain:
        for n in range(3):
            tokens = prompt(PAGE + 7, seed=n)
            found, expected = (one.serve(tokens, 20, audit=True) for one in (worker, plain))
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert differences(worker.runner.layout, found.cache, expected.cache) == ()
            assert found.proposed


@pytest.mark.slow
def test_a_draft_may_have_a_window_longer_than_its_positions() -> None:
    """Such a layer counts its tokens, so the count is cut, too."""
    draft = drafted("mistral", sliding_window=4096, max_position_embeddings=2048)
    with drafting("llama", draft) as worker, serving("llama") as plain:
        for tokens in LONG.values():
            found = worker.serve(tokens, 20)
            assert found.accepted < found.proposed
            assert found.tokens.tolist() == plain.serve(tokens, 20).tokens.tolist()
        assert worker.serve(LONG[1], 2).restored == 6 * PAGE


def test_an_answer_ends_behind_each_of_its_tokens() -> None:
    """A stop token may be proposed, and it is never fed to the model."""
    tokens = prompt(2 * PAGE - 3, seed=8)
    audit = Audit(loaded("llama")[0], page_slots=256, state_slots=1)
    with drafting("llama", drafted("llama")) as worker, serving("llama") as plain:
        for n, stop in enumerate(plain.serve(tokens, 12).answer.tolist()):
            expected = plain.serve(tokens, 12, stop=stop, extra=bytes([n]))
            found = worker.serve(tokens, 12, stop=stop, extra=bytes([n]))
            assert found.tokens.tolist() == expected.tokens.tolist()
            length = worker.runner.layout.length
            assert length(found.cache) == length(expected.cache) == len(found.tokens) - 1
            right(audit, worker, found)


@pytest.mark.parametrize("name", slow_after(1, ["llama", "qwen3"]))
@pytest.mark.parametrize("tier", slow_after(1, [Tier.STORAGE, Tier.HOST, Tier.DEVICE]))
def test_the_cache_of_the_draft_is_restored_bit_by_bit(name: str, tier: Tier, tmp_path: Path) -> None:
    """With that of the model, to the same depth; the slots are overwritten before."""
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=1)
    with drafting(name, drafted("llama", **OTHER), store(tmp_path)) as worker:
        history = LONG[1]
        for turn in range(2):
            last = worker.serve(history, 2 * PAGE, audit=True)
            right(audit, worker, last)
            history = joined(last.tokens, prompt(5, seed=turn))
        depth = (len(last.tokens) - 1) // PAGE * PAGE
        task, expected = live_draft(worker, history)
        task.close()
        evict(worker, *EVICTED[tier])
        assert worker.draft is not None
        if tier is not Tier.DEVICE:
            for tensor in (*worker.tensors.kv.values(), *worker.draft.tensors.kv.values()):
                tensor.fill_(float("nan"))
        before = worker.controller.metrics.value("restored_objects_total", str(tier), "draft")
        task, found = live_draft(worker, history)
        task.close()
        draft = worker.draft.runner
        assert differences(draft.layout, found, expected) == ()
        anew = draft.new_cache()
        draft.forward(anew, history, 0)
        for t in draft.layout.kv_tensors():
            held, computed = (draft.layout.tensor_of(cache, t.layer, t.name) for cache in (found, anew))
            assert torch.allclose(held, computed, atol=1e-4), "but for rounding, as computed from nothing"
        metrics = worker.controller.metrics
        assert metrics.value("restored_objects_total", str(tier), "draft") - before == depth // PAGE
        evict(worker, *EVICTED[tier])
        again = worker.serve(history, 20, audit=True)
        assert (again.restored, tiers_of(again)) == (depth, {tier})
        right(audit, worker, again)
        worker.synchronize()
        worker.controller.check_integrity()


def test_the_draft_needs_no_prefill_after_a_hit() -> None:
    """The draft goes on with the bytes of its slots; wrong ones make wrong proposals, and the same answer."""
    audit = Audit(loaded("llama")[0], page_slots=256, state_slots=1)
    with drafting("llama", drafted("llama")) as worker:
        assert worker.draft is not None
        first = worker.serve(LONG[1], 20, audit=True)
        right(audit, worker, first)
        for tensor in worker.draft.tensors.kv.values():
            tensor.fill_(7.0)
        task, cache = live_draft(worker, LONG[1])
        task.close()
        layout = worker.draft.runner.layout
        for t in layout.kv_tensors():
            held = layout.tensor_of(cache, t.layer, t.name)
            assert (held[:, :, : 6 * PAGE] == 7.0).all()
            assert (held[:, :, 6 * PAGE :] != 7.0).all()
        again = worker.serve(LONG[1], 20, audit=True)
        assert again.tokens.tolist() == first.tokens.tolist()
        assert first.accepted == first.proposed
        assert again.accepted < again.proposed
        right(audit, worker, again)


def test_without_an_object_of_the_draft_the_next_depth_below_is_restored(tmp_path: Path) -> None:
    storage, audit = store(tmp_path), Audit(loaded("llama")[0], page_slots=256, state_slots=1)
    with drafting("llama", drafted("llama", **OTHER), storage) as worker:
        right(audit, worker, worker.serve(LONG[1], 1))
        for page in (5, 2, 0):
            evict(worker, Tier.DEVICE, Tier.HOST)
            kept = {e.meta.depth: e.key for e in storage.scan_all() if e.key.pool is PoolName.DRAFT}
            assert sorted(kept) == [1, 2, 3, 4, 5, 6]
            assert storage.delete([kept[page + 1]]) == [True]
            found = worker.serve(LONG[1], 9, audit=True)
            assert (found.restored, found.reason) == (page * PAGE, Reason.ABSENT)
            right(audit, worker, found)


@pytest.mark.slow
def test_another_draft_finds_nothing_of_the_first(tmp_path: Path) -> None:
    """Each draft later finds its own objects, and a worker without a draft finds the model's."""
    drafts = [drafted("llama"), drafted("llama", **OTHER), build("llama", seed=9), None]
    for whole in (0, 6 * PAGE):
        for draft in drafts:
            audit = Audit(loaded("llama")[0], page_slots=256, state_slots=1)
            maker = serving("llama", store(tmp_path)) if draft is None else None
            with maker or drafting("llama", draft, store(tmp_path)) as worker:  # type: ignore[arg-type]
                found = worker.serve(LONG[1], 9, audit=True)
                assert found.restored == (6 * PAGE if draft is None else whole)
                if not found.restored:
                    right(audit, worker, found)
                settle(worker)


def test_the_plan_and_the_pools_have_the_pages_of_both(tmp_path: Path) -> None:
    with drafting("llama", drafted("llama", **OTHER), store(tmp_path)) as worker:
        pools = {name: pool.geometry.nbytes for name, pool in context_of(worker).device.items()}
        assert set(pools) == {PoolName.KV, PoolName.DRAFT}
        assert pools[PoolName.DRAFT] < pools[PoolName.KV]
        plan = worker.plan(LONG[1], PAGE)
        assert (plan.pages, plan.page_bytes) == (8, 8 * sum(pools.values()))
        used = sum(p.capacity * p.geometry.nbytes for p in context_of(worker).device.values())
        assert AMPLE - sum(pools.values()) < used <= AMPLE
        assert worker.serve(LONG[1], PAGE).restored == 0
        assert worker.plan(LONG[1], PAGE).restored == 6 * PAGE


@pytest.mark.parametrize("limit", slow_after(1, [PAGE, None]))
def test_a_prefill_in_chunks_and_a_request_without_room(limit: int | None) -> None:
    audit = Audit(loaded("llama")[0], page_slots=256, state_slots=1)
    draft = drafted("llama", **OTHER)
    with serving("llama", chunk_limit=limit) as plain:
        expected = plain.serve(LONG[1], 20).tokens.tolist()
    with drafting("llama", draft, chunk_limit=limit) as worker:
        assert worker.draft is not None
        page = sum(geometry.nbytes for geometry in worker.geometries.values())
        task, cache = live_draft(worker, LONG[1])
        task.close()
        assert worker.draft.runner.layout.length(cache) == (limit or len(LONG[1])), "after one chunk"
        for new_tokens in (20, 40):
            found = worker.serve(LONG[1], new_tokens, audit=True)
            assert found.tokens.tolist()[: len(expected)] == expected
            right(audit, worker, found)
        assert found.restored == 6 * PAGE
    with drafting("llama", draft, chunk_limit=limit, device_bytes=3 * page) as worker:
        found = worker.serve(LONG[1], 20)
        assert (found.tokens.tolist(), found.reason) == (expected, Reason.BUSY)
        assert found.proposed > 0
        right(audit, worker, found)


def test_an_answer_beyond_the_limit_is_decoded_without_the_draft(tmp_path: Path) -> None:
    limit, draft = 3 * PAGE + 5, drafted("llama")
    runner, report = serving_module.probed(draft)
    short = runner, replace(report, reach=replace(report.reach, limit=limit))
    tokens = prompt(2 * PAGE, seed=6)
    with serving("llama") as plain, patch.object(serving_module, "probed", lambda model: short):
        expected = plain.serve(tokens, 40).tokens.tolist()
        with serving("llama", store(tmp_path), draft=draft) as worker:
            assert worker.limit == limit
            audit = Audit(worker.runner, page_slots=64, state_slots=1)
            for restored in (0, PAGE):
                found = worker.serve(tokens, 40, audit=True)
                assert (found.restored, found.anew) == (restored, limit + 1)
                assert found.tokens.tolist() == expected
                right(audit, worker, found)
                evict(worker, Tier.DEVICE, Tier.HOST)


def test_a_run_with_rejected_tokens_survives_json() -> None:
    audit = Audit(loaded("llama")[0], page_slots=256, state_slots=1)
    with drafting("llama", drafted("llama", **OTHER)) as worker:
        run = right(audit, worker, worker.serve(LONG[1], 12)).run
    assert any(run.rejected)
    assert AuditedRun.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_a_draft_that_was_changed_is_refused() -> None:
    draft = build("llama", seed=5, **OTHER)
    with drafting("llama", draft) as worker:
        tokens = worker.serve(LONG[1], 3).tokens.tolist()
        weight = draft.model.layers[0].self_attn.q_proj.weight
        with torch.no_grad():
            weight.mul_(2)
            with pytest.raises(ConfigError, match=r"q_proj\.weight is not what it was"):
                worker.serve(LONG[2], 3)
            weight.div_(2)
        assert worker.serve(LONG[1], 3).tokens.tolist() == tokens


def test_requests_that_a_draft_does_not_serve_are_refused() -> None:
    with drafting("llama", drafted("llama")) as worker:
        warm = Sampling(temperature=0.5)
        with pytest.raises(InputError, match=r"^the temperature is 0\.5, and a worker with a draft answers"):
            worker.serve(LONG[1], 2, sampling=warm)
        with pytest.raises(InputError, match="a worker with a draft answers greedily"):
            worker.serve(LONG[1], 2, sampling=warm, n=2)
        with pytest.raises(InputError, match=r"^a worker with a draft serves one request at a time"):
            worker.serve_all([Request(LONG[1], 2)])
        (only,) = worker.serve(LONG[1], 2, n=1)
        assert only.answer.tolist() == worker.serve(LONG[1], 2).answer.tolist()


@pytest.mark.parametrize(
    ("name", "draft", "match"),
    [
        ("bamba", {}, "^the model keeps states or windows"),
        ("gemma3", {}, "^the model keeps states or windows"),
        ("llama", {"vocab_size": 300}, "^the draft has a vocabulary of 300 ids and the model one of 256"),
        ("llama", {"max_position_embeddings": 512}, "^the draft has 512 positions and the model 2048"),
    ],
)
def test_an_impossible_pair_is_refused(name: str, draft: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        drafting(name, drafted("llama", **draft))


@pytest.mark.parametrize("name", ["bamba", "mistral"])
def test_a_draft_with_states_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^the draft keeps states or windows"):
        serving("llama", draft=loaded(name)[0].model)


@pytest.mark.parametrize("count", [0, -1, 2.5, "4", True, None])
def test_an_impossible_number_of_proposed_tokens_is_refused(count: Any) -> None:
    with pytest.raises(InputError, match=r"^draft_tokens is .*; give an integer, at least one$"):
        drafting("llama", drafted("llama"), draft_tokens=count)
    with pytest.raises(InputError, match="not of type int"):
        serving("llama", draft=7)
