"""Memory that the daemon may still touch after the client stopped waiting is not reused before that is over.

The daemon is stopped, or its store is slow, in the middle of a call. What it does later must not reach memory
that was given to somebody else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch, section
from tests.storage_backends.grpc.test_planes import connection_of, shared_of, staging_of, until
from tiercache.core import Outcome
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

BLOCK = 4096
SIZE = 4 * BLOCK
OLD = payload("old", SIZE)
HIT, STORED, UNAVAILABLE = Outcome.HIT, Outcome.STORED, Outcome.UNAVAILABLE


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    import tempfile

    with Daemon(
        "unix", Path(tempfile.mkdtemp(dir=scratch())), f"file://{tmp_path}/store?capacity=16MiB"
    ) as running:
        yield running


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(8 * BLOCK, BLOCK, huge_pages=False)
    yield made
    made.close()


def client_of(daemon: Daemon, **more: Any) -> GrpcBackend:
    given = {
        "timeout": "500ms",
        "transfer_timeout": "500ms",
        "breaker_pause": "100ms",
        "staging": "1MiB",
        **more,
    }
    return GrpcBackend(read_settings(section("unix", daemon.where, **given)))


def views(arena: HostArena, blocks: list[int]) -> list[memoryview]:
    return [arena.view(block) for block in blocks]


def hits_come_back(client: GrpcBackend, item: GetItem) -> None:
    until(lambda: client.get([item]) == [HIT])


@pytest.mark.parametrize("how", ["slow", "stopped"])
def test_a_late_write_meets_nobody(daemon: Daemon, arena: HostArena, how: str) -> None:
    """All blocks but those of the get are in use; the get's are freed and wanted again at once, as a worker
    under pressure does it.
    """
    with client_of(daemon) as client:
        client.attach(arena)
        assert put(client, key("old"), OLD) is STORED
        blocks = arena.alloc(4)
        others = arena.alloc(4)
        daemon.slow(1.5)
        if how == "stopped":
            # It has the request, and is in the store, when it is stopped; the write comes after it goes on.
            import threading

            threading.Thread(target=lambda: (until(daemon.entered), daemon.stop())).start()
        begun = time.monotonic()
        assert client.get([GetItem(key("old"), views(arena, blocks.tolist()), SIZE)]) == [UNAVAILABLE]
        assert time.monotonic() - begun < 1.2, "within its deadline"
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
            time.sleep(1.5)
            assert arena.withheld == 4, "as long as it is stopped"
            daemon.go_on()
        until(lambda: arena.available == 4)
        assert arena.withheld == 0
        assert b"".join(views(arena, blocks.tolist())) == OLD, (
            "the late write came, before the blocks were free"
        )
        assert all(view == mine for view in views(arena, again.tolist()))
        arena.check_integrity()
        daemon.slow(0)
        fresh = arena.alloc(4)
        hits_come_back(client, GetItem(key("old"), views(arena, fresh.tolist()), SIZE))
        assert b"".join(views(arena, fresh.tolist())) == OLD


def test_a_request_that_waits_in_the_daemon_s_socket_meets_nobody(daemon: Daemon, arena: HostArena) -> None:
    """The daemon is stopped before it reads the call.

    When it goes on, it finds the end of the session beside it, in whatever order.
    """
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


def test_a_late_read_stores_nothing_else_under_the_key(daemon: Daemon, arena: HostArena) -> None:
    """A set without a checksum that the daemon reads late must not store what was put there meanwhile."""
    with client_of(daemon) as client:
        client.attach(arena)
        blocks = arena.alloc(4)
        for n, view in enumerate(views(arena, blocks.tolist())):
            view[:] = OLD[n * BLOCK : (n + 1) * BLOCK]
        meta = to_set(key("new"), OLD).meta
        meta = type(meta)(meta.namespace, meta.length, b"")
        daemon.slow(1.0)
        assert client.set([SetItem(key("new"), views(arena, blocks.tolist()), meta)]) == [UNAVAILABLE]
        arena.free(blocks)
        spare = arena.alloc(4)
        for view in views(arena, spare.tolist()):
            view[:] = b"\x55" * BLOCK
        until(lambda: arena.withheld == 0)
        daemon.slow(0)
        hits_come_back(client, to_get(key("new"), SIZE))
        assert fetch(client, key("new"), SIZE) == OLD


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


def test_staging_memory_is_kept_from_the_next_call(daemon: Daemon) -> None:
    with client_of(daemon, staging="64KiB", breaker_failures="100") as client:
        staging = staging_of(client)
        # On a busy machine a set may miss its deadline of half a second, and keep staging memory for a while.
        for name in ("old", "other"):
            until(lambda name=name: put(client, key(name), payload(name, SIZE)) in (STORED, HIT))
        until(lambda: staging.available == 64 << 10)
        daemon.slow(1.5)
        item = to_get(key("old"), SIZE)
        before = content(item)
        assert client.get([item]) == [UNAVAILABLE]
        assert content(item) == before, "nothing reaches the caller's buffers afterwards"
        assert staging.available == (64 << 10) - SIZE
        daemon.slow(0)
        hits_come_back(client, other := to_get(key("other"), SIZE))
        assert content(other) == payload("other", SIZE)
        until(lambda: staging.available == 64 << 10)
        assert content(item) == before


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
        session, shared = connection_of(client).session, shared_of(client)
        assert session is not None
        shared.abandoned.add(session, [])
        assert patient.result() == [HIT]
        assert b"".join(views(arena, [0, 1, 2, 3])) == OLD
        until(lambda: not len(shared.abandoned))
