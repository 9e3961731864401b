"""Requests of the worker that have turns: tasks, and `Worker.serve_all`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import slow_after
from tests.faults import FaultEnv
from tests.integrations.transformers.models import FAMILIES, PAGE, build, loaded, prompt
from tests.integrations.transformers.serving import (
    AMPLE,
    EVICTED,
    LONG,
    SYSTEM,
    context_of,
    evict,
    joined,
    right,
    serving,
    store,
)
from tests.integrity import check_controller
from tiercache.core import PoolName, Reason, Tier
from tiercache.errors import ClosedError, InputError, TokenError, UnsupportedModelError
from tiercache.integrations.transformers import Generation, Request, Sampling, differences
from tiercache.integrations.transformers.requests.request import Chooser
from tiercache.integrations.transformers.requests.task import Task
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = slow_after(2, ["bamba", "llama", "qwen3_next", "jamba"])
WARM = Sampling(temperature=1.5, seed=3)


def begin(worker: Worker, tokens: Any, new_tokens: int) -> Task:
    """A task with slots for its whole sequence."""
    # private: no public call lets a test look between two steps
    checked = worker._checked(Request(tokens, new_tokens))
    return worker.scheduler.begin(checked, audit=True, started=time.perf_counter())


def generated(results: list[Generation | Exception]) -> list[Generation]:
    """The results, none of which may be a failure."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if isinstance(result, Generation)]


@pytest.mark.parametrize("name", NAMES)
def test_tasks_in_turns_equal_their_recompute(name: str, tmp_path: Path) -> None:
    """One waits for a disk that hangs, another computes to its end, and a third is ended before its end."""
    env = FaultEnv()
    audit = Audit(loaded(name)[0], page_slots=128, state_slots=32)
    with serving(name, store(tmp_path, env), chunk_limit=2 * PAGE) as worker:
        right(audit, worker, worker.serve(LONG[1], 2))
        evict(worker, Tier.DEVICE, Tier.HOST)
        hang = env.hang("preadv", times=1000)
        waits = begin(worker, joined(LONG[1], prompt(PAGE, 3)), PAGE + 4)
        others = [begin(worker, tokens, PAGE + 4) for tokens in (LONG[2], prompt(3 * PAGE, 4))]
        while not hang.reached.wait(0.01):
            assert not waits.step(wait=False)
        for task in others:  # each asks storage once whether it has anything
            while not task.step(wait=False):
                time.sleep(0.01)
        for _ in range(5):
            assert [task.step(wait=False) for task in (waits, *others)] == [False, True, True]
        others[1].close()
        while others[0].generation is None:
            assert not waits.step(wait=False)
            others[0].step()
        hang.release()
        for task, restored in ((waits, 6 * PAGE), (others[0], 0)):
            generation = task.run()
            task.close()
            task.close()
            assert generation.restored == restored
            right(audit, worker, generation)
        worker.synchronize()
        check_controller(worker.controller)
        right(audit, worker, worker.serve(LONG[2], 2, audit=True))


# -- serve_all


@pytest.mark.parametrize("name", slow_after(1, NAMES))
def test_requests_in_turns_give_what_they_give_one_by_one(name: str, tmp_path: Path) -> None:
    """Prompts that share nothing have the same cuts in both ways, so everything is equal, to the last bit."""
    asked = [
        Request(prompt(n * PAGE // 2 + 1, seed=n), 3 * n, sampling=WARM if n % 2 else Sampling())
        for n in range(1, 7)
    ]
    with serving(name, store(tmp_path / "alone"), chunk_limit=2 * PAGE) as worker:
        alone = [worker.serve(one.tokens, one.new_tokens, sampling=one.sampling) for one in asked]
    for in_flight in (1, 4):
        with serving(name, store(tmp_path / str(in_flight)), chunk_limit=2 * PAGE) as worker:
            for one, expected in zip(
                generated(worker.serve_all(asked, in_flight=in_flight, audit=in_flight == 4)),
                alone,
                strict=True,
            ):
                assert one.tokens.tolist() == expected.tokens.tolist()
                assert (one.bounds, one.states, one.reason) == (
                    expected.bounds, expected.states, expected.reason
                )  # fmt: skip
                assert torch.equal(one.first_logits, expected.first_logits)
                if in_flight == 4:
                    assert differences(worker.runner.layout, one.cache, expected.cache) == ()
                else:
                    assert worker.runner.layout.length(one.cache) == 0, "memory of what is over is free"
            worker.synchronize()
            check_controller(worker.controller)
            assert worker.controller.flush()


@pytest.mark.parametrize("name", slow_after(1, NAMES))
def test_requests_that_share_a_prefix_use_what_earlier_ones_left(name: str, tmp_path: Path) -> None:
    """Out of the device, and out of the disk after a restart; later ones restore what earlier ones left."""
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    histories = [joined(SYSTEM, prompt(13, seed=n)) for n in range(5)]
    for turn in range(2):
        with serving(name, store(tmp_path)) as worker:
            asked = [Request(history, PAGE + n) for n, history in enumerate(histories)]
            answers = generated(worker.serve_all(asked, in_flight=2, audit=True))
            for answer in answers:
                right(audit, worker, answer)
            restored = [answer.restored for answer in answers]
            assert restored[-1] >= 2 * PAGE
            assert turn == 0 or min(restored) >= 3 * PAGE
            assert turn == 0 or {answer.tier for answer in answers} >= {Tier.STORAGE}
            histories = [joined(answer.tokens, prompt(5, seed=9)) for answer in answers]
            worker.synchronize()
            check_controller(worker.controller)
            assert worker.controller.flush()


@pytest.mark.parametrize("name", slow_after(1, ["bamba", "llama"]))
def test_requests_wait_for_slots(name: str, tmp_path: Path) -> None:
    """The pools have room for one or two; one needs more than there is, and is computed without them."""
    runner = loaded(name)[0]
    geometries = runner.layout.geometries
    states = geometries.get(PoolName.MAMBA)
    small = 10 * geometries[PoolName.KV].nbytes + (7 * states.nbytes if states else 0)
    audit = Audit(runner, page_slots=256, state_slots=64)
    asked = [prompt(3 * PAGE, seed) for seed in range(5)]
    asked.insert(2, prompt(12 * PAGE, seed=9))
    with serving(name, store(tmp_path), device_bytes=small) as worker:
        answers = generated(
            worker.serve_all([Request(tokens, PAGE) for tokens in asked], in_flight=6, audit=True)
        )
        assert [answer.reason is Reason.BUSY for answer in answers] == [n == 2 for n in range(6)]
        for answer in answers:
            right(audit, worker, answer)
        worker.synchronize()
        check_controller(worker.controller)
        assert_nothing_is_held(worker)


def assert_nothing_is_held(worker: Worker) -> None:
    """Every device slot can be freed: no request holds one any more."""
    evict(worker, Tier.DEVICE)
    assert all(pool.available == pool.capacity for pool in context_of(worker).device.values())


FORBIDDEN: list[int] = []
"""Tokens at which the model of the next test fails."""


def fail_at_forbidden_tokens(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    if any(token in FORBIDDEN for token in args[0].flatten().tolist()):
        raise RuntimeError("this token is forbidden")


def test_a_request_that_fails_in_the_middle_does_not_disturb_the_others(tmp_path: Path) -> None:
    """In the prefill, while it decodes, and in its last step; what it committed before is whole."""
    model = build("bamba")
    model.get_input_embeddings().register_forward_pre_hook(fail_at_forbidden_tokens)
    asked = [Request(prompt(2 * PAGE, seed), PAGE) for seed in range(4)]
    with Worker(
        model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(tmp_path), page_size=PAGE
    ) as worker:
        audit = Audit(worker.runner, page_slots=128, state_slots=32)
        whole = generated(worker.serve_all(asked, in_flight=4, audit=True))
        for answer in whole:
            right(audit, worker, answer)
        rest = set().union(*(answer.tokens.tolist() for answer in whole[1:]))
        alone = [n for n, token in enumerate(whole[0].tokens.tolist()) if token not in rest]
        assert alone[0] < 2 * PAGE < alone[-1] < 3 * PAGE - 1, "tokens of the first request only"
        for at in (alone[0], next(n for n in alone if n >= 2 * PAGE), alone[-1]):
            FORBIDDEN[:] = [int(whole[0].tokens[at])]
            anew = [replace(one, extra=str(at).encode()) for one in asked]  # nothing of it is cached yet
            try:
                failed, *others = worker.serve_all(anew, in_flight=3, audit=True)
            finally:
                FORBIDDEN.clear()
            assert isinstance(failed, UnsupportedModelError)
            assert "forbidden" in str(failed)
            for answer, expected in zip(generated(others), whole[1:], strict=True):
                assert answer.tokens.tolist() == expected.tokens.tolist()
                right(audit, worker, answer)
            worker.synchronize()
            check_controller(worker.controller)
            assert_nothing_is_held(worker)
        right(audit, worker, worker.serve(whole[0].tokens, 2, audit=True))


def test_requests_that_are_not_possible_are_refused_before_any_begins() -> None:
    with serving("llama") as worker:
        good = Request(LONG[1], 2)
        for bad, error in (
            (Request(LONG[1], 0), InputError), (Request([], 1), TokenError),
            (Request([1 << 30], 1), TokenError),
            (Request(LONG[1], 1, stop="a"), InputError), (Request(LONG[1], 1, extra="a"), InputError),  # type: ignore[arg-type]
            (Request(LONG[1], 1, sampling=1), InputError), (LONG[1], InputError),  # type: ignore[arg-type]
        ):  # fmt: skip
            with pytest.raises(error, match=r"^request 1 \(the first is 0\): .*; "):
                worker.serve_all([good, bad])  # type: ignore[list-item]
        for in_flight in (0, -1, 0.5):
            with pytest.raises(InputError, match=r"in_flight is .*; give an integer, at least one"):
                worker.serve_all([good], in_flight=in_flight)  # type: ignore[arg-type]
        assert worker.controller.metrics.total("lookups_total") == 0
        assert worker.serve_all([]) == []
    with pytest.raises(ClosedError):
        worker.serve_all([good])


def test_a_worker_that_is_closed_in_the_middle_ends_every_request() -> None:
    with serving("llama") as worker:
        tasks = [begin(worker, LONG[seed], PAGE) for seed in (1, 2)]
        for _ in range(4):
            for task in tasks:
                task.step()
        worker.close()
        for task in tasks:
            with pytest.raises(ClosedError):
                task.run()
            task.close()


# -- prefills in chunks of limited length


CHUNK_LIMIT = 2 * PAGE
BEGINNING = prompt(5 * PAGE + 3, seed=1)
LONGER = joined(BEGINNING, prompt(4 * PAGE, seed=2))


@pytest.mark.parametrize("name", slow_after(2, ["qwen3_next", "llama", "bamba", "falcon_h1", "jamba"]))
def test_a_prefill_in_chunks_equals_its_recompute(name: str, tmp_path: Path) -> None:
    """From nothing, and then what a longer prompt has beyond the part that each of the tiers restores."""
    has_states = FAMILIES[name].states
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name, store(tmp_path), chunk_limit=CHUNK_LIMIT) as worker:
        for tier in (None, *Tier):
            extra = str(tier).encode()
            if tier is not None:
                worker.serve(BEGINNING, 1, extra=extra)
                evict(worker, *EVICTED[tier])
            tokens, depth = (LONGER, 5 * PAGE) if tier is not None else (BEGINNING, 0)
            generation = worker.serve(tokens, 2, extra=extra, audit=True)
            assert (generation.tier, generation.restored) == (tier, depth)
            ends = (
                (7 * PAGE, 9 * PAGE, len(LONGER)) if depth else
                (CHUNK_LIMIT, 2 * CHUNK_LIMIT, 5 * PAGE, len(BEGINNING)) if has_states else
                (CHUNK_LIMIT, 2 * CHUNK_LIMIT, len(BEGINNING))
            )  # fmt: skip
            assert generation.bounds[: len(ends)] == ends
            assert generation.states == (ends[-2:-1] if has_states else ())
            right(audit, worker, generation)
        check_controller(worker.controller)


def test_the_branch_and_the_limit_cut_the_same_prefill() -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    with serving("qwen3_next", chunk_limit=3 * PAGE) as worker:
        for seed in (2, 3):
            generation = worker.serve(joined(SYSTEM, prompt(5 * PAGE, seed)), 1)
            right(audit, worker, generation)
    assert generation.bounds == (2 * PAGE, 5 * PAGE, 7 * PAGE, generation.prompt_tokens)
    assert generation.states == (2 * PAGE, 7 * PAGE)


def test_bytes_that_were_computed_in_other_chunks_are_restored_exactly(tmp_path: Path) -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=128, state_slots=32)
    history = BEGINNING.tolist()
    for restored, limit in ((0, None), (5 * PAGE, PAGE), (10 * PAGE, 3 * PAGE)):
        with serving("qwen3_next", store(tmp_path), chunk_limit=limit) as worker:
            generation = worker.serve(history, 2, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            history = joined(history, prompt(5 * PAGE, seed=restored + 7))
            assert worker.controller.flush()


# -- how the tokens of an answer are chosen


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
    far_apart = [
        tuple(map(Chooser(Sampling(1.0, seed)), logits)) for seed in (5, 5 + (1 << 32), 5 + (1 << 62))
    ]
    assert len(set(far_apart)) == 3, "every bit of a seed counts"
