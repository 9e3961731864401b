"""Rules of every store in a directory: modes, links, foreign files, full disks, failing opens and flushes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.file import FileBackend
from tiercache_backends.lmdb import LmdbBackend

from tests.campaign.stores import check_integrity
from tests.faults import FaultEnv
from tests.storage.backends import FileHooks
from tests.storage_backends.file import store as file_store
from tests.storage_backends.lmdb import hooks as lmdb_store
from tiercache.core import Outcome
from tiercache.errors import ConfigError, StorageError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import fetch, key, payload, put

OPENED: dict[str, Callable[..., FileBackend | LmdbBackend]] = {
    "file": file_store.opened,
    "lmdb": lmdb_store.opened,
}
FILES = {
    "file": ("LOCK", "format", "slabs", "catalog", "catalog/000001.log", "slabs/000000.slab"),
    "lmdb": ("LOCK", "OPENING", "format", "database", "database/data.mdb", "database/lock.mdb"),
}
EVERY_KIND = pytest.mark.parametrize("opened", [pytest.param(make, id=kind) for kind, make in OPENED.items()])


@EVERY_KIND
def test_modes_are_private(tmp_path: Path, opened: Callable[..., StorageBackend]) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names])
def test_no_link_is_followed(tmp_path: Path, kind: str, name: str) -> None:
    opened, store, victim = OPENED[kind], tmp_path / "s", tmp_path / "victim"
    opened(store).close()
    victim.write_bytes(b"precious")
    target = store / name
    if target.is_dir():
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
    else:
        target.unlink(missing_ok=True)
        target.symlink_to(victim)
    with pytest.raises(StorageError):
        opened(store)
    assert victim.read_bytes() == b"precious"


@EVERY_KIND
def test_a_foreign_directory_is_refused(tmp_path: Path, opened: Callable[..., StorageBackend]) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(StorageError, match="not empty"):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not a directory"):
        opened(tmp_path / "file")


@EVERY_KIND
def test_flush_says_when_it_cannot(tmp_path: Path, opened: Callable[..., StorageBackend]) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), b"x")
        env.clear()
        env.fail("fdatasync")
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()


@EVERY_KIND
def test_a_capacity_that_is_too_small_says_what_is_needed(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="set capacity to 4194304 or more"):
        opened(tmp_path / "s", 1 << 20)
    with opened(tmp_path / "s", 4 << 20) as store:
        assert put(store, key("a"), payload("a", 100_000)) is Outcome.STORED


@EVERY_KIND
def test_a_store_opens_on_a_full_disk(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), payload("a", 5000))
    env = FaultEnv()
    env.fail("pwritev", times=10**9, error=errno.ENOSPC)
    with opened(tmp_path / "s", env=env) as store:
        env.fail("commit", times=10**9, error=errno.ENOSPC)
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert put(store, key("b"), b"x") is Outcome.THROTTLED
    with opened(tmp_path / "s", env=(checked := FaultEnv())) as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
    if opened is lmdb_store.opened:
        assert checked.calls["run"] == 1, "nobody said how it was closed"


@pytest.mark.parametrize(
    ("opened", "hooks"), [(file_store.opened, FileHooks()), (lmdb_store.opened, lmdb_store.LmdbHooks())],
    ids=list(OPENED),
)  # fmt: skip
def test_a_corrupt_object_stays_out_of_sight_when_it_cannot_be_removed(tmp_path, opened, hooks):
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        hooks.corrupt(store, key("a"))
        env.clear()
        env.fail("commit")
        file_store.fail_log(env)
        assert fetch(store, key("a"), 5000) is Outcome.CORRUPT
        assert (store.exists([key("a")]), fetch(store, key("a"), 5000)) == ([False], Outcome.MISS)
        assert store.usage().details.get("blocks_stranded", 2) == 2
        check_integrity(store)
        assert put(store, key("a"), payload("a", 5000)) is Outcome.STORED
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        check_integrity(store)
    with opened(tmp_path / "s") as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        check_integrity(store)
