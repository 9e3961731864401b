"""Syncs of a `file` store that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiercache_backends.file import FileBackend

from tests.storage.backends import locate
from tests.storage.integrity import check_tables
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import fetch, key, payload, put

CAPACITY = 24 << 20
HIT, MISS, STORED, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.CORRUPT


def test_after_a_failed_flush_the_next_one_looks_at_the_medium(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        put(store, key("before"), payload("before", 9000))
        store.flush()
        put(store, key("kept"), payload("kept", 9000))
        put(store, key("lost"), payload("lost", 9000))
        env.fail("fdatasync")
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()
        # What a failed write-back leaves: the medium has other bytes than the page cache had.
        [(path, offset, _)] = locate(store, key("lost"))
        with Path(path).open("r+b") as file:
            file.seek(offset)
            file.write(b"stale")
        env.clear()
        store.flush()
        assert env.calls["forget"] >= 2
        assert store.exists([key("before"), key("kept"), key("lost")]) == [True, True, False], (
            "a flush promises only what is there"
        )
        env.clear()
        store.flush()
        assert env.calls["forget"] == 0
        check_tables(store)


def test_with_power_every_set_syncs_files_of_its_own(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, "power", env) as store:
        put(store, key("a"), payload("a", 9000))
        env.clear()
        assert put(store, key("b"), payload("b", 9000)) is STORED
        assert (env.calls["open"], env.calls["fdatasync"]) == (1, 2), "the slab's and the log's"
        env.fail("fdatasync")
        assert put(store, key("c"), payload("c", 9000)) is Outcome.ERROR
        assert fetch(store, key("c"), 9000) is MISS
        assert int(store.usage().details["set_failures"]) == 1
