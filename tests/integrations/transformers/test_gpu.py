"""The worker on a real CUDA device: equal to the last bit to a recompute with the same cuts.

pytest -m gpu tests/integrations/transformers/test_gpu.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.transformers.models import PAGE, SERVED, build, prompt
from tests.integrations.transformers.serving import (
    AMPLE,
    evict,
    fill,
    right,
    serve_from,
    settle,
    store,
    tiers_of,
)
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.integrations.transformers.stream import CudaStream, compute_repeatably, describe, find_device
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit
from tiercache_lab.demo.small import build_small_hybrid

pytestmark = [
    pytest.mark.gpu,
    # Sums along a vector, of which torch has one kernel for CUDA; whether a model repeats itself, the probe
    # has seen.
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning"),
    # Where other tests have used cuBLAS before its workspace was settled; there is one stream, for which that
    # does not matter.
    pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled:UserWarning"),
]
TIERCACHE = [sys.executable, "-m", "tiercache.cli"]
LONG = prompt(6 * PAGE + 1, 1).tolist()
LATE = 400_000_000
"""Cycles: a fifth of a second and more."""


@pytest.fixture(scope="module", autouse=True)
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'tiercache-hybrid[cuda]'")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        compute_repeatably()
        yield find_device("cuda")
        torch.use_deterministic_algorithms(False)


def worker_on(device: torch.device, name: str, storage: Any = None, **options: Any) -> Worker:
    model = build(name).to(device)
    options = {
        "device_bytes": AMPLE,
        "host_bytes": AMPLE,
        "options": ControllerOptions(restore_deadline=30.0),
    } | options
    return Worker(model, storage=storage, page_size=PAGE, **options)


@pytest.mark.parametrize("name", SERVED)
def test_every_state_comes_back_from_every_tier(name: str, cuda: torch.device, tmp_path: Path) -> None:
    with worker_on(cuda, name, store(tmp_path)) as worker:
        assert worker.device == cuda
        assert worker.engine_report.startswith(str(cuda))
        audit = Audit(worker.runner, page_slots=256, state_slots=64)
        prompts = fill(worker, audit)
        for tier in Tier:
            for depth, tokens in prompts.items():
                serve_from(worker, audit, tier, depth, tokens)
        worker.synchronize()
        check_controller(worker.controller)
    with worker_on(cuda, name, store(tmp_path)) as worker:
        serve_from(worker, audit, Tier.STORAGE, 5 * PAGE, prompts[5 * PAGE])


def test_the_demonstration_model_from_every_tier(cuda: torch.device, tmp_path: Path) -> None:
    """Pages and states of a real size, in the default stream and in another one."""
    model = build_small_hybrid().to(cuda)
    tokens = prompt(2049, 1).tolist()
    for stream in (torch.cuda.default_stream(cuda), torch.cuda.Stream(cuda)):
        directory = tmp_path / str(stream.cuda_stream)
        directory.mkdir()
        with (
            torch.cuda.stream(stream),
            Worker(model, device_bytes=64 << 20, host_bytes=64 << 20, storage=store(directory)) as worker,
        ):
            audit = Audit(worker.runner, page_slots=256, state_slots=32)
            right(audit, worker, worker.serve(tokens, 8))
            for tier, above in (
                (Tier.DEVICE, ()),
                (Tier.HOST, (Tier.DEVICE,)),
                (Tier.STORAGE, (Tier.DEVICE, Tier.HOST)),
            ):
                evict(worker, *above)
                generation = worker.serve(tokens, 8, audit=True)
                assert (generation.restored, tiers_of(generation)) == (2048, {tier})
                assert 0 < generation.restore_seconds < generation.ttft_seconds
                right(audit, worker, generation)


class Silent(CudaStream):
    """Names no fences."""

    def fence(self) -> Any:
        return None


@pytest.mark.parametrize("silent", [False, True], ids=["with fences", "without"])
def test_copies_wait_for_late_exports(silent, cuda, monkeypatch):
    """Each export stands behind a long kernel; without fences, the negative control, old bytes go down."""
    with worker_on(cuda, "qwen3_next", stream=Silent(cuda) if silent else None) as worker:
        audit = Audit(worker.runner, page_slots=64, state_slots=16)
        export = worker.runner.export_pages

        def late(*arguments: Any) -> None:
            torch.cuda._sleep(LATE)  # private: torch has no other way to keep a stream busy
            export(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(worker.runner, "export_pages", late)
            first = worker.serve(LONG, 1)
        settle(worker)
        torch.cuda.synchronize()
        right(audit, worker, first)
        evict(worker, Tier.DEVICE)
        for tensor in (*worker.tensors.kv.values(), *worker.tensors.states.values()):
            tensor.view(torch.uint8).fill_(0x5A)
        torch.cuda.synchronize()
        generation = worker.serve(LONG, 1, audit=True)
        assert (generation.restored, tiers_of(generation)) == (6 * PAGE, {Tier.HOST})
        assert audit.check(generation).same_bytes is not silent


def test_the_demonstration(cuda: torch.device, tmp_path: Path) -> None:
    """Two processes, with a kill between them; the second one computes what the first did, and compares."""
    report = tmp_path / "report.json"
    arguments = [
        "--device", "cuda", "--directory", tmp_path / "demo", "--turns", 2, "--conversations", 4, "--context",
        512, "--json", report,
    ]  # fmt: skip
    done = subprocess.run(
        [*TIERCACHE, "demo", *map(str, arguments)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert describe(cuda) in done.stdout
    assert "page-locked" in done.stdout
    data = json.loads(report.read_text())
    assert data["summary"]["wrong_outputs"] == 0
    assert all(data["summary"]["hits_by_tier"][tier] > 0 for tier in ("device", "host", "disk"))
    assert {row["max_logit_diff"] for row in data["rows"]} == {0.0}
