"""The contract over a real pool: the suite, and random histories."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.examples import example_count
from tests.storage_backends.mooncake.hooks import MooncakeHooks
from tests.storage_backends.mooncake.rig import Pool
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import HIT, STORED
from tiercache.testing.conformance.persistence import Peer
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import fetch, key, payload, to_set
from tiercache.testing.stateful import BackendMachine


@pytest.fixture(autouse=True, scope="module")
def in_pool(pool: Pool) -> None:
    MooncakeHooks.pool = pool


@pytest.mark.slow
class TestMooncake(MooncakeHooks):
    def test_both_store_the_same_objects_at_once(self, store: StorageBackend, tmp_path: Path) -> None:
        """Mooncake does not say which of two puts at once was the first, so both may be told STORED."""
        with Peer(type(self), tmp_path / "store") as peer:
            for turn in range(3):
                names = [f"{turn}/{n}" for n in range(30)]
                batch = [to_set(key(n), payload(n, 9000)) for n in names]
                ours, theirs = run_all(partial(store.set, batch), partial(peer.set, names[::-1], 9000))
                answers = list(zip(ours, reversed(theirs), strict=True))
                assert {outcome for pair in answers for outcome in pair} <= {STORED, HIT}
                assert all(STORED in pair for pair in answers)
                assert peer.get(names, 9000) == [HIT] * 30
                assert all(fetch(store, key(n), 9000) == payload(n, 9000) for n in names)


_QUICK = settings(
    deadline=None, stateful_step_count=15, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.hypothesis
def test_random_histories_match_a_dict() -> None:
    run_state_machine_as_test(
        type("M", (BackendMachine,), {"suite": MooncakeHooks}),
        settings=settings(_QUICK, max_examples=example_count(3)),
    )
