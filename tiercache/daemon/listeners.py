"""Listeners of a daemon: gRPC's sockets, the gate in front of them, the attach socket, the data port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import grpc

from tiercache.config.models import Settings
from tiercache.config.urls import Address, parse_address, unix_target
from tiercache.daemon.access import Access
from tiercache.daemon.certificates import Certificates
from tiercache.daemon.gate import Gate
from tiercache.daemon.payload.attachments import Attachments
from tiercache.daemon.payload.port import DataPort, DataSessions
from tiercache.daemon.service import HealthService, Service
from tiercache.daemon.sockets import PLAIN_SOCKET, TLS_SOCKET, prepare, remove
from tiercache.errors import StorageError
from tiercache.wire.methods import ATTACH_SOCKET, DATA_SOCKET, GRPC_SOCKET
from tiercache.wire.v1 import storage_pb2 as pb

_HANDSHAKE_MS: Final = 5_000
"""Milliseconds that a client may take for its handshake with gRPC."""
_ACKNOWLEDGE_MS: Final = 1_000
"""Milliseconds that a client may take to acknowledge gRPC's SETTINGS."""
_READ_BYTES: Final = 64 << 10
"""Maximum bytes of one connection that gRPC has read but not parsed yet."""
_KEEPALIVE_MS: Final = 10_000
"""Milliseconds between gRPC's keepalive pings to a client, which must answer in half that time."""
SETTLING_SECONDS: Final = (_HANDSHAKE_MS + 2 * _ACKNOWLEDGE_MS) / 1e3
"""Seconds after which gRPC has cut a connection whose client has not acknowledged the SETTINGS."""


class Listeners:
    """Listeners of one daemon, from `open` until the exit stack closes them.

    Thread safety: the event loop's thread.
    """

    def __init__(self, settings: Settings, gate: Gate, certificates: Certificates | None) -> None:
        self.addresses: Final[list[str]] = []
        """TCP addresses with their ports; known after `open`."""
        self.data_addresses: Final[list[str]] = []
        """TCP addresses of data connections, with their ports; known after `open`."""
        self._settings: Final = settings
        self._gate: Final = gate
        self._certificates: Final = certificates

    async def open(
        self,
        service: Service,
        access: Access,
        attachments: Attachments,
        sessions: DataSessions,
        port: DataPort,
        ends: AsyncExitStack,
    ) -> list[str]:
        """Serve, and return the addresses and paths that are served; raises StorageError, ConfigError.

        `ends` gets callbacks that drain and close everything.
        """
        server = grpc.aio.server(options=_options(self._settings))
        health = HealthService()
        server.add_generic_rpc_handlers((service.handler(), health.handler()))
        others = has_other_users(self._settings)
        directory = self._settings.socket_directory
        prepare(directory, others=others)
        ends.callback(remove, directory)
        private = self._bind(server, directory, others=others)
        backend = str(directory / (TLS_SOCKET if TLS_SOCKET in private else PLAIN_SOCKET))
        serving = [self._listen(address, backend) for address in self._settings.addresses]
        if self._settings.unix:
            mode = 0o666 if others else 0o600
            attachments.listen(str(directory / ATTACH_SOCKET), mode)
            port.listen_local(str(directory / DATA_SOCKET), mode)
            if others:
                self._gate.listen_local(
                    str(directory / GRPC_SOCKET), 0o666, access.uids, str(directory / PLAIN_SOCKET)
                )
            serving.append(f"unix sockets in {directory}")
        sessions.ports = self._listen_data(port)
        health.is_serving = True
        await server.start()
        self._gate.start()

        async def drain() -> None:
            self._gate.stop_accepting()
            health.is_serving = False
            await asyncio.gather(port.drain(self._settings.drain), server.stop(self._settings.drain))

        ends.push_async_callback(drain)
        return serving

    def _bind(self, server: Any, directory: Path, *, others: bool) -> list[str]:
        """Bind the unix sockets on which gRPC itself listens, and return their names; raises StorageError.

        Only this user can connect to these sockets:

            GRPC_SOCKET     for workers, which connect directly if no other user is a principal here
            PLAIN_SOCKET    for the gate: connections of other users, and TCP without TLS
            TLS_SOCKET      for the gate: TCP with TLS

        If other users are principals, the gate listens on GRPC_SOCKET (`open`).
        """
        certificates = self._certificates
        secure = certificates is not None and bool(self._settings.addresses)
        plain = others or (certificates is None and bool(self._settings.addresses))
        direct = self._settings.unix and not others
        names = [GRPC_SOCKET] * direct + [PLAIN_SOCKET] * plain + [TLS_SOCKET] * secure
        for name in names:
            target = unix_target(directory / name)
            try:
                found = (
                    server.add_secure_port(target, certificates.credentials)
                    if certificates is not None and name == TLS_SOCKET
                    else server.add_insecure_port(target)
                )
            except RuntimeError as error:
                raise StorageError(f"{directory / name} cannot be bound ({error}); is it in use?") from error
            if not found:
                raise StorageError(f"{directory / name} cannot be bound; is it in use?")
            os.chmod(directory / name, 0o600)
        return names

    def _listen(self, address: Address, backend: str) -> str:
        tls = self._certificates is not None
        mutual = self._certificates is not None and self._certificates.now.mutual
        try:
            port = self._gate.listen(address.host, address.port, backend, tls=tls, mutual=mutual)
        except OSError as error:
            raise StorageError(
                f"{address} cannot be served ({error}); is the port in use, or the address not of this"
                " machine?"
            ) from error
        shown = str(Address(address.host, port, address.loopback))
        self.addresses.append(shown)
        return shown

    def _listen_data(self, port: DataPort) -> dict[int, int]:
        """Listen for data connections on the hosts of all TCP addresses; raises StorageError.

        Returns the port for data connections for the port of each address.
        """
        found: dict[str, int] = {}
        for address in self._settings.addresses:
            if address.host not in found:
                where = Address(address.host, self._settings.data_port, address.loopback)
                try:
                    found[address.host] = port.listen(where.host, where.port)
                except OSError as error:
                    raise StorageError(
                        f"data_port: {where} cannot be served ({error}); is the port in use?"
                    ) from error
                self.data_addresses.append(str(Address(where.host, found[where.host], where.loopback)))
        return {
            parse_address(bound).port: found[address.host]
            for address, bound in zip(self._settings.addresses, self.addresses, strict=True)
        }


def limits_message(settings: Settings) -> pb.Limits:
    """Return the limits of calls, as clients learn them."""
    limits = settings.limits
    return pb.Limits(
        keys=limits.keys_per_batch, message_bytes=limits.message_bytes, object_bytes=settings.object_bytes,
        client_bytes=settings.client_bytes, streams=limits.streams_per_client, call_seconds=limits.call,
    )  # fmt: skip


def _options(settings: Settings) -> Sequence[tuple[str, int]]:
    limits = settings.limits
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", limits.streams_per_client),
        ("grpc.max_allowed_incoming_connections", limits.clients),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", _ACKNOWLEDGE_MS),
        ("grpc.experimental.tcp_max_read_buffer_size", _READ_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
        # 0: never cut a client because it pings too often. A cut would come too late to help: gRPC first
        # waits until the client has read everything that was sent to the client. Until then, gRPC would keep
        # all pings in memory.
        ("grpc.http2.max_ping_strikes", 0),
        # 0: switch off the BDP probe, which enlarges the windows of streams. A stream that is not read yet
        # holds one window of data. The probe could enlarge the window to the size of the largest message.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),
    )


def has_other_users(settings: Settings) -> bool:
    """Return whether a user other than that of this process is a principal on the unix sockets."""
    return settings.unix and any(
        principal.uid not in (None, os.getuid()) for principal in settings.principals
    )
