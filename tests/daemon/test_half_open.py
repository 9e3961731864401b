"""Strangers who keep hundreds of connections half open, and clients who come meanwhile."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import grpc
import pytest

from tests.daemon import web
from tests.daemon.attacks import PREFACE, client_hello, half_open, tls
from tests.daemon.hosts import MIB, TOKENS, Client, Daemon, serving, until, with_mallory
from tests.daemon.test_data import Remote, answer
from tests.examples import slow_after
from tests.storage_backends.grpc.nodes import certificates
from tiercache.wire.data import FrameKind

HELLO = client_hello()
FIRST = {
    "nothing": (b"", b""), "a preface": (PREFACE, b""), "a hello": (HELLO, b""),
    "half a preface": (PREFACE[:10], b""), "half a hello": (HELLO[:100], b""),
    "half a request": (b"GET / HTTP/1.1\r\nHost: x\r\n", b""), "a trickled preface": (b"", PREFACE),
    "a trickled hello": (b"", HELLO),
    "a trickled request": (b"GET / HTTP/1.1\r\nHost: x\r\nx: ", b"y" * 4096),
}  # fmt: skip
"""Bytes that strangers send at once, and then one by one."""
PORTS = ("grpc", "data", "http")


class Place:
    """A daemon with its three ports, in clear or in TLS."""

    def __init__(self, daemon: Daemon, *, tls: bool) -> None:
        self.daemon, self.tls = daemon, tls
        found = re.search(r"status on https?://127\.0\.0\.1:(\d+)/status", daemon.log.read_text())
        assert found
        credentials = grpc.ssl_channel_credentials(certificates()[1].read_bytes()) if tls else None
        self.client = partial(
            Client, f"127.0.0.1:{daemon.ports[0]}", [("authorization", f"Bearer {TOKENS['mallory']}")],
            credentials,
        )  # fmt: skip
        self.known = Remote(daemon, credentials=credentials)
        self.ports = dict(zip(PORTS, (daemon.ports[0], self.known.port.port, int(found[1])), strict=True))

    def is_served(self, port: str) -> bool:
        return bool(getattr(self, f"_{port}")())

    def _grpc(self) -> bool:
        with suppress(grpc.RpcError), self.client() as fresh:
            return fresh.call("Hello", b"").principal == "mallory"
        return False

    def _data(self) -> bool:
        with suppress(OSError), closing(self.known.dial()) as plain:
            sock = tls(plain) if self.tls else plain
            sock.sendall(self.known.opening())
            found = answer(sock)
            sock.close()
            return found is not None and found[0] is FrameKind.OPENED
        return False

    def _http(self) -> bool:
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=str(certificates()[1]))
            context.check_hostname = False
        address, told = f"127.0.0.1:{self.ports['http']}", f"Bearer {TOKENS['mallory']}"
        with suppress(OSError, http.client.HTTPException):
            answer = web.ask(address, "/status.json", context=context, pause=0.2, authorization=told)
            return answer.status == 200 and json.loads(answer.text)["readiness"]["ready"]
        return False


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    is_tls = request.param == "tls"
    if is_tls and shutil.which("openssl") is None:
        pytest.skip("certificates are made with the openssl command")
    directory = tmp_path_factory.mktemp("h")
    body = with_mallory(directory, '[http]\nlisten = "127.0.0.1:0"', "read write admin", is_tls=is_tls)
    with serving(directory, body) as daemon:
        place = Place(daemon, tls=is_tls)
        yield place
        place.known.close()


def waits(place: Place, port: str, times: int) -> list[float]:
    """Return the seconds after which newcomers were served, one after the other."""
    found = []
    for _ in range(times):
        started = time.monotonic()
        until(lambda: place.is_served(port), 90)
        found.append(time.monotonic() - started)
    return found


PLAIN = (
    ("grpc", "nothing"), ("data", "nothing"), ("http", "nothing"), ("grpc", "a preface"),
    ("grpc", "a trickled preface"), ("data", "half a preface"), ("http", "half a request"),
    ("http", "a trickled request"),
)  # fmt: skip
IN_TLS = (
    ("grpc", "a hello"),
    *((port, f"{how} hello") for port in PORTS for how in ("half a", "a trickled")),
)
CASES = [*(("plain", *case) for case in PLAIN), *(("tls", *case) for case in IN_TLS)]


@pytest.mark.parametrize(("place", "port", "first"), slow_after(3, CASES), indirect=["place"])
def test_strangers_of_a_hundred_addresses_delay_no_newcomer_for_long(place, port, first):
    """Four hundred connections. Newcomers have waited up to 6 s; a busy machine may need more."""
    before = place.daemon.figures().memory
    with half_open(place.ports[port], *FIRST[first], addresses=100):
        found = waits(place, port, 1)
        time.sleep(1)
        found += waits(place, port, 3)
        grown = place.daemon.figures().memory - before
    print(f"{port}, {first}: {', '.join(f'{wait:.2f}' for wait in found)} s; {grown / MIB:+.1f} MiB")
    assert max(found) < 30
