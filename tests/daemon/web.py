"""Requests to the daemon's HTTP port, by the standard library's client and by bare bytes."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from typing import NamedTuple


class Answer(NamedTuple):
    """Answer to a request."""

    status: int
    text: str
    headers: http.client.HTTPMessage


def ask(
    address: str,
    path: str,
    method: str = "GET",
    *,
    context: ssl.SSLContext | None = None,
    pause: float = 0,
    body: bytes | None = None,
    **headers: str,
) -> Answer:
    """Make one request, `pause` seconds after the connection; `headers` have underscores for hyphens."""
    connection = (
        http.client.HTTPConnection(address, timeout=30)
        if context is None
        else http.client.HTTPSConnection(address, timeout=30, context=context)
    )
    connection.connect()
    time.sleep(pause)
    fields = {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, body, fields)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return Answer(answer.status, text, answer.headers)


def say(address: str, data: bytes) -> bytes:
    """Send bytes, and return everything that comes back."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), 30) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
        return answer
