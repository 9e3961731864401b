"""Opening a damaged `file` store costs what lay on the damage, wherever the opener is killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiercache_backends.file import FileBackend
from tiercache_backends.lmdb import LmdbBackend

from tests.faults import CALLS, FaultEnv
from tests.processes import works_in_a_child
from tests.storage.backends import copy_tree, locate
from tests.storage.integrity import check_tables
from tiercache.errors import ClosedError, ConfigError, StorageError, StoreLockedError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.env import Env
from tiercache.storage.registry import open_backend
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import fetch, key, payload, put, to_set

CAPACITY = 16 << 20
COUNT, SIZE = 200, 3000
NAME = b"n" * 32
PAGE = 4096


def opened(path: Path, capacity: int | None = CAPACITY, env: Env | None = None, **more: str) -> FileBackend:
    return FileBackend(str(path), capacity, env=env, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of many objects, some of them deleted, so that free pages have records of removed ones."""
    path = tmp_path_factory.mktemp("template") / "s"
    with opened(path) as store:
        store.register_namespace(NamespaceRecord(NAME, {"model": "m"}))
        for start in range(0, COUNT, 25):
            store.set([to_set(key(n), payload(n, SIZE)) for n in range(start, start + 25)])
        store.set([to_set(key(("gone", n)), payload(n, SIZE)) for n in range(100)])
        store.delete([key(("gone", n)) for n in range(100)])
        big = payload("big", 9 << 20)
        assert put(store, key("big"), big) is STORED
        assert len(locate(store, key("big"))) > 1, "it has further extents"
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    copy_tree(template, tmp_path / "s")
    return tmp_path / "s"


def data(path: Path) -> Path:
    return path / "catalog" / "000001.log"


def lost(store: FileBackend) -> set[bytes]:
    """Digests of the acknowledged objects that do not hit."""
    found = {key(n): (fetch(store, key(n), SIZE), payload(n, SIZE)) for n in range(COUNT)}
    found[key("big")] = (fetch(store, key("big"), 9 << 20), payload("big", 9 << 20))
    assert all(got in (want, MISS, CORRUPT) for got, want in found.values()), "wrong bytes"
    return {k.digest for k, (got, want) in found.items() if got != want}


def snapshot(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a directory: names, sizes, contents, times and modes."""
    found: dict[str, tuple[object, ...]] = {}
    for where in [path, *sorted(path.rglob("*"))]:
        stat = where.lstat()
        content = where.read_bytes() if where.is_file() else b""
        found[str(where)] = (stat.st_size, stat.st_mtime_ns, stat.st_mode, stat.st_ino, content)
    return found


def test_a_second_damage_deletes_no_earlier_aside(path: Path) -> None:
    settled = json.loads((path / "format").read_text())
    before = data(path).read_bytes()
    for _ in range(3):
        (path / "format").write_text(json.dumps(settled | {"version": 1}))
        opened(path).close()
    assert (path / "catalog.damaged" / "000001.log").read_bytes() == before
    assert {"catalog.damaged", "catalog.damaged.1", "catalog.damaged.2"} <= set(os.listdir(path))


def test_a_kill_between_putting_aside_and_the_new_format_keeps_what_was_put_aside(path: Path) -> None:
    settled = json.loads((path / "format").read_text())
    (path / "format").write_text(json.dumps(settled | {"version": 1}))
    before = data(path).read_bytes()
    env = FaultEnv()
    env.fail("rename", at=2)
    with pytest.raises(StorageError):
        opened(path, env=env)
    opened(path).close()
    assert (path / "catalog.damaged" / "000001.log").read_bytes() == before


# -- looking


def _cut(path: Path) -> None:
    os.truncate(path / "slabs" / "000001.slab", 5000)


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with data(path).open("r+b") as file:
        file.seek(offset)
        file.write(content)


LOOKS: dict[str, Callable[[Path], object]] = {
    "sound": lambda path: None,
    "head": lambda path: _overwrite(path, 0, bytes(192)),
    "block": lambda path: _overwrite(path, 4096, bytes(PAGE)),
    "leftovers": lambda path: (path / "catalog" / "new.log").write_bytes(b"x" * 5000),
    "two logs": lambda path: (path / "catalog" / "000000.log").write_bytes(data(path).read_bytes()),
    "no catalog": lambda path: data(path).unlink(),
    "garbage": lambda path: data(path).write_bytes(os.urandom(40_000)),
    "cut": _cut,
    "no slab": lambda path: (path / "slabs" / "000000.slab").unlink(),
    "no slabs": lambda path: shutil.rmtree(path / "slabs"),
    "no state": lambda path: (path / "state").unlink(),
}


@pytest.mark.parametrize("damage", LOOKS)
def test_looking_writes_nothing(path: Path, damage: str) -> None:
    LOOKS[damage](path)
    before = snapshot(path)
    with opened(path, None) as store:
        entries = list(store.scan_all())
        if damage in ("cut", "no slab", "no slabs"):
            assert store.usage().details["catalog_damaged"] == 1, "it names objects that are not there"
        elif damage not in ("no catalog", "garbage"):
            assert len(entries) >= COUNT - 22, "what is readable is shown"
        found = [fetch(store, entry.key, entry.meta.length) for entry in entries[:50]]
        assert fetch(store, entries[0].key, entries[0].meta.length) == found[0] if entries else True
        assert all(isinstance(got, bytes) for got in found)
        assert put(store, key("new"), b"new") is THROTTLED
        if entries:
            assert put(store, entries[0].key, b"x") is HIT
        assert store.delete([entry.key for entry in entries[:3]]) == [False] * min(3, len(entries))
        store.register_namespace(NamespaceRecord(b"x" * 32, {}))
        store.describe([entry.key for entry in entries[:5]])
        store.usage()
        store.flush()
        store.namespaces()
    assert snapshot(path) == before
    with pytest.raises(ConfigError, match="capacity=kept"):
        opened(path, CAPACITY, access="read")


def test_several_may_look_at_once_and_nobody_opens_meanwhile(path: Path) -> None:
    with opened(path, None) as one, opened(path, None) as other:
        assert lost(one) == lost(other) == set()
        with pytest.raises(StoreLockedError, match="open for reading"):
            opened(path)
    with opened(path), pytest.raises(StoreLockedError, match="in use by this process"):
        opened(path, None)


def test_a_kept_store_can_be_opened_to_change_it(path: Path) -> None:
    with opened(path, None, access="write") as store:
        assert store.delete([key(1)]) == [True]
    with opened(path, None) as store:
        assert lost(store) == {key(1).digest}


# -- under an open store


def test_a_forked_child_is_turned_away_and_harms_nobody(path: Path) -> None:
    with opened(path) as store:

        def use() -> None:
            for act in (
                lambda: put(store, key("child"), b"child"), lambda: fetch(store, key(1), SIZE),
                lambda: store.delete([key(1)]),
                store.usage, store.flush, store.namespaces, lambda: list(store.scan_all()),
            ):  # fmt: skip
                with pytest.raises(ClosedError, match="open it again in this process"):
                    act()
            store.close()

        assert works_in_a_child(use)
        assert lost(store) == set()
        assert put(store, key("after"), b"after") is STORED
        check_tables(store)
    with opened(path) as store:
        assert lost(store) == set()
        assert fetch(store, key("after"), 5) == b"after"


def test_a_child_that_lives_on_does_not_keep_the_directory(path: Path) -> None:
    store = opened(path)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    store.close()
    opened(path).close()
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_directory_that_is_gone_is_told(path: Path, how: str) -> None:
    with opened(path) as store:
        if how == "removed":
            shutil.rmtree(path)
        else:
            path.rename(path.with_name("moved"))
        if how == "replaced":
            copy_tree(path.with_name("moved"), path)
        with pytest.raises(StorageError, match=r"removed or moved|replaced"):
            store.flush()
        assert put(store, key("new"), b"new") is ERROR
        if how == "moved":
            path.with_name("moved").rename(path)
            assert put(store, key("new"), b"new") is STORED, "and it works again when it comes back"
            store.flush()


@pytest.mark.parametrize("name", ["catalog/000001.log", "slabs/000000.slab"])
def test_a_file_that_is_gone_fails_the_flush(path: Path, name: str) -> None:
    with opened(path) as store:
        (path / name).unlink()
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()


@pytest.mark.parametrize("size", [0, 4096, 3 * 4096])
def test_a_catalog_that_is_cut_under_an_open_store_is_written_anew(path: Path, size: int) -> None:
    with opened(path) as store:
        assert store.delete([key(1)]) == [True]
        os.truncate(data(path), size)
        with pytest.raises(StorageError, match="was cut while it was open"):
            list(store.scan_all())
        assert put(store, key("new"), b"new") is STORED
        with pytest.raises(StorageError, match="were lost while the store was open"):
            store.flush()
        assert lost(store) == {key(1).digest}, "what is in memory is served until the next start"
        check_tables(store)
    with opened(path) as store:
        assert fetch(store, key("new"), 3) == b"new"
        assert fetch(store, key(1), SIZE) is MISS, "what was deleted stays away"
        assert COUNT - len(lost(store)) >= size // 192 - 5, "what was not cut off is there"
        store.set([to_set(key(n), payload(n, SIZE)) for n in range(COUNT)])
        check_tables(store)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_disk_that_goes_away_gives_outcomes_and_works_again(tmp_path: Path, kind: str, error: int) -> None:
    env = FaultEnv()
    make = {"file": FileBackend, "lmdb": LmdbBackend}[kind]
    with make(str(tmp_path / "s"), CAPACITY, env=env) as store:
        assert put(store, key("a"), payload("a", 9000)) is STORED
        for call in CALLS:
            if call not in ("close", "run"):
                env.fail(call, times=10**6, error=error)
        assert put(store, key("b"), payload("b", 9000)) is ERROR
        assert fetch(store, key("a"), 9000) in (payload("a", 9000), ERROR)
        assert store.delete([key("b")]) == [False]
        store.exists([key("a")])
        with pytest.raises(StorageError):
            store.flush()
        env.clear()
        assert put(store, key("b"), payload("b", 9000)) is STORED
        # What could not be read at all was given up where a read of it failed with EIO.
        assert fetch(store, key("a"), 9000) in (payload("a", 9000), *([MISS] if error == errno.EIO else []))
        store.flush()


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("now", [-(10**18), 0, 2**80])
def test_any_clock_will_do(tmp_path: Path, kind: str, now: int) -> None:
    class Clock(Env):
        def time_ns(self) -> int:
            return now

    for turn in range(2):
        with open_backend(f"{kind}://{tmp_path}/s?capacity=16MiB", env=Clock()) as store:
            assert put(store, key(turn), b"new") is STORED
            for entry in store.describe([key(n) for n in range(turn + 1)]):
                assert entry is not None
                assert (entry.stored_at is None) == (now <= 0 or kind == "lmdb")


def test_a_capacity_beyond_the_machine_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for capacity in (900 << 50, 1 << 62, 1 << 48):
        with pytest.raises(ConfigError, match="more than can be mapped"):
            opened(tmp_path / "s", capacity)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_recency_survives_a_reopen(tmp_path: Path, kind: str) -> None:
    url = f"{kind}://{tmp_path}/s?capacity=16MiB"
    with open_backend(url) as store:
        for n in range(80):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        assert fetch(store, key(0), 100_000) == payload(0, 100_000)
    with open_backend(url) as store:
        for n in range(80, 200):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        there = store.exists([key(n) for n in range(200)])
        assert there[0] == (kind == "lmdb"), "of reads, only LMDB writes down the time"
        assert there[1:] == sorted(there[1:]), "the oldest went first"
        assert not there[1]
