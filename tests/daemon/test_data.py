"""Data connections of clients that mean harm, against a daemon process, as `test_hostile` has it for gRPC."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.daemon import web
from tests.daemon.attacks import P99, attack, client_hello, rest, tls
from tests.daemon.hosts import (
    MIB,
    NAMESPACE,
    TOKENS,
    Client,
    Daemon,
    Good,
    Worker,
    key,
    secret,
    serving,
    until,
    with_mallory,
)
from tests.daemon.test_hostile import LIMITS
from tests.storage_backends.grpc.nodes import certificates
from tiercache.core import ObjectKey, ObjectMeta
from tiercache.testing.objects import payload
from tiercache.wire import messages
from tiercache.wire.data import FRAME_BYTES, FrameKind, pack, unpack
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

SECTIONS = (
    'drain = "3s"'
    + LIMITS
    + """
[http]
listen = "127.0.0.1:0"
[tenants.trent]
salt_file = "{salt}"
[[principals]]
name = "trent"
token_file = "{trent}"
tenant = "trent"
verbs = ["read"]
"""
)
BIG = {key(n, "big"): MIB for n in range(6)}
BYTES = {k: payload(n, size) for n, (k, size) in enumerate(BIG.items())}


def body_in(directory: Path, *, is_tls: bool = False) -> str:
    salt, trent = secret(directory / "salt", "s" * 32), secret(directory / "trent", TOKENS["trent"])
    return with_mallory(directory, SECTIONS.format(salt=salt, trent=trent), is_tls=is_tls)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("p")
    with serving(directory, body_in(directory)) as daemon:
        with Worker(daemon) as client:
            client.set(BYTES)
            client.set({key(n, "fill"): os.urandom(64 << 10) for n in range(32)})
        rest(daemon)
        yield daemon


class Remote(Client):
    """A client over TCP that can open data connections."""

    def __init__(
        self, daemon: Daemon, name: str = "mallory", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        super().__init__(
            f"127.0.0.1:{daemon.ports[0]}", [("authorization", f"Bearer {TOKENS[name]}")], credentials
        )
        self.name = name
        self.port: pb.DataPort = self.call("Hello", b"").data

    def opening(self, token: bytes | None = None, name: str | None = None) -> bytes:
        authorization = f"Bearer {TOKENS[name or self.name]}"
        opening = data_pb2.DataOpen(token=token or self.port.token, authorization=authorization)
        return pack(FrameKind.OPEN, opening.SerializeToString())

    def dial(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port.port), 20, (source, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def open(self, token: bytes | None = None, name: str | None = None) -> socket.socket:
        sock = self.dial()
        sock.sendall(self.opening(token, name))
        return sock


def answer(sock: socket.socket) -> tuple[FrameKind, bytes, bytes] | None:
    """The next frame, or None if the daemon has closed the connection."""
    try:
        first = received(sock, FRAME_BYTES)
        if len(first) < FRAME_BYTES:
            return None
        frame = unpack(first, 1 << 30, 1 << 40)
        header, payload = received(sock, frame.header), received(sock, frame.payload)
    except ConnectionError:
        return None
    return frame.kind, header, payload


def received(sock: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes, or fewer at the end; MSG_WAITALL does not wait if there is a time limit."""
    data = bytearray()
    while len(data) < nbytes and (part := sock.recv(nbytes - len(data))):
        data += part
    return bytes(data)


def opened(client: Remote) -> socket.socket:
    """A connection that was let in, if need be when the daemon has seen the end of earlier ones."""
    end = time.monotonic() + 20
    while True:
        sock = client.open()
        found = answer(sock)
        if found is not None and found[0] is FrameKind.OPENED:
            return sock
        sock.close()
        assert time.monotonic() < end, found
        time.sleep(0.05)


def whole_or_cut(sock: socket.socket) -> bool:
    """Read the answers to gets of all of BIG to the end; a frame that was begun goes on, or ends with it."""
    wanted, data = itertools.cycle(BYTES.values()), b""
    with suppress(ConnectionError):
        while part := sock.recv(1 << 20):
            data += part
    at = 0
    while at + FRAME_BYTES <= len(data):
        frame = unpack(data[at : at + FRAME_BYTES], 1 << 20, 1 << 30)
        start = at + FRAME_BYTES + frame.header
        at = start + frame.payload
        if frame.kind is FrameKind.FAILED:
            continue
        sizes = (
            pb.GetHeader.FromString(data[start - frame.header : start]).sizes if start <= len(data) else ()
        )
        due = b"".join(item[:size] for size, item in zip(sizes, wanted, strict=False))
        assert due.startswith(data[start:at])
    return True


class Beside(Remote):
    """A client that keeps to the protocol, on a data connection."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon)
        self._sock = opened(self)

    def set(self, items: Mapping[ObjectKey, bytes], namespace: bytes = NAMESPACE, timeout: float = 3) -> Any:
        data = b"".join(items.values())
        frame = call("Set", put({k: len(value) for k, value in items.items()}), len(data))
        return list(pb.OutcomesReply.FromString(self._ask(frame + data)[1]).outcomes)

    def get(self, lengths: Mapping[ObjectKey, int], timeout: float = 3) -> list[bytes | None]:
        [(wanted, length)] = lengths.items()
        kind, _, data = self._ask(call("Get", get([wanted], length)))
        assert kind is FrameKind.OBJECTS
        return [data or None]

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        _, header, _ = self._ask(call("Exists", pb.ExistsRequest(keys=messages.keys(keys))))
        return messages.read_bits(pb.BitmapReply.FromString(header).bits, len(keys))

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Leave them: its principal may not delete."""

    def _ask(self, frame: bytes) -> tuple[FrameKind, bytes, bytes]:
        self._sock.sendall(frame)
        found = answer(self._sock)
        assert found is not None
        assert found[0] is not FrameKind.FAILED, found
        return found

    def close(self) -> None:
        self._sock.close()
        super().close()


def call(method: str, request: Any, payload: int = 0, seconds: float = 3.0) -> bytes:
    data = request if isinstance(request, bytes) else request.SerializeToString()
    made = data_pb2.DataCall(method=method, seconds=seconds, request=data)
    return pack(FrameKind.CALL, made.SerializeToString(), payload)


def get(keys: list[ObjectKey], size: int) -> pb.GetRequest:
    return pb.GetRequest(keys=messages.keys(keys), lengths=[size] * len(keys))


def put(items: dict[ObjectKey, int]) -> pb.SetHeader:
    metas = [messages.meta(ObjectMeta(NAMESPACE, size, b"", None, None)) for size in items.values()]
    return pb.SetHeader(keys=messages.keys(list(items)), metas=metas)


def failure(sock: socket.socket) -> int:
    """The status code with which a call was answered; the connection goes on."""
    found = answer(sock)
    assert found is not None
    kind, header, _ = found
    assert kind is FrameKind.FAILED, found
    return int(data_pb2.DataFailure.FromString(header).code)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def ended(sock: socket.socket) -> bool:
    """Whether the daemon closes the connection, whatever it says before."""
    sock.settimeout(20)
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


@pytest.fixture
def mallory(daemon: Daemon) -> Iterator[Remote]:
    with Remote(daemon) as client:
        yield client


def messages_of(outcomes: list[int]) -> bytes:
    return pb.OutcomesReply(outcomes=outcomes).SerializeToString()  # type: ignore[arg-type]


class TestWhoMayOpen:
    def test_without_a_token_or_with_a_wrong_one(self, daemon: Daemon, mallory: Remote) -> None:
        for token in (b"x", bytes(32), mallory.port.token[:-1]):
            with mallory.open(token) as sock:
                assert failure(sock) == 16
                assert ended(sock)
        for first in (call("Get", get(list(BIG), MIB)), b"\3" + mallory.opening()[1:]):
            with mallory.dial() as sock:
                sock.sendall(first)
                assert failure(sock) == 16
                assert ended(sock)

    def test_a_stolen_token_of_another_principal(self, daemon: Daemon, mallory: Remote) -> None:
        with Remote(daemon, "trent") as trent:
            with trent.open(mallory.port.token) as sock:
                assert failure(sock) == 16, "trent's credentials, mallory's token"
            with mallory.open(mallory.port.token, "trent") as sock:
                assert failure(sock) == 16

    def test_a_token_ends_with_its_connection_to_grpc(self, daemon: Daemon) -> None:
        client = Remote(daemon)
        with opened(client) as sock:
            client.close()
            assert ended(sock)
            # the gate sees the end of the connection at about this time
            with client.open() as again:
                assert failure(again) == 16
                assert ended(again)

    def test_verbs_and_tenants_hold(self, daemon: Daemon) -> None:
        with Remote(daemon, "trent") as trent, opened(trent) as sock:
            sock.sendall(call("Set", put({key("mine"): 70_000}), 70_000) + bytes(70_000))
            assert failure(sock) == 7, "permission denied, and the payload does not come between"
            sock.sendall(call("Exists", pb.ExistsRequest(keys=messages.keys(list(BIG)))))
            assert answer(sock) == (FrameKind.REPLY, pb.BitmapReply(bits=b"\0").SerializeToString(), b"")
            sock.sendall(call("Get", get(list(BIG)[:1], MIB)))
            kind, header, payload = answer(sock) or (None, b"", b"")
            assert (kind, payload) == (FrameKind.OBJECTS, b"")
            assert list(pb.GetHeader.FromString(header).outcomes) == [pb.OUTCOME_MISS]

    def test_a_client_has_a_few_connections(self, daemon: Daemon, mallory: Remote) -> None:
        with ExitStack() as stack:
            for _ in range(mallory.port.connections):
                stack.enter_context(opened(mallory))
            with mallory.open() as sock:
                assert failure(sock) == 8


WRONG: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"\xff" * 64,
    "http": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge header": lambda: struct.pack("<B3xIQ", 3, 0xFFFFFFFF, 0),
    "a huge payload": lambda: struct.pack("<B3xIQ", 3, 100, 2**63),
    "a kind of the daemon's": lambda: pack(FrameKind.OBJECTS, b"", 0),
    "an unknown kind": lambda: struct.pack("<B3xIQ", 77, 0, 0),
    "a call that is none": lambda: pack(FrameKind.CALL, b"\xff" * 30),
    "a call in a frame of another kind": lambda: b"\5" + call("Exists", pb.ExistsRequest())[1:],
    "another method": lambda: call("Delete", pb.DeleteRequest(keys=messages.keys([key(1)]))),
    "a get with a payload": lambda: call("Get", get([key(1)], 5), 5) + b"12345",
    "a lookup with a payload": lambda: call("Exists", pb.ExistsRequest(), 5) + b"12345",
    "opened twice": lambda: pack(FrameKind.OPEN, b""),
}
REFUSED: dict[str, tuple[Callable[[], bytes], int]] = {
    "no deadline left": (lambda: call("Get", get(list(BIG), MIB), seconds=0.0), 4),
    "a deadline that is no number": (lambda: call("Get", get(list(BIG), MIB), seconds=float("nan")), 4),
    "a request that is none": (lambda: call("Get", b"\xff" * 30), 3),
    "an object beyond the limit": (lambda: call("Get", get([key(1)], 1 << 40)), 3),
    "an object of no bytes": (lambda: call("Get", get([key(1)], 0)), 3),
    "more keys than may be": (
        lambda: call("Exists", pb.ExistsRequest(keys=messages.keys([key(1)] * 513))),
        3,
    ),
    "keys without lengths": (lambda: call("Get", pb.GetRequest(keys=messages.keys([key(1)]))), 3),
    "a payload that is too short": (lambda: call("Set", put({key(1): 100}), 99) + bytes(99), 3),
    "a payload that is too long": (lambda: call("Set", put({key(1): 100}), 101) + bytes(101), 3),
    "fewer descriptions than keys": (
        lambda: (
            call("Set", pb.SetHeader(keys=messages.keys([key(1), key(2)]), metas=put({key(1): 9}).metas), 9)
            + bytes(9)
        ),
        3,
    ),
    "a set without its payload": (lambda: call("Set", put({key(1): 100})), 3),
    "an object that claims 2**62 bytes": (
        lambda: call("Set", put({key(1): 2**62, key(2): 2**62}), 5) + b"12345",
        3,
    ),
}


class TestLies:
    def test_what_is_no_frame_closes_the_connection(self, daemon: Daemon, request: Any) -> None:
        with attack(daemon, request), Remote(daemon) as mallory:
            for wrong in WRONG.values():
                with opened(mallory) as sock:
                    sock.sendall(wrong())
                    assert ended(sock)

    def test_what_cannot_be_served_is_refused_and_the_next_call_is_served(self, daemon, mallory):
        with opened(mallory) as sock:
            for name, (wrong, code) in REFUSED.items():
                sock.sendall(wrong())
                assert (name, failure(sock)) == (name, code)
                sock.sendall(call("Exists", pb.ExistsRequest(keys=messages.keys([key("big")]))))
                assert (answer(sock) or ((),))[0] is FrameKind.REPLY


@pytest.mark.slow
class TestWhoDoesNotMoveOn:
    def test_many_that_do_not_read_and_many_that_do_not_send(self, daemon, request):
        with attack(daemon, request, crowded=True), ExitStack() as stack:
            clients = [stack.enter_context(Remote(daemon)) for _ in range(6)]
            with Good(lambda: Beside(daemon), name="beside", crowded=True):
                socks = [stack.enter_context(opened(client)) for client in clients for _ in range(6)]
                for n, sock in enumerate(socks):
                    keys = {key(part, f"slow {n}"): MIB for part in range(6)}
                    reading = call("Get", get([key(part % 6, "big") for part in range(48)], MIB))
                    sock.sendall(call("Set", put(keys), 6 * MIB) + bytes(MIB) if n % 2 else reading)
                time.sleep(4)  # longer than `limits.call`: these were cut, or told that they are late
                for n, sock in enumerate(socks):
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_WR)
                    assert ended(sock) if n % 2 else whole_or_cut(sock)

    def test_half_a_payload_and_half_a_frame(self, daemon: Daemon, request: Any) -> None:
        with attack(daemon, request), Remote(daemon) as mallory, ExitStack() as stack:
            socks = [stack.enter_context(opened(mallory)) for _ in range(8)]
            whole = call("Set", put({key(n, "half"): MIB for n in range(4)}), 4 * MIB)
            for n, sock in enumerate(socks):
                sock.sendall([whole + bytes(MIB + 5), whole[:20], whole[:3], b""][n % 4])
            assert all(ended(sock) for n, sock in enumerate(socks) if n % 4 != 3)
            sock = socks[3]
            sock.sendall(call("Exists", pb.ExistsRequest(keys=messages.keys([key("big")]))))
            assert answer(sock) is not None, "a connection without a call may stand still"

    def test_bytes_one_by_one(self, daemon: Daemon, request: Any) -> None:
        """A request must come within `limits.idle`, a call in its deadline, a refused payload soon."""
        with attack(daemon, request), Remote(daemon) as mallory, ExitStack() as stack:
            trent = stack.enter_context(Remote(daemon, "trent"))
            socks = [stack.enter_context(opened(client)) for client in [mallory, trent] for _ in range(6)]
            slow = call("Set", put({key("slow"): MIB}), MIB)
            for sock in socks[::2]:
                sock.sendall(slow)
            end = time.monotonic() + 20
            left = list(socks)
            while left and time.monotonic() < end:
                for n, sock in enumerate(socks):
                    if sock in left:
                        try:
                            sock.sendall(b"\3" if n % 2 else b"x")
                        except ConnectionError:
                            left.remove(sock)
                time.sleep(0.2)
            assert not left


class TestStrangers:
    @pytest.mark.slow
    def test_a_flood_beside_known_clients(self, daemon: Daemon, request: pytest.FixtureRequest) -> None:
        """Known clients go on, the flood makes room for others, and another address need not wait for it."""
        gone = Remote(daemon)
        over = gone.opening()
        gone.close()
        with attack(daemon, request), Remote(daemon) as mallory, Remote(daemon, "trent") as trent:
            first = [
                b"", mallory.opening()[:20], mallory.opening()[:-1], mallory.opening(bytes(32)),
                mallory.opening(name="trent"), trent.opening(mallory.port.token), over, os.urandom(40),
                call("Get", get(list(BIG), MIB)),
            ]  # fmt: skip
            with Good(lambda: Beside(daemon), name="flooded") as beside, ExitStack() as stack:
                for n in range(3000):
                    with suppress(OSError):
                        sock = mallory.dial("127.0.0.1" if n % 2 else "127.0.0.2")
                        stack.enter_context(sock) if n > 2600 else stack.callback(sock.close)
                        sock.sendall(first[n % 9])
                        if n <= 2600 and n % 3:
                            sock.close()
                    if n % 300 == 0:
                        until(lambda: greeted(mallory, "127.0.0.3"), 30)
                until(lambda: greeted(mallory), 30)
            assert beside.p99 < P99

    def test_who_says_nothing_is_cut(self, daemon: Daemon, mallory: Remote) -> None:
        with mallory.dial() as sock:
            assert ended(sock)

    @pytest.mark.slow
    def test_who_brings_a_token_byte_by_byte_is_cut(self, daemon: Daemon, mallory: Remote) -> None:
        """No wait for one byte is ever too long."""
        with mallory.dial() as sock:
            sock.sendall(pack(FrameKind.OPEN, bytes(8000))[:FRAME_BYTES])
            sock.settimeout(0.3)
            for _ in range(200):
                try:
                    sock.sendall(b"x")
                    if not sock.recv(1000):
                        return
                except TimeoutError:
                    continue
                except ConnectionError:
                    return
            raise AssertionError("the connection stays open for a minute")


def greeted(client: Remote, source: str = "127.0.0.1") -> bool:
    with suppress(OSError), client.dial(source) as sock:
        sock.sendall(client.opening())
        return (answer(sock) or ((),))[0] is FrameKind.OPENED
    return False


@pytest.mark.slow
def test_a_drain_ends_calls_in_time_and_idle_connections_at_once(tmp_path: Any) -> None:
    body = re.sub(r'(drain|idle|call) = "\ds"', r'\1 = "60s"', body_in(tmp_path))
    body = body.replace('name = "mallory"', 'name = "mallory"\nverbs = ["read", "write", "observe"]')
    with serving(tmp_path, body) as daemon, Remote(daemon) as client, ExitStack() as stack:
        [page] = re.findall(r"status on http://(\S+)/status", daemon.log.read_text())
        idle, busy, late = (stack.enter_context(opened(client)) for _ in range(3))
        data = os.urandom(MIB)
        busy.sendall(call("Set", put({key("last"): MIB}), MIB, 60) + data[: MIB // 2])
        token = f"Bearer {TOKENS['mallory']}"
        begun = 'tiercache_node_calls_under_way{method="Set"} 1.0'
        until(lambda: begun in web.ask(page, "/metrics", authorization=token).text)
        daemon.process.terminate()
        assert ended(idle)
        with suppress(ConnectionError):
            late.sendall(call("Exists", pb.ExistsRequest(keys=messages.keys([key("last")]))))
        assert ended(late)
        busy.sendall(data[MIB // 2 :])
        assert answer(busy) == (FrameKind.REPLY, messages_of([2]), b"")
        assert ended(busy)
        with pytest.raises(ConnectionError):
            client.dial().recv(1)
        assert daemon.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_strangers_in_tls(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Half a handshake, one without a token, no TLS, and resets: a client with a token is let in."""
    with serving(tmp_path, body_in(tmp_path, is_tls=True)) as daemon:
        rest(daemon)
        credentials = grpc.ssl_channel_credentials(certificates()[1].read_bytes())
        with attack(daemon, request), Remote(daemon, credentials=credentials) as client, ExitStack() as stack:
            for n in range(144):
                with suppress(OSError):
                    sock = stack.enter_context(client.dial())
                    if n % 6 == 5:
                        secure = tls(sock)
                        secure.sendall(client.opening())
                        # From here on it is no TLS any more: a record that is cut, and garbage.
                        sock = stack.enter_context(socket.socket(fileno=secure.detach()))
                        sock.sendall([b"\x17\x03\x03\x40\x00abc", os.urandom(40)][n // 6 % 2])
                    elif n % 6 == 2:
                        stack.enter_context(tls(sock))
                    else:
                        sock.sendall([client_hello()[:100], client.opening()][n % 2])
                    if n % 12 in (3, 4, 5):
                        reset(sock)

            def opens() -> bool:
                """Whether a client is let in, with three calls in the TLS record of its token."""
                data, due = b"", pack(FrameKind.OPENED, b"")
                ask = call("Exists", pb.ExistsRequest(keys=messages.keys([key("no")])))
                due += 3 * pack(FrameKind.REPLY, pb.BitmapReply(bits=b"\0").SerializeToString())
                with suppress(OSError), tls(client.dial()) as sock:
                    sock.sendall(client.opening() + 3 * ask)
                    while len(data) < len(due) and (part := sock.recv(1000)):
                        data += part
                return data == due

            until(opens, 60)
