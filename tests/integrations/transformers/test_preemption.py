"""Requests that are parked because others need their device slots, and go on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import slow_after
from tests.faults import FaultEnv
from tests.integrations.transformers.models import PAGE, loaded, prompt
from tests.integrations.transformers.serving import context_of, right, serving, settle, store
from tests.integrations.transformers.test_tasks import generated
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Reason
from tiercache.errors import AdmissionError, InputError
from tiercache.integrations.transformers import Generation, Request, Sampling, differences
from tiercache.integrations.transformers.requests.task import Task
from tiercache.integrations.transformers.stream import TorchStream
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = slow_after(2, ["bamba", "llama", "gemma3", "mistral", "jamba"])
ASKED = [
    Request(prompt(2 * PAGE + n, seed=n), PAGE + 4, sampling=Sampling(1.5 * (n % 2), seed=n))
    for n in range(4)
]


@contextmanager
def page_slots(worker: Worker, count: int) -> Iterator[None]:
    """Leave `count` page slots of the device free."""
    pool = context_of(worker).device[PoolName.KV]
    taken = pool.alloc(pool.available - count)
    try:
        yield
    finally:
        pool.free(taken)


def alone(name: str, directory: Path, asked: list[Request], **options: Any) -> list[Generation]:
    """The answer of each request with the device to itself."""
    with serving(name, store(directory / "alone"), **options) as worker:
        return [worker.serve(one.tokens, one.new_tokens, sampling=one.sampling) for one in asked]


def same(worker: Worker, one: Generation, expected: Generation) -> None:
    """Everything that the model computed is equal, to the last bit."""
    assert one.tokens.tolist() == expected.tokens.tolist()
    assert (one.restored, one.bounds) == (expected.restored, expected.bounds)
    assert torch.equal(one.first_logits, expected.first_logits)
    assert differences(worker.runner.layout, one.cache, expected.cache) == ()


def whole(worker: Worker) -> None:
    """Nothing is left behind."""
    worker.synchronize()
    settle(worker)
    check_controller(worker.controller)


@pytest.mark.parametrize(
    ("name", "below"),
    slow_after(1, [("bamba", False), ("llama", True), *product(("gemma3",), (False, True))]),
)
def test_parked_requests_go_on_bit_for_bit(name: str, below: bool, tmp_path: Path) -> None:
    """In decoding, at any place in a page; the answers are those of a device without pressure."""
    expected = alone(name, tmp_path, ASKED)
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    with serving(name, store(tmp_path)) as worker:
        with page_slots(worker, 9):
            answers = generated(worker.serve_all(ASKED, in_flight=4, audit=True, below=below))
        assert sum(answer.parks for answer in answers) > 0
        assert answers[0].parks == 0, "the oldest is never parked"
        for answer, one in zip(answers, expected, strict=True):
            same(worker, answer, one)
            assert answer.reason is Reason.NONE
            right(audit, worker, answer)
        assert worker.controller.metrics.total("parked_requests_total") > 0
        whole(worker)
        again = worker.serve(answers[-1].tokens, 1, audit=True)
        assert again.restored == (len(answers[-1].tokens) - 1) // PAGE * PAGE
        right(audit, worker, again)


@pytest.mark.parametrize("name", ["bamba", "llama"])
def test_a_request_is_parked_between_the_chunks_of_its_prefill(name: str, tmp_path: Path) -> None:
    asked = [ASKED[0], Request(prompt(8 * PAGE + 5, seed=9), 3)]
    expected = alone(name, tmp_path, asked, chunk_limit=PAGE)
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    with serving(name, store(tmp_path), chunk_limit=PAGE) as worker:
        with page_slots(worker, 11):
            answers = generated(worker.serve_all(asked, audit=True))
        assert [answer.parks for answer in answers] == [0, 1]
        for answer, one in zip(answers, expected, strict=True):
            same(worker, answer, one)
            right(audit, worker, answer)
        whole(worker)


@pytest.mark.parametrize("name", slow_after(1, NAMES))
def test_a_request_may_be_parked_before_every_step(name: str, tmp_path: Path) -> None:
    """At every length, within a window or page and at its end, on the host and in storage in turn."""
    asked = Request(prompt(PAGE + 3, seed=4), PAGE + 4, sampling=Sampling(1.5, seed=4))
    (expected,) = alone(name, tmp_path, [asked], chunk_limit=PAGE)
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    with serving(name, store(tmp_path), chunk_limit=PAGE) as worker:
        task, parks = begin(worker, asked), 0
        while task.generation is None:
            if task.park(below=parks % 2 == 1):
                parks += 1
                assert not task.has_slots
                # private: no public call shows the live cache of a request that is not over
                assert task._cache is None or worker.runner.layout.length(task._cache) == 0
                settle(worker)
                task.resume()
            while not task.step(wait=False):
                assert not task.lost
        answer = task.generation
        task.close()
        assert answer.parks == PAGE + 4 + 1, "each step but the first one, which restores"
        same(worker, answer, expected)
        right(audit, worker, answer)
        whole(worker)


def begin(worker: Worker, request: Request) -> Task:
    # private: no public call lets a test look between two steps
    return worker.scheduler.begin(worker._checked(request), audit=True, started=0.0)


@pytest.mark.parametrize("below", [False, True])
def test_a_parked_request_that_is_lost_begins_anew(below: bool, tmp_path: Path) -> None:
    """Its bytes are damaged on the disk, or it has been given up; and one that is ended leaves nothing."""
    env = FaultEnv(seed=2)
    with serving("bamba", store(tmp_path, env)) as worker:
        for ended in (False, True):
            task = begin(worker, ASKED[1])
            for _ in range(6):
                task.step()
            assert task.park(below=below)
            settle(worker)
            if not ended and below:
                env.spoil(times=1000)
                task.resume()
                while not task.lost:
                    assert not task.step(wait=False)
                env.clear()
            elif not ended:
                # private: only the task has the ticket
                parked = task._commits.parked
                assert parked is not None
                parked.release()
                with pytest.raises(AdmissionError):
                    task.resume()
            task.close()
            whole(worker)


def test_requests_that_cannot_be_parked_begin_anew(tmp_path: Path) -> None:
    """All bits are the same, because what they left is restored at the place where their prompt was cut."""
    expected = alone("bamba", tmp_path, ASKED)
    options: dict[str, Any] = {"options": ControllerOptions(restore_deadline=30.0, park_share=0.0)}
    with serving("bamba", store(tmp_path), **options) as worker:
        with page_slots(worker, 9):
            answers = generated(worker.serve_all(ASKED, in_flight=4, audit=True))
        assert [answer.parks for answer in answers] == [0] * 4
        assert any(answer.restored for answer in answers)
        for answer, one in zip(answers, expected, strict=True):
            assert answer.tokens.tolist() == one.tokens.tolist()
            assert torch.equal(answer.first_logits, one.first_logits)
            assert differences(worker.runner.layout, answer.cache, one.cache) == ()
        whole(worker)


@pytest.mark.parametrize("name", ["bamba", "llama"])
def test_a_request_that_runs_alone_and_finds_no_slot_goes_on_without(name: str, tmp_path: Path) -> None:
    """Everything that it committed before is restored later."""
    expected = alone(name, tmp_path, ASKED[:1])
    audit = Audit(loaded(name)[0], page_slots=512, state_slots=128)
    with serving(name, store(tmp_path)) as worker:
        with page_slots(worker, 3):
            (answer,) = generated(worker.serve_all(ASKED[:1], audit=True))
        assert (answer.reason, answer.parks) == (Reason.BUSY, 0)
        same(worker, answer, expected[0])
        right(audit, worker, answer)
        whole(worker)
        again = worker.serve(answer.tokens, 1, audit=True)
        assert again.restored == 3 * PAGE
        right(audit, worker, again)


class FailingStream(TorchStream):
    """A stream whose next fence fails, once `left` prefills are over."""

    left = 0

    def synchronize(self) -> None:
        self.left -= 1

    def fence(self) -> None:
        if self.left == 0:
            self.left = -1
            raise RuntimeError("the device is lost")


def test_what_fails_when_a_request_goes_on_without_slots_ends_that_request_alone() -> None:
    stream = FailingStream()
    with serving("bamba", stream=stream) as worker:
        stream.left = 2  # fails in the commit before the second request gives its slots back
        with page_slots(worker, 3):
            first, second = worker.serve_all([replace(ASKED[1], new_tokens=1), ASKED[0]], in_flight=1)
        assert isinstance(first, Generation)
        assert isinstance(second, RuntimeError)
        assert stream.left < 0
        whole(worker)


def test_without_storage_nothing_can_be_parked_there() -> None:
    with serving("llama") as worker:
        with pytest.raises(InputError, match=r"no storage to park requests in; leave out below=True"):
            worker.serve_all(ASKED, below=True)
        assert worker.controller.metrics.total("lookups_total") == 0
