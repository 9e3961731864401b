"""Attacks on a daemon that are measured, and floods of HTTP/2 frames."""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import pytest

from tests.daemon.hosts import HOST_BYTES, MIB, Daemon, Good, Watch, Worker, until
from tiercache.wire.methods import METHODS

THREADS = 24
"""More than there may be: threads of the store and the event loop are made when needed, and stay."""
_CONNECTIONS = 40
P99 = 5.0
"""Seconds; on a busy machine a good client may wait until a bad one is cut after `limits.idle`."""


def rest(daemon: Daemon) -> None:
    """Serve a client for a moment; what the daemon then holds is what attacks are compared with."""
    with Good(lambda: Worker(daemon)):
        time.sleep(0.3)
    daemon.first = daemon.figures()


@contextmanager
def attack(
    daemon: Daemon,
    request: pytest.FixtureRequest,
    *,
    crowded: bool = False,
    most: float = 1.1 * HOST_BYTES,
    seconds: float = 15,
) -> Iterator[Good]:
    """Measure that the daemon grows by `most` bytes at most, and within `seconds` is as it was before."""
    before, first = daemon.figures(), daemon.first
    with Watch(daemon.pid) as watch, Good(lambda: Worker(daemon), crowded=crowded) as good:
        yield good
    assert daemon.alive(), daemon.log.read_text()[-4000:]

    def settled() -> bool:
        now = daemon.figures()
        little = now.memory <= first.memory + HOST_BYTES // 2
        return little and now.descriptors <= before.descriptors + 2 and now.threads <= first.threads + THREADS

    with suppress(AssertionError):
        until(settled, seconds, 0.1)
    after = daemon.figures()
    print(
        f"\n{request.node.name}: idle {before.memory / MIB:.0f} MiB, peak"
        f" +{(watch.peak - before.memory) / MIB:.1f}, after {(after.memory - before.memory) / MIB:+.1f};"
        f" descriptors {before.descriptors} -> {after.descriptors}, threads {before.threads} ->"
        f" {after.threads}; good client {len(good.seconds)} rounds, {good.lost} lost, p99"
        f" {good.p99 * 1e3:.0f} ms"
    )
    assert watch.peak <= first.memory + most
    assert good.p99 < P99
    assert settled(), (before, after)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
_FIELD = b"\x10\x01a\x7f\x00" + b"b" * 127
_KNOWN = {
    ":method": "POST", ":scheme": "http", ":authority": "x", "te": "trailers",
    "content-type": "application/grpc",
}  # fmt: skip
_FIELDS = [
    bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    for name, value in {**_KNOWN, ":path": METHODS["Hello"].path, "grpc-timeout": "30S"}.items()
]
_CALL = b"".join(b"\x00" + field for field in _FIELDS)
_REMEMBERED = b"".join(b"\x40" + field for field in _FIELDS)
_INDEXED = bytes(0x80 | 62 + at for at in reversed(range(len(_FIELDS))))
"""The same, a byte a field, behind `_REMEMBERED`."""


@dataclass(frozen=True)
class Flood:
    """Bytes that are sent once on each connection, and bytes that are then sent repeatedly."""

    first: bytes
    more: Callable[[int], bytes] | None
    """Function that makes the bytes to repeat, some 100 KB, from a number that grows by one each time.

    None: the connection is closed after `first`, and another one is opened.
    """


def _always(data: bytes) -> Callable[[int], bytes]:
    return lambda _: data


def _streams(make: Callable[[int], bytes], count: int) -> Callable[[int], bytes]:
    return lambda number: b"".join(make(2 * (number * count + n) + 1) for n in range(count))


FLOODS = {
    "continuation of tiny fields": Flood(
        frame(1, 0, 1, _FIELD), _always(frame(9, 0, 1, b"\x10\x01a\x01b" * 3200) * 6)
    ),
    "continuation of fields": Flood(frame(1, 0, 1, _FIELD), _always(frame(9, 0, 1, _FIELD) * 700)),
    "continuation of indexed fields": Flood(
        frame(1, 0, 1, _FIELD), _always(frame(9, 0, 1, b"\x8f" * 16_000) * 6)
    ),
    "continuation of remembered fields": Flood(
        frame(1, 0, 1, b"\x40\x01a\x7f\x80\x18" + b"b" * (127 + 24 * 128)),
        _always(frame(9, 0, 1, b"\xbe" * 16_000) * 6),
    ),
    "continuation of one field": Flood(
        frame(1, 0, 1, b"\x10\x01a\x7f\x80\x80\x80\x80\x04"), _always(frame(9, 0, 1, b"x" * 16_000) * 6)
    ),
    "empty continuation": Flood(frame(1, 0, 1, _FIELD), _always(frame(9, 0, 1) * 10_000)),
    "header lists": Flood(
        b"",
        _streams(
            lambda n: (
                frame(1, 0, n, _FIELD * 120) + frame(9, 0, n, _FIELD * 120) + frame(9, 4, n, _FIELD * 120)
            ),
            3,
        ),
    ),
    "calls without end": Flood(b"", _streams(lambda n: frame(1, 4, n, _CALL), 500)),
    "short calls without end": Flood(
        frame(1, 4, 1, _REMEMBERED),
        _streams(lambda n: frame(1, 4, n + 2, _INDEXED) + frame(3, 0, n + 2, b"\0\0\0\x08"), 2000),
    ),
    "calls of who goes at once": Flood(b"".join(frame(1, 4, 2 * n + 1, _CALL) for n in range(32)), None),
    "rapid reset": Flood(b"", _streams(lambda n: frame(1, 4, n, _CALL) + frame(3, 0, n, b"\0\0\0\x08"), 500)),
    "ping": Flood(b"", _always(frame(6, 0, 0, bytes(8)) * 6000)),
    "settings": Flood(b"", _always(frame(4, 0, 0) * 10_000)),
    "long settings": Flood(b"", _always(frame(4, 0, 0, b"\0\4\0\0\xff\xff" * 100) * 160)),
    "priority": Flood(b"", _always(frame(2, 0, 1, b"\0\0\0\0\x10") * 7000)),
    "window updates": Flood(b"", _always(frame(8, 0, 0, b"\0\0\0\1") * 8000)),
    "goaway": Flood(b"", _always(frame(7, 0, 0, bytes(16_000)) * 6)),
    "unknown frames": Flood(b"", _always(frame(0x77, 0, 0, bytes(16_000)) * 6)),
    "no http at all": Flood(b"GET / HTTP/1.1\r\n", _always(b"x: " + b"y" * 100_000 + b"\r\n")),
}


def flood(
    connect: Callable[[], socket.socket],
    kind: str,
    seconds: float,
    *,
    acknowledge: bool,
    over: Event | None = None,
) -> None:
    """Keep up many connections of one kind until `over`, without credentials; one that is cut comes again."""
    end = time.monotonic() + seconds
    meant = FLOODS[kind]

    def goes_on() -> bool:
        return time.monotonic() < end and not (over is not None and over.is_set())

    def hit(sock: socket.socket) -> None:
        sock.settimeout(max(0.1, min(5.0, end - time.monotonic())))
        sock.sendall(PREFACE)
        if acknowledge:
            sock.recv(9)
            sock.sendall(frame(4, 1, 0))
        sock.sendall(meant.first)
        number = 0
        while meant.more is not None and goes_on():
            sock.sendall(meant.more(number))
            number += 1

    def keep_on(_: int) -> None:
        while goes_on():
            with suppress(OSError), connect() as sock:
                hit(sock)
            time.sleep(0.01)

    at_once(_CONNECTIONS, keep_on)


def stalled(
    connect: Callable[[], socket.socket], seconds: float, *, first: bytes = b"", connections: int = 1000
) -> None:
    """Connections that say so much and no more."""
    with ExitStack() as stack:
        for _ in range(connections):
            with suppress(OSError):
                sock = stack.enter_context(connect())
                sock.sendall(first)
        time.sleep(seconds)


def tls(sock: socket.socket) -> socket.socket:
    """The same connection in TLS; who is at the other end does not matter here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        return context.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


def client_hello() -> bytes:
    """The first bytes of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()


@contextmanager
def half_open(
    port: int, first: bytes, trickled: bytes, *, addresses: int, connections: int = 400
) -> Iterator[None]:
    """Keep up connections of strangers that say `first`, then `trickled` byte by byte, and no more.

    They come from 127.1.0.1 and on; with no `addresses` from 127.0.0.1. One that is cut comes again at once.
    """
    over = Event()
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(_keep_half_open, port, first, trickled, connections, addresses, over)
        try:
            yield
        finally:
            over.set()
        flooding.result()


def _keep_half_open(
    port: int, first: bytes, trickled: bytes, connections: int, addresses: int, over: Event
) -> None:
    selector = selectors.DefaultSelector()
    said: dict[socket.socket, int] = {}

    def connect(number: int) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if addresses:
            sock.bind((f"127.1.0.{1 + number % addresses}", 0))
        sock.connect_ex(("127.0.0.1", port))
        said[sock] = 0
        selector.register(sock, selectors.EVENT_WRITE, number)

    for number in range(connections):
        connect(number)
    looked = time.monotonic()
    while not over.is_set():
        for found, events in selector.select(0.05):
            sock = found.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    sock.send(first)
                    selector.modify(sock, selectors.EVENT_READ, found.data)
                elif not sock.recv(1 << 16):
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(sock)
                sock.close()
                del said[sock]
                connect(found.data)
        if time.monotonic() - looked > 0.3:
            looked = time.monotonic()
            for sock, at in said.items():
                with suppress(OSError):
                    said[sock] = at + sock.send(trickled[at : at + 1])
    for sock in said:
        sock.close()
    selector.close()
