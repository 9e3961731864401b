"""One connection to a daemon: a gRPC channel, the daemon's identity and, on the same host, a session.

The session holds the memory that the client has attached (`session`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, Self

import grpc

from tiercache.errors import ConfigError
from tiercache.storage.base import NamespaceRecord
from tiercache.wire.methods import ATTACH_SOCKET, METHODS, SESSION_METADATA
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.data import DataPool
from tiercache_backends.grpc.failures import CallError, Kind, classify
from tiercache_backends.grpc.session import Session
from tiercache_backends.grpc.settings import GrpcSettings

_KEEPALIVE_MS: Final = 10_000
"""Milliseconds between keepalive pings to the daemon. The daemon must answer a ping in half this time."""
_RECONNECT_MS: Final = 100
"""Milliseconds until gRPC tries to connect again after its first failure."""
_MIN_MESSAGE: Final = 64 << 10
"""Lowest limit on messages, in bytes, with which a daemon is used. A daemon with a lower limit is refused."""
_MAX_MESSAGE: Final = 16 << 20
"""Maximum size in bytes of a received message: a batch of a scan, or a chunk of payload."""


class Connection:
    """Connection to a daemon; another connection replaces it when the daemon is restarted or does not answer.

    Thread safety: one thread opens the connection; then any thread may make calls, between `begin` and
    `finish`.
    """

    hello: pb.HelloReply
    """Answer of the daemon to the first greeting."""

    def __init__(self, settings: GrpcSettings) -> None:
        """Make a connection without opening it; callers use `open` instead."""
        self.session: Session | None = None
        self._data: DataPool | None = None
        self._expired = False
        self.regions: dict[int, int] = {}
        """Region numbers that the daemon gave to attached memory, by the `id` of the SharedMemory object."""
        self.registered: dict[bytes, NamespaceRecord] = {}
        """Records that were registered on this connection, by namespace."""
        self.checked = time.monotonic()
        """Time of the last greeting that was answered, in seconds of the monotonic clock."""
        self._settings = settings
        self._lock = Lock()
        self._users = 0
        """Number of calls on this connection that have not ended, under `_lock`."""
        self._retired = False
        """Whether the connection closes at the end of the last call on it, under `_lock`."""
        self._metadata: tuple[tuple[str, str | bytes], ...] = ()
        self._channel: Any = None
        self._calls: dict[str, Callable[..., Any]] = {}

    @classmethod
    def open(cls, settings: GrpcSettings, seconds: float) -> Self:
        """Return a connection on which the daemon has answered a greeting.

        Raises CallError if that fails or takes more than `seconds`.
        """
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
            if made.hello.data.connections:
                made._data = DataPool(settings, made.hello.data)
        except ConfigError as error:
            made.close()
            raise CallError(Kind.REFUSED, str(error)) from error
        except BaseException:
            made.close()
            raise
        return made

    @property
    def over(self) -> bool:
        """Whether the daemon does not know this client by this connection any more."""
        return self._expired or (self.session is not None and self.session.over)

    def expire(self) -> None:
        """Let another connection replace this one, because the daemon has forgotten the client."""
        self._expired = True
        if self.session is not None:
            self.session.end()

    def pool(self) -> DataPool:
        """Return the data connections; raises CallError if the daemon offers none."""
        if self._data is None:
            raise CallError(
                Kind.IMPOSSIBLE, f"{self._settings} offers no data connections; it may be another version"
            )
        return self._data

    def greet(self, seconds: float) -> pb.HelloReply:
        """Ask the daemon for its identity and limits.

        Raises CallError if the call fails or the limits are impossible.
        """
        reply: pb.HelloReply = self.call(
            "Hello", pb.HelloRequest(client=f"{os.path.basename(sys.argv[0])[:64]} {os.getpid()}"), seconds
        )
        limits = reply.limits
        if not limits.keys or not limits.object_bytes or limits.message_bytes < _MIN_MESSAGE:
            raise CallError(
                Kind.REFUSED,
                f"{self._settings} reports impossible limits; is it a tiercache daemon of another version?",
            )
        self.checked = time.monotonic()
        return reply

    def call(self, name: str, request: Any, seconds: float) -> Any:
        """Return the reply to one call.

        Raises CallError if the call fails or takes more than `seconds`.
        """
        if name == "Exists" and self._data is not None:
            deadline = time.monotonic() + seconds
            return self._data.perform(lambda data: data.exists(request, deadline), deadline)
        try:
            return self._calls[name](request, timeout=max(0.0, seconds), metadata=self._metadata)
        except grpc.RpcError as error:
            raise classify(error, str(self._settings), session=self.session is not None) from error
        except ValueError as error:  # another thread closed the channel
            raise self._channel_closed(error) from error

    def begin(self) -> None:
        """Count one more call on this connection; not allowed after `retire`."""
        with self._lock:
            self._users += 1

    def finish(self) -> None:
        """Count one call less; if the connection was retired and this was the last call, close it."""
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self.close()

    def retire(self) -> None:
        """Close the connection after the last call on it, because another connection has replaced it."""
        with self._lock:
            self._retired = True
            unused = not self._users
        if unused:
            self.close()

    def close(self) -> None:
        """Cancel calls under way, and close the session; a second `close` does nothing.

        If `AbandonedCalls` still waits for the daemon to close the session, `close` leaves the session open.
        """
        if self._data is not None:
            self._data.close()
        if self._channel is not None:
            self._channel.close()
        if self.session is not None and not self.session.watched:
            self.session.close()

    def _connect(self) -> None:
        settings = self._settings
        credentials = settings.credentials()
        options: list[tuple[str, Any]] = [
            # Without this option, channels to one address share subchannels. If a shared subchannel waits
            # for its next try to connect, a new connection has to wait too.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", int(settings.timeout * 1000)),
            ("grpc.max_reconnect_backoff_ms", max(_RECONNECT_MS, int(settings.breaker_pause * 1000))),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
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
            if not method.streams:  # payload in messages is for clients of other languages
                self._calls[method.name] = self._channel.unary_unary(
                    method.path, method.request.SerializeToString, method.reply.FromString
                )

    def _channel_closed(self, error: ValueError) -> CallError:
        return CallError(
            Kind.UNREACHABLE,
            f"{self._settings}: another thread closed the connection ({error})",
            untouched=True,
        )
