"""Workers over the small models, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.integrations.transformers.models import PAGE, loaded, prompt
from tiercache.controller import ControllerOptions
from tiercache.controller.context import ControllerContext
from tiercache.core import PoolName, Tier, as_tokens
from tiercache.integrations.transformers import worker as worker_module
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.worker import Worker
from tiercache.storage.base import StorageBackend
from tiercache.storage.env import Env
from tiercache.storage.registry import open_backend
from tiercache_lab.demo.audit import Audit, AuditVerdict

AMPLE = 4 << 20
LONG = {seed: prompt(6 * PAGE + 1, seed).tolist() for seed in (1, 2)}
"""Two prompts that restore all but their last token."""


def store(path: Path, env: Env | None = None) -> StorageBackend:
    """A file store in `path`."""
    return open_backend({"type": "file", "path": str(path / "store"), "capacity": "64MiB"}, env=env)


def serving(
    name: str, storage: StorageBackend | None = None, *, runner: ModelRunner | None = None, **options: Any
) -> Worker:
    """A worker over a family's model, which was probed once per test run."""
    found = (runner or loaded(name)[0], loaded(name)[1])
    options = {
        "device_bytes": AMPLE,
        "host_bytes": AMPLE,
        "options": ControllerOptions(restore_deadline=30.0),
    } | options
    target = loaded(name)[0].model
    with patch.object(worker_module, "load", lambda model, page_size: found):
        return Worker(target, storage=storage, page_size=PAGE, **options)


def context_of(worker: Worker) -> ControllerContext:
    """The `ControllerContext` of the worker's controller."""
    # private: no public call tells the bytes in a tier, and what is under way
    return worker.controller._context


def settle(worker: Worker) -> None:
    """Wait until nothing is on its way down any more; what the host had no room for is not."""
    worker.controller.flush()
    assert not context_of(worker).in_flight.operations


def evict(worker: Worker, *tiers: Tier) -> None:
    """Empty near tiers once everything is further down."""
    worker.synchronize()
    settle(worker)
    for tier in tiers:
        worker.controller.evict(tier)


def objects(worker: Worker, tier: Tier, prompt: Sequence[int], pool: PoolName) -> list[list[torch.Tensor]]:
    """The bytes that restore `prompt`, where `tier` (device or host) keeps them: its pages in order, or its
    one state.

    An object is a list of writable parts. What is written there is what the next restore reads.
    """
    index = context_of(worker).index
    match = index.match(as_tokens(prompt))
    pages, states = index.locations(match, match.near_depth)
    held = pages[pool] if pool in pages else states[pool]
    at = np.atleast_1d(held.device if tier is Tier.DEVICE else held.host).tolist()
    assert min(at) >= 0, "the tier holds this prefix"
    if tier is Tier.HOST:
        return [
            [torch.frombuffer(block, dtype=torch.uint8) for block in blocks]
            for blocks in context_of(worker).host[pool].buffers_of(at)
        ]
    tensors, layout = worker.tensors, worker.runner.layout
    if pool in states:
        return [[tensor[n] for tensor in tensors.of(pool).values()] for n in at]
    return [[tensors.pages(t.layer, t.name)[n] for t in layout.kv_tensors()] for n in at]


def right(audit: Audit, worker: Worker, generation: Generation) -> AuditVerdict:
    """The verdict on a generation that must equal its recompute to the last bit.

    To an uncut prefill it must be as near as the probe's cuts were, although a conversation adds up many of
    them; over all families and tests here it is off by at most 0.35 tolerances.
    """
    verdict = audit.check(generation)
    assert verdict.same_bytes
    assert verdict.max_logit_diff == 0.0
    assert verdict.same_text
    assert verdict.max_logit_diff_uncut <= worker.probe.tolerance
    return verdict


def tiers_of(generation: Generation) -> set[Tier]:
    """The tiers that gave something."""
    return {tier for (tier, _), count in generation.sources.objects.items() if count}


def joined(*parts: Any) -> list[int]:
    """One prompt out of several arrays or lists of tokens."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts]).tolist()


SYSTEM = prompt(2 * PAGE + 5, seed=1)
FIRST = joined(SYSTEM, prompt(21, seed=2))
EVICTED = {Tier.DEVICE: (), Tier.HOST: (Tier.DEVICE,), Tier.STORAGE: (Tier.DEVICE, Tier.HOST)}


def fill(worker: Worker, audit: Audit) -> dict[int, list[int]]:
    """Serve two prompts that part within their third page. Returns prompts by the depth that they restore.

    A state is left at each: the branch point, the end of the first prompt, and the last page boundary that
    decoding crossed. None of the prompts leaves a further one, so that they can be repeated.
    """
    first = worker.serve(FIRST, 24)
    branch = worker.serve(joined(SYSTEM, prompt(13, seed=3)), 1)
    assert first.restored == 0
    assert branch.restored == (0 if worker.runner.layout.state_geometries else 2 * PAGE)
    if worker.runner.layout.state_geometries:
        assert (first.states, branch.states) == ((3 * PAGE, 5 * PAGE), (2 * PAGE, 3 * PAGE))
    for generation in (first, branch):
        right(audit, worker, generation)
    return {
        2 * PAGE: joined(SYSTEM, prompt(7, seed=4)),
        3 * PAGE: joined(FIRST[: 3 * PAGE], prompt(5, seed=5)),
        5 * PAGE: joined(first.tokens, prompt(3, seed=6)),
    }


def serve_from(worker: Worker, audit: Audit, tier: Tier, depth: int, tokens: list[int]) -> None:
    """Serve a prompt that must restore exactly `depth` tokens, all of them from `tier`."""
    evict(worker, *EVICTED[tier])
    generation = worker.serve(tokens, 2, audit=True)
    assert (generation.restored, generation.tier, tiers_of(generation)) == (depth, tier, {tier})
    right(audit, worker, generation)


def restored(worker: Worker, tier: Tier) -> Generation:
    """All but the last token of the first long prompt, from `tier`."""
    evict(worker, *EVICTED[tier])
    generation = worker.serve(LONG[1], 1, audit=True)
    assert (generation.restored, tiers_of(generation)) == (6 * PAGE, {tier})
    return generation
