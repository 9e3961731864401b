"""HTTP client for an engine's server, with limits of time and of bytes.

Error messages are one sentence and never contain a key.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tiercache.cli.terminal import CannotTellError, UnreachableError, clean
from tiercache.errors import ConfigError, RefusedError

MAX_BYTES: Final = 64 << 20
_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_QUOTED: Final = 300
"""Maximum characters of a server's own message that an error quotes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Complete response."""

    url: str
    status: int
    body: bytes = field(repr=False)

    def document(self) -> Any:
        """Return the body parsed as JSON; raises CannotTellError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise CannotTellError(
                f"{self.url} does not answer with JSON; is that the URL of an engine?"
            ) from error


class Server:
    """Server at a URL.

    Redirects are not followed and proxies are not used, so that the key is sent to this address only. Each
    request has a connection of its own. Thread safety: one thread.
    """

    def __init__(self, url: str, key: str, admin_key: str, timeout_s: float) -> None:
        self.url = _base(url)
        self.timeout_s = timeout_s
        # The headers of requests that need the administrator's key (True) and of all other requests (False).
        self._keys = {False: _header(key, "--api-key"), True: _header(admin_key or key, "--admin-key")}
        self._client = httpx.Client(
            headers=_HEADERS,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=ssl.create_default_context(),
            trust_env=False,
        )

    def get(self, path: str) -> Reply:
        """Return the reply to a GET request, with any status.

        Raises UnreachableError or CannotTellError if there is no reply.
        """
        return self._whole("GET", path, admin=False)

    def post(self, path: str) -> Reply:
        """Return the reply to a POST request with an empty body and the administrator's key.

        Raises the same errors as `get`.
        """
        return self._whole("POST", path, admin=True)

    @contextmanager
    def lines(self, path: str, document: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
        """POST a document and yield the lines of the answer as they arrive.

        Raises UnreachableError if there is no answer, RefusedError for status 401 and 403, and
        CannotTellError for any other status but 200 and for an answer that cannot be read.
        """
        body = json.dumps(document).encode()
        with self._open("POST", path, body, admin=False) as (status, parts):
            if status != 200:
                raise self.refusal(Reply(self.url + path, status, b"".join(parts)))
            yield _split(parts)

    def refusal(self, reply: Reply) -> CannotTellError | RefusedError:
        """Return the error for a status other than 200; for 401 and 403 it is a RefusedError."""
        answers = f"{reply.url} answers {reply.status}"
        if reply.status in (401, 403):
            return RefusedError(
                f"{answers}: the key is not accepted; set OPENAI_API_KEY, or give --api-key or --admin-key"
            )
        if 300 <= reply.status < 400:
            return CannotTellError(
                f"{answers}, a redirect, which is not followed; give the URL of the engine itself"
            )
        said = self.quote(reply.body.decode(errors="replace"))
        return CannotTellError(f"{answers}{': ' if said else ''}{said or '; is that the URL of an engine?'}")

    def quote(self, text: str) -> str:
        """Return a server's message as one line, cut if it is long, with all keys replaced by ***."""
        for header in self._keys.values():
            key = header.get("Authorization", "").removeprefix("Bearer ")
            if key:  # as it is, and as it stands in JSON
                text = text.replace(key, "***").replace(json.dumps(key)[1:-1], "***")
        text = " ".join(text.split())
        return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."

    def _whole(self, method: str, path: str, *, admin: bool) -> Reply:
        with self._open(method, path, b"", admin=admin) as (status, parts):
            return Reply(self.url + path, status, b"".join(parts))

    @contextmanager
    def _open(
        self, method: str, path: str, body: bytes, *, admin: bool
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Send a request and yield the status of its answer and the parts of the answer as they arrive."""
        url = self.url + path
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._client.stream(method, url, content=body, headers=self._keys[admin]) as response:
                yield response.status_code, self._parts(response, url, deadline)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, UnicodeError) as error:
            raise UnreachableError(
                f"no server answers at {url} ({_cause(error)}); start the engine there, or give its URL"
            ) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise CannotTellError(
                f"{url} took longer than {self.timeout_s:g} s; see the server's log, or give a higher"
                " --timeout"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise CannotTellError(
                f"{url} closed the connection or does not speak HTTP ({type(error).__name__}); see the"
                " server's log, or give another URL"
            ) from error

    def _parts(self, response: httpx.Response, url: str, deadline: float) -> Iterator[bytes]:
        total = 0
        for part in response.iter_bytes():
            total += len(part)
            if total > MAX_BYTES:
                raise CannotTellError(
                    f"{url} answers with more than {MAX_BYTES >> 20} MiB; is that the URL of an engine?"
                )
            # httpx limits only the wait for each part of the answer; the deadline limits the whole answer.
            if time.monotonic() > deadline:
                raise TimeoutError
            yield part


def _cause(error: BaseException) -> str:
    """Return the reason of the operating system, or of TLS, for a failed connection."""
    # The errors of httpx have no cause, but their context leads to the error of the socket.
    while inner := error.__cause__ or error.__context__:
        error = inner
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _split(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of an event stream.

    httpx's own `iter_lines` also splits at characters such as U+2028, which a model's text may contain.
    """
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" in part:
            *whole, rest = rest.split(b"\n")
            yield from (bytes(line.rstrip(b"\r")) for line in whole)
    yield bytes(rest.rstrip(b"\r"))


def _base(url: str) -> str:
    """Return the URL of a server without a trailing #, ?, slash or /v1.

    Raises ConfigError for a text that is not the URL of an engine.
    """
    if "@" in url:
        raise ConfigError(
            "URL has a user or a password, which would be printed; remove them and give --api-key"
        )
    try:
        parts = httpx.URL(url)
        is_plain = (
            parts.scheme in ("http", "https")
            and bool(parts.host)
            and not parts.query + parts.fragment.encode()
        )
    except httpx.InvalidURL:
        is_plain = False
    if not is_plain:
        raise ConfigError(
            f"{clean(url)} is not the URL of an engine; give one such as http://127.0.0.1:30000"
        )
    return url.rstrip("#?/").removesuffix("/v1").rstrip("/")


def _header(key: str, option: str) -> dict[str, str]:
    """Return the Authorization header for a key; empty without a key.

    Raises ConfigError if the key has characters that no header can carry. Without this check, httpx would
    print the key in an error message of its own.
    """
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{option}, or its environment variable, has characters that no key can have; copy the key again"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}
