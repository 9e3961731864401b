"""Syncs of a `file` store that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiercache_backends.file import FileBackend

from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import fetch, key, payload, put

CAPACITY = 24 << 20
HIT, MISS, STORED, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.CORRUPT


def test_after_a_failed_flush_no_other_succeeds_until_the_store_is_opened_again(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        put(store, key("kept"), payload("kept", 9000))
        env.fail("fdatasync")
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be flushed"):
                store.flush()
            assert fetch(store, key("kept"), 9000) == payload("kept", 9000), "what is there is verified"
    with FileBackend(str(tmp_path / "s"), CAPACITY) as store:
        store.flush()


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
