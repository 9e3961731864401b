"""Arguments of a worker: sensible values are accepted, all others are refused with one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import slow_after
from tests.integrations.transformers.models import PAGE, build, loaded, prompt
from tests.integrations.transformers.serving import evict, serving
from tests.integrity import check_controller
from tiercache.core import PoolName, Reason, Tier, as_tokens
from tiercache.errors import InputError, PoolFullError, TierCacheError, TokenError
from tiercache.integrations.transformers.arguments import count_of, size_of
from tiercache.integrations.transformers.worker import Worker
from tiercache.keys import Identity
from tiercache.pools import DevicePool
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"device_bytes": "4MiB", "host_bytes": "4MiB", "page_size": PAGE}
TOKENS = prompt(4 * PAGE + 1, seed=1)


def test_a_model_and_a_store_by_their_paths_and_sizes_with_units(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    url = f"file://{tmp_path / 'store'}?capacity=64MiB"
    section = {"type": "file", "path": str(tmp_path / "store"), "capacity": "64MiB"}
    restored = []
    for model, storage in (
        (tmp_path / "model", url),
        (str(tmp_path / "model"), section),
        (build("llama"), url),
        (build("llama"), ["memory://", section]),
    ):
        with Worker(model, storage=storage, **SIZES) as worker:
            restored.append(worker.serve(TOKENS, 2).restored)
            worker.controller.flush()
    assert restored == [0, 4 * PAGE, 4 * PAGE, 4 * PAGE]


def test_a_prefix_is_prefetched_pinned_and_hinted_at(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}?capacity=64MiB"
    with Worker(build("llama"), storage=url, **SIZES) as worker:
        worker.serve(TOKENS, 2)
        worker.controller.flush()
    with Worker(build("llama"), storage=url, **SIZES) as worker:
        ticket = worker.prefetch(torch.tensor(TOKENS))
        while not ticket.done:
            worker.controller.tick(0.01)
        assert ticket.tokens == 4 * PAGE
        assert worker.pin(TOKENS, 60.0) == worker.hint(TOKENS, 5.0) == 4 * PAGE
        with pytest.raises(InputError, match="knows nothing"):
            worker.pin(TOKENS, 60.0, extra=b"another adapter")
        fetched = worker.controller.metrics.total("storage_gets_total")
        assert worker.serve(TOKENS, 2).restored == 4 * PAGE
        assert worker.controller.metrics.total("storage_gets_total") == fetched
        assert worker.controller.metrics.value("hints_total", "honoured") == 1
        assert worker.unpin(TOKENS)
        assert not worker.unpin(TOKENS)
        for call in (worker.prefetch, worker.unpin):
            with pytest.raises(TokenError, match="outside the model's vocabulary"):
                call([1 << 30])
            with pytest.raises(InputError, match="extra"):
                call(TOKENS, extra="adapter")


def test_sizes_of_every_kind_are_one_size() -> None:
    sizes = (4 << 20, "4MiB", "4194304", np.int64(4 << 20), np.uint32(4 << 20))
    assert {size_of("device_bytes", size) for size in sizes} == {4 << 20}
    assert count_of("page_size", np.int32(PAGE)) == PAGE


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_bytes": "much"}, {"device_bytes": None}, {"device_bytes": 1.5}, {"device_bytes": -1},
        {"device_bytes": True},
        {"device_bytes": "auto"}, {"host_bytes": "much"}, {"host_bytes": None}, {"host_bytes": b"1GiB"},
        {"host_bytes": 0},
        {"page_size": "64"}, {"page_size": 0}, {"page_size": 2.0}, {"page_size": None}, {"page_size": True},
        {"storage": 7}, {"storage": "not a url"}, {"storage": "nosuch://x"}, {"storage": {"path": "/tmp"}},
        {"storage": object()},
        {"identity": "me"}, {"identity": b"me"}, {"options": {"restore_deadline": 1}}, {"engine": "cuda"},
        {"stream": 0},
        {"chunk_limit": 0}, {"chunk_limit": PAGE // 2}, {"chunk_limit": PAGE + 1}, {"chunk_limit": -PAGE},
        {"chunk_limit": "64"}, {"chunk_limit": float(PAGE)}, {"chunk_limit": True},
        {"model": None}, {"model": 7}, {"model": torch.nn.Linear(2, 2)}, {"model": "/nowhere/at/all"},
        {"model": type("Model", (), {})()},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_sentence(wrong: dict[str, Any]) -> None:
    arguments = {"model": loaded("llama")[0].model} | SIZES | wrong
    with pytest.raises(TierCacheError) as refused:
        Worker(arguments.pop("model"), **arguments)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) > 20


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    for name, text in (("empty", None), ("broken", "{"), ("no-weights", '{"model_type": "llama"}')):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "config.json").write_text(text)
        with pytest.raises(TierCacheError, match=name) as refused:
            Worker(tmp_path / name, **SIZES)
        assert "\n" not in str(refused.value)


def test_a_page_size_that_is_not_the_identity_s_is_refused() -> None:
    with pytest.raises(InputError, match="page"):
        Worker(
            loaded("llama")[0].model, identity=Identity("m", "r", "float32", "float32", "", 2 * PAGE), **SIZES
        )


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((TOKENS, "3"), {}), ((TOKENS, 0), {}), ((TOKENS, 1.0), {}), ((TOKENS, None), {}),
        ((TOKENS, True), {}), ((TOKENS, -1), {}),
        ((TOKENS, 1), {"extra": "tenant"}), ((TOKENS, 1), {"extra": None}), ((TOKENS, 1), {"extra": 7}),
        ((TOKENS, 1), {"stop": "abc"}), ((TOKENS, 1), {"stop": [1.5]}), ((TOKENS, 1), {"stop": None}),
        ((TOKENS, 1), {"stop": ["x"]}),
        ((None, 1), {}), (("text", 1), {}), ((7, 1), {}), (([[1, 2]], 1), {}), (([1.5], 1), {}),
        ((["a"], 1), {}), (([None], 1), {}),
        ((torch.ones(2, 2, dtype=torch.int64), 1), {}), ((torch.ones(3), 1), {}),
        (({"input_ids": [1]}, 1), {}), ((b"text", 1), {}),
        (([], 1), {}), (([1 << 70], 1), {}), ((np.array(["a"]), 1), {}), (([3, 256], 1), {}), (([-1], 1), {}),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_in_one_sentence(arguments, options):
    with serving("llama") as worker:
        with pytest.raises(InputError) as refused:
            worker.serve(*arguments, **options)
        assert "\n" not in str(refused.value)
        check_controller(worker.controller)
        assert worker.serve(TOKENS, 1).restored == 0


def test_requests_may_be_lists_arrays_and_tensors_and_answers_are_int64() -> None:
    with serving("llama") as worker:
        answers = []
        for tokens in (
            TOKENS,
            TOKENS.tolist(),
            tuple(TOKENS.tolist()),
            TOKENS.astype(np.int32),
            torch.from_numpy(TOKENS),
        ):
            generation = worker.serve(tokens, np.int64(3), extra=bytearray(b"tenant"))
            assert generation.tokens.dtype == generation.answer.dtype == np.int64
            answers.append(generation.answer.tolist())
        assert answers == answers[:1] * 5
        assert generation.restored == 4 * PAGE
        stop = answers[0][1]
        assert worker.serve(TOKENS, 3, stop=stop).answer.tolist() == answers[0][: answers[0].index(stop) + 1]
        again = torch.from_numpy(np.concatenate([generation.tokens, generation.answer]))
        assert len(worker.serve(again, 1).answer) == 1


def test_pools_of_numpy_arrays_are_refused() -> None:
    runner = loaded("llama")[0]
    tensors = {at: t.numpy() for at, t in runner.allocate_pools(4, 0).kv.items()}
    with pytest.raises(InputError, match="tensor") as refused:
        DevicePool.from_tensors(runner.layout.geometries[PoolName.KV], tensors)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", slow_after(1, ["llama", "falcon_h1", "jamba"]))
def test_requests_beside_others_that_hold_the_slots_are_computed_without_the_cache(name: str) -> None:
    """Other admissions hold all slots but a number from none to enough, before a restore from each tier."""
    runner = loaded(name)[0]
    audit = Audit(runner, page_slots=512, state_slots=256)
    least = {pool: geometry.nbytes for pool, geometry in runner.layout.geometries.items()}
    size = 9 * least.get(PoolName.MAMBA, 0) + 14 * least[PoolName.KV]
    reasons = set()
    with serving(name, device_bytes=2 * size if PoolName.MAMBA in least else size) as worker:
        assert audit.check(worker.serve(TOKENS, 2, audit=True)).same_text
        for tier in (Tier.DEVICE, Tier.HOST):
            for held in range(1, 15):
                others = []
                if tier is Tier.HOST:
                    evict(worker, Tier.DEVICE)
                for n in range(held):
                    other = as_tokens(prompt(PAGE - 3, seed=50 + n))
                    try:
                        others.append(
                            worker.controller.admit(
                                worker.controller.lookup(other), tokens=PAGE, states=n % 3
                            )
                        )
                    except PoolFullError:
                        break
                generation = worker.serve(TOKENS, 2, audit=True)
                verdict = audit.check(generation)
                assert (verdict.max_logit_diff, verdict.same_text, verdict.same_bytes) == (0.0, True, True)
                reasons.add(generation.reason)
                for admission in others:
                    worker.controller.release(admission)
                worker.synchronize()
                check_controller(worker.controller)
    assert {Reason.NONE, Reason.BUSY} <= reasons
