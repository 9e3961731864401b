"""Others in the same pool: clients that put other bytes under our names, and stores of other prefixes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tiercache_backends.mooncake.header import HEADER_BYTES, write_header
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.processes import refuses_a_child
from tests.storage_backends.mooncake.hooks import Vandal
from tests.storage_backends.mooncake.rig import Pool
from tiercache.errors import StorageError
from tiercache.storage.base import SetItem
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_get, to_set

SIZE = 20_000


def open_in(pool: Pool, prefix: str, **more: object) -> MooncakeBackend:
    return MooncakeBackend(read_settings({**pool.section(prefix, staging="4MiB"), **more}))


@pytest.fixture
def store(pool: Pool, request: pytest.FixtureRequest) -> Iterator[MooncakeBackend]:
    with open_in(pool, f"n{abs(hash(request.node.name)) % 10**9}") as opened:
        yield opened
        opened.clear()


def forged(store: MooncakeBackend, item: SetItem) -> bytes:
    """An object as a client would make it that knows the format."""
    header = bytearray(HEADER_BYTES)
    name = store._names.of(key("a").digest)  # private: a client that knows the names
    write_header(memoryview(header), name, item, 0)
    return bytes(header) + b"".join(item.buffers)


def test_what_others_put_under_our_names_is_never_returned(store: MooncakeBackend, pool: Pool) -> None:
    data = payload("a", SIZE)
    good, other = to_set(key("a"), data), to_set(key("b"), data)
    longer = to_set(key("a"), payload("a", SIZE + 1))
    lying = good._replace(meta=replace(good.meta, length=SIZE))
    sound = forged(store, good)
    vandal = Vandal(store._settings)  # private: another client of the same pool
    cases = {
        "noise": (os.urandom(HEADER_BYTES + SIZE), CORRUPT),
        "zeros": (bytes(HEADER_BYTES + SIZE), CORRUPT),
        "a short object": (b"x" * 100, CORRUPT),
        "a header alone": (sound[:HEADER_BYTES], CORRUPT),
        "a long object": (sound + b"x", CORRUPT),
        "a truncated object": (sound[:-1], CORRUPT),
        "the bytes of another key": (forged(store, other), CORRUPT),
        "a header of another length": (forged(store, lying)[:-10], CORRUPT),
        "a sound object of another length": (forged(store, longer), ERROR),
        "a bit of the header": (bytes([sound[0] ^ 1]) + sound[1:], CORRUPT),
        "a bit of the namespace": (sound[:113] + bytes([sound[113] ^ 1]) + sound[114:], CORRUPT),
        "the object itself": (sound, HIT),
    }
    try:
        for what, (there, expected) in cases.items():
            vandal.write(key("a"), there)
            store.describe([key("a")])
            item = to_get(key("a"), SIZE)
            assert store.get([item]) == [expected], what
            assert b"".join(item.buffers) == (data if expected is HIT else b"\xaa" * SIZE), what
            if expected is CORRUPT:
                assert store.set([good]) == [STORED], what
                assert fetch(store, key("a"), SIZE) == data
            store.delete([key("a")])
    finally:
        vandal.close()
    assert store.usage().details["corrupt"] == 10


def test_clear_takes_the_objects_of_its_own_prefix_only(pool: Pool) -> None:
    """A dot is no wildcard, and a prefix of a prefix is another store."""
    prefixes = ["a.b", "a", "a.b.c", "axb", "a.b-", "A.b"]
    stores = [open_in(pool, prefix) for prefix in prefixes]
    try:
        for store in stores:
            assert put(store, key("a"), payload("a", SIZE)) is STORED
            assert put(store, key("b"), payload("b", SIZE)) is STORED
        assert stores[0].clear() == 2
        assert [sum(store.exists([key("a"), key("b")])) for store in stores] == [0, 2, 2, 2, 2, 2]
        assert stores[0].clear() == 0
        assert put(stores[0], key("a"), payload("a", SIZE)) is STORED
    finally:
        for store in stores:
            store.clear()
            store.close()


def test_a_store_that_cannot_list_says_so(pool: Pool) -> None:
    with (
        open_in(pool, "unlisted", http="127.0.0.1:1") as broken,
        pytest.raises(StorageError, match="metrics_port"),
    ):
        broken.usage()
    section = {k: v for k, v in pool.section("unlisted").items() if k != "http"}
    with MooncakeBackend(read_settings(section)) as store:
        assert not store.capabilities.listed
        put(store, key("a"), payload("a", SIZE))
        with pytest.raises(StorageError, match=r"cannot list or count .* add http=HOST:PORT"):
            store.scan()
        usage = store.usage()
        assert (usage.objects, usage.capacity_bytes) == (0, 0)
        assert "add http=HOST:PORT" in str(usage.details["unlisted"])
        [entry] = store.describe([key("a")])
        assert entry is not None
        assert entry.meta.length == SIZE
        assert store.clear() == 1


def test_a_forked_process_is_refused_and_ends_well(store: MooncakeBackend) -> None:
    assert refuses_a_child(store)
    assert put(store, key("a"), payload("a", SIZE)) is STORED


def test_a_process_that_does_not_close_ends_silently(pool: Pool) -> None:
    program = (
        "import sys\n"
        "from tiercache.storage import open_backend\n"
        "from tiercache.testing.objects import fetch, key, payload, put\n"
        "from tiercache_backends.mooncake.store import MooncakeBackend\n"
        "from tiercache_backends.mooncake.settings import read_settings\n"
        "from tiercache.config.urls import section_of\n"
        "section = section_of(sys.argv[1]); section.pop('type')\n"
        "MooncakeBackend(read_settings(section)).close()\n"
        "store = MooncakeBackend(read_settings(section))\n"
        "print(put(store, key('a'), payload('a', 9)), fetch(store, key('x'), 9), store.clear())\n"
    )
    command = [sys.executable, "-c", program, pool.url("careless")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "stored miss 1\n", "")


def test_a_client_serves_the_next_store_unless_it_lends_memory(pool: Pool) -> None:
    def client(store: MooncakeBackend) -> object:
        return store._link._client  # private: whose client it is

    with open_in(pool, "first") as store:
        first, capacity = client(store), store.usage().capacity_bytes
    with open_in(pool, "second") as store, open_in(pool, "third") as other:
        assert client(store) is first
        assert client(other) is not first
        assert put(store, key("a"), payload("a", SIZE)) is STORED
        assert store.clear() == 1
    with open_in(pool, "lender", segment="32MiB") as store:
        assert store.usage().capacity_bytes > capacity
    with open_in(pool, "fourth") as store:
        assert store.usage().capacity_bytes == capacity
