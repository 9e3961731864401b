"""How payloads travel: through attached memory, and on data connections."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.data import DataConnection
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.hooks import answers, open_client
from tests.storage_backends.grpc.nodes import certificates, daemon_settings
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.conformance.hooks import ERROR, HIT, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_get, to_set

THROTTLED, UNAVAILABLE = Outcome.THROTTLED, Outcome.UNAVAILABLE
BLOCK = 4096
SIZE = 3 * BLOCK - 100


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(ends: ExitStack, transport: str = "unix", **more: Any) -> StorageServer:
    return ends.enter_context(StorageServer(daemon_settings(transport, **more), MemoryBackend()))


def connection_of(client: GrpcBackend) -> Connection:
    """The connection in use."""
    # private: no call tells its session, and the memories that it has
    connection = client._manager.peek()
    assert connection is not None
    return connection


def spied(client: GrpcBackend, ends: ExitStack) -> list[str]:
    """The names of the calls that the client makes from now on."""
    made: list[str] = []
    # private: which way a payload takes shows in nothing but the calls
    calls = connection_of(client)._calls
    for name, call in list(calls.items()):

        def told(*arguments: Any, _name: str = name, _call: Any = call, **named: Any) -> Any:
            made.append(_name)
            return _call(*arguments, **named)

        calls[name] = told
    # private: likewise for data connections
    send = DataConnection._call

    def told_data(self: DataConnection, method: str, *more: Any) -> None:
        made.append(method)
        send(self, method, *more)

    patch = pytest.MonkeyPatch()
    ends.callback(patch.undo)
    patch.setattr(DataConnection, "_call", told_data)
    return made


def arena_of(ends: ExitStack, blocks: int = 64) -> HostArena:
    arena = HostArena(blocks * BLOCK, BLOCK, huge_pages=False)
    ends.callback(arena.close)
    return arena


def place(arena: HostArena, data: bytes) -> list[memoryview]:
    """Blocks of the arena, filled."""
    blocks = arena.alloc(-(-len(data) // BLOCK))[::-1].tolist()
    views = [arena.view(block) for block in blocks]
    for at, view in enumerate(views):
        part = data[at * BLOCK : (at + 1) * BLOCK]
        view[: len(part)] = part
    return views


def test_what_lies_in_attached_memory_is_not_copied_by_the_client(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends)))
    arena = arena_of(ends)
    client.attach(arena)
    made = spied(client, ends)
    item = to_set(key("a"), payload("a", SIZE))
    assert client.set([SetItem(item.key, place(arena, payload("a", SIZE)), item.meta)]) == [STORED]
    target = place(arena, bytes(3 * BLOCK))
    assert client.get([GetItem(key("a"), target, SIZE)]) == [HIT]
    assert b"".join(target)[:SIZE] == payload("a", SIZE)
    assert made == ["SetFrom", "GetInto"]
    assert fetch(client, key("a"), SIZE) == payload("a", SIZE)
    assert made == ["SetFrom", "GetInto", "Get"], "elsewhere it goes on a data connection"


def test_thousands_of_small_objects_are_more_than_one_request(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends)))
    arena = arena_of(ends, 4200)
    client.attach(arena)
    calls = spied(client, ends)
    items = [
        SetItem(item.key, [arena.view(n)], item.meta) for n in range(4100) for item in [to_set(key(n), b"x")]
    ]
    for n in range(4100):
        arena.view(n)[:1] = b"x"
    assert set(client.set(items)) == {STORED}
    assert calls.count("SetFrom") > 1
    assert set(client.get([GetItem(item.key, item.buffers, 1) for item in items])) == {HIT}


def test_memory_that_the_daemon_refuses_is_not_used(ends, caplog):
    caplog.set_level(logging.WARNING)
    node = started(ends, limits={"attached_bytes": 8 * BLOCK})
    client = ends.enter_context(open_client("unix", node))
    arena = arena_of(ends)
    client.attach(arena)
    item = to_set(key("a"), payload("a", SIZE))
    assert client.set([SetItem(item.key, place(arena, payload("a", SIZE)), item.meta)]) == [STORED]
    assert fetch(client, key("a"), SIZE) == payload("a", SIZE)
    assert ["attached_bytes" in record.message for record in caplog.records] == [True]


def test_after_a_reconnect_the_same_memory_is_attached_again(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends)))
    arena = arena_of(ends)
    client.attach(arena)
    views = place(arena, payload("a", SIZE))
    for turn in range(3):
        item = to_set(key(turn), payload("a", SIZE))
        assert client.set([SetItem(item.key, views, item.meta)]) == [STORED]
        # Sessions end when the daemon restarts, or when a call is abandoned; here it is ended from inside,
        # because the same daemon must go on.
        connection = connection_of(client)
        assert connection.session is not None
        connection.session.end()
        assert fetch(client, key(turn), SIZE) == payload("a", SIZE)
        made = spied(client, ends)
        assert client.get([GetItem(key(turn), views, SIZE)]) == [HIT]
        assert made == ["GetInto"]


def test_two_daemons_share_the_same_memory_at_once(ends: ExitStack) -> None:
    clients = [ends.enter_context(open_client("unix", started(ends))) for _ in range(2)]
    arena = arena_of(ends)
    views = place(arena, payload("a", SIZE))
    for client in clients:
        client.attach(arena)
    sessions = [connection_of(client) for client in clients]
    for turn in range(5):
        item = to_set(key(turn), payload("a", SIZE))
        assert [client.set([SetItem(item.key, views, item.meta)]) for client in clients] == [[STORED]] * 2
    assert [connection_of(client) for client in clients] == sessions, "neither cut off the other"


def punched(arena: HostArena) -> list[int]:
    """Try each way of punching a hole into the arena; return the kernel's results, 0 where it allows one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return [libc.fallocate(arena.fd, 3, 0, 8 * BLOCK), libc.madvise(arena.address, 8 * BLOCK, 9)]


def test_nobody_can_punch_holes_into_what_is_attached(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends)))
    arena, other = arena_of(ends), arena_of(ends)
    assert punched(other) == [0, 0], "before, everybody can, and is refused"
    client.attach(other)
    client.attach(arena)
    connection = connection_of(client)
    assert connection.regions.keys() == {id(arena)}
    assert punched(arena) == [-1, -1]
    item = to_set(key("a"), payload("a", SIZE))
    assert client.set([SetItem(item.key, place(arena, payload("a", SIZE)), item.meta)]) == [STORED]
    assert os.fstat(arena.fd).st_blocks * 512 == arena.nbytes


def test_after_a_restart_of_the_daemon_payloads_take_the_way_through_a_socket(ends: ExitStack) -> None:
    settings = daemon_settings("unix")
    arena = arena_of(ends)
    client: GrpcBackend | None = None
    for turn in range(3):
        with StorageServer(settings, MemoryBackend()) as node:
            if client is None:
                client = ends.enter_context(open_client("unix", node))
                client.attach(arena)
            until(partial(answers, client))
            item = to_set(key("a"), payload("a", SIZE))
            assert client.set([SetItem(item.key, place(arena, payload("a", SIZE)), item.meta)]) == [STORED]
            read = place(arena, bytes(SIZE))
            assert client.get([GetItem(key("a"), read, SIZE)]) == [HIT]
            assert b"".join(read)[:SIZE] == payload("a", SIZE)
            connection = connection_of(client)
            assert (id(arena) in connection.regions) == (turn == 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_over_tls_by_token_and_by_certificate(ends: ExitStack) -> None:
    private, certificate = certificates()
    by_token = ends.enter_context(open_client("tls", started(ends, "tls")))
    assert put(by_token, key("a"), payload("a", SIZE)) is STORED
    assert fetch(by_token, key("a"), SIZE) == payload("a", SIZE)
    assert (by_token.ping().transport, by_token.ping().principal) == ("tls", "worker")
    mutual = {"certificate": certificate, "key": private, "client_ca": certificate}
    node = started(ends, "tls", tls=mutual, principals=({"name": "peer", "san": "localhost"},))
    given = {"address": node.addresses[0], "ca": str(certificate)}
    shown = ends.enter_context(
        GrpcBackend(read_settings({**given, "certificate": str(certificate), "key": str(private)}))
    )
    assert put(shown, key("a"), payload("a", SIZE)) is STORED
    assert (shown.ping().principal, shown.ping().verbs) == ("peer", ("read", "write"))
    hidden = ends.enter_context(GrpcBackend(read_settings(given)))
    assert hidden.get([to_get(key("a"), SIZE)]) == [UNAVAILABLE]
    elsewhere = ends.enter_context(
        GrpcBackend(read_settings({**given, "ca": str(certificate), "server_name": "other.example"}))
    )
    assert put(elsewhere, key("b"), b"x") is UNAVAILABLE, "the certificate is another one's"


def test_a_large_batch_is_cut_into_calls(ends: ExitStack) -> None:
    node = started(ends, "tcp", limits={"keys_per_batch": 8})
    client = ends.enter_context(open_client("tcp", node))
    made = spied(client, ends)
    assert client.set([to_set(key(n), payload(n, 1000)) for n in range(20)]) == [STORED] * 20
    assert client.exists([key(n) for n in range(21)]) == [True] * 20 + [False]
    assert client.get([to_get(key(n), 1000) for n in range(20)]) == [HIT] * 20
    assert made == ["Set"] * 3 + ["Exists"] * 3 + ["Get"] * 3
    made.clear()
    big = payload("big", 300_000)
    assert [put(client, key("big"), big), put(client, key("big"), big)] == [STORED, HIT]
    assert made == ["Exists", "Set", "Exists"], "a payload that the daemon has is not sent"
    too_large = node.settings.object_bytes + 1
    assert client.set([to_set(key("huge"), bytes(too_large))]) == [ERROR]
    assert client.get([to_get(key("huge"), too_large)]) == [ERROR]
    assert len(made) == 3
