"""Floods of strangers, in clear and in TLS: what they make the daemon hold before anybody knows them is
bounded, and clients go on.

See `attacks` for the floods, and `attacks.attack` for what is asserted of each. `pytest -m stress
tests/daemon/test_floods.py` keeps them up for a minute, in clear and in TLS.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from threading import Event

import grpc
import pytest

from tests.daemon.attacks import FLOODS, attack, client_hello, flood, rest, stalled, tls
from tests.daemon.hosts import (
    HOST_BYTES,
    MIB,
    TOKENS,
    Client,
    Daemon,
    Good,
    Http2,
    serving,
    until,
    with_mallory,
)
from tests.examples import slow_after
from tests.storage_backends.grpc.nodes import certificates
from tiercache.wire.methods import METHODS

BEARER = [("authorization", f"Bearer {TOKENS['mallory']}")]
STRANGERS = 16 * MIB
"""Floods made daemons hold less than this, and gRPC alone hundreds of MiB."""


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "tls" and shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command")
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("f")
    body = with_mallory(directory, "[limits]\nclients = 64", "read write admin", is_tls=transport == "tls")
    with serving(directory, body) as daemon:
        rest(daemon)
        yield daemon


@pytest.fixture
def connect(daemon: Daemon, transport: str) -> Callable[[], socket.socket]:
    """Connections to the TCP port: in TLS, after the handshake."""

    def connect() -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", daemon.ports[0]), timeout=2)
        return tls(sock) if transport == "tls" else sock

    return connect


@pytest.fixture
def client(daemon: Daemon, transport: str) -> Callable[[], Client]:
    """Clients with a token."""

    def client() -> Client:
        credentials = (
            grpc.ssl_channel_credentials(certificates()[1].read_bytes()) if transport == "tls" else None
        )
        return Client(f"127.0.0.1:{daemon.ports[0]}", BEARER, credentials)

    return client


def greeted(client: Callable[[], Client]) -> bool:
    with suppress(grpc.RpcError), client() as fresh:
        return fresh.call("Hello", b"").principal == "mallory"
    return False


def over_tcp(daemon: Daemon) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(("127.0.0.1", daemon.ports[0]), timeout=1)


@pytest.mark.parametrize(
    ("transport", "acknowledge", "seconds"),
    [
        ("plain", True, 0.3),
        pytest.param("plain", False, 0.3, marks=pytest.mark.slow),
        *(pytest.param(*row, 44 / len(FLOODS), marks=pytest.mark.stress)
          for row in product(["plain", "tls"], [False, True])),
    ],
    indirect=["transport"],
)  # fmt: skip
def test_floods(daemon, request, connect, client, acknowledge, seconds):
    """Each kind for so many seconds, and in a minute of them a thousand that stall.

    Before the daemon's settings are acknowledged, and after, as one who keeps to the protocol so far. gRPC's
    threads end when they were idle for 20 s. What the daemon holds after each kind is printed, so that the
    one that broke it can be told.
    """
    is_long = seconds > 1
    most = 1.1 * HOST_BYTES if acknowledge or is_long else STRANGERS
    with attack(daemon, request, most=most, seconds=50 if is_long else 15), Good(client, name="remote"):
        for kind in FLOODS:
            flood(connect, kind, seconds, acknowledge=acknowledge)
            print(f"{kind}: {daemon.figures().memory / MIB:.0f} MiB", end="; ")
        if is_long:
            stalled(over_tcp(daemon), 8.0, first=b"PRI * HTTP/2.0\r\n")
    until(lambda: greeted(client))


@pytest.mark.parametrize(
    ("transport", "first"),
    slow_after(1, [("plain", "half a preface"), ("tls", "half a handshake"), ("plain", "nothing")]),
    indirect=["transport"],
)
def test_a_thousand_that_say_no_more(daemon, request, client, first):
    said = {
        "nothing": b"",
        "half a handshake": client_hello()[:100],
        "half a preface": b"PRI * HTTP/2.0\r\n",
    }[first]
    with attack(daemon, request, most=STRANGERS), Good(client, name="remote"):
        stalled(over_tcp(daemon), 1.0, first=said)
    until(lambda: greeted(client))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["plain"], indirect=True)
@pytest.mark.parametrize("kind", ["short calls without end", "calls of who goes at once", "ping"])
def test_who_comes_during_a_flood_is_let_in(connect, client, kind):
    """From the address that it comes from."""
    with ThreadPoolExecutor(1) as pool:
        over = Event()
        flooding = pool.submit(flood, connect, kind, 60, acknowledge=True, over=over)
        try:
            time.sleep(1)
            until(lambda: greeted(client), 30)
            assert not flooding.done()
        finally:
            over.set()


def test_a_stranger_who_says_nothing_is_cut(daemon: Daemon) -> None:
    with over_tcp(daemon)() as sock:
        sock.settimeout(20)
        while sock.recv(4096):  # gRPC's SETTINGS, perhaps
            pass


def test_headers_of_a_client_that_has_not_acknowledged_yet_are_served(daemon: Daemon, transport: str) -> None:
    """A client need not wait for the SETTINGS before its first call (RFC 9113, 3.4)."""
    with over_tcp(daemon)() as sock:
        conn = Http2(tls(sock) if transport == "tls" else sock, acknowledge=False)
        conn.open(1, METHODS["Hello"].path, {"authorization": BEARER[0][1]})
        conn.data(1, b"\0\0\0\0\0", end=True)
        data = b""
        conn.sock.settimeout(30)
        while b"mallory" not in data:
            data += conn.sock.recv(4096)
        conn.sock.close()
