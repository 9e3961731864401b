"""The reference worker where objects are damaged or gone, stores hang, copies fail or pools are small."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tiercache_kernels.reference import copy_segments

from tests.examples import slow_after
from tests.integrations.transformers.models import FAMILIES, PAGE, loaded, prompt
from tests.integrations.transformers.serving import (
    AMPLE,
    LONG,
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
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Reason, Tier, as_tokens
from tiercache.errors import ConfigError
from tiercache.integrations.transformers.worker import Worker
from tiercache.keys import page_keys
from tiercache.storage.base import ScanEntry, StorageBackend
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
        worker.controller.check_integrity()


@pytest.mark.parametrize(
    ("name", "pool", "what"),
    [
        ("bamba", PoolName.MAMBA, "zeroed"),
        ("bamba", PoolName.MAMBA, "swapped"),
        ("bamba", PoolName.MAMBA, "page"),
        ("gemma3", PoolName.SWA, "zeroed"),
        ("gemma3", PoolName.SWA, "swapped"),
        pytest.param("inkling", PoolName.MAMBA, "swapped", marks=pytest.mark.slow),
        pytest.param("inkling", PoolName.SWA, "swapped", marks=pytest.mark.slow),
    ],
)
def test_bytes_changed_on_disk_are_a_miss(name: str, pool: PoolName, what: str, tmp_path: Path) -> None:
    """The same negative controls on the medium, between two processes: none gets through, each is counted."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name, store(tmp_path)) as worker:
        for tokens in LONG.values():
            worker.serve(tokens, 1)
        worker.controller.flush()
        state, another = (
            payload(objects(worker, Tier.HOST, LONG[seed], pool)[0], worker, pool) for seed in (1, 2)
        )
        page, other = (
            payload(objects(worker, Tier.HOST, LONG[seed], PoolName.KV)[3], worker, PoolName.KV)
            for seed in (1, 2)
        )
    changes = {
        "zeroed": {state: bytes(len(state))},
        "swapped": {state: another, another: state},
        "page": {page: other},
    }
    assert rewrite(tmp_path, changes[what]) == len(changes[what])
    with serving(name, store(tmp_path)) as worker:
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


@pytest.mark.parametrize(
    ("name", "restart"),
    slow_after(
        2,
        [
            ("qwen3_next", False),
            ("llama", True),
            ("qwen3_next", True),
            ("llama", False),
            *product(("jamba", "inkling"), (False, True)),
        ],
    ),
)
def test_any_one_object_may_be_gone(name: str, restart: bool, tmp_path: Path) -> None:
    """Drop each page and each state in turn: the deepest depth that is still whole is restored, and the
    reason is counted.
    """
    storage = store(tmp_path)
    audit = Audit(loaded(name)[0], page_slots=1024, state_slots=256)
    worker = serving(name, storage)
    tokens = fill(worker, audit)[5 * PAGE]
    evict(worker, Tier.DEVICE, Tier.HOST)
    entries = on_path(worker, storage, tokens)
    assert {
        pool: len([e for e in entries if e.key.pool is pool]) for pool in worker.runner.layout.geometries
    } == {PoolName.KV: 5} | dict.fromkeys(FAMILIES[name].states, 3)
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
        assert restorable(on_path(worker, storage, tokens), FAMILIES[name].states) == 5 * PAGE, (
            "the request put it back"
        )
    worker.close()


def on_path(worker: Worker, storage: StorageBackend, tokens: list[int]) -> list[ScanEntry]:
    """The stored objects of a prompt, pages first, from its beginning."""
    keys = {key: n for n, key in enumerate(page_keys(context_of(worker).namespace, as_tokens(tokens), PAGE))}
    found = [entry for entry in storage.scan_all() if entry.key.page_key in keys]
    return sorted(found, key=lambda entry: (entry.key.pool is not PoolName.KV, keys[entry.key.page_key]))


def restorable(entries: list[ScanEntry], states: Sequence[PoolName]) -> int:
    """The deepest depth, in tokens, at which everything is there."""
    held = {
        pool: {entry.meta.depth for entry in entries if entry.key.pool is pool}
        for pool in (PoolName.KV, *states)
    }
    pages = next(n for n in range(len(entries) + 1) if n + 1 not in held[PoolName.KV])
    return PAGE * max((depth for depth in set.intersection(*held.values()) if depth <= pages), default=0)


def misses(worker: Worker, pool: PoolName) -> float:
    """Counted reasons why storage did not give everything."""
    metrics = worker.controller.metrics
    failures = sum(metrics.value("restore_failures_total", reason) for reason in Reason)
    return failures + metrics.total("lookups_total", tier="storage", pool=str(pool), result="miss")


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
        assert 0.2 <= generation.restore_seconds < 20
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
        right(audit, worker, worker.serve(LONG[1], 2))
        assert hang.reached.wait(30)
        right(audit, worker, worker.serve(LONG[1], 2, audit=True))
        too_long = joined(LONG[1], prompt(8 << 10, 3))
        assert worker.scheduler.admit(worker.controller.lookup(too_long), AMPLE, 5) is None
        hang.release()
        settle(worker)
        worker.controller.check_integrity()


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
            worker.controller.check_integrity()


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
