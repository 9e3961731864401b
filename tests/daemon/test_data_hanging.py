"""Calls of data connections whose store hangs, and what stays held."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import Client, key, until
from tests.daemon.test_data import answer, call, ended, get, put
from tests.daemon.test_data_histories import AUTHORIZATION, HELD, samples
from tests.storage.late import Late
from tests.storage_backends.grpc.nodes import daemon_settings, scratch
from tiercache.core import ObjectKey
from tiercache.daemon import StorageServer
from tiercache.daemon.http import routes
from tiercache.testing.objects import payload
from tiercache.wire import messages
from tiercache.wire.data import FrameKind, pack
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

SIZE = 100_000
HANGING = 3
"""Number of calls that hang, one fewer than the client may have."""


class Node:
    """A daemon with a store whose reads wait for `go_on`, and data connections to it."""

    def __init__(self, stack: ExitStack) -> None:
        self.go_on = Event()
        self.reading = 0
        given = {"http": {"listen": "127.0.0.1:0", "public": True}, "limits": {"idle": 30.0}, "drain": 30.0}
        made = daemon_settings("tcp", Path(tempfile.mkdtemp(dir=scratch())), **given)
        store = Late(MemoryBackend(), {"get"}, self._wait)
        self.server = stack.enter_context(StorageServer(made, store))
        stack.callback(self.go_on.set)  # before the daemon ends
        client = Client(self.server.addresses[0], [("authorization", AUTHORIZATION)])
        self._client = stack.enter_context(client)
        self._port: pb.DataPort = client.call("Hello", b"").data
        self._stack = stack

    def _wait(self) -> None:
        self.reading += 1
        assert self.go_on.wait(60)

    def open(self) -> socket.socket:
        sock = self._stack.enter_context(socket.create_connection(("127.0.0.1", self._port.port), timeout=60))
        opening = data_pb2.DataOpen(token=self._port.token, authorization=AUTHORIZATION)
        sock.sendall(pack(FrameKind.OPEN, opening.SerializeToString()))
        assert answer(sock) == (FrameKind.OPENED, b"", b"")
        return sock

    def settled(self) -> None:
        """Wait until nothing is held any more but the connections."""
        until(lambda: samples(self.server, *HELD[::2]) == {0.0}, 60)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)
    with ExitStack() as stack:
        yield Node(stack)


def asks(*names: object) -> bytes:
    keys: list[ObjectKey] = [key(name) for name in names]
    return call("Exists", pb.ExistsRequest(keys=messages.keys(keys)), seconds=60)


def is_answered(sock: socket.socket) -> bool:
    sock.sendall(asks("there"))
    return (answer(sock) or ((),))[0] is FrameKind.REPLY


def test_reads_that_hang_hold_up_nobody_and_end_when_the_store_is_back(node: Node) -> None:
    beside, socks = node.open(), [node.open() for _ in range(HANGING)]
    for sock in socks:
        sock.sendall(call("Get", get([key("there")], SIZE), seconds=0.5))
    until(lambda: node.reading == HANGING, 60)
    assert is_answered(beside), "while others hang"
    time.sleep(0.5)
    node.go_on.set()
    assert all(map(ended, socks)), "their deadline has passed"
    assert is_answered(beside)
    node.settled()


def test_a_client_that_goes_while_its_read_hangs(node: Node) -> None:
    sock = node.open()
    sock.sendall(call("Get", get([key("there")], SIZE), seconds=60))
    until(lambda: node.reading == 1, 60)
    sock.close()
    node.go_on.set()
    node.settled()
    until(lambda: samples(node.server, "tiercache_node_data_connections ") == {0.0}, 60)


def test_a_drain_lets_a_read_end(node: Node) -> None:
    node.go_on.set()
    sock, data = node.open(), payload("there", SIZE)
    sock.sendall(call("Set", put({key("there"): SIZE}), SIZE, 60) + data)
    assert answer(sock) is not None
    node.go_on.clear()
    sock.sendall(call("Get", get([key("there")], SIZE), seconds=60))
    until(lambda: node.reading == 1, 60)
    stopping = Thread(target=node.server.stop)
    stopping.start()
    time.sleep(0.1)
    node.go_on.set()
    assert (answer(sock) or ((), b"", b""))[2] == data
    assert ended(sock)
    stopping.join(60)
    assert not stopping.is_alive()
