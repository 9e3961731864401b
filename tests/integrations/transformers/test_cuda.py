"""The worker over the CUDA engine on a simulated device: the same answers, or who does not wait is found."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.examples import slow_after
from tests.integrations.transformers.models import FAMILIES, PAGE, loaded, prompt
from tests.integrations.transformers.serving import (
    SYSTEM,
    evict,
    fill,
    right,
    serving,
    settle,
    store,
    tiers_of,
)
from tests.integrations.transformers.simulated import SimulatedStream, simulated
from tests.integrity import check_controller
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import PoolName, Reason, Tier
from tiercache.errors import ConfigError
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.stream import (
    CudaStream,
    TorchStream,
    find_device,
    rounds_parts,
    stream_of,
    to_device,
)
from tiercache.integrations.transformers.watch import identity_of
from tiercache.integrations.transformers.worker import Worker
from tiercache.transfer.cuda import Method
from tiercache_lab.demo.audit import Audit
from tiercache_lab.demo.serving import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = prompt(6 * PAGE + 1, 1).tolist()
"""A prompt that restores all but its last token."""


def scramble(worker: Worker) -> None:
    """Leave nothing in the slots that could be taken for what a load brings."""
    worker.stream.synchronize()
    for tensor in (*worker.tensors.kv.values(), *worker.tensors.states.values()):
        tensor.view(torch.uint8).fill_(0x5A)


def from_host(worker: Worker) -> Generation:
    """The long prompt, restored from the host into slots that hold other bytes."""
    evict(worker, Tier.DEVICE)
    scramble(worker)
    generation = worker.serve(LONG, 1, audit=True)
    assert (generation.restored, tiers_of(generation)) == (6 * PAGE, {Tier.HOST})
    return generation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"), slow_after(1, [("qwen3_next", 0), ("qwen3_next", 1), ("llama", 0), ("llama", 1)])
)
def test_conversations_with_pools_too_small_for_all_of_them(name: str, seed: int, tmp_path: Path) -> None:
    """Slots change hands all the time between slow streams and slow copies; nothing waits in between."""
    device = SimulatedDevice(seed=seed, jitter=0.003, seconds=lambda method, nbytes, count: nbytes / 200e6)
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=128)
    geometries = loaded(name)[0].layout.geometries
    states = geometries.get(PoolName.MAMBA)
    sizes = {
        "device_bytes": 18 * geometries[PoolName.KV].nbytes + (12 * states.nbytes if states else 0),
        "host_bytes": (
            16 * geometries[PoolName.KV].padded_nbytes + (8 * states.padded_nbytes if states else 0)
        ),
    }
    histories = [SYSTEM.tolist() for _ in range(3)]
    seen: set[Tier | None] = set()
    with simulated(name, store(tmp_path), device=device, pause=0.004, **sizes) as worker:
        for turn in range(4):
            for n, history in enumerate(histories):
                history += prompt(12, seed=100 + 10 * n + turn).tolist()
                generation = worker.serve(history, 14, audit=True)
                history += generation.answer.tolist()
                assert generation.reason is not Reason.BUSY
                right(audit, worker, generation)
                seen.add(generation.tier)
        settle(worker)
        worker.synchronize()
        check_controller(worker.controller)
    assert seen & {Tier.HOST, Tier.STORAGE}


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_copies_wait_for_what_is_queued_before_them(name: str) -> None:
    """Exports take longer than a whole request; the copies to the host wait for them all the same."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with simulated(name, pause=0.05) as worker:
        right(audit, worker, worker.serve(LONG, 4))
        right(audit, worker, from_host(worker))


def test_without_fences_old_bytes_go_to_the_host() -> None:
    """The negative control of the test above: a commit that does not say when its slots are written."""

    class Silent(SimulatedStream):
        def fence(self) -> Any:
            return None

    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    with simulated("qwen3_next", pause=0.05, stream=Silent) as worker:
        right(audit, worker, worker.serve(LONG, 4))
        verdict = audit.check(from_host(worker))
        assert not verdict.same_bytes
        assert verdict.max_logit_diff > 100 * worker.probe.tolerance


def test_if_another_stream_waits_for_a_layer_old_bytes_are_restored() -> None:
    class Elsewhere(SimulatedStream):
        """Names another stream than the one that it works in."""

        def __init__(self, device: SimulatedDevice) -> None:
            super().__init__(device)
            self._own = self.handle
            with device.current():
                self.handle = device.create_stream(urgent=False)

        @property
        def own(self) -> int:
            assert self._own is not None
            return self._own

        def close(self) -> None:
            super().close()
            with self.device.current():
                self.device.destroy_stream(self.handle)

    for stream, same in ((SimulatedStream, True), (Elsewhere, False)):
        audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
        device = SimulatedDevice(seconds=lambda method, nbytes, count: 0.02)
        with simulated("qwen3_next", device=device, stream=stream) as worker:
            right(audit, worker, worker.serve(LONG, 4))
            assert audit.check(from_host(worker)).same_bytes is same


def test_every_commit_and_release_names_a_fence_of_its_own(tmp_path: Path) -> None:
    passed: list[Any] = []
    with simulated("qwen3_next", store(tmp_path)) as worker:
        stream = worker.stream
        assert isinstance(stream, SimulatedStream)
        for call in ("commit", "release"):
            real = getattr(worker.controller, call)

            def spy(*arguments: Any, real: Any = real, **options: Any) -> Any:
                passed.append(options["fence"])
                return real(*arguments, **options)

            setattr(worker.controller, call, spy)
        first = worker.serve(SYSTEM, 2 * PAGE)
        assert len(first.states) == 2
        assert len(passed) == 3, "the prompt's checkpoint, the end, the release"
        assert passed == stream.fences, "each once, in order, and all that were made"
        with (
            patch.object(stream, "fence", side_effect=RuntimeError("the device is gone")),
            pytest.raises(RuntimeError, match="is gone"),
        ):
            worker.serve(SYSTEM, 1)


def test_the_device_waits_for_a_layer_and_not_the_thread() -> None:
    """Each layer's copies take a while; the calls that wait for them return at once."""
    device = SimulatedDevice(seconds=lambda method, nbytes, count: 0.05)
    waits: list[float] = []
    with simulated("qwen3_next", device=device) as worker:
        worker.serve(LONG, 1)
        evict(worker, Tier.DEVICE)
        restore = worker.runner.restore

        def timed(*arguments: Any, wait_layer: Any, **options: Any) -> Any:
            def wait(layer: int) -> None:
                began = time.perf_counter()
                wait_layer(layer)
                waits.append(time.perf_counter() - began)

            return restore(*arguments, wait_layer=wait, **options)

        with patch.object(worker.runner, "restore", timed):
            generation = worker.serve(LONG, 1)
        assert generation.restored == 6 * PAGE
        layers = len(worker.runner.layout.layers)
        assert len(waits) == layers
        assert sum(waits) < 0.05 * layers / 2, "all layers together take longer than that"


def test_a_device_that_is_slow_is_not_busy() -> None:
    """The next request needs slots of the last one, whose work outlasts the wait for copies."""
    geometries = loaded("qwen3_next")[0].layout.geometries
    small = 8 * geometries[PoolName.KV].nbytes + 7 * geometries[PoolName.MAMBA].nbytes  # of one request
    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    with simulated("qwen3_next", pause=0.35, device_bytes=small) as worker:
        for seed in (1, 2):
            generation = worker.serve(prompt(6 * PAGE + 1, seed), PAGE, audit=True)
            assert generation.reason is not Reason.BUSY
            right(audit, worker, generation)


def test_the_first_load_comes_after_the_pools_are_zeroed(tmp_path: Path) -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    runner = loaded("qwen3_next")[0]
    identity = identity_of(runner.model, runner, PAGE)  # hashed once: it takes longer than the zeros
    with serving("qwen3_next", store(tmp_path), identity=identity) as worker:
        right(audit, worker, worker.serve(LONG, 1))
    with simulated("qwen3_next", store(tmp_path), pause=0.3, identity=identity) as worker:
        generation = worker.serve(LONG, 1, audit=True)
        assert generation.tier is Tier.STORAGE
        right(audit, worker, generation)


def test_the_time_to_the_first_token_is_when_it_is_there() -> None:
    """The time ends when the token is computed, behind two exports of 0.2 s, not when its work is queued."""
    with simulated("qwen3_next", pause=0.2) as worker:
        generation = worker.serve(LONG, 1)
        assert generation.states == (6 * PAGE,)
        assert generation.ttft_seconds >= 0.4


@pytest.mark.parametrize("at", slow_after(1, [1, 4]))
def test_a_layer_that_cannot_be_loaded(at: int) -> None:
    device = SimulatedDevice(jitter=0.002)
    audit = Audit(loaded("qwen3_next")[0], page_slots=128, state_slots=32)
    with simulated("qwen3_next", device=device, pause=0.002, engine={"method": Method.BATCH}) as worker:
        tokens = fill(worker, audit)[5 * PAGE]
        evict(worker, Tier.DEVICE)
        device.fail("copy_batch", at=at)
        generation = worker.serve(tokens, 2, audit=True)
        assert (generation.restored, generation.reason) == (0, Reason.IO_ERROR)
        right(audit, worker, generation)
        settle(worker)
        right(audit, worker, worker.serve(tokens, 2, audit=True))
        worker.synchronize()
        check_controller(worker.controller)


def test_what_the_engine_found_is_reported() -> None:
    with simulated("llama") as worker:
        assert worker.engine_report.startswith("cuda:0: Simulated at")
    with serving("llama") as worker:
        assert worker.engine_report == ""
        assert (worker.stream.fence(), worker.stream.handle) == (None, None)


def test_times_are_taken_in_the_stream_and_add_up() -> None:
    for name in ("llama", "qwen3_next"):
        with serving(name) as worker:
            worker.serve(LONG, 1)
            for audit in (False, True):
                generation = worker.serve(LONG, 1, audit=audit)
                assert FAMILIES[name].states or not generation.restored_state
                assert 0 < generation.restore_seconds < generation.ttft_seconds


# -- the real stream, as far as it goes without a device


def test_the_current_stream_is_asked_each_time() -> None:
    events = iter("abc")
    streams = [
        SimpleNamespace(cuda_stream=n, record_event=lambda *a: next(events), synchronize=lambda: None)
        for n in (0, 7)
    ]
    current = iter([streams[0], streams[1], streams[0], streams[1]])
    with patch.object(torch.cuda, "current_stream", lambda device: next(current)):
        stream = CudaStream(torch.device("cuda:0"))
        assert [stream.handle, stream.handle] == [0, 7], "0 is a stream too"
        assert [stream.fence(), stream.fence()] == ["a", "b"], "never the same event twice"


def test_a_device_that_is_not_there_is_named() -> None:
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(
        ConfigError,
        match=(
            r"device cuda:999 needs a torch that was built for CUDA; pip install|there is no device cuda:999"
        ),
    ):
        find_device("cuda:999")
    with (
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(torch.cuda, "device_count", lambda: 1),
        pytest.raises(ConfigError, match="there is no device cuda:1, torch sees 1"),
    ):
        find_device("cuda:1")
    with pytest.raises(ConfigError, match="cache is on meta, and only CPU and CUDA memory"):
        stream_of(torch.device("meta"))
    assert type(stream_of(torch.device("cpu"))) is TorchStream


def test_a_device_without_room_is_named() -> None:
    runner, full = loaded("bamba")[0], torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
    with (
        patch.object(torch, "zeros", side_effect=full),
        pytest.raises(ConfigError, match="no room for 9 pages and 3 states beside the model"),
    ):
        runner.allocate_pools(9, 3)
    with (
        patch.object(torch.nn.Module, "to", side_effect=full),
        pytest.raises(ConfigError, match="does not fit into the memory of cuda:1"),
    ):
        load_model("", torch.device("cuda:1"))


def test_on_a_cpu_nothing_is_moved_and_nothing_is_rounded() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert not rounds_parts(torch.device("cpu"))
    assert rounds_parts(torch.device("cuda")), "torch's own choice"
