"""A proxy between a store and the service, which counts requests and does to them what a test tells it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import urlsplit

from tests.storage_backends.s3.server import endpoint


@dataclass
class Exchange:
    """One request, and the answer to it."""

    method: str
    target: str
    request: bytes
    """Head and body."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_pack(self) -> bool:
        return "/packs/" in self.target.partition("?")[0]

    @property
    def is_list(self) -> bool:
        return "list-type=2" in self.target

    @property
    def is_head(self) -> bool:
        """Whether this reads the head of a pack."""
        return self.method == "GET" and b"\r\nrange: bytes=0-" in self.request.lower()

    def refuse(self, status: int, code: str) -> None:
        """Answer with an error of S3."""
        self.status, self.headers = status, {"content-type": "application/xml"}
        self.body = bytearray(
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        )


Fault = Callable[[Exchange], bool | None]
"""Changes the answer; returns False to cut the connection after half of the answer."""


class Proxy:
    """`before` sees a new request, and may answer it by a status; `after` sees the service's answer."""

    def __init__(self) -> None:
        parts = urlsplit(endpoint())
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream: Final = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url: Final = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.log: list[Exchange] = []
        self.before: Fault = lambda _: None
        self.after: Fault = lambda _: None
        self._sockets: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def count(self, method: str, *, packs: bool = True) -> int:
        """How many requests of a method for packs were seen."""
        return sum(one.method == method and one.is_pack is packs for one in list(self.log))

    def well(self) -> None:
        """Pass everything on from now on."""
        self.before = self.after = lambda _: None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self._sockets.add(client)
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as reader:
            while line := reader.readline():
                head = [line]
                while (line := reader.readline()) not in (b"\r\n", b""):
                    head.append(line)
                raw = b"".join(head) + b"\r\n"
                request = raw + reader.read(int(_header(raw, b"content-length") or 0))
                method, target, _ = head[0].decode().split(" ", 2)
                exchange = Exchange(method, target, request)
                self.log.append(exchange)
                if self.before(exchange) is False:
                    return
                if not exchange.status:
                    self._ask(exchange)
                    whole = self.after(exchange) is not False
                else:
                    whole = True
                if exchange.method != "HEAD":  # whose answer gives the length of what it leaves out
                    exchange.headers["content-length"] = str(len(exchange.body))
                lines = [f"HTTP/1.1 {exchange.status} x", *(f"{k}: {v}" for k, v in exchange.headers.items())]
                answer = "\r\n".join([*lines, "", ""]).encode() + exchange.body
                client.sendall(answer if whole else answer[: len(answer) // 2])
                if not whole:
                    return

    def _ask(self, exchange: Exchange) -> None:
        import http.client

        head, _, _ = exchange.request.partition(b"\r\n\r\n")
        with socket.create_connection(self._upstream, 30) as upstream:
            upstream.sendall(exchange.request.replace(head, head + b"\r\nConnection: close", 1))
            answer = http.client.HTTPResponse(upstream, method=exchange.method)
            answer.begin()
            exchange.status = answer.status
            hop = ("transfer-encoding", "connection")
            exchange.headers = {k.lower(): v for k, v in answer.getheaders() if k.lower() not in hop}
            exchange.body = bytearray(answer.read())


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
