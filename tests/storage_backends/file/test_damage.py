"""A `file` store whose catalog or slabs were damaged while it was closed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import CAPACITY, catalog_of, opened
from tests.storage_backends.local.files import DAMAGE, damage, disk_bytes
from tiercache.testing.conformance.hooks import CORRUPT, HIT, MISS, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_set


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_catalog_costs_contents_and_nothing_else(tmp_path, how, caplog):
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    damage(path / "catalog" / "000001.log", how, rest=4 * 4096)
    with caplog.at_level(logging.ERROR), opened(path) as store:
        found = [fetch(store, key(n), 5000) for n in range(300)]
        assert all(got in (MISS, payload(n, 5000)) for n, got in enumerate(found))
        assert found.count(MISS) >= 200
        assert put(store, key("new"), payload("new", 5000)) is STORED
        assert disk_bytes(path) <= CAPACITY
        check_tables(store)
    if how not in ("truncated", "to a page", "garbage inside"):  # what is left of these ends earlier
        assert "was put aside as catalog.damaged; the store starts empty" in caplog.text
        assert (path / "catalog.damaged" / "000001.log").exists()
    with opened(path) as store:
        assert fetch(store, key("new"), 5000) == payload("new", 5000)
        kept = [fetch(store, key(n), 5000) for n in range(300)]
        assert kept == found


def test_overlapping_and_misplaced_records_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(7):
            put(store, key(n), payload(n, 9000))
        records = catalog_of(store).page(b"", 1 << 20)
        records["start"][0] = records["start"][1]
        records["start"][2] = 1 << 40
        records["blocks"][3] = 1
        records["pool"][4] = b"WHAT"
        catalog_of(store).apply(records[:5], removals=records["number"][:5].tolist())
    with opened(path) as store:
        assert {e.key for e in store.scan_all()} == {key(1), key(5), key(6)}, "the newer of two stays"
        assert fetch(store, key(1), 9000) == payload(1, 9000)
        assert fetch(store, key(5), 9000) == payload(5, 9000)
        assert [put(store, key(n), payload(n, 9000)) for n in (0, 2, 3, 4)] == [STORED] * 4
        check_tables(store)
    with opened(path) as store:
        assert store.usage().objects == 7, "what was dropped is gone from the catalog as well"


def test_a_slab_that_was_cut_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(100):
            put(store, key(n), payload(n, 60_000))
        slab = path / "slabs" / "000000.slab"
        os.truncate(slab, 300_000)
        found = [fetch(store, key(n), 60_000) for n in range(100)]
        assert CORRUPT in found
        assert all(f in (CORRUPT, payload(n, 60_000)) for n, f in enumerate(found))
        check_tables(store)
    slab.unlink()
    with opened(path) as store:
        found = [fetch(store, key(n), 60_000) for n in range(100)]
        assert all(f in (MISS, payload(n, 60_000)) for n, f in enumerate(found))
        for n in range(100):
            assert put(store, key(n), payload(n, 60_000)) in (STORED, HIT)
        check_tables(store)
