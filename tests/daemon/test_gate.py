"""How much the gate passes on, and for whom, before a server that only counts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.daemon.attacks import PREFACE, frame
from tests.daemon.hosts import until
from tiercache.daemon.gate import Gate

SAID = 300 << 10
ONCE = 64 << 10
PER_SECOND = 16 << 10


class Server:
    """Greets like gRPC, reads all that comes, and knows the other end by the name that gRPC would give it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard = 0
        self.peer = ""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            client, address = self._listener.accept()
            with client:
                self.peer = "unix-abstract:" + address.lstrip(b"\0").decode()
                client.sendall(frame(4, 0, 0))
                while piece := client.recv(1 << 16):
                    self.heard += len(piece)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "s")
    yield server
    server.close()


@contextmanager
def gated(settling: float) -> Iterator[Gate]:
    gate = Gate(
        max_connections=8, max_wide=4, max_streams=32, settling=settling, count_refusal=lambda _: None
    )
    try:
        yield gate
    finally:
        gate.close()


@contextmanager
def greeted(gate: Gate, server: Server, *, mutual: bool = False) -> Iterator[socket.socket]:
    """A connection through the gate, whose SETTINGS and their acknowledgement the server has read."""
    port = gate.listen("127.0.0.1", 0, server.path, tls=mutual, mutual=mutual)
    gate.start()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(PREFACE)
        client.recv(9)
        client.sendall(frame(4, 1, 0))
        until(lambda: server.heard >= len(PREFACE) + 9)
        yield client


@pytest.mark.parametrize(("mutual", "recognised"), [(False, False), (False, True), (True, False)])
def test_only_strangers_are_stinted(server: Server, mutual: bool, recognised: bool) -> None:
    """In TLS, as far as the gate can tell, nothing is acknowledged; so that must settle by time."""
    with gated(settling=0.2 if mutual else 20) as gate, greeted(gate, server, mutual=mutual) as client:
        started = time.monotonic()
        if recognised:
            gate.mark_known(server.peer)
        Thread(target=client.sendall, args=(bytes(SAID),), daemon=True).start()
        if not (mutual or recognised):
            until(lambda: server.heard >= ONCE)
            time.sleep(1)
            assert server.heard < SAID
            assert server.heard <= ONCE + PER_SECOND * (time.monotonic() - started + 1)
            gate.mark_known(server.peer)
        until(lambda: server.heard >= SAID)


@pytest.mark.parametrize(
    ("settling", "more"), [(20, 48 << 10), (2, 4 * ONCE)], ids=["it is seen", "it is not seen"]
)
def test_who_has_gone_is_forgotten_while_nobody_is_heard(server: Server, settling: float, more: int) -> None:
    """Although what it said has not been read, or not even been taken by the kernel."""
    with gated(settling) as gate:
        with greeted(gate, server) as client:
            Thread(target=client.sendall, args=(bytes(ONCE + more),), daemon=True).start()
            until(lambda: server.heard >= ONCE)
        until(lambda: gate.find(server.peer) is None, 2 if settling == 20 else 5)


@pytest.mark.parametrize("closing", [False, True], ids=["the client sends", "the gate closes"])
def test_what_grpc_sent_before_it_closed_reaches_the_client(tmp_path: Path, closing: bool) -> None:
    """The way down is full when gRPC closes; then the way up breaks, or the gate is closed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    with listener, ExitStack() as stack:
        gate = stack.enter_context(gated(settling=20))
        port = gate.listen("127.0.0.1", 0, str(tmp_path / "s"), tls=False)
        gate.start()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(PREFACE)
            backend, address = listener.accept()
            name = "unix-abstract:" + address.lstrip(b"\0").decode()
            backend.sendall(frame(4, 0, 0))
            client.recv(9)
            client.sendall(frame(4, 1, 0))
            gate.mark_known(name)
            sent = fill(backend)
            backend.close()
            if closing:
                Thread(target=stack.pop_all().close).start()
            else:
                client.sendall(b"more")
            time.sleep(0.3)  # for a gate that would end the connection now
            received = bytearray()
            while piece := client.recv(1 << 20):
                received += piece
            assert received == sent
        until(lambda: gate.find(name) is None)


def fill(end: socket.socket) -> bytearray:
    """Send until nothing more is accepted for a while; return what was sent."""
    end.settimeout(0.5)
    sent = bytearray()
    with suppress(TimeoutError):
        while True:
            sent += (piece := os.urandom(1 << 16))[: end.send(piece)]
    return sent
