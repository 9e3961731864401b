"""Memory that the daemon may still touch after the client stopped waiting is not reused before that is over.

The daemon is stopped, or its store is slow, in the middle of a call. What it does later must not reach memory
that was given to somebody else meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.pools.integrity import check_arena
from tests.storage_backends.chain.stores import chain_over
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch, section
from tests.storage_backends.grpc.test_planes import connection_of
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.objects import fetch, key, payload, put, to_get, to_set

BLOCK = 4096
SIZE = 4 * BLOCK
OLD = payload("old", SIZE)
STORES = {
    "memory": "memory://?capacity=128MiB",
    "file": "file://{}/file?capacity=128MiB",
    "lmdb": "lmdb://{}/lmdb?capacity=128MiB",
    "chain": "memory://?capacity=32MiB&tier_name=near,file://{}/far?capacity=128MiB&tier_name=far",
}
HIT, STORED, UNAVAILABLE = Outcome.HIT, Outcome.STORED, Outcome.UNAVAILABLE


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    store = f"file://{tmp_path_factory.mktemp('daemon')}/store?capacity=16MiB"
    with Daemon("unix", Path(tempfile.mkdtemp(dir=scratch())), store) as started:
        yield started


@pytest.fixture
def daemon(running: Daemon) -> Iterator[Daemon]:
    """A daemon that is neither stopped nor slow, and may have objects of the tests before."""
    yield running
    running.go_on()
    running.slow(0)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(8 * BLOCK, BLOCK, huge_pages=False)
    yield made
    made.close()


def client_of(daemon: Daemon, **more: Any) -> GrpcBackend:
    given = {"timeout": "500ms", "transfer_timeout": "500ms", "breaker_pause": "100ms", **more}
    return GrpcBackend(read_settings(section("unix", daemon.where, **given)))


def views(arena: HostArena, blocks: list[int]) -> list[memoryview]:
    return [arena.view(block) for block in blocks]


def hits_come_back(client: GrpcBackend, item: GetItem) -> None:
    until(lambda: client.get([item]) == [HIT])


@pytest.mark.parametrize("how", ["slow", "stopped"])
def test_a_late_write_meets_nobody(daemon: Daemon, arena: HostArena, how: str) -> None:
    """All blocks but the get's are in use, so its are freed and wanted again at once, as under pressure."""
    with client_of(daemon) as client:
        client.attach(arena)
        until(lambda: put(client, key("old"), OLD) in (STORED, HIT))
        blocks = arena.alloc(4)
        others = arena.alloc(4)
        daemon.slow(60)
        if how == "stopped":
            # It has the request, and is in the store, when it is stopped; the write comes after it goes on.
            Thread(target=lambda: (until(daemon.entered), daemon.stop())).start()
        begun = time.monotonic()
        assert client.get([GetItem(key("old"), views(arena, blocks.tolist()), SIZE)]) == [UNAVAILABLE]
        assert time.monotonic() - begun < 30, "it does not wait for the daemon"
        assert daemon.entered(), "the daemon is at it"
        arena.free(blocks)
        assert (arena.available, arena.withheld) == (0, 4), "not to be handed out"
        arena.free(others)
        again = arena.alloc(4)
        assert sorted(again.tolist()) == sorted(others.tolist())
        mine = b"\x55" * BLOCK
        for view in views(arena, again.tolist()):
            view[:] = mine
        assert b"".join(views(arena, blocks.tolist())) == bytes(SIZE), "nothing was written yet"
        if how == "stopped":
            daemon.slow(0)
            time.sleep(0.5)
            assert arena.withheld == 4, "as long as it is stopped"
            daemon.go_on()
        daemon.slow(0)
        until(lambda: arena.available == 4)
        assert arena.withheld == 0
        assert b"".join(views(arena, blocks.tolist())) == OLD, "the late write came before"
        assert all(view == mine for view in views(arena, again.tolist()))
        check_arena(arena)
        fresh = arena.alloc(4)
        hits_come_back(client, GetItem(key("old"), views(arena, fresh.tolist()), SIZE))
        assert b"".join(views(arena, fresh.tolist())) == OLD


def test_a_request_that_waits_in_the_daemon_s_socket_meets_nobody(daemon: Daemon, arena: HostArena) -> None:
    """A daemon that was stopped finds, when it goes on, the call and the end of its session in any order."""
    with client_of(daemon) as client:
        client.attach(arena)
        put(client, key("old"), OLD)
        for _ in range(3):
            hits_come_back(client, to_get(key("old"), SIZE))
            blocks = arena.alloc(4)
            daemon.stop()
            assert client.get([GetItem(key("old"), views(arena, blocks.tolist()), SIZE)]) == [UNAVAILABLE]
            arena.free(blocks)
            assert (arena.available, arena.withheld) == (4, 4)
            daemon.go_on()
            until(lambda: arena.available == 8)
            blocks = arena.alloc(8)
            for view in views(arena, blocks.tolist()):
                view[:] = b"\x55" * BLOCK
            time.sleep(0.3)
            assert all(view == b"\x55" * BLOCK for view in views(arena, blocks.tolist()))
            arena.free(blocks)


def test_a_late_read_of_blocks_that_are_freed_finds_them_as_they_were(daemon, arena):
    with client_of(daemon) as client:
        client.attach(arena)
        until(lambda: put(client, key("old"), OLD) in (STORED, HIT))
        blocks = arena.alloc(4)
        for n, view in enumerate(views(arena, blocks.tolist())):
            view[:] = OLD[n * BLOCK : (n + 1) * BLOCK]
        meta = to_set(key("new"), OLD).meta
        meta = type(meta)(meta.namespace, meta.length, b"")
        daemon.slow(60)
        item = SetItem(key("new"), views(arena, blocks.tolist()), meta)
        until(lambda: client.set([item]) == [UNAVAILABLE] and daemon.entered())
        arena.free(blocks)
        spare = arena.alloc(4)
        for view in views(arena, spare.tolist()):
            view[:] = b"\x55" * BLOCK
        daemon.slow(0)
        until(lambda: arena.withheld == 0)
        hits_come_back(client, to_get(key("new"), SIZE))
        assert fetch(client, key("new"), SIZE) == OLD


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Stop the daemon while its store is at the first call of the block; let it go on at the end."""
    daemon.slow(60)
    stopping = Thread(target=lambda: (until(daemon.entered), daemon.stop()))
    stopping.start()
    yield
    stopping.join()
    daemon.slow(0)
    daemon.go_on()


def untouched(arena: HostArena) -> bool:
    """Whether the daemon has done with all calls that were given up."""
    return not arena.is_quarantined([(0, arena.nbytes)])


@pytest.mark.parametrize(
    "store", ["memory", "file", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lmdb", "chain"))]
)
def test_a_late_read_of_blocks_that_are_written_again_costs_a_miss(tmp_path, arena, store):
    """The caller keeps its blocks, and puts something else there as soon as its set has answered."""
    sockets, url = Path(tempfile.mkdtemp(dir=scratch())), STORES[store].format(tmp_path)
    with Daemon("unix", sockets, url) as daemon, client_of(daemon) as client:
        client.attach(arena)
        place = views(arena, arena.alloc(4).tolist())
        item = SetItem(key("new"), place, replace(to_set(key("new"), OLD).meta, checksum=b""))
        _fill(place, OLD)
        with stopped(daemon):
            # On a busy machine the deadline may be over before the store is called at all.
            until(lambda: client.set([item]) == [UNAVAILABLE] and daemon.entered())
            _fill(place, b"\x55" * SIZE)
        until(lambda: untouched(arena))
        until(lambda: fetch(client, key("new"), SIZE) in (Outcome.CORRUPT, Outcome.MISS))
        until(lambda: fetch(client, key("new"), SIZE) is Outcome.MISS)
        _fill(place, OLD)
        until(lambda: client.set([item])[0] in (STORED, HIT))
        until(lambda: fetch(client, key("new"), SIZE) == OLD)


@pytest.mark.parametrize("gives_up", ["the tier", "the chain"])
def test_no_other_tier_answers_into_buffers_that_a_late_one_may_write_to(daemon, arena, gives_up):
    patient = {"transfer_timeout": "60s"} if gives_up == "the chain" else {}
    deadline = {"deadline": 0.5} if gives_up == "the chain" else {}
    first, below = client_of(daemon, **patient), MemoryBackend()
    until(lambda: put(first, key("old"), OLD) in (STORED, HIT))
    with chain_over(first, below, settings={0: deadline}) as chain:
        chain.attach(arena)
        put(below, key("old"), OLD)
        place = views(arena, arena.alloc(4).tolist())
        item = GetItem(key("old"), place, SIZE)
        with stopped(daemon):
            assert chain.get([item]) == [UNAVAILABLE], "another tier must not write there"
            assert chain.get([item]) == [UNAVAILABLE], "nor for another call"
            assert fetch(chain, key("old"), SIZE) == OLD, "other buffers are free"
        until(lambda: untouched(arena))
        until(lambda: chain.get([item]) == [HIT])
        _fill(place, b"\x55" * SIZE)
        time.sleep(0.3)
        assert b"".join(place) == b"\x55" * SIZE


def test_a_get_into_buffers_of_a_late_call_is_not_made(daemon: Daemon, arena: HostArena) -> None:
    with client_of(daemon, transfer_timeout="60s") as client, chain_over(MemoryBackend()) as chain:
        place = views(arena, arena.alloc(4).tolist())
        for store in (client, chain):
            store.attach(arena)
            assert put(store, key("old"), OLD) in (STORED, HIT)
            ends = arena.quarantine([(0, BLOCK)])
            first, rest = (
                GetItem(key("old"), views(arena, some), SIZE) for some in ([3, 2, 1, 0], [4, 5, 6, 7])
            )
            assert store.get([first, rest, to_get(key("old"), SIZE)]) == [UNAVAILABLE, HIT, HIT]
            assert store.peek([first, to_get(key("none"), SIZE)]) == [UNAVAILABLE, Outcome.MISS]
            assert b"".join(place) == bytes(SIZE)
            ends()
            assert store.get([first]) == [HIT]
            _fill(place, bytes(SIZE))


def _fill(place: list[memoryview], data: bytes) -> None:
    for n, view in enumerate(place):
        view[:] = data[n * BLOCK : (n + 1) * BLOCK]


def test_the_death_of_the_daemon_ends_the_quarantine(daemon: Daemon, arena: HostArena) -> None:
    with client_of(daemon) as client:
        client.attach(arena)
        put(client, key("old"), OLD)
        blocks = arena.alloc(4)
        daemon.slow(30)
        assert client.get([GetItem(key("old"), views(arena, blocks.tolist()), SIZE)]) == [UNAVAILABLE]
        arena.free(blocks)
        assert arena.withheld == 4
        daemon.kill()
        until(lambda: arena.available == 8)
        daemon.slow(0)
        daemon.start()
        fresh = arena.alloc(4)
        hits_come_back(client, GetItem(key("old"), views(arena, fresh.tolist()), SIZE))


def test_others_on_the_session_get_their_answers(daemon: Daemon, arena: HostArena) -> None:
    """One call stops waiting, which ends the session; another that waits longer on it still gets its own."""
    from concurrent.futures import ThreadPoolExecutor

    with client_of(daemon, transfer_timeout="5s") as client, ThreadPoolExecutor(2) as pool:
        client.attach(arena)
        put(client, key("old"), OLD)
        daemon.slow(1.0)
        patient = pool.submit(client.get, [GetItem(key("old"), views(arena, [0, 1, 2, 3]), SIZE)])
        until(daemon.entered)
        # All calls of a client have the same deadline, so a call that gives up earlier is put in by hand.
        session, abandoned = connection_of(client).session, client._payload.abandoned  # private: likewise
        assert session is not None
        abandoned.add(session, [])
        assert patient.result() == [HIT]
        assert b"".join(views(arena, [0, 1, 2, 3])) == OLD
        until(lambda: not len(abandoned))
