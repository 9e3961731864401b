"""The `lmdb` store when its files are damaged, cut or moved: it starts empty, and nobody dies twice."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest
from tiercache_backends.lmdb import LmdbBackend, check
from tiercache_backends.lmdb.records import Record

from tests.faults import FaultEnv
from tests.storage_backends.lmdb.hooks import (
    CAPACITY,
    check_integrity,
    data_file,
    environment_of,
    flip,
    opened,
    page_kinds,
    zero,
)
from tests.storage_backends.local.files import DAMAGE, damage, disk_bytes
from tiercache.errors import StorageError, StoreFormatError
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import fetch, key, payload, put, to_get, to_set

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_put_aside(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    damage(path / "database" / "data.mdb", how)
    damaged = (path / "database" / "data.mdb").read_bytes()
    with pytest.raises(StorageError, match=r"is damaged; open the store for writing"):
        LmdbBackend(str(path), None)
    with caplog.at_level(logging.ERROR), opened(path) as store:
        assert store.usage().objects == 0
        assert set(store.set([to_set(key(n), payload(n, 5000)) for n in range(100)])) == {STORED}
        assert disk_bytes(path) <= CAPACITY
        check_integrity(store)
    assert "was put aside as database.damaged; the store starts empty" in caplog.text
    aside = path / "database.damaged" / "data.mdb"
    assert not aside.exists() or aside.read_bytes() == damaged, "it is removed only for its size"
    with opened(path) as store:
        assert fetch(store, key(99), 5000) == payload(99, 5000)


def used_elsewhere(path: Path, *arguments: str) -> dict[str, Any] | None:
    """Use a store in another process (`bad_page.py`); None if LMDB ends it, or hangs in a damaged heap."""
    command = [sys.executable, "-m", "tests.storage_backends.lmdb.bad_page", str(path), *arguments]
    try:
        # Fifty times what it takes on a quiet machine.
        child = subprocess.run(command, capture_output=True, cwd=ROOT, check=False, timeout=100)
    except subprocess.TimeoutExpired:
        return None
    if child.returncode in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return None
    assert child.returncode == 0, child.stderr[-2000:]
    found: dict[str, Any] = json.loads(child.stdout)
    assert found["wrong"] == 0
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "objects leaf",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "parts overflow", "free leaf", "objects branch", "parts leaf", "parts branch", "ages leaf",
                "facts leaf", "main leaf",
            )
        ),
    ],
)  # fmt: skip
def test_a_page_that_goes_bad_under_an_open_store_ends_at_most_one_process(tmp_path: Path, kind: str) -> None:
    used_elsewhere(tmp_path / "s", "spoil", kind)
    again = used_elsewhere(tmp_path / "s", "use")
    assert again is not None, "nobody dies twice"
    assert again["stored"] + again["there"] == 100
    assert again["counted"]


def test_a_start_after_a_death_examines_every_kind_of_page(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert used_elsewhere(made, "fill") is not None
    kinds = page_kinds(str(made / "database" / "data.mdb"))
    assert len(kinds) >= 7
    for kind, pages in (("none", []), *kinds.items(), ("head", [0, 1])):
        path = tmp_path / kind
        shutil.copytree(made / "database", path)
        for page in pages[-1:]:
            zero(str(path / "data.mdb"), page)
        done = subprocess.run([sys.executable, "-P", check.__file__, str(path)], check=False, timeout=100)
        # A payload is not examined: its checksum is, when it is read.
        assert (done.returncode == 0) == (kind in ("none", "parts overflow")), kind


def test_a_store_that_met_damage_answers_errors_until_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    beside = f"from tiercache_backends.lmdb import LmdbBackend as L; L({str(path)!r}, {CAPACITY})"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
        with pytest.raises(OSError, match="requires a buffer of 112 bytes"):
            environment_of(store).read(lambda _: Record.unpack(bytes(8)))
        assert (store.exists([key(0)]), fetch(store, key(0), 5000)) == ([False], ERROR)
        assert put(store, key(1), payload(1, 5000)) is ERROR
        assert store.delete([key(0)]) == [False]
        for call in (store.usage, store.scan, store.namespaces):
            with pytest.raises(StorageError, match="must be closed, in all processes, and opened again"):
                call()
        code = f"{beside}.set([])"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, "nothing is seen"
    for _ in range(2):
        with opened(path) as store:
            assert put(store, key("new"), b"new") in (STORED, HIT)
            assert store.usage().objects == 1
            check_integrity(store)
    assert sorted(p.name for p in path.glob("*.damaged*")) == ["database.damaged"], "it was put aside once"


def test_damage_that_a_second_opener_meets_is_not_put_aside_under_the_first(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"a")
        code = f"""
from tiercache_backends.lmdb import LmdbBackend, opening
from tiercache_backends.lmdb.environment import DamagedError
def damaged(*_, **__):
    raise DamagedError("a page")
opening._open = damaged
LmdbBackend({str(tmp_path / "s")!r}, {CAPACITY})
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "is damaged; close it in all other processes, and open" in done.stderr
        assert fetch(store, key("a"), 1) == b"a"


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (SystemError("Negative size passed to PyBytes_FromStringAndSize"), 0),
        (lmdb.PanicError("MDB_PANIC: Update of meta page failed"), 1),
    ],
)
def test_a_failure_of_lmdb_is_an_outcome(tmp_path: Path, error: Exception, left: int) -> None:
    """An impossible size, as the binding says it, means damage; a head page that was not written does not."""

    def fail(*_: object) -> object:
        raise error

    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        assert put(store, key(1), b"1") is STORED
        env.add("commit", fail)
        assert put(store, key(2), b"2") is ERROR
        assert put(store, key(2), b"2") is ERROR
        assert fetch(store, key(1), 1) is ERROR
    with opened(tmp_path / "s") as store:
        assert put(store, key(2), b"2") is STORED
        assert store.usage().objects == 1 + left
        check_integrity(store)


def spoil_entry(data: str, name: bytes, what: str) -> None:
    """Change LMDB's entry of a database: its name, or the page that is its root; the file's times stay."""
    before = os.stat(data)
    [page] = page_kinds(data)["main leaf"]
    with open(data, "rb") as file:
        entry = file.read().index(name, page * 4096)
    # struct MDB_db, behind the name: five counters and flags, 40 bytes, then the root's page number.
    flip(data, entry if what == "name" else entry + len(name) + 40, 3)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "what", "killed"),
    # A root that hides entries, and that no call meets, is found where the owner has died.
    [
        (b"facts", "root", False),
        (b"parts", "root", False),
        (b"objects", "root", True),
        (b"objects", "name", False),
    ],
)
def test_a_tree_that_leads_elsewhere_is_not_followed(tmp_path, name, what, killed):
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(200)])
        data = data_file(store)
    spoil_entry(data, name, what)
    if killed:
        (path / "state").write_text(json.dumps({"database": None}))
    with opened(path) as store:
        for n in range(200):
            assert fetch(store, key(n), 5000) in (payload(n, 5000), MISS, CORRUPT, ERROR)
        put(store, key("new"), b"new")
    with opened(path) as store:
        assert put(store, key("more"), b"more") is STORED
        check_integrity(store)
    with opened(path) as store:
        assert store.usage().objects == len(list(store.scan_all())) >= 1
        assert fetch(store, key("more"), 4) == b"more"


def test_looking_writes_nothing_and_lets_others_look(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(20)])
    before = {
        p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in [path, *path.rglob("*")]
    }
    with LmdbBackend(str(path), None) as store:
        assert [e.key for e in store.scan_all()]
        assert fetch(store, key(1), 5000) == payload(1, 5000)
        assert put(store, key("new"), b"new") is THROTTLED
        assert put(store, key(1), b"new") is HIT
        assert store.delete([key(1)]) == [False]
        store.flush()
        code = (
            f"from tiercache_backends.lmdb import LmdbBackend as L; print(len(list(L({str(path)!r},"
            " None).scan_all())))"
        )
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            == "20\n"
        )
    assert {
        p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in [path, *path.rglob("*")]
    } == before
    with LmdbBackend(str(path), None, access="write") as store:
        assert store.delete([key(1)]) == [True]


def test_a_file_that_is_cut_or_moved_under_an_open_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = """
import os, sys
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.lmdb.records import Record
from tiercache.testing.objects import fetch, key, put, payload
store = LmdbBackend(sys.argv[1], 16 << 20)
put(store, key(1), payload(1, 100_000))
os.truncate(sys.argv[1] + "/database/data.mdb", int(sys.argv[2]))
print(put(store, key("new"), b"new"), fetch(store, key(1), 100_000), store.delete([key(1)]), end=" ")
store.close()
store = LmdbBackend(sys.argv[1], 16 << 20)
print(put(store, key("new"), b"new"), fetch(store, key("new"), 3))
store.close()
"""
    for size in (0, 4096, 5 * 4096):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(size)], capture_output=True, text=True, check=False
        )
        answers = "error error [False] stored b'new'\n"
        assert (done.returncode, done.stdout) == (0, answers), done.stderr
    with opened(path) as store:
        assert put(store, key(2), b"2") is STORED
        path.rename(tmp_path / "moved")
        assert put(store, key(3), b"3") is ERROR
        with pytest.raises(StorageError, match="removed or moved"):
            store.flush()
        (tmp_path / "moved").rename(path)
        assert put(store, key(3), b"3") is STORED


def test_damaged_data_make_way_where_they_take_too_much_room(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(120):
            put(store, key(n), payload(n, 100_000))
    damage(path / "database" / "data.mdb", "zeroed")
    with opened(path) as store:
        for n in range(120):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        assert store.usage().payload_bytes > CAPACITY // 2
        assert disk_bytes(path) <= CAPACITY


def test_a_mac_finds_what_a_checksum_would_pass(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with opened(tmp_path / "s", mac_key=MacKey.from_file(Env(), str(secret))) as store:
        assert put(store, key("a"), payload("a", 20_000)) is STORED
        assert put(store, key("b"), payload("b", 20_000)) is STORED
        environment = environment_of(store)
        digest = key("a").digest
        record = environment.read(lambda txn: bytes(txn.get(digest, db=environment.objects)))
        forged = record.replace(to_set(key("a"), payload("a", 20_000)).meta.checksum, bytes(16))
        assert fetch(store, key("a"), 20_000) == payload("a", 20_000)
        environment.write(lambda txn: txn.put(digest, forged, db=environment.objects))
        assert store.get([to_get(key(name), 20_000) for name in "ba"]) == [HIT, CORRUPT]
    with pytest.raises(StoreFormatError, match="made with a MAC key"):
        opened(tmp_path / "s")
    with opened(tmp_path / "s", mac_key=MacKey.from_file(Env(), str(secret))) as store:
        assert fetch(store, key("b"), 20_000) == payload("b", 20_000)
