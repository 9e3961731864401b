"""Namespaces of an `lmdb` store: those without objects and records are forgotten when it fills."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from tiercache_backends.lmdb.transaction import names_in

from tests.storage_backends.lmdb.hooks import check_integrity, environment_of, lmdb_of, opened
from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.objects import key, to_set

STORED = Outcome.STORED


def names(store: StorageBackend) -> dict[bytes, int]:
    environment = environment_of(lmdb_of(store))
    found = environment.read(partial(names_in, environment))
    return {namespace: name.number for namespace, name in found.items()}


def forget(store: StorageBackend) -> None:
    """Do as a set that must evict for the first time."""
    lmdb = lmdb_of(store)
    lmdb._mirror.read()  # private: as below
    lmdb._writer._forget_namespaces()  # private: a full store would take long to make here


def store_in_each(store: StorageBackend, who: str, first: int, count: int) -> None:
    """Store an object in each of some namespaces."""
    numbers = range(first, first + count)
    items = [to_set(key((who, n)), b"x", namespace=f"{who} {n}".encode()) for n in numbers]
    assert store.set(items) == [STORED] * count


def test_namespaces_without_objects_are_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        store.register_namespace(NamespaceRecord(b"named", {"model": "m"}))
        store_in_each(store, "a", 0, 300)
        store.delete([key(("a", n)) for n in range(3, 300)])
        assert len(names(store)) == 301
    with opened(tmp_path / "s") as store:
        forget(store)
        before = names(store)
        assert set(before) == {b"named", b"a 0", b"a 1", b"a 2", b"a 299"}, "the last number is kept"
        store_in_each(store, "b", 0, 2)
        assert {names(store)[b"b 0"], names(store)[b"b 1"]} == {302, 303}
        assert store.describe([key(("a", 2))])[0].meta.namespace == b"a 2"  # type: ignore[union-attr]
        assert [record.namespace for record in store.namespaces()] == [b"named"]
        check_integrity(store)


def test_a_process_beside_never_loses_a_namespace(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        command = [sys.executable, "-m", "tests.storage_backends.lmdb.test_namespaces", str(path)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as child:
            turn = 0
            while child.poll() is None:
                store_in_each(store, "mine", turn * 5, 5)
                store.delete([key(("mine", n)) for n in range(turn * 5, turn * 5 + 4)])
                forget(store)
                turn += 1
        assert child.returncode == 0
        forget(store)
        assert turn > 3
        there = {entry.key: entry.meta.namespace for entry in store.scan_all()}
        assert there == {
            key((who, n)): f"{who} {n}".encode()
            for who, last in (("mine", turn), ("other", 100))
            for n in range(4, last * 5, 5)
        }
        assert len(names(store)) <= len(there) + 1
        check_integrity(store)


def beside(path: Path) -> None:
    with opened(path) as store:
        for turn in range(100):
            store_in_each(store, "other", turn * 5, 5)
            store.delete([key(("other", n)) for n in range(turn * 5, turn * 5 + 4)])


if __name__ == "__main__":
    beside(Path(sys.argv[1]))
