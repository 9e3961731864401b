"""The directory of a `file` store, and its capacity."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.storage.backends import locate
from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import opened
from tests.storage_backends.local.files import disk_bytes
from tiercache.errors import StoreFormatError, StoreLockedError
from tiercache.testing.conformance.hooks import STORED
from tiercache.testing.objects import fetch, key, outcomes, payload, put, to_set


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        with pytest.raises(StoreLockedError, match=f"in use by this process \\(pid {os.getpid()}\\); close"):
            opened(tmp_path / "s")
        assert fetch(store, key("a"), 1) == b"x", "the refused opener did no harm"
    opened(tmp_path / "s").close()


def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    opened(tmp_path / "s").close()
    path = tmp_path / "s" / "format"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 4}))
    with pytest.raises(StoreFormatError, match=r"format 4 .* up to 3; upgrade"):
        opened(tmp_path / "s")
    path.write_text("what")
    with pytest.raises(StoreFormatError, match="cannot be read"):
        opened(tmp_path / "s")


def test_everything_in_the_directory_counts_at_every_instant(tmp_path: Path) -> None:
    path = tmp_path / "s"
    opened(path, 8 << 20).close()
    (path / "notes").write_bytes(bytes(1 << 20))
    with opened(path, 8 << 20) as store:
        for n in range(150):
            assert put(store, key(n), payload(n, 30_000 + 997 * n)) is STORED
            assert disk_bytes(path) <= 8 << 20
        check_tables(store)
        assert store.usage().details["evicted"] != 0


@pytest.mark.parametrize("capacity", [6 << 20, 40 << 20])
def test_a_store_opens_with_another_capacity(tmp_path: Path, capacity: int) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(150):
            put(store, key(n), payload(n, 100_000))
        before = store.usage().objects
    with opened(path, capacity) as store:
        left = [n for n in range(150) if store.exists([key(n)])[0]]
        assert 0 < len(left) <= before
        assert all(fetch(store, key(n), 100_000) == payload(n, 100_000) for n in left)
        for n in range(200, 400):
            assert put(store, key(n), payload(n, 100_000)) is STORED
            assert disk_bytes(path) <= max(capacity, 0)
        check_tables(store)


def test_many_tiny_objects_evict_for_the_catalogs_sake(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 24 << 20) as store:
        for batch in range(12):
            names = range(batch * 500, batch * 500 + 500)
            assert outcomes(store.set([to_set(key(n), b"x") for n in names])) == {STORED: 500}
            assert disk_bytes(tmp_path / "s") <= 24 << 20
        assert store.usage().objects < 6000
        check_tables(store)


def test_objects_fill_a_fragmented_store(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        names = range(2000)
        store.set([to_set(key(n), payload(n, 4096)) for n in names])
        store.delete([key(n) for n in names[::2]])
        # private: another slab at this moment would spare the store the fragments that are to be used
        while store.usage().details["blocks_free"] > 1200 or store._writer._grow():
            if put(store, key(("fill", store.usage().objects)), bytes(1 << 20)) is not STORED:
                break
        big = payload("big", 3 << 20)
        assert put(store, key("big"), big) is STORED
        assert len(locate(store, key("big"))) > 1
        assert fetch(store, key("big"), len(big)) == big
        check_tables(store)
