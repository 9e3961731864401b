"""Payload on data connections: what a daemon that lies, hangs, breaks or is not reached there does to calls.

The daemon is a server of the test's own, which speaks gRPC well and frames as badly as a test wants.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.data.plane import DataPlane
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.hooks import open_client
from tests.storage_backends.grpc.nodes import daemon_settings
from tests.storage_backends.grpc.stalling import LIMITS, server
from tests.storage_backends.grpc.test_planes import connection_of, until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.testing.objects import content, key, payload, to_get, to_set
from tiercache.wire.data import FRAME_BYTES, FrameKind, pack, unpack
from tiercache.wire.frames import encode
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

HIT, STORED, UNAVAILABLE = Outcome.HIT, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 100_000
DATA = payload("a", SIZE)
SUM = to_set(key("a"), DATA).meta.checksum
OPENED = pack(FrameKind.OPENED, b"")
QUICK = {"timeout": "500ms", "transfer_timeout": "700ms"}


def pieces(**more: Any) -> pb.GetPieces:
    return pb.GetPieces(**{"items": [0], "outcomes": [1], "sizes": [SIZE], "checksums": SUM, **more})


def frame(header: pb.GetPieces, data: bytes = DATA) -> bytes:
    return pack(FrameKind.PIECES, header.SerializeToString(), len(data)) + data


class Frames:
    """The data port of a bad daemon: it opens every connection, and answers each call with `answers()`."""

    def __init__(self, answers: Callable[[], bytes | None]) -> None:
        self._answers = answers
        self.calls = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self._held:
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self._held.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, struct.error):
            self._receive(sock)
            sock.sendall(OPENED)
            while self._receive(sock):
                self.calls += 1
                answer = self._answers()
                if answer is None:  # nothing more: reset in the middle
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
                    return
                sock.sendall(answer)

    def _receive(self, sock: socket.socket) -> bytes:
        first = unpack(sock.recv(FRAME_BYTES, socket.MSG_WAITALL), 1 << 30, 1 << 40)
        rest = sock.recv(first.header + first.payload, socket.MSG_WAITALL)
        return b"x" + rest


@contextmanager
def bad(answers: Callable[[], bytes | None], **more: Any) -> Iterator[tuple[GrpcBackend, Frames]]:
    """A client of a daemon whose frames are bad, and whose gRPC serves the object "a"."""
    port = Frames(answers)

    def hello(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        data = pb.DataPort(port=port.port, token=b"t" * 32, connections=4)
        reply = pb.HelloReply(version="0", instance=b"i", principal="p", limits=LIMITS, data=data)
        yield reply.SerializeToString()

    def get(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for n in range(len(pb.GetRequest.FromString(next(requests)).lengths)):
            yield encode(pieces(items=[n]), [memoryview(DATA)])

    def store(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for _ in requests:
            pass
        yield pb.OutcomesReply(outcomes=[pb.OUTCOME_STORED]).SerializeToString()

    with server(Hello=hello, Get=get, Set=store) as address:
        try:
            with GrpcBackend(read_settings({"address": address, **QUICK, **more})) as client:
                yield client, port
        finally:
            port.close()


def plane_of(client: GrpcBackend) -> DataPlane:
    plane = connection_of(client).data
    assert plane is not None
    return plane


LIES: dict[str, Callable[[], bytes | None]] = {
    "garbage": lambda: b"\xff" * 4096,
    "a huge header": lambda: struct.pack("<B3xIQ", 4, 0xFFFFFFF0, 0),
    "a huge payload": lambda: struct.pack("<B3xIQ", 4, 10, 2**62),
    "a header that is none": lambda: pack(FrameKind.PIECES, b"\xff" * 9, 0),
    "a shorter object": lambda: frame(pieces(sizes=[SIZE - 1]), DATA[:-1]),
    "a longer object": lambda: frame(pieces(sizes=[SIZE + 1]), DATA + b"x"),
    "a payload that is longer than its objects": lambda: frame(pieces(sizes=[SIZE - 1]), DATA),
    "another item": lambda: frame(pieces(items=[1])),
    "columns of two lengths": lambda: frame(pieces(sizes=[SIZE, 0])),
    "more items than were asked for": lambda: frame(pieces(items=[0, 1], outcomes=[1, 3], sizes=[SIZE, 0])),
    "no item at all": lambda: frame(pb.GetPieces(), b""),
    "a hit without a checksum": lambda: frame(pieces(checksums=b"")),
    "a miss with bytes": lambda: frame(pieces(outcomes=[3], checksums=b"")),
    "a reply to another call": lambda: pack(FrameKind.REPLY, b"\x0a\x01\x01"),
    "a reset before the answer": lambda: None,
    "a failure that is none": lambda: pack(FrameKind.FAILED, b"\xff"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_daemon_that_lies_is_asked_by_grpc_at_once(lie: str) -> None:
    with bad(LIES[lie]) as (client, port):
        item = to_get(key("a"), SIZE)
        assert client.get([item]) == [HIT]
        assert content(item) == DATA
        assert (port.calls, plane_of(client).losses) == (1, 1)
        assert plane_of(client).why
        assert client.get([item]) == [HIT]
        assert port.calls == 1, "for a while it is not asked by frames"
        assert client.set([to_set(key("b"), b"x")]) == [STORED]


def test_wrong_bytes_are_no_hit() -> None:
    with bad(lambda: frame(pieces(), bytes(SIZE))) as (client, _):
        assert client.get([to_get(key("a"), SIZE)]) == [Outcome.ERROR]
    with bad(lambda: frame(pieces(checksums=bytes(16)))) as (client, _):
        assert client.get([to_get(key("a"), SIZE)]) == [Outcome.ERROR]


@pytest.mark.parametrize("begun", [b"", OPENED, frame(pieces())[:-7], frame(pieces())[:20]])
def test_a_daemon_that_stops_in_the_middle(begun: bytes) -> None:
    """Its call ends within the deadline; nothing is written into the buffers after that; the next goes by
    gRPC.
    """
    go_on = threading.Event()

    def answers() -> bytes:
        if not begun:
            go_on.wait(30)
            return frame(pieces())
        return begun

    with bad(answers) as (client, _):
        item = to_get(key("a"), SIZE)
        started = time.monotonic()
        found = client.get([item])
        assert time.monotonic() - started < 1.5
        if begun != OPENED:  # a second greeting is a lie, and not a silence
            assert found == [UNAVAILABLE]
        for buffer in item.buffers:
            buffer[:] = b"\5" * buffer.nbytes
        go_on.set()
        other = to_get(key("a"), SIZE)
        assert client.get([other]) == [HIT]
        assert content(other) == DATA
        assert content(item) == b"\5" * SIZE


def test_what_has_come_before_a_silence_is_kept() -> None:
    with bad(lambda: frame(pieces())) as (client, _):
        items = [to_get(key("a"), SIZE), to_get(key("b"), SIZE)]
        assert client.get(items) == [HIT, UNAVAILABLE]
        assert content(items[0]) == DATA


def test_a_refusal_is_an_answer() -> None:
    def busy() -> bytes:
        return pack(FrameKind.FAILED, data_pb2.DataFailure(code=8, text="later").SerializeToString())

    with bad(busy) as (client, port):
        for n in range(5):
            assert client.get([to_get(key("a"), SIZE)]) == [Outcome.THROTTLED]
            assert port.calls == n + 1, "the connection is as good as before"


def test_a_port_that_is_not_reached_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache_backends.grpc.data.plane.PAUSES", (0.05, 0.1))
    with bad(lambda: frame(pieces())) as (client, frames):
        frames.close()
        until(lambda: client.get([to_get(key("a"), SIZE)]) == [HIT] and plane_of(client).why != "")
        frames.listener = socket.create_server(("127.0.0.1", frames.port))
        # private: the same port answers again
        threading.Thread(target=frames._accept, daemon=True).start()
        until(lambda: client.get([to_get(key("a"), SIZE)]) == [HIT] and not plane_of(client).why)


def test_a_daemon_without_the_plane_and_a_client_without_it(tmp_path: Path) -> None:
    for settings, given in (({"data": False}, {}), ({}, {"plane": "stream"})):
        with StorageServer(daemon_settings("tcp", **settings), MemoryBackend()) as node:
            assert bool(node.data_addresses) is not bool(settings)
            with open_client("tcp", node, **given) as client:
                assert client.set([to_set(key("a"), DATA)]) == [STORED]
                item = to_get(key("a"), SIZE)
                assert client.get([item]) == [HIT]
                assert content(item) == DATA


def test_many_threads_share_the_connections() -> None:
    with StorageServer(daemon_settings("tcp"), MemoryBackend()) as node, open_client("tcp", node) as client:
        items = {n: payload(n, 50_000 + n) for n in range(24)}
        client.set([to_set(key(n), data) for n, data in items.items()])
        wrong: list[int] = []

        def read(n: int) -> None:
            for _ in range(10):
                item = to_get(key(n), len(items[n]))
                if client.get([item]) != [HIT] or content(item) != items[n]:
                    wrong.append(n)

        threads = [threading.Thread(target=read, args=(n,)) for n in items]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert (plane_of(client).losses, plane_of(client).why) == (0, "")
