"""HTTP client for an engine's server: bounded in time and in bytes; each failure is one sentence that never contains a key."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

from tiercache.cli.exits import CannotTellError, UnreachableError
from tiercache.cli.output import clean
from tiercache.errors import ConfigError, RefusedError

MOST_BYTES: Final = 64 << 20
"""Largest response, in bytes, that is read."""
_READ: Final = 1 << 16
_QUOTED: Final = 300
"""Characters of a server's own message that an error quotes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response."""

    url: str
    status: int
    body: bytes = field(repr=False)

    def document(self) -> Any:
        """Return the body parsed as JSON; raises CannotTellError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise CannotTellError(f"{self.url} answers with something that is not JSON; is an engine's API there?") from error


class Server:
    """The server at a URL. Redirects and proxies are not followed, so that the key goes to this address only.

    Thread safety: one thread.
    """

    def __init__(self, url: str, key: str, admin_key: str, timeout_s: float) -> None:
        self.url = _base(url)
        self.timeout_s = timeout_s
        self._keys = {False: _header(key, "--api-key"), True: _header(admin_key or key, "--admin-key")}
        parts = urlsplit(self.url)
        self._secure, self._host, self._port, self._prefix = parts.scheme == "https", parts.hostname or "", parts.port, parts.path

    def get(self, path: str) -> Reply:
        """Return the reply to a GET request, whatever its status; raises UnreachableError or CannotTellError if there is none."""
        return self._whole("GET", path, admin=False)

    def post(self, path: str) -> Reply:
        """Return the reply to a POST request with an empty body and the administrator's key; otherwise like `get`."""
        return self._whole("POST", path, admin=True)

    @contextmanager
    def lines(self, path: str, document: Mapping[str, Any]) -> Iterator[Iterator[str]]:
        """POST a document and yield the lines of the answer as they arrive.

        Raises CannotTellError for an answer that cannot be read or a status other than 200, RefusedError for 401 and 403, and
        UnreachableError.
        """
        body = json.dumps(document).encode()
        with self._open("POST", path, body, admin=False) as (response, parts):
            if response.status != 200:
                raise self.refusal(Reply(self.url + path, response.status, b"".join(parts)))
            yield _split(parts, self.url + path)

    def refusal(self, reply: Reply) -> CannotTellError | RefusedError:
        """Return the error for a status other than 200: RefusedError for 401 and 403, else CannotTellError."""
        answers = f"{reply.url} answers {reply.status}"
        if reply.status in (401, 403):
            return RefusedError(f"{answers}: it wants another key; set OPENAI_API_KEY, or give --api-key or --admin-key")
        if 300 <= reply.status < 400:
            return CannotTellError(f"{answers}, a redirect, which is not followed; give the URL of the engine itself")
        said = self.without_keys(_said(reply.body))
        return CannotTellError(f"{answers}{': ' if said else ''}{said or '; is that the URL of an engine?'}")

    def without_keys(self, text: str) -> str:
        """Return a server's message with the keys replaced by ***, in case it repeats them."""
        for header in self._keys.values():
            text = text.replace(header.get("Authorization", "Bearer ").removeprefix("Bearer ") or "\0", "***")
        return text

    def _whole(self, method: str, path: str, *, admin: bool) -> Reply:
        with self._open(method, path, b"" if method == "POST" else None, admin=admin) as (response, parts):
            return Reply(self.url + path, response.status, b"".join(parts))

    @contextmanager
    def _open(self, method: str, path: str, body: bytes | None, *, admin: bool) -> Iterator[tuple[HTTPResponse, Iterator[bytes]]]:
        url = self.url + path
        deadline = time.monotonic() + self.timeout_s
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        try:
            connection.connect()
            socket = connection.sock  # kept here: the connection drops its reference when the response is its last
            connection.request(method, self._prefix + path, body, {"Content-Type": "application/json"} | self._keys[admin])
            response = connection.getresponse()

            def parts() -> Iterator[bytes]:
                total = 0
                while True:
                    # One deadline for the whole response: each read may take what is left of it, at least 1 ms.
                    socket.settimeout(max(0.001, deadline - time.monotonic()))
                    if not (part := response.read1(_READ)):
                        return
                    if (total := total + len(part)) > MOST_BYTES:
                        raise CannotTellError(f"{url} answers with more than {MOST_BYTES >> 20} MiB; is that the URL of an engine?")
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    yield part

            yield response, parts()
        except TimeoutError as error:
            raise UnreachableError(
                f"{url} took longer than {self.timeout_s:g} s; look at the server's log, or give it more --timeout"
            ) from error
        except ssl.SSLError as error:
            raise UnreachableError(f"{url} cannot be reached by TLS: {error.reason}; SSL_CERT_FILE names other certificates") from error
        except ConnectionRefusedError as error:
            raise UnreachableError(f"nothing answers at {url}; start the engine there, or give its URL") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
            said = getattr(error, "strerror", None) or error
            raise UnreachableError(f"{url} cannot be reached: {said}; look whether the server runs") from error
        except HTTPException as error:
            raise CannotTellError(
                f"{url} broke off or does not speak HTTP ({type(error).__name__}); look at the server's log, or give another URL"
            ) from error
        finally:
            connection.close()


def _split(parts: Iterator[bytes], url: str) -> Iterator[str]:
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" in part:
            *whole, last = rest.split(b"\n")
            rest = bytearray(last)
            yield from (_text(line, url) for line in whole)
    yield _text(rest, url)


def _text(line: bytes | bytearray, url: str) -> str:
    try:
        return line.decode().rstrip("\r")
    except UnicodeDecodeError as error:
        raise CannotTellError(f"{url} answers with a malformed stream (no UTF-8); is that the URL of an engine?") from error


def _base(url: str) -> str:
    """Return the URL without a trailing #, ?, slash or /v1; raises ConfigError if it is not that of a server."""
    try:
        parts = urlsplit(url)
        port_is_known = parts.port != 0
    except ValueError:
        raise ConfigError("URL has no host and port that can be read; give one such as http://127.0.0.1:30000") from None
    if "@" in parts.netloc:
        raise ConfigError("URL holds a user or a password, which would be printed; leave them out and give --api-key")
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_known or not plain or parts.query or parts.fragment:
        raise ConfigError(f"URL {clean(url)} is not one of an engine; give one such as http://127.0.0.1:30000")
    return url.rstrip("#?/").removesuffix("/v1").rstrip("/")


def _header(key: str, option: str) -> dict[str, str]:
    """Return the Authorization header for a key; empty without a key.

    Raises ConfigError for characters that no header can carry: `http.client` would print the key in its own error.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{option} (or its variable) holds characters that no key has; copy it anew")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _said(body: bytes) -> str:
    """Return a server's message about a refusal, from any of the JSON shapes that the engines use: on one line, and cut if it is long."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    text = " ".join((found if isinstance(found, str) else json.dumps(found) if found else "").split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
