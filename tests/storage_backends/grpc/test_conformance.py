"""The contract through a daemon: the suite and random histories, over every way to it.

A local daemon with shared memory is here by default, and random histories over both planes; other pairs of
transport and plane, and other stores behind a daemon, are `slow`
(`pytest -m slow tests/storage_backends/grpc`). These repeat what depends on the way to the store,
and not what the store evicts and keeps.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.examples import example_count
from tests.storage.backends import another_way, without_themes
from tests.storage_backends.grpc.hooks import TcpMemory, TlsMemory, UnixChain, UnixFile, UnixMemory
from tiercache.testing.conformance.eviction import Coldest, Eviction
from tiercache.testing.stateful import BackendMachine, EvictingMachine

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="certificates are made with the openssl command"
)


class TestUnix(UnixMemory):
    """The suite but for evictions, which `EvictingMachine` shows below to follow what a client told."""


without_themes(TestUnix, Coldest, Eviction)


@pytest.mark.slow
@another_way
class TestTcp(TcpMemory):
    pass


@pytest.mark.slow
@another_way
class TestUnixChain(UnixChain):
    pass


_QUICK = settings(deadline=None, stateful_step_count=20, suppress_health_check=list(HealthCheck))
STORES = [
    pytest.param(UnixMemory, 10, id="unix"),
    pytest.param(TcpMemory, 5, id="tcp"),
    pytest.param(TlsMemory, 5, id="tls", marks=[pytest.mark.slow, needs_openssl]),
    pytest.param(UnixFile, 2, id="unix file"),
]


@pytest.mark.hypothesis
@pytest.mark.parametrize(("hooks", "examples"), STORES)
@pytest.mark.parametrize("machine", [BackendMachine, EvictingMachine])
def test_random_histories_match_a_dict(machine, hooks, examples):
    run_state_machine_as_test(
        type("M", (machine,), {"suite": hooks}),
        settings=settings(_QUICK, max_examples=example_count(examples)),
    )
