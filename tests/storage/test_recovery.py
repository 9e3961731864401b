"""Opening a damaged `file` store: at most what lay on the damage is lost, wherever the opening process is
killed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tiercache_backends.file import FileBackend
from tiercache_backends.file.opening import salvage
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.local.lmdb_file import LmdbFile, UnsoundError

from tests.storage.backends import copy_tree
from tests.storage_backends.file.store import catalog_of
from tiercache.core import Outcome
from tiercache.errors import ClosedError, ConfigError, StorageError, StoreLockedError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.env import Env
from tiercache.storage.registry import open_backend
from tiercache.testing.faults import CALLS, FaultEnv
from tiercache.testing.objects import fetch, key, payload, put, to_set

CAPACITY = 16 << 20
COUNT, SIZE = 200, 3000
NAME = b"n" * 32
HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR
PAGE = 4096


def opened(path: Path, capacity: int | None = CAPACITY, env: Env | None = None, **more: str) -> FileBackend:
    return FileBackend(str(path), capacity, env=env, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of many objects in batches, of which some were deleted, so that there are free pages with
    records that were removed.
    """
    path = tmp_path_factory.mktemp("template") / "s"
    with opened(path) as store:
        store.register_namespace(NamespaceRecord(NAME, {"model": "m"}))
        for start in range(0, COUNT, 25):
            store.set([to_set(key(n), payload(n, SIZE)) for n in range(start, start + 25)])
        store.set([to_set(key(("gone", n)), payload(n, SIZE)) for n in range(100)])
        store.delete([key(("gone", n)) for n in range(100)])
        big = payload("big", 9 << 20)
        assert put(store, key("big"), big) is STORED
        assert len(store.locate(key("big"))) > 1, "it has further extents"
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    copy_tree(template, tmp_path / "s")
    return tmp_path / "s"


def data(path: Path) -> Path:
    return path / "catalog" / "data.mdb"


def pages_of(path: Path, kind: str) -> list[int]:
    """The pages of a kind that are in use."""
    with_kind = {"branch": 1, "leaf": 2, "bare": 0x22}
    raw = data(path).read_bytes()
    if kind == "meta":
        return [0, 1]
    file = LmdbFile(Env(), str(data(path)))
    try:
        used = [first + i for first, pages in file.pages() for i in range(len(pages))]
        # private: only the pages that hold the list of free pages are damaged here, which no call names
        free = [node.page for node in file._leaves(file._newest.free_root, 0)]  # type: ignore[union-attr]
    finally:
        file.close()
    if kind == "freelist":
        return sorted(set(free))
    return [
        p
        for p in used
        if p not in free and struct.unpack_from("<H", raw, p * PAGE + 10)[0] & 0x2F == with_kind[kind]
    ]


def zero(path: Path, *pages: int) -> None:
    with data(path).open("r+b") as file:
        for page in pages:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))


def on_page(path: Path, page: int) -> set[bytes]:
    """The digests that are named on a page."""
    raw = data(path).read_bytes()[page * PAGE : (page + 1) * PAGE]
    return {key(n).digest for n in [*range(COUNT), "big"] if key(n).digest in raw}


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


def test_reading_a_sound_catalog_page_by_page_finds_what_lmdb_finds(path: Path) -> None:
    found = salvage(Env(), str(path / "catalog"))
    assert not found.loaded.damaged
    assert found.names.records == {NAME: NamespaceRecord(NAME, {"model": "m"})}
    with opened(path) as store:
        there = catalog_of(store).load()
    assert found.loaded.records.tobytes() == there.records.tobytes()
    assert found.loaded.extents == there.extents


@pytest.mark.parametrize("kind", ["meta", "freelist", "branch", "leaf", "bare"])
def test_a_zeroed_page_costs_what_lay_on_it(path: Path, kind: str) -> None:
    for n, page in enumerate(pages_of(path, kind)[:4]):
        copy = path.with_name(f"copy{n}")
        copy_tree(path, copy)
        may = on_page(copy, page)
        if kind == "leaf":  # the further extents of an object lie on a page of their own
            may.add(key("big").digest)
        zero(copy, page)
        with opened(copy) as store:
            assert lost(store) <= may, (kind, page)
            assert store.namespaces() or kind == "leaf"
            assert put(store, key("new"), b"new") is STORED
            store.check_integrity()
        with opened(copy) as store:
            assert lost(store) <= may
        shutil.rmtree(copy)


def test_a_zeroed_head_and_list_of_free_pages_cost_nothing(path: Path) -> None:
    zero(path, 0, *pages_of(path, "freelist"))
    with opened(path) as store:
        assert lost(store) == set(), "what had been removed before does not displace what is stored"
        store.check_integrity()


def test_a_suspect_catalog_keeps_everything(path: Path) -> None:
    state = json.loads((path / "state").read_text())
    (path / "state").write_text(json.dumps(state | {"suspect": True}))
    with opened(path) as store:
        assert lost(store) == set()
        assert [e.meta.namespace for e in store.scan_all()]
        assert store.namespaces() == [NamespaceRecord(NAME, {"model": "m"})]
    assert "suspect" not in json.loads((path / "state").read_text())


def test_an_opening_that_fails_while_it_repairs_leaves_the_old_catalog(path: Path) -> None:
    state = json.loads((path / "state").read_text())
    (path / "state").write_text(json.dumps(state | {"suspect": True}))
    before = data(path).read_bytes()
    for call in ("commit", "rename"):
        env = FaultEnv()
        env.fail(call, at=1 if call == "commit" else 2)
        with pytest.raises(StorageError):
            opened(path, env=env)
        if call == "commit":
            assert data(path).read_bytes() == before
        assert json.loads((path / "state").read_text())["suspect"], "the next owner repairs it"
    with opened(path) as store:
        assert lost(store) == set()
    assert sorted(os.listdir(path / "catalog")) == ["data.mdb", "lock.mdb"]


DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "suspect": lambda path, _: _edit_state(path, suspect=True),
    "killed": lambda path, _: _edit_state(path, database=None),
    "freelist": lambda path, _: zero(path, *pages_of(path, "freelist")),
    "meta": lambda path, random: zero(path, random.randrange(2)),
    "branch": lambda path, _: zero(path, *pages_of(path, "branch")),
    "leftovers": lambda path, random: (
        _edit_state(path, suspect=True),
        (path / "catalog" / "data.new").write_bytes(random.randbytes(9999)),
    )[0],
}


def _edit_state(path: Path, **more: object) -> None:
    (path / "state").write_text(json.dumps(json.loads((path / "state").read_text()) | more))


@pytest.mark.parametrize(
    "damage", ["suspect", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DAMAGES)[1:])]
)
def test_a_kill_while_open_repairs_loses_nothing(path: Path, damage: str) -> None:
    random = Random(damage)
    DAMAGES[damage](path, random)
    code = (
        "import sys; from tiercache_backends.file import FileBackend; print('go', flush=True);"
        " FileBackend(sys.argv[1], 16 << 20)"
    )
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(random.uniform(0, 0.06))
            child.kill()
    with opened(path) as store:
        assert lost(store) == set()
        store.check_integrity()


@pytest.mark.parametrize(
    "damage", ["suspect", *(pytest.param(name, marks=pytest.mark.slow) for name in list(DAMAGES)[1:])]
)
def test_every_step_of_a_repair_can_be_the_last(path: Path, damage: str) -> None:
    """A copy of the directory, as it is before each call of the disk in an opening, is a store that holds
    everything.
    """
    DAMAGES[damage](path, Random(damage))
    copies: list[Path] = []

    def copy(real: Callable[..., object], arguments: tuple[object, ...]) -> object:
        copies.append(path.with_name(f"killed{len(copies)}"))
        copy_tree(path, copies[-1])
        return real(*arguments)

    env = FaultEnv()
    for call in ("rename", "unlink", "commit", "ftruncate", "fallocate"):
        env.add(call, copy, times=10**6)
    opened(path, env=env).close()
    assert len(copies) >= 2
    for found in copies:
        with opened(found) as store:
            assert lost(store) == set(), (damage, found)
        shutil.rmtree(found)


def test_a_second_damage_deletes_no_earlier_aside(path: Path) -> None:
    settled = json.loads((path / "format").read_text())
    before = data(path).read_bytes()
    for _ in range(3):
        (path / "format").write_text(json.dumps(settled | {"version": 1}))
        opened(path).close()
    assert (path / "catalog.damaged" / "data.mdb").read_bytes() == before
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
    assert (path / "catalog.damaged" / "data.mdb").read_bytes() == before


# --- looking
# ------------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    os.truncate(path / "slabs" / "000001.slab", 5000)


LOOKS: dict[str, Callable[[Path], object]] = {
    "sound": lambda path: None,
    "suspect": lambda path: _edit_state(path, suspect=True),
    "killed": lambda path: _edit_state(path, database=None),
    "head": lambda path: zero(path, 0),
    "freelist": lambda path: zero(path, *pages_of(path, "freelist")),
    "branch": lambda path: zero(path, *pages_of(path, "branch")),
    "bare": lambda path: zero(path, pages_of(path, "bare")[0]),
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
        if damage not in ("no catalog", "garbage", "bare"):
            assert len(entries) >= COUNT, "what is readable is shown"
        found = [fetch(store, entry.key, entry.meta.length) for entry in entries[:50]]
        assert fetch(store, entries[0].key, entries[0].meta.length) == found[0] if entries else True, (
            "a get drops nothing"
        )
        if damage in ("no slab", "no slabs"):
            assert set(map(type, found)) == {Outcome}
            assert set(found) == {CORRUPT}
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


# --- under an open store
# ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_turned_away_and_harms_nobody(path: Path) -> None:
    with opened(path) as store:
        child = os.fork()
        if not child:
            status = 1
            try:
                refused = 0
                for act in (
                    lambda: put(store, key("child"), b"child"), lambda: fetch(store, key(1), SIZE),
                    lambda: store.delete([key(1)]),
                    store.usage, store.flush, store.namespaces, lambda: list(store.scan_all()),
                ):  # fmt: skip
                    try:
                        act()
                    except ClosedError as error:
                        refused += "open it again in this process" in str(error)
                store.close()
                status = 0 if refused == 7 else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert lost(store) == set()
        assert put(store, key("after"), b"after") is STORED
        store.check_integrity()
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


@pytest.mark.parametrize("name", ["catalog/data.mdb", "slabs/000000.slab"])
def test_a_file_that_is_gone_fails_the_flush(path: Path, name: str) -> None:
    with opened(path) as store:
        (path / name).unlink()
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()


def test_a_catalog_that_is_cut_under_an_open_store_ends_no_process(path: Path) -> None:
    code = """
import os, sys
from tiercache_backends.file import FileBackend
from tiercache.errors import StorageError
from tiercache.testing.objects import key, put, to_set
store = FileBackend(sys.argv[1], 16 << 20)
os.truncate(sys.argv[1] + "/catalog/data.mdb", int(sys.argv[2]))
print(put(store, key("new"), b"new"), store.delete([key(1)]))
try:
    list(store.scan_all())
except StorageError as error:
    print("cut" in str(error))
store.usage()
store.close()
"""
    for size in (0, 4096, 3 * 4096):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(size)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "error [False]\nTrue\n"), done.stderr
        with opened(path) as store:
            store.set([to_set(key(n), payload(n, SIZE)) for n in range(COUNT)])


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


def test_a_directory_with_impossible_sizes_and_nothing_in_it_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    opened(path).close()
    shutil.rmtree(path / "slabs")
    settled = json.loads((path / "format").read_text())
    (path / "format").write_text(json.dumps(settled | {"slab_blocks": 2**42}))
    with opened(path) as store:
        assert put(store, key("a"), b"a") is STORED


def test_a_sound_file_passes_and_any_damaged_page_does_not(path: Path) -> None:
    file = LmdbFile(Env(), str(data(path)))
    file.check()
    used = [first + i for first, pages in file.pages() for i in range(len(pages))]
    file.close()
    for page in used:
        copy = path.with_name("page.mdb")
        shutil.copyfile(data(path), copy)
        with copy.open("r+b") as raw:
            raw.seek(page * PAGE)
            raw.write(bytes(np.random.default_rng(page).integers(0, 256, PAGE, np.uint8)))
        file = LmdbFile(Env(), str(copy))
        with pytest.raises(UnsoundError):
            file.check()
        file.close()


def test_repairs_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero(path, 0)
    with caplog.at_level(logging.ERROR), opened(path):
        pass
    assert "one of its two head pages is malformed" in caplog.text
    assert "it is written anew from " in caplog.text
