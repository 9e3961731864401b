"""The contract, over every store."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.storage.backends import FileHooks, MemoryHooks
from tiercache.testing.stateful import BackendMachine


class TestMemory(MemoryHooks):
    pass


class TestFile(FileHooks):
    pass


class MemoryMachine(BackendMachine):
    suite = MemoryHooks


class FileMachine(BackendMachine):
    suite = FileHooks


_QUICK = settings(deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("machine", "examples"), [(MemoryMachine, 60), (FileMachine, 25)])
def test_random_histories_match_a_dict(machine: type[BackendMachine], examples: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(_QUICK, max_examples=examples))
