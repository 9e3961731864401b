"""Behaviour of the `lmdb` store alone: conformance, capacity, eviction, the directory.

The names of the other test files here say what they test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from tiercache_backends.lmdb.records import PART_PAGES, pages_for, piece_sizes

from tests.examples import example_count
from tests.storage_backends.lmdb.hooks import CAPACITY, LmdbHooks, check_integrity, opened
from tests.storage_backends.local.files import disk_bytes
from tiercache.errors import ConfigError
from tiercache.testing.conformance.hooks import HIT, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_get, to_set
from tiercache.testing.stateful import BackendMachine, EvictingMachine


class TestLmdb(LmdbHooks):
    pass


class LmdbMachine(BackendMachine):
    suite = LmdbHooks


class FullLmdbMachine(EvictingMachine):
    suite = LmdbHooks


@pytest.mark.hypothesis
@pytest.mark.parametrize(("machine", "examples"), [(LmdbMachine, 12), (FullLmdbMachine, 8)])
def test_random_histories(machine: type[RuleBasedStateMachine], examples: int) -> None:
    quick = settings(
        deadline=None,
        stateful_step_count=25,
        suppress_health_check=list(HealthCheck),
        max_examples=example_count(examples),
    )
    run_state_machine_as_test(machine, settings=quick)


# -- capacity


@pytest.mark.parametrize(
    ("size", "step", "batch", "batches"), [(500, 0, 96, 110), (1_500_000, 0, 1, 12), (100, 7919, 3, 100)]
)
def test_everything_in_the_directory_counts_at_every_instant(tmp_path, size, step, batch, batches):
    path = tmp_path / "s"
    opened(path, 8 << 20).close()
    (path / "notes").write_bytes(bytes(1 << 20))
    with opened(path, 8 << 20) as store:
        for n in range(batches):
            names = range(n * batch, n * batch + batch)
            assert set(store.set([to_set(key(m), payload(m, size + step * (m % 150))) for m in names])) == {
                STORED
            }
            usage = store.usage()
            assert usage.used_bytes <= usage.details["disk_bytes"] == disk_bytes(path) <= 8 << 20
        check_integrity(store)
        assert usage.details["evicted"] != 0
        assert usage.details["full"] == 0, "room is made well before the map is full"
        assert int(usage.details["map_pages_used"]) <= int(usage.details["map_pages_limit"])


@pytest.mark.parametrize(("size", "batch"), [(24_000, 8), (700_001, 1)])
def test_nothing_is_evicted_while_a_tenth_is_free(tmp_path: Path, size: int, batch: int) -> None:
    with opened(tmp_path / "s") as store:
        least = 1.0
        room = 0.90 - batch * size / CAPACITY
        before = 0
        for n in range(0, 3 * CAPACITY // size // 2, batch):
            assert set(store.set([to_set(key(m), payload(m % 7, size)) for m in range(n, n + batch)])) == {
                STORED
            }
            usage = store.usage()
            if usage.details["evicted"]:
                least = min(least, before / CAPACITY)
            before = usage.used_bytes
        assert room <= least < 1.0
        assert usage.details["full"] == 0
        check_integrity(store)


def test_a_store_grows_and_shrinks_only_as_far_as_its_data(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(40):
            put(store, key(n), payload(n, 200_000))
    for capacity in (32 << 20, 12 << 20):
        with opened(path, capacity) as store:
            assert all(fetch(store, key(n), 200_000) == payload(n, 200_000) for n in range(40))
            assert put(store, key(capacity), b"x") is STORED
            check_integrity(store)
    with pytest.raises(ConfigError, match=r"grown to \d+ bytes, .* set capacity to (\d+) or more") as refused:
        opened(path, 6 << 20)
    needed = int(str(refused.value).split("set capacity to ")[1].split()[0])
    with opened(path, needed) as store:
        assert store.usage().objects == 42
        check_integrity(store)


# -- eviction


def test_many_reads_write_their_recency_down(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 64 << 20) as store:
        names = range(5000)
        store.set([to_set(key(n), b"x") for n in names])
        for n in range(0, 5000, 500):
            assert set(store.get([to_get(key(m), 1) for m in range(n, n + 500)])) == {HIT}
        assert int(store.usage().details["recency_waiting"]) < 4096
        store.flush()
        assert store.usage().details["recency_waiting"] == 0
        check_integrity(store)


@given(length=st.integers(1, 3_000_000), part_pages=st.sampled_from([4, PART_PAGES]))
def test_pieces_cover_a_payload_and_waste_no_page(length: int, part_pages: int) -> None:
    sizes = piece_sizes(length, 4096, part_pages)
    assert sum(sizes) == length
    assert 0 < min(sizes) <= max(sizes) <= part_pages * 4096 - 16
    assert pages_for(length, 4096, part_pages) <= 2 + length // 4000
    assert all(size % 64 == 0 for size in sizes[:-1])
