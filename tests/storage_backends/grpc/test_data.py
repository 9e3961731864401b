"""Payload on data connections: what a daemon that lies, hangs, breaks or is not reached there does to calls.

The daemon is a server of the test's own, which speaks gRPC well and frames as badly as a test wants.
"""

from __future__ import annotations

import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.data import DataConnection, FailedError
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.hooks import open_client
from tests.storage_backends.grpc.nodes import certificates, daemon_settings
from tests.storage_backends.grpc.stalling import LIMITS, server
from tests.storage_backends.grpc.test_planes import connection_of
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import StorageError
from tiercache.testing.objects import content, fetch, key, payload, to_get, to_set
from tiercache.wire.data import FRAME_BYTES, FrameKind, pack, unpack
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

HIT, STORED, UNAVAILABLE = Outcome.HIT, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 100_000
DATA = payload("a", SIZE)
SUM = to_set(key("a"), DATA).meta.checksum
OPENED = pack(FrameKind.OPENED, b"")
Answer = bytes | Iterable[bytes] | None
QUICK = {"timeout": "1s", "transfer_timeout": "2s", "breaker_failures": "1000"}


def told(**more: Any) -> pb.GetHeader:
    return pb.GetHeader(**{"items": [0], "outcomes": [1], "sizes": [SIZE], "checksums": SUM, **more})


def frame(header: pb.GetHeader, data: bytes = DATA) -> bytes:
    return pack(FrameKind.OBJECTS, header.SerializeToString(), len(data)) + data


class Frames:
    """The data port of a bad daemon, which answers each call with `answers()`, slowly if it has parts."""

    def __init__(self, answers: Callable[[], Answer]) -> None:
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
                if isinstance(answer, bytes):
                    sock.sendall(answer)
                    continue
                for n, part in enumerate(answer):
                    time.sleep(0.05 * bool(n))
                    sock.sendall(part)
                sock.close()
                return

    def _receive(self, sock: socket.socket) -> bytes:
        first = unpack(sock.recv(FRAME_BYTES, socket.MSG_WAITALL), 1 << 30, 1 << 40)
        rest = sock.recv(first.header + first.payload, socket.MSG_WAITALL)
        return b"x" + rest


@contextmanager
def bad(answers: Callable[[], Answer], **more: Any) -> Iterator[tuple[GrpcBackend, Frames]]:
    """A client of a daemon whose frames are bad."""
    port = Frames(answers)

    def hello(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        place = pb.DataPort(port=port.port, token=b"t" * 32, connections=4)
        answer = pb.HelloReply(version="0", instance=b"i", principal="p", limits=LIMITS, data=place)
        yield answer.SerializeToString()

    with server(Hello=hello) as address:
        try:
            with GrpcBackend(read_settings({"address": address, **QUICK, **more})) as client:
                yield client, port
        finally:
            port.close()


LIES: dict[str, Callable[[], Answer]] = {
    "garbage": lambda: b"\xff" * 4096,
    "a huge header": lambda: struct.pack("<B3xIQ", 4, 0xFFFFFFF0, 0),
    "a huge payload": lambda: struct.pack("<B3xIQ", 4, 10, 2**62),
    "a header that is none": lambda: pack(FrameKind.OBJECTS, b"\xff" * 9, 0),
    "a shorter object": lambda: frame(told(sizes=[SIZE - 1]), DATA[:-1]),
    "a longer object": lambda: frame(told(sizes=[SIZE + 1]), DATA + b"x"),
    "a payload that is longer than its objects": lambda: frame(told(sizes=[SIZE - 1]), DATA),
    "a payload that is shorter than its objects": lambda: (
        pack(FrameKind.OBJECTS, told().SerializeToString(), SIZE - 1) + DATA
    ),
    "a refusal with bytes behind it": lambda: pack(FrameKind.FAILED, b"\x08\x08", 5) + b"12345",
    "another item": lambda: frame(told(items=[1])),
    "columns of two lengths": lambda: frame(told(sizes=[SIZE, 0])),
    "more items than were asked for": lambda: frame(told(items=[0, 1], outcomes=[1, 3], sizes=[SIZE, 0])),
    "no item at all": lambda: frame(pb.GetHeader(), b""),
    "a hit without a checksum": lambda: frame(told(checksums=b"")),
    "a miss with bytes": lambda: frame(told(outcomes=[3], checksums=b"")),
    "a reply to another call": lambda: pack(FrameKind.REPLY, b"\x0a\x01\x01"),
    "a failure that is none": lambda: pack(FrameKind.FAILED, b"\xff"),
}


def test_a_daemon_that_lies_is_an_error_and_asked_again() -> None:
    lies = iter(LIES.values())
    with bad(lambda: next(lies)()) as (client, port):
        for n, lie in enumerate(LIES, 1):
            assert client.get([to_get(key("a"), SIZE)]) == [Outcome.ERROR], lie
            assert port.calls == n, "on a new connection"


SET_LIES: dict[str, Callable[[], Answer]] = {
    "more outcomes than objects": lambda: reply(pb.OutcomesReply(outcomes=[2, 2])),
    "no outcome": lambda: reply(pb.OutcomesReply()),
    "a reply that is none": lambda: pack(FrameKind.REPLY, b"\xff"),
    "an answer to a get": lambda: frame(told()),
    "a reply in a frame of another kind": lambda: b"\4" + reply(pb.OutcomesReply(outcomes=[2]))[1:],
    "a reply with a payload": lambda: pack(FrameKind.REPLY, b"", 5) + b"12345",
    "a refusal with a payload": lambda: pack(FrameKind.FAILED, b"", 5) + b"12345",
}


def reply(message: Any) -> bytes:
    return pack(FrameKind.REPLY, message.SerializeToString())


def test_a_daemon_that_lies_about_what_it_stored() -> None:
    lies = iter(SET_LIES.values())
    with bad(lambda: next(lies)()) as (client, _):
        for lie in SET_LIES:
            assert client.set([to_set(key("a"), DATA[:90])]) == [Outcome.ERROR], lie


def test_a_daemon_that_tells_of_too_few_keys() -> None:
    with bad(lambda: reply(pb.BitmapReply(bits=b"\1"))) as (client, _):
        with pytest.raises(StorageError, match="another version"):
            client.exists([key(n) for n in range(9)])
        assert client.set([to_set(key(n), bytes(1 << 20)) for n in range(9)]) == [Outcome.ERROR] * 9
        assert client.exists([key("a")]) == [True]


def test_wrong_bytes_are_no_hit() -> None:
    """A checksum covers the key, so bytes of another object are wrong also with their own checksum."""
    lies = [
        frame(told(), bytes(SIZE)),
        frame(told(checksums=bytes(16))),
        frame(told(checksums=to_set(key("b"), DATA).meta.checksum)),
    ]
    told_lies = iter(lies)
    with bad(lambda: next(told_lies)) as (client, _):
        assert [client.get([to_get(key("a"), SIZE)]) for _ in lies] == [[Outcome.ERROR]] * 3


def test_a_daemon_that_closes_at_any_byte() -> None:
    """Each such call is UNAVAILABLE; a connection that was closed after an answer is replaced unnoticed."""
    whole = frame(told(sizes=[9], checksums=to_set(key("a"), DATA[:9]).meta.checksum), DATA[:9])
    cuts = iter(range(len(whole)))
    with bad(lambda: [whole[: next(cuts, None)]]) as (client, port):
        for n in range(len(whole)):
            assert fetch(client, key("a"), 9) == UNAVAILABLE
            assert port.calls == n + 1
        for _ in range(3):
            assert fetch(client, key("a"), 9) == DATA[:9]


def test_an_answer_that_trickles_ends_with_the_deadline() -> None:
    def trickle() -> Iterator[bytes]:
        yield frame(told())[: 60 + SIZE // 2]
        yield from [b"x"] * 100

    with bad(trickle) as (client, _):
        started = time.monotonic()
        assert client.get([to_get(key("a"), SIZE)]) == [UNAVAILABLE]
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("begun", [b"", frame(told())[:-7], frame(told())[:20]])
def test_a_daemon_that_stops_in_the_middle(begun: bytes) -> None:
    """Its call ends within the deadline; nothing is written into the buffers after that."""
    go_on = threading.Event()
    answers = iter([lambda: begun or (go_on.wait(30), frame(told()))[1]])

    with bad(lambda: next(answers, lambda: frame(told()))()) as (client, _):
        item = to_get(key("a"), SIZE)
        started = time.monotonic()
        assert client.get([item]) == [UNAVAILABLE]
        assert time.monotonic() - started < 30
        for buffer in item.buffers:
            buffer[:] = b"\5" * buffer.nbytes
        go_on.set()
        other = to_get(key("a"), SIZE)
        assert client.get([other]) == [HIT]
        assert content(other) == DATA
        assert content(item) == b"\5" * SIZE


def test_what_has_come_before_a_silence_is_kept() -> None:
    with bad(lambda: frame(told())) as (client, _):
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


def test_connections_that_could_not_be_opened_do_not_count() -> None:
    """The client may have four; more of them fail while the first one is in use, and the next one works."""
    go_on = threading.Event()
    waits = iter([lambda: go_on.wait(30), lambda: True])

    def answer() -> bytes:
        next(waits)()
        return frame(told())

    with bad(answer, transfer_timeout="30s") as (client, frames):
        first = threading.Thread(target=client.get, args=([to_get(key("a"), SIZE)],))
        first.start()
        until(lambda: frames.calls == 1)
        frames.listener.shutdown(socket.SHUT_RDWR)
        frames.listener.close()
        for _ in range(6):
            assert client.get([to_get(key("a"), SIZE)]) == [UNAVAILABLE]
        frames.listener = socket.create_server(("127.0.0.1", frames.port))
        # private: the same port answers again
        threading.Thread(target=frames._accept, daemon=True).start()
        assert client.get([to_get(key("a"), SIZE)]) == [HIT]
        assert frames.calls == 2
        go_on.set()
        first.join(30)


def test_a_call_that_is_interrupted_gives_its_connection_up() -> None:
    def interrupted(_: DataConnection) -> None:
        raise KeyboardInterrupt

    with bad(lambda: frame(told())) as (client, _):
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                connection_of(client).pool().perform(interrupted, time.monotonic() + 30)
        assert client.get([to_get(key("a"), SIZE)]) == [HIT]


def test_a_session_that_has_ended_is_replaced() -> None:
    """The daemon forgets the client, as when its connection to gRPC is lost between two calls."""
    with StorageServer(daemon_settings("tcp"), MemoryBackend()) as node, open_client("tcp", node) as client:
        assert client.set([to_set(key("a"), DATA)]) == [STORED]
        before = connection_of(client)
        # private: gRPC's channel connects again by itself, and nothing tells the client so
        before._channel.close()
        before._connect()  # private: likewise
        item = to_get(key("a"), SIZE)
        until(lambda: client.get([item]) == [HIT] and connection_of(client) is not before)
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_a_token_is_worth_nothing_with_another_certificate(tmp_path: Path) -> None:
    owner, thief = certificates(), certificates("thief.example")
    both = tmp_path / "both"
    both.write_bytes(owner[1].read_bytes() + thief[1].read_bytes())
    mutual = {"key": owner[0], "certificate": owner[1], "client_ca": both}
    principals = tuple({"name": san, "san": san} for san in ("localhost", "thief.example"))
    given = {"key": str(owner[0]), "certificate": str(owner[1]), "ca": str(owner[1])}
    served = StorageServer(daemon_settings("tls", tls=mutual, principals=principals), MemoryBackend())
    with served as node, GrpcBackend(read_settings({"address": node.addresses[0], **given})) as client:
        offered = connection_of(client).hello.data

        def opened_by(private: Path, certificate: Path) -> DataConnection:
            other = {"key": str(private), "certificate": str(certificate), "server_name": "localhost"}
            settings = read_settings({"address": node.addresses[0], **given, **other})
            return DataConnection(settings, offered, time.monotonic() + 30)

        opened_by(*owner).close()
        with pytest.raises(FailedError, match="another principal"):
            opened_by(*thief)
        assert client.set([to_set(key("a"), b"x")]) == [STORED]
