"""One connection to one daemon: a gRPC channel, the daemon's identity and, on the same host, a session with attached memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any, Final, Self

import grpc

from tiercache.errors import ConfigError
from tiercache.storage.base import NamespaceRecord
from tiercache.wire.methods import ATTACH_SOCKET, METHODS, SESSION_METADATA
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.failures import CallError, Kind, judge
from tiercache_backends.grpc.session import Session
from tiercache_backends.grpc.settings import Settings

_KEEPALIVE_MS: Final = 10_000
_RECONNECT_MS: Final = 100
_LEAST_MESSAGE: Final = 64 << 10
_MOST_MESSAGE: Final = 16 << 20
"""Most bytes of a received message, which is at most a page of a scan or a chunk of payload."""


class Connection:
    """Connection to a daemon, replaced whenever the daemon was restarted or has been out of reach.

    Thread safety: any thread may call, between `begin` and `finish`; one thread opens it.
    """

    hello: pb.HelloReply

    def __init__(self, settings: Settings) -> None:
        """Make an object that is not connected yet; callers use `open` instead."""
        self.session: Session | None = None
        self.regions: dict[int, int] = {}
        """Number of each attached memory in this session, by `id` of the memory's object."""
        self.registered: dict[bytes, NamespaceRecord] = {}
        """Records that were registered on this connection, by namespace."""
        self.checked = time.monotonic()
        self._settings = settings
        self._lock = Lock()
        self._users = 0
        self._retired = False
        self._metadata: tuple[tuple[str, str | bytes], ...] = ()
        self._channel: Any = None
        self._calls: dict[str, Callable[..., Any]] = {}

    @classmethod
    def open(cls, settings: Settings, seconds: float) -> Self:
        """Connect and greet the daemon, within `seconds`; raise CallError."""
        deadline = time.monotonic() + seconds
        made = cls(settings)
        try:
            if settings.directory:
                made.session = Session(f"{settings.directory}/{ATTACH_SOCKET}", deadline)
                made._metadata = ((SESSION_METADATA, made.session.token),)
            else:
                made._metadata = settings.metadata()
            made._connect()
            made.hello = made.greet(deadline - time.monotonic())
        except ConfigError as error:
            made.close()
            raise CallError(Kind.REFUSED, str(error)) from error
        except BaseException:
            made.close()
            raise
        return made

    @property
    def over(self) -> bool:
        """Whether its session has ended."""
        return self.session is not None and self.session.over

    def greet(self, seconds: float) -> pb.HelloReply:
        """Ask the daemon for its identity and limits; raise CallError."""
        reply: pb.HelloReply = self.call("Hello", pb.HelloRequest(client=f"{os.path.basename(sys.argv[0])[:64]} {os.getpid()}"), seconds)
        limits = reply.limits
        if not limits.keys or not limits.object_bytes or limits.message_bytes < _LEAST_MESSAGE:
            raise CallError(Kind.REFUSED, f"{self._settings} does not tell usable limits; is it a tiercache daemon, and of which version?")
        self.checked = time.monotonic()
        return reply

    def call(self, name: str, request: Any, seconds: float) -> Any:
        """Return the reply to one call within `seconds`; raise CallError. `request`: a message, or an iterator of bytes."""
        try:
            return self._calls[name](request, timeout=max(0.0, seconds), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._judge(error) from error
        except ValueError as error:  # another thread closed the channel
            raise self._gone(error) from error

    def stream(self, name: str, request: Any, seconds: float) -> Iterator[bytes]:
        """Yield the messages of a call's reply within `seconds`; raise CallError. Closing the iterator cancels the rest."""
        try:
            call = self._calls[name](request, timeout=max(0.0, seconds), metadata=self._metadata)
        except ValueError as error:
            raise self._gone(error) from error
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._judge(error) from error
        finally:
            call.cancel()

    def begin(self) -> None:
        """Add one use; not allowed after `retire`."""
        with self._lock:
            self._users += 1

    def finish(self) -> None:
        """Release one use; close the connection if it was retired and this was the last use."""
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self.close()

    def retire(self) -> None:
        """Close the connection once it has no uses left, because another one has taken its place."""
        with self._lock:
            self._retired = True
            unused = not self._users
        if unused:
            self.close()

    def close(self) -> None:
        """Cancel calls under way, and close the session unless `Hazards` watches it; harmless when repeated."""
        if self._channel is not None:
            self._channel.close()
        if self.session is not None and not self.session.watched:
            self.session.close()

    def _connect(self) -> None:
        settings = self._settings
        credentials = settings.credentials()
        options: list[tuple[str, Any]] = [
            # Subchannels of its own, because those of others to the same address may be in their backoff.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", int(settings.timeout * 1000)),
            ("grpc.max_reconnect_backoff_ms", max(_RECONNECT_MS, int(settings.breaker_pause * 1000))),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
            ("grpc.max_receive_message_length", _MOST_MESSAGE),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
        ]
        if settings.server_name:
            options.append(("grpc.ssl_target_name_override", settings.server_name))
        if credentials is None:
            self._channel = grpc.insecure_channel(settings.target, options)
        else:
            self._channel = grpc.secure_channel(settings.target, credentials, options)
        for method in METHODS.values():
            kind, pack, unpack = self._channel.unary_unary, method.request.SerializeToString, method.reply.FromString
            if method.streams == "request":
                kind, pack = self._channel.stream_unary, None
            elif method.streams == "reply":
                kind, unpack = self._channel.unary_stream, None
            self._calls[method.name] = kind(method.path, pack, unpack)

    def _judge(self, error: grpc.RpcError) -> CallError:
        return judge(error, str(self._settings), session=self.session is not None)

    def _gone(self, error: ValueError) -> CallError:
        return CallError(Kind.AWAY, f"{self._settings}: the connection was given up ({error})", untouched=True)
