"""Requests of the worker that are advanced one forward pass at a time, in turns with others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.examples import slow_after
from tests.integrations.transformers.models import PAGE, loaded, prompt
from tests.integrations.transformers.serving import LONG, evict, joined, right, serving, store
from tiercache.core import Tier, as_tokens
from tiercache.integrations.transformers.audit import Audit
from tiercache.integrations.transformers.task import Task
from tiercache.integrations.transformers.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")


def begin(worker: Worker, tokens: list[int], new_tokens: int) -> Task:
    """A task with slots for its whole sequence."""
    asked = as_tokens(tokens)
    admission = worker.controller.admit(
        worker.controller.lookup(asked), tokens=len(asked) + new_tokens, states=5
    )
    return Task(worker, admission, asked, new_tokens, frozenset(), audit=True, started=time.perf_counter())


@pytest.mark.parametrize("name", slow_after(2, ["qwen3_next", "llama", "bamba", "jamba"]))
def test_two_tasks_in_turns_equal_their_recompute(name: str, tmp_path: Path) -> None:
    """One restores from the disk while the other computes; a third is ended before its end."""
    audit = Audit(loaded(name)[0], page_slots=128, state_slots=32)
    with serving(name, store(tmp_path), chunk_limit=2 * PAGE) as worker:
        right(audit, worker, worker.serve(LONG[1], 2))
        evict(worker, Tier.DEVICE, Tier.HOST)
        asked = [joined(LONG[1], prompt(PAGE, 3)), LONG[2], prompt(3 * PAGE, 4).tolist()]
        tasks = [begin(worker, tokens, PAGE + 4) for tokens in asked]
        stepped = [0, 0, 0]
        while any(task.generation is None for task in tasks[:2]):
            for n, task in enumerate(tasks):
                if task.generation is None and (n < 2 or stepped[2] < 5):
                    stepped[n] += task.step(wait=False)
        for task in reversed(tasks):
            task.close()
            task.close()
        for task, restored in zip(tasks, (6 * PAGE, 0), strict=False):
            assert task.generation is not None
            assert task.generation.restored == restored
            right(audit, worker, task.generation)
        assert tasks[2].generation is None
        worker.synchronize()
        worker.controller.check_integrity()
        right(audit, worker, worker.serve(LONG[2], 2, audit=True))
