"""The small parts of stores: settings, vectors, checksums, a failing disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiercache_backends.file import FileBackend
from tiercache_backends.lmdb.environment import PageBudget
from tiercache_backends.memory import MemoryBackend

from tests.faults import FaultEnv
from tiercache.core import Outcome, PoolName
from tiercache.errors import ClosedError, ConfigError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.checksum import checksum
from tiercache.storage.env import read_all, write_all
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import open_backend
from tiercache.storage.vectors import parts, take
from tiercache.testing.objects import chain, fetch, key, payload, put, split


def test_stores_open_by_url_and_by_section(tmp_path: Path) -> None:
    with open_backend("memory://?capacity=64KiB") as store:
        assert isinstance(store, MemoryBackend)
        assert store.usage().capacity_bytes == 65536
    with open_backend(f"file://{tmp_path}/a%20b?capacity=16MiB&durability=power") as store:
        assert isinstance(store, FileBackend)
        assert store.usage().capacity_bytes == 16 << 20
    assert (tmp_path / "a b" / "format").exists()
    with open_backend({"type": "file", "path": str(tmp_path / "b"), "capacity": 16 << 20}) as store:
        assert isinstance(store, FileBackend)


@pytest.mark.parametrize("url", ["memory://", "file://{}?capacity=8MiB", "lmdb://{}?capacity=8MiB"])
def test_orphans_are_counted(url: str, tmp_path: Path) -> None:
    with open_backend(url.format(tmp_path / "s")) as store:
        pages = chain("s", 4)
        for k, parent in pages:
            put(store, k, b"x", parent)
        state = key(("s", 3), PoolName.MAMBA)
        put(store, state, b"x", state.page_key)
        assert store.usage().details["orphans"] == 0
        store.delete([pages[1][0], pages[3][0]])
        assert store.usage().details["orphans"] == 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing://", "'nothing' is unknown; use one of chain, file, grpc, lmdb, memory"),
        ("/var/lib/x", "not a URL"), ("memory:", "not a URL"), ({}, "no type"),
        ({"type": "memory", "size": 1}, "no setting 'size'; it has capacity"),
        ("memory://?capacity=lots", "'capacity': 'lots' is not a size"),
        ("memory://?capacity=1&capacity=2", "twice"), ("file:///x", "needs 'capacity'"),
        ("file://x?capacity=1GiB", "three slashes"),
        ("file:///x?capacity=1GiB&durability=no", "use process or power"),
        ({"type": "file", "path": "x", "capacity": 1}, "not an absolute path"),
    ],
)  # fmt: skip
def test_bad_specs_say_what_is_known(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_backend(spec)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("None", "needs grpcio, which is not installed: pip install 'tiercache-hybrid[grpc]'"),
        ("types.ModuleType('grpc')", "cannot be imported: cannot import name"),
    ],
)
def test_a_missing_package_is_told_from_a_broken_one(module: str, said: str) -> None:
    code = (
        f"import sys, types; sys.modules['grpc'] = {module}\n"
        "from tiercache.errors import ConfigError; from tiercache.storage.registry import open_backend\n"
        "try:\n    open_backend('grpc://127.0.0.1:1')\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said in done.stdout, done


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 50), st.integers(0, 50))
def test_take_is_a_slice(sizes: list[int], start: int, stop: int) -> None:
    whole = bytes(range(sum(sizes)))
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(whole)[at : at + size])
        at += size
    assert b"".join(take(views, start, stop)) == whole[start:stop]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 12))
def test_parts_are_the_bytes_of_the_buffers(sizes: list[int], nbytes: int) -> None:
    data = bytes(range(sum(sizes)))
    found = list(parts([memoryview(data)[sum(sizes[:n]) :][:size] for n, size in enumerate(sizes)], nbytes))
    assert b"".join(found) == data
    assert [len(part) for part in found[:-1]] == [nbytes] * (len(found) - 1)
    assert len(found) == max(1, -(-len(data) // nbytes))


@given(st.binary(min_size=1, max_size=300), st.integers(1, 6), st.integers(0, 100))
def test_the_checksum_sees_the_payload_and_the_key_alone(data: bytes, pieces: int, slack: int) -> None:
    whole = checksum(key("a"), [memoryview(data)], len(data))
    assert checksum(key("a"), split(bytearray(data + b"?" * slack), pieces), len(data)) == whole
    assert checksum(key("b"), [memoryview(data)], len(data)) != whole
    assert checksum(key("a", PoolName.MAMBA), [memoryview(data)], len(data)) != whole
    assert checksum(key("a"), [memoryview(bytes([data[0] ^ 1]) + data[1:])], len(data)) != whole
    assert len(whole) == 16


def test_short_reads_and_writes_are_taken_up(tmp_path: Path) -> None:
    env = FaultEnv(seed=3)
    fd = env.open(str(tmp_path / "f"), os.O_RDWR | os.O_CREAT)
    data = payload("x", 50_000)
    env.shorten("pwritev", times=5)
    env.shorten("preadv", times=5)
    write_all(env, fd, split(bytearray(data), 2000), 7)
    target = bytearray(60_000)
    assert read_all(env, fd, split(target, 1500), 7) == 50_000
    assert target[:50_000] == data
    assert env.calls["pwritev"] >= 6
    env.close(fd)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_record_of_an_impossible_namespace_harms_nothing(tmp_path, kind, caplog):
    """LMDB takes no such key, which must not look like damage, or fail the transactions of others."""
    with open_backend(f"{kind}://{tmp_path}/s?capacity=16MiB") as store:
        assert put(store, key(1), b"1") is Outcome.STORED
        for namespace in (b"", bytes(65), bytes(512)):
            store.register_namespace(NamespaceRecord(namespace, {"model": "m"}, states=True))
            assert put(store, key(namespace), b"2") is Outcome.STORED
        assert fetch(store, key(1), 1) == b"1"
        assert not store.namespaces()
    assert not caplog.records


def test_a_gate_waits_for_calls_inside() -> None:
    gate = CallGate("it")
    with gate:
        closing = Thread(target=gate.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        with pytest.raises(ClosedError, match="it is closed"):
            gate.__enter__()
    closing.join(30)
    assert not closing.is_alive()
    assert not gate.close(), "only the first caller releases"


@pytest.mark.parametrize("map_pages", [512, 4096, 1 << 20, 1 << 28])
def test_a_transaction_of_lmdb_is_bounded_whatever_the_capacity(map_pages: int) -> None:
    budget = PageBudget(map_pages, 4096)
    assert all(0 < budget.burst(used) <= (8 << 20) // 4096 for used in (0, budget.limit // 2, budget.limit))
    assert 2 * budget.burst(budget.limit) <= budget.reserve, "two in a row fit into what is kept free"
