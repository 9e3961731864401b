"""The reference worker where objects are damaged or gone, stores hang, copies fail or pools are small."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from tiercache_kernels.reference import copy_segments

from tests.examples import slow_after
from tests.integrations.transformers.models import PAGE, loaded
from tests.integrations.transformers.serving import (
    LONG,
    context_of,
    evict,
    fill,
    restored,
    right,
    serve_from,
    serving,
    settle,
    store,
)
from tests.integrity import check_controller
from tiercache.core import PoolName, Reason, Tier, as_tokens
from tiercache.errors import ConfigError
from tiercache.testing.faults import FaultEnv
from tiercache.transfer import CopyEngine
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

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
    """A copier that fails when it is to copy the layer number `at` from now on.

    Thread safety: `at` is set while nothing copies.
    """

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
    """Two requests share a load that fails, late; the slots stay with the first, and the second is computed
    without the cache.
    """

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
