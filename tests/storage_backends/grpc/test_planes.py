"""How payloads travel: in messages, through attached memory, and through staging."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.session import Staging
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.grpc.shared import SharedPlane
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.hooks import answers, open_client
from tests.storage_backends.grpc.nodes import certificates, daemon_settings
from tests.storage_backends.grpc.stalling import server
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import RefusedError, StorageError
from tiercache.pools import HostArena
from tiercache.storage.attached import FreeRanges
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.checksum import checksum
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

HIT, STORED, ERROR, THROTTLED, UNAVAILABLE = (
    Outcome.HIT,
    Outcome.STORED,
    Outcome.ERROR,
    Outcome.THROTTLED,
    Outcome.UNAVAILABLE,
)
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


def shared_of(client: GrpcBackend) -> SharedPlane:
    """The way of the client's payloads through shared memory."""
    # private: staging memory is the client's own, and no call tells how much of it is free
    shared = client._shared
    assert shared is not None
    return shared


def staging_of(client: GrpcBackend) -> Staging:
    """The memory through which payloads go that lie elsewhere."""
    staging = shared_of(client).staging
    assert staging is not None
    return staging


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
    client = ends.enter_context(open_client("unix", started(ends), staging="0"))
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
    assert made == ["SetFrom", "GetInto", "Get"], "elsewhere, and without staging, it goes in messages"


def test_a_batch_larger_than_the_staging_memory_goes_through_it_in_rounds(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends), staging="64KiB"))
    made = spied(client, ends)
    sizes = [(n * 7919) % 30_000 + 1 for n in range(40)]
    assert client.set([to_set(key(n), payload(n, size)) for n, size in enumerate(sizes)]) == [STORED] * 40
    items = [to_get(key(n), size, pieces=1 + n % 5) for n, size in enumerate(sizes)]
    assert client.get(items) == [HIT] * 40
    assert [content(item) for item in items] == [payload(n, size) for n, size in enumerate(sizes)]
    assert set(made) == {"SetFrom", "GetInto"}
    big = payload("big", 200_000)
    made.clear()
    assert client.set([to_set(key("big"), big), to_set(key("small"), b"x")]) == [STORED, STORED]
    assert fetch(client, key("big"), len(big)) == big
    assert made == ["SetFrom", "Set", "Get"], "what has no room in it goes in messages"
    # A range that is not given back would show only as payloads that take the slower way one day.
    assert staging_of(client).free.nbytes == 64 << 10


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


def test_staging_gives_every_byte_once() -> None:
    staging = FreeRanges(16 * BLOCK)
    taken = [staging.take(size) for size in (1, BLOCK, BLOCK + 1, 8 * BLOCK)]
    assert taken == [0, BLOCK, 2 * BLOCK, 4 * BLOCK]
    assert staging.take(5 * BLOCK) is None
    staging.give(BLOCK, BLOCK)
    staging.give(4 * BLOCK, 8 * BLOCK)
    assert staging.take(9 * BLOCK) == 4 * BLOCK
    staging.give(4 * BLOCK, 9 * BLOCK)
    staging.give(0, 1)
    staging.give(2 * BLOCK, BLOCK + 1)
    assert staging.take(16 * BLOCK) == 0


def test_memory_that_the_daemon_refuses_is_not_used(
    ends: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    node = started(ends, limits={"attached_bytes": 8 * BLOCK})
    client = ends.enter_context(open_client("unix", node, staging="1MiB"))
    arena = arena_of(ends)
    client.attach(arena)
    item = to_set(key("a"), payload("a", SIZE))
    assert client.set([SetItem(item.key, place(arena, payload("a", SIZE)), item.meta)]) == [STORED]
    assert fetch(client, key("a"), SIZE) == payload("a", SIZE)
    assert ["attached_bytes" in record.message for record in caplog.records] == [True, True]


def test_after_a_reconnect_the_same_memory_is_attached_again(ends: ExitStack) -> None:
    client = ends.enter_context(open_client("unix", started(ends), staging="1MiB"))
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
    clients = [ends.enter_context(open_client("unix", started(ends), staging="0")) for _ in range(2)]
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
    client = ends.enter_context(open_client("unix", started(ends), staging="0"))
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


def test_after_a_restart_of_the_daemon_payloads_take_the_way_through_staging(ends: ExitStack) -> None:
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
            assert id(staging_of(client)) in connection.regions


def test_memory_that_cannot_be_mapped_for_writing_is_refused(
    ends: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    client = ends.enter_context(open_client("unix", started(ends), staging="0"))
    arena = arena_of(ends)
    fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, 0x10)
    client.attach(arena)
    assert "cannot be mapped for writing" in caplog.text
    assert put(client, key("a"), payload("a", SIZE)) is STORED


def mapped(name: str) -> set[str]:
    """The inodes of the shared memories of this name that the process has mapped."""
    return {
        line.split()[4]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"memfd:{name}" in line
    }


def test_a_worker_that_is_killed_leaves_nothing_with_the_node(ends: ExitStack) -> None:
    node = started(ends)
    # What a client of an earlier test had may stay until the next garbage collection: a failed call's
    # traceback holds it.
    before = mapped("tiercache-")
    script = (
        "import sys, time; from tiercache_backends.grpc import GrpcBackend; from"
        " tiercache_backends.grpc.settings import read_settings;from tiercache.pools import HostArena; a ="
        " HostArena(1 << 22, 4096, huge_pages=False);s = GrpcBackend(read_settings({'path':"
        f" {str(node.settings.socket_directory)!r}}})); s.attach(a); s.exists([]);print('ready', flush=True);"
        " time.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"ready\n"
    assert len(mapped("tiercache-arena") - before) == 1
    assert len(mapped("tiercache-staging") - before) == 1
    worker.kill()
    worker.communicate()
    until(lambda: mapped("tiercache-") <= before)


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


# --- in messages
# ------------------------------------------------------------------------------------------------------------


def direct(address: str, **more: Any) -> GrpcBackend:
    return GrpcBackend(read_settings({"address": address, **more}))


def test_what_is_damaged_on_its_way_is_an_error(ends: ExitStack) -> None:
    store = MemoryBackend()
    put(store, key("a"), payload("a", SIZE))

    def get(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        request = pb.GetRequest.FromString(next(requests))
        for n, (k, length) in enumerate(
            zip(messages.read_keys(request.keys, 16), request.lengths, strict=True)
        ):
            item = to_get(k, length)
            assert store.get([item]) == [HIT]
            data = bytearray(content(item))
            data[n] ^= n
            entry = store.describe([k])[0]
            assert entry is not None
            header = pb.GetHeader(items=[n], outcomes=[1], sizes=[length], checksums=entry.meta.checksum)
            yield pb.GetReply(header=header, payload=bytes(data)).SerializeToString()

    with server(Get=get) as address, direct(address) as client:
        items = [to_get(key("a"), SIZE) for _ in range(3)]
        assert client.get(items) == [HIT, ERROR, ERROR]
        assert content(items[0]) == payload("a", SIZE)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xff\xff"],
        [pb.GetReply(header=pb.GetHeader(items=[1], outcomes=[3], sizes=[0])).SerializeToString()],
    ],
)
def test_an_answer_that_is_none_is_an_error_and_no_outage(ends: ExitStack, frames: list[bytes]) -> None:
    with server(Get=lambda requests, _: iter(frames)) as address, direct(address) as client:
        assert client.get([to_get(key("a"), 100)]) == [ERROR]


@pytest.mark.parametrize(("more", "outcome"), [(0, HIT), (2 << 20, ERROR)])
def test_an_answer_with_too_large_a_header_is_an_error(more: int, outcome: Outcome) -> None:
    """Parsed, columns take several times their bytes; an honest message has far fewer."""
    data = payload("a", 100)
    sums = checksum(key("a"), [memoryview(data)], 100) + bytes(more)
    header = pb.GetHeader(items=[0], outcomes=[1], sizes=[100], checksums=sums)
    frame = pb.GetReply(header=header, payload=data).SerializeToString()
    with server(Get=lambda requests, _: iter([frame])) as address, direct(address) as client:
        assert client.get([to_get(key("a"), 100)]) == [outcome]


def test_an_answer_about_other_keys_than_those_asked_is_an_error() -> None:
    """A set asks first whether a large object is there; the server answers for too many keys."""

    def exists(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        yield pb.BitmapReply(bits=b"\xff\xff\xff").SerializeToString()

    with server(Exists=exists) as address, direct(address) as client:
        large = to_set(key("a"), bytes(1 << 20))
        assert client.set([large]) == [ERROR]
        with pytest.raises(StorageError, match="another version"):
            client.exists([key("a")])


def test_a_set_that_stalls_leaves_the_buffers_alone_when_it_returns(ends: ExitStack) -> None:
    """The server takes the first message and then no more, until long after the caller reuses its buffers."""
    seen: list[bytes] = []
    later, done = Event(), Event()

    def stall(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        try:
            seen.append(pb.SetRequest.FromString(next(requests)).payload)
            later.wait(30)
            for message in requests:
                seen.append(pb.SetRequest.FromString(message).payload)
        finally:
            done.set()
        yield b""

    threads = set(threading.enumerate())
    with server(Set=stall) as address, direct(address, transfer_timeout="500ms") as client:
        data = bytearray(b"\x01" * (24 << 20))
        view = memoryview(data)
        item = to_set(key("a"), b"x")
        meta = to_set(key("a"), bytes(data)).meta
        begun = time.monotonic()
        assert client.set([SetItem(item.key, [view], meta)]) == [UNAVAILABLE]
        assert time.monotonic() - begun < 20
        view.release()
        data[:] = b"\x02" * len(data)
        later.set()
        assert done.wait(30)
        data.clear()  # raises BufferError if anybody still looks at it
        assert seen
        assert all(part.count(2) == 0 for part in seen)
        until(lambda: not any("consume" in thread.name for thread in set(threading.enumerate()) - threads))


def test_a_get_that_stalls_keeps_what_is_complete(ends: ExitStack) -> None:
    wait = Event()

    def stall(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        item = to_set(key(0), payload(0, 100))
        for n, size, found, data in (
            (0, 100, item.meta.checksum, payload(0, 100)),
            (1, 100, bytes(16), bytes(50)),
        ):
            header = pb.GetHeader(items=[n], outcomes=[1], sizes=[size], checksums=found)
            yield pb.GetReply(header=header, payload=data).SerializeToString()
        wait.wait(30)

    with server(Get=stall) as address, direct(address, transfer_timeout="300ms") as client:
        items = [to_get(key(n), 100) for n in range(3)]
        assert client.get(items) == [HIT, UNAVAILABLE, UNAVAILABLE]
        assert content(items[0]) == payload(0, 100)
        wait.set()


def test_a_busy_daemon_throttles(ends: ExitStack) -> None:
    from grpc import StatusCode

    def busy(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort(StatusCode.RESOURCE_EXHAUSTED, "later")
        yield b""

    with server(Get=busy, Set=busy, Exists=busy) as address, direct(address) as client:
        for _ in range(10):
            assert client.get([to_get(key("a"), 100)]) == [THROTTLED]
            assert client.set([to_set(key("a"), b"x")]) == [THROTTLED]
            with pytest.raises(RefusedError, match="later"):
                client.exists([key("a")])


def test_a_large_batch_is_cut_into_calls(ends: ExitStack) -> None:
    node = started(ends, "tcp", limits={"keys_per_batch": 8})
    client = ends.enter_context(open_client("tcp", node, plane="stream"))
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
