"""The contract, over every store and every wrapper: the suite, and random histories beside a dict."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tiercache_backends.file import FileBackend
from tiercache_backends.lmdb import LmdbBackend

from tests.examples import example_count
from tests.faulty import Faulty, Outage, Rates
from tests.storage.backends import FileHooks, MemoryHooks, wrapped
from tests.storage_backends.file.store import catalog_of
from tests.storage_backends.lmdb.hooks import LmdbHooks, environment_of
from tiercache.errors import StorageError
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.wrappers import Metered
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, key, payload, put, to_set
from tiercache.testing.stateful import BackendMachine, EvictingMachine

OFTEN = Rates(error=0.05, throttled=0.05, corrupt=0.05, miss=0.05)


def faulty(inner: StorageBackend) -> StorageBackend:
    return Faulty(inner, OFTEN, seed=3)


class TestMemory(MemoryHooks):
    pass


class TestFile(FileHooks):
    pass


def every_wrapper(inner: StorageBackend) -> StorageBackend:
    """Put all wrappers around a store, none of which does any harm."""
    return Metered(Outage(Faulty(inner, Rates())))


TestEveryWrapper = pytest.mark.slow(wrapped(MemoryHooks, every_wrapper))
STORES = {
    "memory": (MemoryHooks, 40, 30),
    "file": (FileHooks, 25, 25),
    "faulty memory": (wrapped(MemoryHooks, faulty, faults=OFTEN.outcomes), 30, 20),
    "metered, faulty file": (
        wrapped(FileHooks, lambda inner: Metered(faulty(inner)), faults=OFTEN.outcomes),
        10,
        10,
    ),
}
"""Hooks, and how many histories each of the two machines tries."""


@pytest.mark.parametrize("hooks", [FileHooks, LmdbHooks])
def test_a_store_that_cannot_read_its_catalog_does_not_call_it_empty(hooks, tmp_path):
    store = hooks().open_store(tmp_path / "s")
    put(store, key("a"), payload("a", 5000))
    if isinstance(store, FileBackend):
        os.ftruncate(catalog_of(store)._fd, 0)  # private: a log that is cut under an open store
    else:
        environment_of(store)._lmdb.close()  # private: a database that fails at whatever is asked
    for call in (store.scan, lambda: store.describe([key("a")])):
        with pytest.raises(StorageError, match="cannot be"):
            call()
    if isinstance(store, LmdbBackend):  # the other has these in memory
        for call in (store.usage, store.namespaces):
            with pytest.raises(StorageError, match="cannot be"):
                call()
    store.close()


def test_a_namespace_whose_record_cannot_be_read_has_none(tmp_path: Path) -> None:
    hooks, folder = LmdbHooks, "database"
    names = {namespace: number for number, namespace in enumerate((NAMESPACE, OTHER_NAMESPACE, b"n"), 1)}
    with hooks().open_store(tmp_path / "s") as store:
        for namespace in names:
            store.register_namespace(NamespaceRecord(namespace, {"model": "m"}, states=True))
            store.set([to_set(key(namespace), payload(namespace, 100), namespace=namespace)])
    values = {NAMESPACE: [1, {"model": "m"}, False], OTHER_NAMESPACE: [2, None, False], b"n": "damaged"}
    with (
        lmdb.open(str(tmp_path / "s" / folder), max_dbs=8) as environment,
        environment.begin(write=True) as txn,
    ):
        db = environment.open_db(b"namespaces", txn)
        for namespace, value in values.items():
            txn.put(namespace, msgpack.packb(value), db=db)
    with hooks().open_store(tmp_path / "s") as store:
        assert store.namespaces() == [NamespaceRecord(NAMESPACE, {"model": "m"})]
        found = {entry.key: entry.meta.namespace for entry in store.scan_all()}
        assert found == {key(NAMESPACE): NAMESPACE, key(OTHER_NAMESPACE): OTHER_NAMESPACE, key(b"n"): b""}
        store.register_namespace(NamespaceRecord(OTHER_NAMESPACE, {}, states=True))
        for namespace in (b"new", b"newer"):
            store.set([to_set(key(namespace), payload(namespace, 100), namespace=namespace)])
            assert [entry.key for entry in store.scan_all(namespace)] == [key(namespace)], "one number each"
        assert {r.namespace: r.states for r in store.namespaces()} == {
            NAMESPACE: False,
            OTHER_NAMESPACE: True,
        }


_QUICK = settings(deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck))


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("machine", "hooks", "examples"),
    [
        pytest.param(machine, hooks, counts[n], id=f"{name}-{machine.__name__}")
        for n, machine in enumerate((BackendMachine, EvictingMachine))
        for name, (hooks, *counts) in STORES.items()
    ],
)
def test_random_histories_match_a_dict(machine, hooks, examples):
    run_state_machine_as_test(
        type("M", (machine,), {"suite": hooks}),
        settings=settings(_QUICK, max_examples=example_count(examples)),
    )
