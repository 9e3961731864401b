"""A `file` store whose catalog or slabs were damaged while it was closed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from random import Random

import pytest

from tests.examples import slow_after
from tests.storage import owner
from tests.storage_backends.file.store import CAPACITY, catalog_of, child_of, opened
from tests.storage_backends.local.files import DAMAGE, damage, disk_bytes
from tiercache.core import Outcome
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import fetch, key, payload, put, to_set

HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("clean", [True, False])
def test_a_damaged_catalog_costs_the_contents_and_nothing_else(
    tmp_path: Path, how: str, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    if not clean:
        (path / "state").write_text(json.dumps({"database": None}))
    damage(path / "catalog" / "data.mdb", how, rest=4 * 4096)  # far behind that, blocks are only reserved
    with caplog.at_level(logging.ERROR), opened(path) as store:
        assert store.usage().objects == 0
        assert put(store, key("new"), payload("new", 5000)) is STORED
        assert disk_bytes(path) <= CAPACITY
        store.check_integrity()
    if how != "empty":
        assert "written anew" in caplog.text
    with opened(path) as store:
        assert fetch(store, key("new"), 5000) == payload("new", 5000)


@pytest.mark.parametrize("seed", slow_after(4, range(12)))
def test_garbage_in_any_page_of_the_catalog_is_survived(tmp_path: Path, seed: int) -> None:
    """Within the catalog's tree, its free list or its records: the next owner has what can be believed, and a
    store that works.
    """
    random = Random(seed)
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, owner.SIZE)) for n in range(owner.COUNT)])
        store.delete([key(n) for n in range(0, owner.COUNT, 3)])
        store.set([to_set(key(n), payload(n, owner.SIZE)) for n in range(0, owner.COUNT, 6)])
    data = path / "catalog" / "data.mdb"
    raw = bytearray(data.read_bytes())
    pages = [p for p in range(8192, len(raw), 4096) if any(raw[p : p + 4096])]
    page = random.choice(pages)
    if seed % 2:
        raw[page : page + 4096] = random.randbytes(4096)
    else:
        for _ in range(20):
            raw[random.choice(pages) + random.randrange(4096)] = random.randrange(256)
    data.write_bytes(raw)
    for _ in range(2):
        child = child_of(path, "read")
        assert child.wait(60) == 0
        child.communicate()


def test_after_an_unclean_shutdown_a_sound_catalog_passes_its_check(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        put(store, key("a"), payload("a", 5000))
    (path / "state").write_text(json.dumps({"database": None}))
    env = FaultEnv()
    with opened(path, env=env) as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
    assert env.calls["run"] == 1
    with opened(path, env=env):
        pass
    assert env.calls["run"] == 1, "after a clean one it is not checked"


def test_overlapping_and_misplaced_records_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(7):
            put(store, key(n), payload(n, 9000))
        records = catalog_of(store).load().records.copy()
        records["start"][1] = records["start"][0]
        records["start"][2] = 1 << 40
        records["blocks"][3] = 1
        records["pool"][4] = b"WHAT"
        catalog_of(store).apply(records[:5], removals=records["number"][:5].tolist())
    with opened(path) as store:
        assert {e.key for e in store.scan_all()} == {key(0), key(5), key(6)}, (
            "of two that name the same blocks the right one stays"
        )
        assert fetch(store, key(0), 9000) == payload(0, 9000)
        assert fetch(store, key(5), 9000) == payload(5, 9000)
        assert [put(store, key(n), payload(n, 9000)) for n in range(1, 5)] == [STORED] * 4
        store.check_integrity()
    with opened(path) as store:
        assert store.usage().objects == 7, "what was dropped is gone from the catalog as well"


def test_a_flipped_bit_anywhere_in_a_catalog_record_costs_that_record(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        put(store, key(0), payload(0, 9000))
        put(store, key(1), payload(1, 9000))
    data = path / "catalog" / "data.mdb"
    whole = data.read_bytes()
    at = whole.index(key(1).digest) - 8
    for bit in range(0, 192 * 8, 53):
        flipped = bytearray(whole)
        flipped[at + bit // 8] ^= 1 << bit % 8
        data.write_bytes(flipped)
        with opened(path) as store:
            assert fetch(store, key(0), 9000) == payload(0, 9000)
            assert fetch(store, key(1), 9000) is MISS
            assert put(store, key(1), payload(1, 9000)) is STORED, "and it can be stored anew"
            assert fetch(store, key(1), 9000) == payload(1, 9000)
            store.check_integrity()


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
        store.check_integrity()
    slab.unlink()
    with opened(path) as store:
        found = [fetch(store, key(n), 60_000) for n in range(100)]
        assert all(f in (MISS, payload(n, 60_000)) for n, f in enumerate(found))
        for n in range(100):
            assert put(store, key(n), payload(n, 60_000)) in (STORED, HIT)
        store.check_integrity()
