"""Several continuations of one prompt: `Worker.serve(prompt, n=...)` and `Sampling`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import slow_after
from tests.integrations.transformers.models import PAGE, loaded, prompt
from tests.integrations.transformers.serving import (
    EVICTED,
    LONG,
    context_of,
    evict,
    joined,
    right,
    serving,
    store,
)
from tiercache.core import PoolName, Reason, Tier
from tiercache.errors import ClosedError, InputError
from tiercache.integrations.transformers import Request, Sampling, differences
from tiercache.integrations.transformers.requests.request import Chooser
from tiercache.integrations.transformers.requests.task import Task
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

WARM = Sampling(temperature=1.5, seed=7)
ASKED = joined(LONG[1], prompt(PAGE + 3, 9))


def begin(worker: Worker, n: int) -> Task:
    """A task with `n` continuations of `ASKED`, of a page each."""
    # private: no public call lets a test look between two steps
    checked = worker._checked(Request(ASKED, PAGE, sampling=WARM), n)
    return worker.scheduler.begin(checked, audit=False, started=0.0)


@pytest.mark.parametrize(
    ("name", "tier"),
    slow_after(
        1,
        [
            ("bamba", None),
            ("llama", Tier.STORAGE),
            ("bamba", Tier.DEVICE),
            ("qwen3_next", Tier.HOST),
            ("jamba", None),
        ],
    ),
)
def test_each_continuation_is_the_one_that_its_seed_gives_alone(
    name: str, tier: Tier | None, tmp_path: Path
) -> None:
    """Out of every tier, and from nothing; and each answer is committed, so that it is restored later."""
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    alone = []
    for seed in range(7, 10):
        with serving(name, store(tmp_path / str(seed))) as worker:
            if tier is not None:
                worker.serve(LONG[1], 1)
                evict(worker, *EVICTED[tier])
            alone.append(worker.serve(ASKED, PAGE + 4, sampling=Sampling(1.5, seed)))
    with serving(name, store(tmp_path)) as worker:
        if tier is not None:
            right(audit, worker, worker.serve(LONG[1], 1))
            evict(worker, *EVICTED[tier])
        lookups = worker.controller.metrics.total("lookups_total", tier="device")
        answers = worker.serve(ASKED, PAGE + 4, sampling=WARM, n=3, audit=True)
        assert worker.controller.metrics.total("lookups_total", tier="device") - lookups == len(
            worker.runner.layout.geometries
        ), "the prompt is restored once"
        assert len({tuple(answer.answer.tolist()) for answer in answers}) == 3
        for answer, expected in zip(answers, alone, strict=True):
            assert (answer.tier, answer.restored) == (tier, 0 if tier is None else 6 * PAGE)
            assert answer.sampling == expected.sampling
            assert (answer.bounds, answer.states) == (expected.bounds, expected.states)
            assert answer.tokens.tolist() == expected.tokens.tolist()
            assert torch.equal(answer.first_logits, expected.first_logits)
            assert differences(worker.runner.layout, answer.cache, expected.cache) == ()
            right(audit, worker, answer)
        worker.synchronize()
        worker.controller.check_integrity()
        for answer in answers:
            again = worker.serve(answer.tokens, 1, audit=True)
            assert again.restored == (len(ASKED) + PAGE + 3) // PAGE * PAGE
            right(audit, worker, again)


@pytest.mark.parametrize("name", ["bamba", "llama"])
def test_the_pages_of_the_prompt_are_shared(name: str) -> None:
    """Four continuations take the slots of one prompt and four answers, and leave one prompt in the pool."""
    with serving(name) as worker:
        pool = context_of(worker).device[PoolName.KV]
        free = pool.available
        seen = []
        task = begin(worker, 4)
        while not task.generations:
            task.step()
            seen.append(free - pool.available)
        worker.synchronize()
        assert free - pool.available == len(ASKED) // PAGE + 4, "each gives its slots back when it is over"
        task.close()
        assert max(seen) == len(ASKED) // PAGE + 4 * 2, "the page in which the prompt ends, and another"
        worker.synchronize()
        assert free - pool.available == len(ASKED) // PAGE + 4
        worker.controller.check_integrity()


@pytest.mark.parametrize("name", slow_after(1, ["bamba", "llama"]))
def test_continuations_end_in_any_order(name: str) -> None:
    """Each ends behind another token of its answer, the first one first, last or in between."""
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name) as worker:
        whole = worker.serve(ASKED, PAGE, sampling=WARM, n=3)
        for answer in whole:
            right(audit, worker, answer)
        for answer in whole:
            token = int(answer.answer[5])
            ended = worker.serve(ASKED, PAGE, sampling=WARM, n=3, stop=token, audit=True)
            for one, full in zip(ended, whole, strict=True):
                expected = full.answer.tolist()
                if token in expected:
                    expected = expected[: expected.index(token) + 1]
                assert one.answer.tolist() == expected
                right(audit, worker, one)
            worker.synchronize()
            worker.controller.check_integrity()


@pytest.mark.parametrize("name", ["bamba", "llama"])
def test_without_room_a_continuation_keeps_nothing_and_is_right(name: str, tmp_path: Path) -> None:
    runner = loaded(name)[0]
    geometries = runner.layout.geometries
    states = geometries.get(PoolName.MAMBA)
    small = 10 * geometries[PoolName.KV].nbytes + (7 * states.nbytes if states else 0)
    audit = Audit(runner, page_slots=128, state_slots=32)
    with serving(name, store(tmp_path), device_bytes=small) as worker:
        answers = worker.serve(LONG[1], PAGE, sampling=WARM, n=4)
        assert Reason.BUSY in {answer.reason for answer in answers[1:]}
        assert answers[0].reason is Reason.NONE
        for answer in answers:
            right(audit, worker, answer)
        worker.synchronize()
        worker.controller.check_integrity()
        again = worker.serve(answers[0].tokens, 1, audit=True)
        assert again.restored > 0
        right(audit, worker, again)


@pytest.mark.parametrize("name", ["bamba", "llama"])
def test_continuations_that_are_ended_early_leave_nothing_behind(name: str) -> None:
    """In the prefill, behind it, and with some answers complete; at last because the worker is closed."""
    audit = Audit(loaded(name)[0], page_slots=64, state_slots=16)
    with serving(name) as worker:
        for steps in (0, 1, 2, 3, 9):
            task = begin(worker, 3)
            for _ in range(steps):
                task.step()
            task.close()
            worker.synchronize()
            worker.controller.check_integrity()
        right(audit, worker, worker.serve(LONG[2], 2))
        task = begin(worker, 3)
        for _ in range(9):
            task.step()
    with pytest.raises(ClosedError):
        task.run()
    task.close()
    with pytest.raises(ClosedError):
        worker.serve(LONG[2], 2, n=3, sampling=WARM)


@pytest.mark.parametrize("n", [0, -1, 1.5, "4", True])
def test_an_impossible_number_of_continuations_is_refused(n: Any) -> None:
    with serving("llama") as worker:
        with pytest.raises(InputError, match=r"^n is .*; give an integer, at least one$"):
            worker.serve(LONG[1], 2, n=n, sampling=WARM)
        assert worker.controller.metrics.total("lookups_total") == 0


def test_greedy_continuations_that_would_be_equal_are_refused() -> None:
    with serving("llama") as worker:
        with pytest.raises(InputError, match="n is 2, and greedy continuations would all be equal"):
            worker.serve(LONG[1], 2, n=2)
        (only,) = worker.serve(LONG[1], 2, n=1)
        assert only.answer.tolist() == worker.serve(LONG[1], 2).answer.tolist()
        with pytest.raises(InputError, match="sampling is of type float"):
            worker.serve(LONG[1], 2, sampling=0.8)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "values",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"temperature": "1"}, {"temperature": True}, {"temperature": 10**400}, {"temperature": torch.ones(2)},
     {"seed": -1}, {"seed": 1 << 63}, {"seed": 0.5}, {"seed": None}],
    ids=lambda values: str(values)[:30],
)  # fmt: skip
def test_an_impossible_sampling_is_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(InputError, match=f"^{name} is .*; give"):
        Sampling(**values)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Draws of four tokens, one of them impossible, at three temperatures."""
    logits = torch.tensor([1.0, -float("inf"), 0.0, 2.0])
    for temperature in (0.5, 1.0, 4.0):
        choose = Chooser(Sampling(temperature, seed=3))
        counts = np.bincount([choose(logits) for _ in range(4_000)], minlength=4) / 4_000
        expected = torch.softmax(logits.double() / temperature, 0).numpy()
        assert counts[1] == 0
        assert np.abs(counts - expected).max() < 4 * np.sqrt(0.25 / 4_000)


def test_a_seed_gives_its_tokens_at_any_time_and_temperature() -> None:
    logits = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    for temperature in (1e-300, 0.7, 1e300):
        twice = [[choose(row) for row in logits] for choose in map(Chooser, [Sampling(temperature, 5)] * 2)]
        assert twice[0] == twice[1]
    assert [Chooser(Sampling(1e-300, 5))(row) for row in logits] == logits.argmax(1).tolist()
    spread = Sampling(1.0, (1 << 63) - 2).spread(4)
    assert [one.seed for one in spread] == [(1 << 63) - 2, (1 << 63) - 1, 0, 1]
    drawn = [tuple(map(Chooser(one), logits)) for one in spread]
    assert all(a != b for a, b in pairwise(drawn))
    far_apart = [
        tuple(map(Chooser(Sampling(1.0, seed)), logits)) for seed in (5, 5 + (1 << 32), 5 + (1 << 62))
    ]
    assert len(set(far_apart)) == 3, "every bit of a seed counts"
