"""Random histories of frames on several data connections, against a daemon and a plain model of its answers.

A client may send calls before it has read the answers to earlier ones, lie about lengths, send what is no
frame, and close or reset a connection at any byte. On each connection the answers come in the order of the
calls, with the right bytes; a connection that cannot go on ends, and nothing that it held stays held.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import Client, key, until
from tests.daemon.test_data import answer, call, ended, get, put, reset
from tests.daemon.web import ask
from tests.examples import example_count
from tests.storage_backends.grpc.nodes import daemon_settings, scratch, token_file
from tiercache.daemon import StorageServer
from tiercache.daemon.http import routes
from tiercache.testing.objects import payload
from tiercache.wire import messages
from tiercache.wire.data import FrameKind, pack
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

SIZES = (1, 700, 4096, 20_000, 70_000)
MOST = 3
"""Maximum number of answers that wait to be read; more could fill the buffers of both ends."""
HELD = ("tiercache_node_held_bytes{", "tiercache_node_data_connections ", "tiercache_node_calls_under")
"""Metrics of all that the daemon holds for clients: bytes, connections, calls."""
NAMES = range(8)
STORED, HIT, MISS = 2, 1, 3
AUTHORIZATION = f"Bearer {token_file().read_text()}"

Check = Callable[[tuple[FrameKind, bytes, bytes] | None], None]


def data_of(name: int) -> bytes:
    return payload(name, SIZES[name % len(SIZES)])


class Conversation:
    """One connection, and what is due on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.due: list[Check] = []
        self.sets: set[int] = set()
        """Names of objects whose set was sent, and its answer not read."""
        self.guesses: list[dict[int, bool | None]] = []
        """Names in the calls that were sent, and whether the call finds the object."""


class Histories(RuleBasedStateMachine):
    node: StorageServer
    port: pb.DataPort

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Conversation] = []
        self.known: dict[int, bool | None] = {}
        """Whether each object is stored; None: nobody can know."""

    @initialize()
    def begin(self) -> None:
        store = self.node.store
        assert store is not None
        store.delete([key(name) for name in NAMES])
        self.known = dict.fromkeys(NAMES, False)

    @precondition(lambda self: len(self.open) < 3)
    @rule(token=st.sampled_from(["right"] * 8 + ["wrong", "short", "stranger", "none", "long"]))
    def connect(self, token: str) -> None:
        sock = socket.create_connection(("127.0.0.1", self.port.port), timeout=60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = data_pb2.DataOpen(
            token={"wrong": bytes(32), "short": self.port.token[:31]}.get(token, self.port.token),
            authorization="Bearer " + "x" * 32 if token == "stranger" else AUTHORIZATION,
        )
        first = pack(FrameKind.OPEN, opening.SerializeToString())
        if token == "none":
            first = call("Exists", pb.ExistsRequest())
        elif token == "long":
            first = pack(FrameKind.OPEN, bytes(9000))
        sock.sendall(first)
        made = Conversation(sock)
        self.open.append(made)
        if token == "right":
            made.due.append(is_frame(FrameKind.OPENED, b""))
            return
        if token != "long":
            made.due.append(is_failure(16))
        self.close_of(made)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    def store(self, data: Any, names: list[int]) -> None:
        made = self.any(data)
        whole = b"".join(map(data_of, names))
        frame = call("Set", put({key(name): len(data_of(name)) for name in names}), len(whole), 60) + whole
        if not self.send(data, made, frame):
            return
        seen = self.seen(made, names)

        def check(found: tuple[FrameKind, bytes, bytes] | None) -> None:
            assert found is not None
            assert (found[0], found[2]) == (FrameKind.REPLY, b"")
            outcomes = pb.OutcomesReply.FromString(found[1]).outcomes
            assert len(outcomes) == len(names)
            for outcome, name in zip(outcomes, names, strict=True):
                assert outcome in {None: (STORED, HIT), True: (HIT,), False: (STORED,)}[seen[name]]
            made.sets -= set(names)
            self.known |= dict.fromkeys(names, True)

        made.sets |= set(names)
        made.due.append(check)
        # The calls of other connections may be served before this one or after it.
        for guess in [guess for other in self.open if other is not made for guess in other.guesses]:
            guess |= {name: guess[name] or None for name in names if name in guess}

    @precondition(lambda self: self.open)
    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), other=st.booleans())
    def read(self, data: Any, names: list[int], other: bool) -> None:
        """`other`: with another length than that of what is stored."""
        made = self.any(data)
        keys, lengths = [key(n) for n in names], [len(data_of(n)) + other for n in names]
        request = pb.GetRequest(keys=messages.keys(keys), lengths=lengths)
        if not self.send(data, made, call("Get", request, 0, 60)):
            return
        seen = self.seen(made, names)
        left = list(names)

        def check(found: tuple[FrameKind, bytes, bytes] | None) -> None:
            assert found is not None
            assert found[0] is FrameKind.OBJECTS
            header = pb.GetHeader.FromString(found[1])
            first, at = len(names) - len(left), 0
            assert list(header.items) == list(range(first, first + len(header.items)))
            for outcome, size in zip(header.outcomes, header.sizes, strict=True):
                name = left.pop(0)
                there = seen[name]
                hit = outcome == HIT
                assert hit is (there and not other) or there is None
                assert other or hit or outcome == MISS
                assert found[2][at : at + size] == (data_of(name) if hit else b"")
                at += size
            assert at == len(found[2])
            if left:  # the rest comes in another frame
                made.due.insert(0, check)

        made.due.append(check)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), max_size=4))
    def ask(self, data: Any, names: list[int]) -> None:
        made = self.any(data)
        request = pb.ExistsRequest(keys=messages.keys([key(name) for name in names]))
        if not self.send(data, made, call("Exists", request, 0, 60)):
            return
        seen = self.seen(made, names)

        def check(found: tuple[FrameKind, bytes, bytes] | None) -> None:
            assert found is not None
            assert found[0] is FrameKind.REPLY
            bits = messages.read_bits(pb.BitmapReply.FromString(found[1]).bits, len(names))
            assert all(seen[name] in (None, bit) for name, bit in zip(names, bits, strict=True))

        made.due.append(check)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), name=st.sampled_from(NAMES), by=st.sampled_from([-1, 0, 1, 500]))
    def lie(self, data: Any, name: int, by: int) -> None:
        """A set whose payload is shorter or longer than its objects, or (0) a get that is too late."""
        made = self.any(data)
        size = len(data_of(name))
        frame = call("Get", get([key(name)], size), seconds=0)
        if by:
            frame = call("Set", put({key(name): size}), size + by, 60) + bytes(size + by)
        if self.send(data, made, frame):
            made.due.append(is_failure(3 if by else 4))

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        wrong=st.sampled_from(
            [
                b"\xff" * 40, struct.pack("<B3xIQ", 3, 0xFFFFFFFF, 0), struct.pack("<B3xIQ", 3, 100, 2**63),
                pack(FrameKind.REPLY, b""), pack(FrameKind.OPEN, b""), pack(FrameKind.CALL, b"\xff" * 30),
                call("Delete", pb.DeleteRequest()),
            ]
        ),
    )  # fmt: skip
    def break_off(self, data: Any, wrong: bytes) -> None:
        """Send no call: the connection is closed, behind the answers to the calls before it."""
        made = self.any(data)
        if self.send(data, made, wrong):
            self.close_of(made)

    @precondition(lambda self: any(made.due for made in self.open))
    @rule(data=st.data())
    def listen(self, data: Any) -> None:
        waiting = [made for made in self.open if made.due]
        made = data.draw(st.sampled_from(waiting), label="connection")
        made.due.pop(0)(answer(made.sock))

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data(), by_reset=st.booleans())
    def leave(self, data: Any, by_reset: bool) -> None:
        self.end(self.any(data), by_reset)

    def any(self, data: Any) -> Conversation:
        found: Conversation = data.draw(st.sampled_from(self.open), label="connection")
        return found

    def seen(self, made: Conversation, names: list[int]) -> dict[int, bool | None]:
        """Return whether the next call of a connection finds these objects, as far as it can be known."""
        others = set().union(*(other.sets for other in self.open if other is not made))
        guess = {
            n: n in made.sets or self.known[n] or (None if n in others else self.known[n]) for n in names
        }
        made.guesses.append(guess)
        return guess

    def send(self, data: Any, made: Conversation, frame: bytes) -> bool:
        """Send a frame, or a part of it and no more: then the connection ends, and return False."""
        while len(made.due) > MOST:
            made.due.pop(0)(answer(made.sock))
        cut = data.draw(st.one_of(st.just(None), st.just(None), st.integers(0, len(frame) - 1)), label="cut")
        made.sock.sendall(frame[:cut])
        if cut is not None:
            self.end(made, data.draw(st.booleans(), label="reset"))
        return cut is None

    def end(self, made: Conversation, by_reset: bool) -> None:
        for name in made.sets:
            self.known[name] = self.known[name] or None
        reset(made.sock) if by_reset else made.sock.close()
        self.open.remove(made)

    def close_of(self, made: Conversation) -> None:
        """Read what is due on a connection, and its end."""
        try:
            while made.due:
                made.due.pop(0)(answer(made.sock))
            assert ended(made.sock)
        finally:
            self.end(made, False)

    def teardown(self) -> None:
        for made in list(self.open):
            made.sock.shutdown(socket.SHUT_WR)
            self.close_of(made)
        until(lambda: samples(self.node, *HELD) == {0.0})


def samples(node: StorageServer, *names: str) -> set[float]:
    """Return the values of all metrics whose lines begin with one of these."""
    status, text, _ = ask(node.http_address, "/metrics")
    assert status == 200
    return {float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}


def is_frame(kind: FrameKind, header: bytes) -> Check:
    def check(found: tuple[FrameKind, bytes, bytes] | None) -> None:
        assert found == (kind, header, b"")

    return check


def is_failure(code: int) -> Check:
    def check(found: tuple[FrameKind, bytes, bytes] | None) -> None:
        assert found is not None
        assert (found[0], found[2]) == (FrameKind.FAILED, b"")
        assert data_pb2.DataFailure.FromString(found[1]).code == code

    return check


@pytest.mark.slow
def test_every_history_is_answered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)
    given = {
        "http": {"listen": "127.0.0.1:0", "public": True},
        "limits": {"idle": 30.0, "keys_per_batch": 64},
    }
    made = daemon_settings("tcp", Path(tempfile.mkdtemp(dir=scratch())), **given)
    with (
        StorageServer(made, MemoryBackend()) as node,
        Client(node.addresses[0], [("authorization", AUTHORIZATION)]) as client,
    ):
        Histories.node, Histories.port = node, client.call("Hello", b"").data
        chosen = settings(max_examples=example_count(50), stateful_step_count=25, deadline=None)
        run_state_machine_as_test(Histories, settings=chosen)
        moved = samples(node, 'tiercache_node_payload_bytes_total{direction="in",plane="data"}')
        assert min(moved) > 0
