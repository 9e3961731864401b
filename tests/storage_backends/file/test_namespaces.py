"""Namespaces of a `file` store: they never fill the catalog, and those without objects are forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

from tiercache_backends.file import FileBackend

from tests.storage.integrity import check_tables
from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.conformance.hooks import STORED, THROTTLED
from tiercache.testing.objects import fetch, key, put, to_set

CAPACITY = 16 << 20
MOST = CAPACITY // 16 // 2048
"""Namespaces of a store of this capacity."""


def store_in_each(store: StorageBackend, first: int, count: int) -> list[Outcome]:
    """Store an object in each of some namespaces."""
    numbers = range(first, first + count)
    return [
        outcome
        for at in numbers[::500]
        for outcome in store.set(
            [to_set(key(n), b"x", namespace=n.to_bytes(64)) for n in range(at, min(at + 500, numbers.stop))]
        )
    ]


def flood_and_die(path: str) -> None:
    """Use all namespaces, empty most of them, and end by SIGKILL."""
    store = FileBackend(path, CAPACITY)
    store.register_namespace(NamespaceRecord(b"named", {"model": "m"}, states=True))
    assert put(store, key("old"), b"old") is STORED
    outcomes = store_in_each(store, 0, 2000)
    assert outcomes == [STORED] * (MOST - 2) + [THROTTLED] * (2000 - MOST + 2)
    assert put(store, key("later"), b"old") is STORED, "a namespace that is known takes more"
    mixed = [to_set(key("a"), b"a"), to_set(key("b"), b"b", namespace=b"new"), to_set(key("c"), b"c")]
    assert store.set(mixed) == [STORED, THROTTLED, STORED]
    store.register_namespace(NamespaceRecord(b"beyond", {"model": "m"}, states=True))
    assert [record.namespace for record in store.namespaces()] == [b"named"]
    assert all(store.delete([key(n) for n in range(7, MOST - 2)]))
    store.flush()
    os.kill(os.getpid(), SIGKILL)


def test_namespaces_without_objects_are_forgotten_when_the_store_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    command = [sys.executable, "-m", "tests.storage_backends.file.test_namespaces", path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -SIGKILL, done.stderr
    for again in range(2):
        with FileBackend(path, CAPACITY) as store:
            assert [record.namespace for record in store.namespaces()] == [b"named"]
            assert fetch(store, key("old"), 3) == b"old"
            kept = {entry.key: entry.meta.namespace for entry in store.scan_all()}
            assert [kept[key(n)] for n in range(7)] == [n.to_bytes(64) for n in range(7)]
            first = 10_000 + again * 400
            assert store_in_each(store, first, 400) == [STORED] * 400
            kept = {entry.key: entry.meta.namespace for entry in store.scan_all()}
            assert [kept[key(n)] for n in range(first, first + 400)] == [
                n.to_bytes(64) for n in range(first, first + 400)
            ]
            check_tables(store)
            store.delete([key(n) for n in range(first, first + 400)])


def test_a_store_with_more_namespaces_opens(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with FileBackend(path, 4 * CAPACITY) as store:
        assert store_in_each(store, 0, MOST + 100) == [STORED] * (MOST + 100)
    with FileBackend(path, CAPACITY) as store:
        assert store.set([to_set(key("new"), b"x", namespace=(5).to_bytes(64))]) == [STORED]
        assert {entry.meta.namespace for entry in store.scan_all()} >= {n.to_bytes(64) for n in range(100)}


def test_records_never_fill_the_catalog(tmp_path: Path) -> None:
    with FileBackend(str(tmp_path / "s"), CAPACITY) as store:
        for n in range(500):
            store.register_namespace(NamespaceRecord(b"%d" % n, {"model": "m" * 4000}))
        assert len(store.namespaces()) == CAPACITY // 16 // 8 // 4021
        assert store.set([to_set(key(0), b"abc", namespace=b"499")]) == [STORED]
        assert store.set([to_set(key(n), b"abc") for n in range(1, 800)]) == [STORED] * 799
        assert store.usage().details["namespace_failures"] > 0


if __name__ == "__main__":
    flood_and_die(sys.argv[1])
