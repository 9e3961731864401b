"""A daemon as a process, what it holds, and clients that keep to the protocol or do not."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from tests.storage_backends.grpc.nodes import certificates, secret
from tests.waiting import until
from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.storage.vectors import parts
from tiercache.wire import attachment, messages
from tiercache.wire.methods import ATTACH_SOCKET, GRPC_SOCKET, METHODS, SESSION_METADATA
from tiercache.wire.v1 import attach_pb2
from tiercache.wire.v1 import storage_pb2 as pb

MIB = 1 << 20
HOST_BYTES = 48 * MIB
GUARD = 120
"""Seconds after which a daemon that does not start or end is taken to hang; a quiet machine needs two."""
STORE_BYTES = 8 * MIB
TOKENS = {"mallory": "mallory-" + "m" * 24, "trent": "trent-" + "t" * 24}
NAMESPACE = b"n" * 32
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.CANCELLED,
}  # fmt: skip
"""Every way in which a call may be answered with nothing."""


def key(number: int, name: str = "") -> ObjectKey:
    """An object key of its own for each number, on a page of its own."""
    return ObjectKey(PoolName.KV, b"." * 32 + f"{name}{number}".encode().ljust(32, b"."))


class Figures(NamedTuple):
    """Resources that a process holds.

    `memory` is the bytes of its anonymous pages (heap, stacks) and of its own arena, without the memory
    that clients attached.
    """

    memory: int
    descriptors: int
    threads: int


_SMAPS = re.compile(
    rb"^(?:[0-9a-f]+-[0-9a-f]+(?: +[^ \n]+){4} *(.*)|Rss: +(\d+) kB|Anonymous: +(\d+) kB)$", re.MULTILINE
)
"""Names of mappings, and the two figures that count. The rest is much, and read many times a second."""


def figures(pid: int) -> Figures:
    """Read the resources of a process from /proc.

    The memory is the anonymous pages of every mapping, and the resident pages of the memfds that the
    daemon made itself. Memfds with "hostile" in their names belong to the tests' clients and are not
    counted.
    """
    held, name = 0, b""
    for told, resident, anonymous in _SMAPS.findall(Path(f"/proc/{pid}/smaps").read_bytes()):
        is_memfd = name.startswith(b"/memfd:")
        if resident:
            held += int(resident) << 10 if is_memfd and b"hostile" not in name else 0
        elif anonymous:
            held += int(anonymous) << 10 if not is_memfd else 0
        else:
            name = told
    threads = int(re.search(r"Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return Figures(held, len(os.listdir(f"/proc/{pid}/fd")), threads)


@dataclass
class Watch:
    """Samples a process; `peak` is the most memory that was seen."""

    pid: int
    peak: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.03):
            with suppress(OSError, TypeError):
                self.peak = max(self.peak, figures(self.pid).memory)


@dataclass
class Daemon:
    """A running `tiercache serve`."""

    process: subprocess.Popen[str]
    directory: Path
    ports: list[int]
    log: Path
    first: Figures = field(init=False)
    """Resources that the daemon held when it was idle for the first time."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def grpc(self) -> str:
        return f"unix:{self.directory / 'run' / GRPC_SOCKET}"

    @property
    def attach(self) -> str:
        return str(self.directory / "run" / ATTACH_SOCKET)

    def alive(self) -> bool:
        return self.process.poll() is None

    def figures(self) -> Figures:
        return figures(self.pid)


def config(directory: Path, body: str) -> Path:
    path = directory / "tiercache.toml"
    path.write_text(body)
    return path


def with_mallory(directory: Path, sections: str = "", verbs: str = "", *, is_tls: bool = False) -> str:
    """The configuration of a daemon with a small store, one of whose principals means harm."""
    tls = '[tls]\nkey = "{}"\ncertificate = "{}"\n'.format(*certificates()) if is_tls else ""
    return f"""
directory = "{directory}"
storage = "memory://?capacity={STORE_BYTES}"
host_bytes = {HOST_BYTES}
listen = ["127.0.0.1:0"]
{sections}
{tls}
[[principals]]
name = "mallory"
token_file = "{secret(directory / "mallory", TOKENS["mallory"])}"
{verbs and f"verbs = {verbs.split()}"}
"""


@contextmanager
def serving(directory: Path, body: str) -> Iterator[Daemon]:
    """A daemon with this configuration, killed at the end if need be; its log is shown if something broke."""
    log, places = directory / "log", directory / "places.json"
    command = [sys.executable, "-m", "tiercache.cli", "serve", "--config", str(config(directory, body))]
    with log.open("w") as err, places.open("w") as out:
        process = subprocess.Popen([*command, "-o", "json"], stderr=err, stdout=out, text=True)
    try:
        # Printed after the last of what the log says of the start.
        until(lambda: process.poll() is not None or '"store"' in places.read_text(), GUARD)
        assert process.poll() is None, log.read_text()
        ports = [int(port) for port in re.findall(r"on 127\.0\.0\.1:(\d+)", log.read_text())]
        yield Daemon(process, directory, ports, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD) == 0, log.read_text()[-4000:]
        assert "Traceback" not in log.read_text(), log.read_text()[-6000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class Client(AbstractContextManager["Client"]):
    """Calls over one channel, with what one says of oneself in the metadata."""

    def __init__(
        self,
        target: str,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.metadata = list(metadata)
        self.channel = (
            grpc.insecure_channel(target, OPTIONS)
            if credentials is None
            else grpc.secure_channel(
                target, credentials, (*OPTIONS, ("grpc.ssl_target_name_override", "localhost"))
            )
        )

    def stream(
        self, path: str, requests: Iterator[bytes], timeout: float | None = 30, metadata: Any = None
    ) -> Any:
        """A raw call of any shape: bytes in, bytes out."""
        call = self.channel.stream_stream(path if path.startswith("/") else METHODS[path].path)
        return call(requests, timeout=timeout, metadata=self.metadata if metadata is None else metadata)

    def call(self, name: str, request: Any, timeout: float | None = 30, metadata: Any = None) -> Any:
        """One reply to one request."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        [reply] = self.stream(name, iter([data]), timeout, metadata)
        return METHODS[name].reply.FromString(reply)

    def refused(
        self, name: str, request: Any = b"", timeout: float | None = 30, metadata: Any = None
    ) -> grpc.StatusCode:
        """The status of a call that must come back with nothing."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return status(self.stream(name, iter([data]), timeout, metadata))

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return messages.read_bits(
            self.call("Exists", pb.ExistsRequest(keys=messages.keys(keys))).bits, len(keys)
        )

    def set(
        self, items: Mapping[ObjectKey, bytes], namespace: bytes = NAMESPACE, timeout: float = 30
    ) -> list[int]:
        [reply] = self.stream("Set", set_messages(items, namespace), timeout)
        return list(pb.OutcomesReply.FromString(reply).outcomes)

    def get(self, lengths: Mapping[ObjectKey, int], timeout: float = 30) -> list[bytes | None]:
        request = get_request(lengths)
        outcomes: list[tuple[int, int]] = []
        payload = b""
        for data in self.stream("Get", iter([request]), timeout):
            reply = pb.GetReply.FromString(data)
            assert list(reply.header.items) == list(
                range(len(outcomes), len(outcomes) + len(reply.header.items))
            )
            outcomes += zip(reply.header.outcomes, reply.header.sizes, strict=True)
            payload += reply.payload
        found: list[bytes | None] = []
        for outcome, size in outcomes:
            found.append(payload[:size] if outcome == pb.OUTCOME_HIT else None)
            payload = payload[size:]
        assert not payload
        return found

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.call("Delete", pb.DeleteRequest(keys=messages.keys(keys)))

    def close(self) -> None:
        self.channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def get_request(lengths: Mapping[ObjectKey, int]) -> bytes:
    return pb.GetRequest(
        keys=messages.keys(list(lengths)), lengths=list(lengths.values())
    ).SerializeToString()


def set_messages(items: Mapping[ObjectKey, bytes], namespace: bytes = NAMESPACE) -> Iterator[bytes]:
    header = pb.SetHeader(
        keys=messages.keys(list(items)),
        metas=[messages.meta(ObjectMeta(namespace, len(value), b"", None, None)) for value in items.values()],
    )
    for number, payload in enumerate(parts([memoryview(value) for value in items.values()], MIB)):
        yield pb.SetRequest(header=None if number else header, payload=payload).SerializeToString()


def status(call: Any) -> grpc.StatusCode:
    """How a call ended that must not have brought anything."""
    try:
        replies = list(call)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code not in REFUSALS:
            raise AssertionError(f"{code}: {error.details()}") from error
        return code
    raise AssertionError(f"it was answered: {replies!r}")


class Worker(Client):
    """A client on the unix sockets, with its session."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = attach_socket(daemon)
        session, _ = attachment.receive(self.sock, attach_pb2.Session)
        if session is None or not session.token:
            self.sock.close()
            raise AssertionError(session.refusal if session else "no session")
        self.token = session.token
        super().__init__(daemon.grpc, [(SESSION_METADATA, session.token)])

    def attach(self, fd: int, nbytes: int) -> attach_pb2.Answer:
        attachment.send(self.sock, attach_pb2.Request(attach=attach_pb2.Attach(bytes=nbytes)), fd)
        return self.answer()

    def answer(self) -> attach_pb2.Answer:
        answer, _ = attachment.receive(self.sock, attach_pb2.Answer)
        assert answer is not None, "the session is over"
        return answer

    def close(self) -> None:
        super().close()
        self.sock.close()


def attach_socket(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(daemon.attach)  # waits while the daemon's backlog is full
    sock.settimeout(30)
    return sock


class Good:
    """A client that keeps to the protocol, round after round, in a thread; what each round took is kept.

    It must always find what it has just stored, unless the store is `crowded`: others store more than fits
    meanwhile, and what it lost to them is counted. It never reads anything else.
    """

    def __init__(
        self, make: Callable[[], Client], nbytes: int = 64 << 10, *, crowded: bool = False, name: str = "good"
    ) -> None:
        self._make = make
        self._name = name
        self._crowded = crowded
        self.lost = 0
        self._payload = os.urandom(nbytes)
        self._stop = threading.Event()
        self.seconds: list[float] = []
        self.error: BaseException | None = None

    def __enter__(self) -> Good:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: bool(self.seconds) or self.error is not None)
        self.seconds.clear()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not kind:
            # during or right after, but it goes on
            until(lambda: len(self.seconds) >= 20 or self.error is not None, 60)
        self._stop.set()
        self._thread.join(30)
        if not kind:
            assert self.error is None, repr(self.error)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98]

    def _run(self) -> None:
        try:
            with self._make() as client:
                for number in itertools.count():
                    self._round(client, number)
                    if self._stop.wait(0.01):
                        return
        except BaseException as error:  # noqa: BLE001  shown by the test
            self.error = error

    def _round(self, client: Client, number: int) -> None:
        started = time.monotonic()
        mine = key(number % 4, self._name)
        stored, [found] = client.set({mine: self._payload}), client.get({mine: len(self._payload)})
        there = client.exists([mine]) == [True]
        assert found in (None, self._payload), "other bytes than were stored"
        assert self._crowded or (found and there), f"{stored=}, {there=}, found: {found is not None}"
        self.lost += found is None
        client.delete([mine])
        self.seconds.append(time.monotonic() - started)


class Http2:
    """Part of an HTTP/2 client, enough to misbehave: without flow control, and without reading replies."""

    def __init__(self, sock: socket.socket, *, window: int = 65_535, acknowledge: bool = True) -> None:
        """`acknowledge`: the other end's SETTINGS, once they are there."""
        self.sock = sock
        sock.settimeout(30)
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.frame(4, 0, 0, b"\x00\x04" + window.to_bytes(4))
        if acknowledge:
            header = sock.recv(9, socket.MSG_WAITALL)
            sock.recv(int.from_bytes(header[:3]), socket.MSG_WAITALL)
            self.frame(4, 1, 0)

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.sock.sendall(len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload)

    def open(
        self, stream: int, path: str, metadata: Mapping[str, str] | None = None, timeout: str = "30S"
    ) -> None:
        headers = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
            "content-type": "application/grpc",
        }  # fmt: skip
        headers |= {"grpc-timeout": timeout} | dict(metadata or {})
        self.frame(
            1, 4, stream, b"".join(b"\x10" + _text(name) + _text(value) for name, value in headers.items())
        )

    def data(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        self.frame(0, int(end), stream, payload)

    def close(self) -> None:
        self.sock.close()


def _text(text: str) -> bytes:
    data = text.encode()
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    out, size = bytearray([127]), size - 127
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes(out) + bytes([size]) + data


@contextmanager
def clients(count: int, make: Callable[[], Client]) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(make()) for _ in range(count)]
