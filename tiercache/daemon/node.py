"""A storage node from start to stop: it opens the store, the sockets and the service, and drains them within a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Final

import grpc

from tiercache.config.settings import Address, Settings, Tls, check_files
from tiercache.config.urls import section_of, storage_url, unix_target
from tiercache.daemon.access import ANONYMOUS, OWNER, Access, Bounds
from tiercache.daemon.budget import Budget
from tiercache.daemon.call import Threads
from tiercache.daemon.gate import Gate
from tiercache.daemon.heap import keep_little, trim_now_and_then
from tiercache.daemon.meters import Figures, Meters
from tiercache.daemon.notify import Notifier
from tiercache.daemon.objects import Objects
from tiercache.daemon.service import Service
from tiercache.daemon.sessions import Attachments
from tiercache.daemon.sockets import PLAIN_SOCKET, TLS_SOCKET, make_way, prepare, remove
from tiercache.daemon.staging import BLOCK_BYTES
from tiercache.daemon.standard import Standard
from tiercache.errors import StorageError
from tiercache.metrics import Endpoint
from tiercache.metrics.endpoint import PATH
from tiercache.pools import HostArena
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Metered, StoreMetrics, unwrap
from tiercache.wire.methods import ATTACH_SOCKET, GRPC_SOCKET, SERVICE
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_THREADS: Final = 16
"""Store calls at once. Stores have threads of their own for large batches; these threads are for many clients."""
_FIGURES_SECONDS: Final = 1.0
"""Seconds to wait at shutdown for a pending `usage` call of the store."""
_HANDSHAKE_MS: Final = 5_000
"""Milliseconds that a client may take for its handshake with gRPC."""
_ACKNOWLEDGE_MS: Final = 1_000
"""Milliseconds that a client may take to acknowledge gRPC's SETTINGS."""
_READ_BYTES: Final = 64 << 10
"""Most bytes of one connection that gRPC has read and not yet parsed; without this limit they would grow with what a client sends."""
_OPENING_BYTES: Final = 24 << 20
"""Bytes of `host_bytes` for each connection that may be opening; a client can make gRPC hold an eighth of them while it opens."""
_OPENINGS: Final = (4, 32)
"""Least and most connections that may be opening at once, whatever `host_bytes` is."""
_KEEPALIVE_MS: Final = 10_000
"""Milliseconds between gRPC's keepalive pings of a client; half of them is the time in which the client must answer."""
_START_SECONDS: Final = 300.0
"""Seconds that `Node.start` waits until the node serves."""


class Node:
    """A storage node in this process: `start` serves, `stop` drains; in between its event loop runs on a thread of its own.

    It opens the store that the settings name, or takes over `store`, and closes it at the end. The memory that clients can make it hold
    is bounded by `host_bytes`: one half is an arena for payloads, the other half is a budget for messages, a third of which is for messages
    without payload.

    Thread safety: `start` and `stop` from one thread; the other attributes are for reading, from any.
    """

    def __init__(self, settings: Settings, store: StorageBackend | None = None, *, notifier: Notifier | None = None) -> None:
        self.settings: Final = settings
        self.addresses: list[str] = []
        """TCP addresses that are served, with their ports; known after `start`."""
        self.metrics_address = ""
        """Address that Prometheus scrapes, with its port; known after `start`, empty where metrics are off."""
        self.store = store
        self._opened = store is None
        self.instance: Final = secrets.token_bytes(16)
        self._notifier = notifier or Notifier()
        self._serving: list[str] = []
        self._ready = Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._gate: Gate | None = None
        self._thread = Thread(target=self._run, name="tiercache-node", daemon=True)

    def start(self) -> None:
        """Open the store and serve; return when clients can connect. Raises ConfigError, StorageError or OSError if that fails."""
        check_files(self.settings)
        keep_little()
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise StorageError(f"the node was not ready within {_START_SECONDS:g} s; its store hangs")
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> bool:
        """Drain and close; return False if the node's thread still runs after 3 * drain + 5 s. A second call is harmless."""
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(3 * self.settings.drain + 5)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the node serves, starts or drains."""
        return self._thread.is_alive() and (self._gate is None or self._gate.alive)

    def describe(self) -> list[str]:
        """Return lines for a person to read: what is served, and where."""
        settings = self.settings
        lines = [f"serving {settings.store_url}" if self._opened else f"serving a {type(self.store).__name__}"]
        lines += [f"on {place}" for place in self._serving]
        if self.metrics_address:
            lines.append(f"metrics on http://{self.metrics_address}{PATH}")
        if settings.unix:
            lines.append(f"workers of this host: storage = {storage_url('grpc', settings.socket_directory)}")
        return lines

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # noqa: BLE001  raised again by `start`; after that it can only be logged
            self._error = error
            if self._ready.is_set():
                _log.exception("the node ended with an error")
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        _raise_descriptors(self.settings.limits.clients)
        async with AsyncExitStack() as ends:
            self._serving = await self._open(ends)
            ends.callback(self._loop.create_task(trim_now_and_then()).cancel)
            self._ready.set()
            self._notifier.send("READY=1", f"STATUS=serving on {', '.join(self._serving)}")
            await self._wait(self._stopping)
            self._notifier.send("STOPPING=1")

    async def _wait(self, stopping: asyncio.Event) -> None:
        """Wait until `stopping` is set, and feed systemd's watchdog from this event loop, so that a loop that hangs is noticed."""
        beat = self._notifier.watchdog / 3 or None
        while not stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), beat)
            if beat:
                self._notifier.send("WATCHDOG=1")

    async def _open(self, ends: AsyncExitStack) -> list[str]:
        """Open everything, from the store outwards, and return the places that are served; `ends` closes all of it in reverse order."""
        settings, limits = self.settings, self.settings.limits
        if _foreign(settings):
            make_way(settings.directory, settings.socket_directory)
        if self.store is None:
            self.store = await asyncio.to_thread(open_backend, settings.store_url)
        kind = str(section_of(settings.store_url)["type"]) if self._opened else type(unwrap(self.store)).__name__
        meters = Meters([*(principal.name for principal in settings.principals), OWNER, ANONYMOUS])
        store = Metered(self.store, kind, StoreMetrics(meters.registry))
        threads = Threads(_THREADS)
        figures = Figures(self.store)
        ends.push_async_callback(self._close_store, store, threads, figures)
        rest = settings.host_bytes - settings.payload_bytes
        arena = HostArena(settings.payload_bytes, BLOCK_BYTES, huge_pages=False)
        ends.callback(arena.close)
        bounds = Bounds(
            payload=Budget(arena.nbytes),
            streams=Budget(limits.streams),
            transfers=Budget(max(rest - rest // 3, 2 * limits.message_bytes)),
            requests=Budget(max(rest // 3, limits.message_bytes)),
            workers=Budget(threads.count),
        )
        access = Access(settings, store, bounds)
        attachments = Attachments(access, most_clients=limits.clients, most_bytes=limits.attached_bytes, meters=meters)
        meters.watch(settings, bounds, attachments, figures)
        self._serve_metrics(meters, ends)
        ends.push_async_callback(attachments.close)
        objects = Objects(
            threads,
            arena,
            most_keys=limits.keys_per_batch,
            most_bytes=settings.object_bytes,
            message_bytes=limits.message_bytes,
            meters=meters,
        )
        least, most = _OPENINGS
        gate = self._gate = Gate(
            most=limits.clients, most_opening=max(least, min(most, settings.host_bytes // _OPENING_BYTES)),
            most_streams=limits.streams_per_client, settling=(_HANDSHAKE_MS + 2 * _ACKNOWLEDGE_MS) / 1e3, refused=meters.refused,
        )  # fmt: skip
        ends.callback(gate.close)
        service = Service(
            access, attachments, threads, objects, instance=self.instance, limits=_limits(settings), idle=limits.idle,
            store=kind, meters=meters, gate=gate,
        )  # fmt: skip
        return await self._serve(service, attachments, access, gate, ends)

    async def _serve(self, service: Service, attachments: Attachments, access: Access, gate: Gate, ends: AsyncExitStack) -> list[str]:
        server = grpc.aio.server(options=_options(self.settings))
        standard = Standard(service.admit, SERVICE)
        server.add_generic_rpc_handlers((service.handler(), *standard.handlers()))
        foreign = _foreign(self.settings)
        directory = self._socket_directory(ends, foreign=foreign)
        private = self._bind(server, directory, foreign=foreign)
        backend = str(directory / (TLS_SOCKET if TLS_SOCKET in private else PLAIN_SOCKET))
        secure, ca = TLS_SOCKET in private, self.settings.tls and self.settings.tls.client_ca
        serving = [self._listen(gate, address, backend, tls=secure, mutual=bool(ca)) for address in self.settings.addresses]
        if self.settings.unix:
            attachments.listen(str(directory / ATTACH_SOCKET), 0o666 if foreign else 0o600)
            if foreign:
                gate.listen_local(str(directory / GRPC_SOCKET), 0o666, access.uids, str(directory / PLAIN_SOCKET))
            serving.append(f"unix sockets in {directory}")
        await standard.serving()
        await server.start()
        gate.start()

        async def drain() -> None:
            gate.leave()
            await standard.leaving()
            await server.stop(self.settings.drain)

        ends.push_async_callback(drain)
        return serving

    def _socket_directory(self, ends: AsyncExitStack, *, foreign: bool) -> Path:
        """Make the directory of the sockets: the configured one for workers on this host, or a temporary one that only the gate uses.

        Raises StorageError, and ConfigError for a directory that cannot be taken over.
        """
        if not self.settings.unix:
            try:
                return Path(ends.enter_context(TemporaryDirectory(prefix="tiercache-", ignore_cleanup_errors=True)))
            except OSError as error:
                raise StorageError(f"a directory for sockets cannot be made ({error}); set TMPDIR to one that can be written") from error
        directory = self.settings.socket_directory
        prepare(directory, others=foreign)
        ends.callback(remove, directory)
        return directory

    def _bind(self, server: Any, directory: Path, *, foreign: bool) -> list[str]:
        """Bind the unix sockets on which gRPC itself listens, and return their names; raises StorageError.

        Only this user can connect to them. Workers connect to gRPC directly if no other user is a principal on the unix sockets; all other
        connections come through the gate.
        """
        tls = self.settings.tls
        secure = tls is not None and bool(self.settings.addresses)
        plain = foreign or (tls is None and bool(self.settings.addresses))
        direct = self.settings.unix and not foreign
        names = [GRPC_SOCKET] * direct + [PLAIN_SOCKET] * plain + [TLS_SOCKET] * secure
        for name in names:
            target = unix_target(directory / name)
            try:
                found = server.add_secure_port(target, _credentials(tls)) if name == TLS_SOCKET else server.add_insecure_port(target)
            except RuntimeError as error:
                raise StorageError(f"{directory / name} cannot be bound ({error}); is it in use?") from error
            if not found:
                raise StorageError(f"{directory / name} cannot be bound; is it in use?")
            os.chmod(directory / name, 0o600)
        return names

    def _serve_metrics(self, meters: Meters, ends: AsyncExitStack) -> None:
        """Serve the metrics, if they have an address, until everything else is closed, so that a drain can be watched."""
        address = self.settings.metrics.address
        if address is not None:
            endpoint = Endpoint(address.host, address.port, meters.registry)
            ends.callback(endpoint.close)
            self.metrics_address = str(Address(address.host, endpoint.port, address.loopback))

    def _listen(self, gate: Gate, address: Address, backend: str, *, tls: bool, mutual: bool) -> str:
        try:
            port = gate.listen(address.host, address.port, backend, tls=tls, mutual=mutual)
        except OSError as error:
            raise StorageError(f"{address} cannot be served ({error}); is the port in use, or not of this machine?") from error
        shown = str(Address(address.host, port, address.loopback))
        self.addresses.append(shown)
        return shown

    async def _close_store(self, store: StorageBackend, threads: Threads, figures: Figures) -> None:
        """Close the store once no thread works in it any more; leave a store that hangs open, as a kill would."""
        ended = await threads.close(self.settings.drain)
        if not (await asyncio.to_thread(figures.close, _FIGURES_SECONDS) and ended):
            _log.error("the store did not finish what it was at within %g s; it is left open", self.settings.drain)
            return
        started = time.monotonic()
        await asyncio.to_thread(store.close)
        _log.info("the store was closed in %.2f s", time.monotonic() - started)


def _credentials(tls: Tls | None) -> grpc.ServerCredentials:
    assert tls is not None
    assert tls.certificate is not None
    assert tls.key is not None
    ca = tls.client_ca.read_bytes() if tls.client_ca else None
    return grpc.ssl_server_credentials([(tls.key.read_bytes(), tls.certificate.read_bytes())], ca, require_client_auth=ca is not None)


def _limits(settings: Settings) -> pb.Limits:
    limits = settings.limits
    return pb.Limits(
        keys=limits.keys_per_batch, message_bytes=limits.message_bytes, object_bytes=settings.object_bytes,
        client_bytes=settings.client_bytes, streams=limits.streams_per_client, call_seconds=limits.call,
    )  # fmt: skip


def _raise_descriptors(clients: int) -> None:
    """Raise the process's limit on descriptors to what all clients together can use, for connections and attached memory.

    32 descriptors for each client and 1024 for the rest, as far as the hard limit allows; a failure is ignored.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 32 * clients
    if resource.RLIM_INFINITY not in (soft, hard):
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        # gRPC would cut a client that pings too often only once the client has read all that is sent to it, and remember all pings so long.
        ("grpc.http2.max_ping_strikes", 0),
        # A stream that is not read yet holds one window, which gRPC would make grow up to the largest message.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),
    )


def _foreign(settings: Settings) -> bool:
    """Return whether a user other than this process's is a principal on the unix sockets."""
    return settings.unix and any(principal.uid not in (None, os.getuid()) for principal in settings.principals)
