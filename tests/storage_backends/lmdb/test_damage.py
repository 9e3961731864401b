"""The `lmdb` store when its files are damaged, cut, moved or lied about."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.local.lmdb_file import LmdbFile

from tests.storage.backends import AgingEnv, copy_tree
from tests.storage_backends.lmdb.hooks import (
    CAPACITY,
    data_file,
    environment_of,
    flip,
    locate,
    opened,
    page_kinds,
)
from tests.storage_backends.local.files import DAMAGE, damage, disk_bytes
from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError, StoreFormatError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import chain, fetch, key, payload, put, to_set

HIT, MISS, STORED, CORRUPT, THROTTLED, ERROR = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.CORRUPT,
    Outcome.THROTTLED,
    Outcome.ERROR,
)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_costs_the_contents_and_nothing_else(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    damage(path / "database" / "data.mdb", how)
    with caplog.at_level(logging.ERROR), opened(path) as store:
        left = store.usage().objects
        assert 0 < left < 200 if how == "truncated" else left == 0
        assert all(fetch(store, key(n), 5000) in (payload(n, 5000), MISS) for n in range(300))
        assert set(store.set([to_set(key(n), payload(n, 5000)) for n in range(100)])) <= {STORED, HIT}
        assert disk_bytes(path) <= CAPACITY
        store.check_integrity()
    if how != "empty":
        assert "written anew" in caplog.text
    with opened(path) as store:
        assert fetch(store, key(99), 5000) == payload(99, 5000)


def test_a_zeroed_page_costs_what_lay_on_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.register_namespace(NamespaceRecord(b"n" * 32, {"model": "m"}))
        for k, parent in chain("s", 100):
            put(store, k, payload(k, 700), parent)
        store.set([to_set(key(n), payload(n, 9000)) for n in range(100)])
        put(store, key("big"), payload("big", 300_000))
        store.delete([key(n) for n in range(0, 100, 7)])
    data = path / "database" / "data.mdb"
    whole = data.read_bytes()
    file = LmdbFile(Env(), str(data))
    used = [first + i for first, pages in file.pages() for i in range(len(pages))]
    file.close()
    sizes = {key(n): 9000 for n in range(100) if n % 7} | {k: 700 for k, _ in chain("s", 100)}
    for page in [0, 1, *Random(1).sample(used, 25)]:
        spoiled = bytearray(whole)
        spoiled[page * 4096 : (page + 1) * 4096] = bytes(4096)
        data.write_bytes(spoiled)
        before = json.loads((path / "state").read_text())
        (path / "state").write_text(json.dumps(before | {"database": None}))
        with opened(path) as store:
            lost = sum(fetch(store, k, size) != payload(n, size) for k, n, size in _named(sizes))
            # A leaf has some 25 records, or four small payloads.
            assert lost <= 30, page
            assert put(store, key("new"), b"new") is STORED
            store.check_integrity()


def _named(sizes: dict[ObjectKey, int]) -> list[tuple[ObjectKey, object, int]]:
    names = {key(n): n for n in range(100)}
    return [(k, names.get(k, k), size) for k, size in sizes.items()]


def test_a_kill_while_an_opening_repairs_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(100)])
    with (path / "database" / "data.mdb").open("r+b") as file:
        file.write(bytes(4096))
    copies: list[Path] = []

    def copy(real: Callable[..., object], arguments: tuple[object, ...]) -> object:
        copies.append(path.with_name(f"killed{len(copies)}"))
        copy_tree(path, copies[-1])
        return real(*arguments)

    env = FaultEnv()
    for call in ("rename", "unlink", "commit"):
        env.add(call, copy, times=10**6)
    opened(path, env=env).close()
    for left in copies:
        with opened(left) as store:
            assert all(fetch(store, key(n), 5000) == payload(n, 5000) for n in range(100)), left
            store.check_integrity()


def test_a_repair_that_failed_half_way_is_repeated_from_its_begin(tmp_path: Path) -> None:
    env = AgingEnv()
    with opened(tmp_path / "s", env=env) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
        environment_of(store).note_damage()
        env.fail("commit", at=5, error=ENOSPC)  # behind some of the objects
        assert store.exists([key(0)]) == [True]
        assert not os.listdir(tmp_path / "s" / "database.new"), "a full disk does not keep what is of no use"
        env.later += 100.0
        assert store.exists([key(0)]) == [True]
        assert store.usage().objects == 300
        assert all(fetch(store, key(n), 5000) == payload(n, 5000) for n in range(300))
        store.check_integrity()


def test_a_damaged_object_stays_hidden_while_another_process_keeps_the_store_from_a_repair(
    tmp_path: Path,
) -> None:
    env, size = AgingEnv(), 30_000
    code = (
        "import sys; from tiercache_backends.lmdb import LmdbBackend as L;"
        f" s = L({str(tmp_path / 's')!r}, {CAPACITY}); print(flush=True); sys.stdin.read()"
    )
    with opened(tmp_path / "s", env=env) as store:
        put(store, key(1), payload(1, size))
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            environment_of(store).note_damage()
            assert store.exists([key(1)]) == [True]
            flip(data_file(store), locate(store, key(1))[0][0], 1)
            assert fetch(store, key(1), size) is CORRUPT
            for _ in range(2):
                assert fetch(store, key(1), size) is MISS
                env.later += 100.0
            other.communicate()
        assert fetch(store, key(1), size) is MISS
        assert not environment_of(store).is_damaged(), "nobody else has it open now"
        assert store.usage().objects == 0
        store.check_integrity()


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
from tiercache.testing.objects import fetch, key, put, payload
store = LmdbBackend(sys.argv[1], 16 << 20)
put(store, key(1), payload(1, 100_000))
os.truncate(sys.argv[1] + "/database/data.mdb", int(sys.argv[2]))
print(put(store, key("new"), b"new"), fetch(store, key(1), 100_000), store.delete([key(1)]), end=" ")
print(put(store, key("new"), b"new"), fetch(store, key("new"), 3))
store.close()
"""
    for size in (0, 4096, 5 * 4096):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(size)], capture_output=True, text=True, check=False
        )
        answers = "error miss [False] stored b'new'\n"
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


def test_no_flipped_bit_of_a_payload_is_served(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        size = 300_000
        for where in range(6):
            put(store, key(where), payload(where, size))
            pieces = locate(store, key(where))
            assert sum(length for _, length in pieces) == size
            offset, length = pieces[where * 7 % len(pieces)]
            flip(data_file(store), offset + where * 1237 % length, 1 << where)
            assert fetch(store, key(where), size) is CORRUPT
            assert fetch(store, key(where), size) is MISS
            assert put(store, key(where), payload(where, size)) is STORED
        assert store.usage().details["corrupt"] == 6
        store.check_integrity()


def test_a_mac_finds_what_a_checksum_would_pass(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with opened(tmp_path / "s", mac_key=MacKey.from_file(Env(), str(secret))) as store:
        assert put(store, key("a"), payload("a", 200_000)) is STORED
        assert put(store, key("b"), payload("b", 200_000)) is STORED
        environment = environment_of(store)
        place = key("a").digest[32:] + key("a").digest[:32]
        record = environment.read(lambda txn: bytes(txn.get(place, db=environment.objects)))
        forged = record.replace(to_set(key("a"), payload("a", 200_000)).meta.checksum, bytes(16))
        assert fetch(store, key("a"), 200_000) == payload("a", 200_000)
        environment.write(lambda txn: txn.put(place, forged, db=environment.objects))
        assert fetch(store, key("a"), 200_000) is CORRUPT
    with pytest.raises(StoreFormatError, match="made with a MAC key"):
        opened(tmp_path / "s")
    with opened(tmp_path / "s", mac_key=MacKey.from_file(Env(), str(secret))) as store:
        assert fetch(store, key("b"), 200_000) == payload("b", 200_000)


GUARD = 100
"""Seconds, fifty times what it takes on a quiet machine."""


def bad_page(path: Path, kind: str, which: float) -> dict[str, Any] | None:
    """Run `bad_page.py` and return its report; None if LMDB ended the process or hangs.

    The process hangs if LMDB damaged its heap.
    """
    arguments = [sys.executable, "-m", "tests.storage_backends.lmdb.bad_page", str(path), kind, str(which)]
    try:
        child = subprocess.run(
            arguments, capture_output=True, cwd=Path(__file__).parents[3], check=False, timeout=GUARD
        )
    except subprocess.TimeoutExpired:
        return None
    if child.returncode in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return None
    assert child.returncode == 0, child.stderr[-2000:]
    found: dict[str, Any] = json.loads(child.stdout)
    assert found["wrong"] == 0
    return found


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("objects leaf", 30),
        pytest.param("objects branch", 1, marks=pytest.mark.slow),
        ("parts overflow", 1),
        ("parts leaf", 150),
        ("ages leaf", 0),
    ],
)
def test_one_bad_page_costs_what_lies_on_it(tmp_path: Path, kind: str, lost: int) -> None:
    found = bad_page(tmp_path / "s", kind, 0.5)
    if found is None:
        assert kind == "ages leaf", "where LMDB joins leaves it does not look at the neighbour"
        assert bad_page(tmp_path / "s", "again", 0) == {
            "old": 360,
            "hits": 360,
            "wrong": 0,
            "more": {"stored": 100},
        }
        return
    assert found["old"] - lost <= found["first"]["hit"] <= found["there"]
    assert found["together"].get("stored", 0) > 60
    assert found["single"].get("stored", 0) > 60
    assert found["good"] == found["together"]["stored"] + found["single"]["stored"], (
        "what is elsewhere is written and read"
    )
    assert found["back"] >= found["there"]
    assert found["gone"] * 40 > found["old"] - lost - 200
    if kind == "parts overflow":
        assert found["first"] == {"hit": found["old"] - 1, "corrupt": 1}
    if kind.startswith("parts"):
        assert found["back"] == found["old"], "what was on the page can be stored anew"
    assert found["counted"]


@pytest.mark.parametrize("kind", ["free leaf", "parts branch", "objects branch"])
def test_damage_above_the_leaves_costs_one_answer_and_no_object(tmp_path: Path, kind: str) -> None:
    found = bad_page(tmp_path / "s", kind, -1)
    assert found is not None
    assert found["first"]["hit"] >= found["old"] - 1, "the store is written anew after the first bad answer"
    assert found["there"] == found["back"] == found["old"]
    assert sum(found["together"].values()) == 100
    assert found["single"]["stored"] >= 99
    assert found["counted"]


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
        (b"parts", "root", True),
        (b"objects", "root", True),
        (b"objects", "name", False),
    ],
)
def test_a_tree_that_leads_elsewhere_costs_no_object(
    tmp_path: Path, name: bytes, what: str, killed: bool
) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(200)])
        data = data_file(store)
    spoil_entry(data, name, what)
    if killed:
        state = json.loads((path / "state").read_text())
        (path / "state").write_text(json.dumps(state | {"database": None}))
    with opened(path) as store:
        for n in range(200):
            assert fetch(store, key(n), 5000) in (payload(n, 5000), MISS, CORRUPT, ERROR)
        put(store, key("new"), b"new")
        lost = [n for n in range(200) if fetch(store, key(n), 5000) != payload(n, 5000)]
        assert len(lost) <= 1, "the store was written anew after the first bad answer, if not before"
        assert not (lost and killed), "a store whose owner died is examined before it is used"
        assert put(store, key("more"), b"more") is STORED
        store.check_integrity()
    with opened(path) as store:
        assert fetch(store, key(7), 5000) in (payload(7, 5000), MISS)
        assert store.usage().objects == len(list(store.scan_all())) >= 200


def test_a_failure_of_the_binding_is_an_outcome(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        assert put(store, key(1), b"1") is STORED
        env.add("commit", raise_system_error)
        assert put(store, key(2), b"2") is STORED, "the second try has done it"
        assert fetch(store, key(1), 1) == b"1"
        assert fetch(store, key(2), 1) == b"2"
        assert store.usage().objects == 2
        store.check_integrity()


def raise_system_error(*_: object) -> object:
    """Raise what the binding raises for an entry that claims an impossible size."""
    raise SystemError("Negative size passed to PyBytes_FromStringAndSize")
