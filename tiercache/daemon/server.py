"""The storage server from start to stop: it opens store, sockets and service, and drains them at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import mkdtemp
from threading import Event, Thread
from typing import Any, Final

import grpc

from tiercache.config.files import check_files
from tiercache.config.models import Settings
from tiercache.config.urls import Address, parse_address, section_of, storage_url, unix_target
from tiercache.daemon.access import ANONYMOUS, OWNER, Access, Budgets
from tiercache.daemon.audit import AuditLog
from tiercache.daemon.budget import BLOCK_BYTES, MESSAGE_COPIES, BlockPool, Budget
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import CertificateFiles, Certificates
from tiercache.daemon.gate import Gate
from tiercache.daemon.inquiries import Inquiries
from tiercache.daemon.node_metrics import NodeMetrics, UsageFigures
from tiercache.daemon.payload.calls import DataCalls
from tiercache.daemon.payload.port import DataPort
from tiercache.daemon.payload.sessions import DataSessions
from tiercache.daemon.process import Notifier, limit_malloc, raise_descriptor_limit, trim_malloc_periodically
from tiercache.daemon.reload import Reload, TenantShares
from tiercache.daemon.removals import DaemonStore
from tiercache.daemon.service import Service
from tiercache.daemon.sessions import Attachments
from tiercache.daemon.shared import SharedCalls
from tiercache.daemon.sockets import PLAIN_SOCKET, TLS_SOCKET, make_way, prepare, remove
from tiercache.daemon.standard import Standard
from tiercache.daemon.status.board import StatusBoard
from tiercache.daemon.status.journal import Journal
from tiercache.daemon.store_threads import Threads
from tiercache.daemon.tenants.account import Account
from tiercache.daemon.tiers import TierCalls
from tiercache.errors import ConfigError, StorageError
from tiercache.events.publisher import EventPublisher
from tiercache.pools import HostArena
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import StoreEvents
from tiercache.storage.watching import Following
from tiercache.storage.wrappers import StoreMetrics, unwrap
from tiercache.wire.methods import ATTACH_SOCKET, GRPC_SOCKET, SERVICE
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_THREADS: Final = 16
"""Number of store threads, and so the maximum number of store calls at once.

These threads serve many clients at once. A store has threads of its own for a large batch of one client."""
_FIGURES_SECONDS: Final = 1.0
"""Seconds to wait at shutdown for a pending `usage` call of the store."""
_HANDSHAKE_MS: Final = 5_000
"""Milliseconds that a client may take for its handshake with gRPC."""
_ACKNOWLEDGE_MS: Final = 1_000
"""Milliseconds that a client may take to acknowledge gRPC's SETTINGS."""
_READ_BYTES: Final = 64 << 10
"""Maximum bytes of one connection that gRPC has read but not parsed yet."""
_WIDE_BYTES: Final = 24 << 20
"""Bytes of `host_bytes` (the bound on the server's memory) for one wide connection (`admission`).

`host_bytes` divided by this figure is the number of connections that may be wide at once, within the limits
of _WIDE. The figure is eight times the memory that one wide connection can make gRPC hold.
"""
_WIDE: Final = (4, 32)
"""Minimum and maximum number of connections that may be wide at once, for any `host_bytes`."""
_RELOAD_SECONDS: Final = 30.0
"""Seconds in which the event loop must take over new settings."""
_KEEPALIVE_MS: Final = 10_000
"""Milliseconds between gRPC's keepalive pings to a client, which must answer in half that time."""
_LOOK_SECONDS: Final = 5.0
"""Seconds from one look for tiers that have joined or left to the next."""
_ACCOUNT_SECONDS: Final = 60.0
"""Seconds from one write of the account to the next: what a killed daemon may lose of it."""
_START_SECONDS: Final = 300.0
"""Seconds that `StorageServer.start` waits until the server is ready."""


class StorageServer:
    """Storage server in this process: `start` serves, `stop` drains.

    From `start` to `stop` its event loop runs on a thread of its own. The server opens the store that the
    settings name, or takes over `store`, and closes it at the end. The memory that clients can make the
    server hold is bounded by `host_bytes`:

        |------------ 1/2 ------------|------------ 1/3 ------------|------------ 1/6 ------------|
               arena for payloads          messages with payload        messages without payload

    Thread safety: call `start` and `stop` from one thread; any thread may read the attributes.
    """

    def __init__(
        self, settings: Settings, store: StorageBackend | None = None, *, notifier: Notifier | None = None
    ) -> None:
        self.settings: Final = settings
        self.addresses: list[str] = []
        """TCP addresses on which the server listens, with their ports; known after `start`."""
        self.data_addresses: list[str] = []
        """TCP addresses of data connections, with their ports; known after `start`."""
        self.http_address = ""
        """Address of the HTTP port, with its port; known after `start`, empty if it is off."""
        self.publisher: EventPublisher | None = None
        """Publisher of KV events, with its addresses; None before `start`, and without `events.endpoint`."""
        self.store = store
        """The store that is served; None until `start` opens it."""
        self._opened = store is None
        self.instance: Final = secrets.token_bytes(16)
        """Random bytes, different in each server, by which a client notices that the server was restarted."""
        self._notifier = notifier or Notifier()
        self._serving: list[str] = []
        self._ready = Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._gate: Gate | None = None
        self._reload: Reload | None = None
        self._calls: CallLog | None = None
        self._board: StatusBoard | None = None
        self._thread = Thread(target=self._run, name="tiercache-node", daemon=True)

    def start(self) -> None:
        """Open the store and serve; return when clients can connect.

        Raises ConfigError, StorageError or OSError if the server cannot start.
        """
        check_files(self.settings)
        limit_malloc()
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise StorageError(
                f"the storage server was not ready within {_START_SECONDS:g} s; its store hangs"
            )
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> bool:
        """Drain and close; return False if the server's thread still runs after 3 * `drain` + 5 seconds.

        A second call does nothing.
        """
        if self._loop is not None and self._stopping is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(3 * self.settings.drain + 5)
        return not self._thread.is_alive()

    def reload(self, settings: Settings) -> list[str]:
        """Take over what may change while the server serves, or nothing of it; raises ConfigError.

        That is: certificates, principals with their credentials and rights, quotas and guarantees of
        tenants, and the duration of a slow call.
        Raises StorageError if the server does not answer. Returns the names of changed settings that take
        effect at the next start only. Calls that are under way are not interrupted, and a connection keeps
        the certificate with which it was made.
        """
        if self._loop is None or self._reload is None:
            raise ConfigError("the server does not serve yet, so it has nothing to reload")
        waiting, apply = self._reload.prepare(settings)
        done: Future[None] = Future()

        def run() -> None:
            try:
                done.set_result(apply())
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                done.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:
            raise StorageError("the server has ended, so it has nothing to reload") from error
        try:
            done.result(_RELOAD_SECONDS)
        except TimeoutError as error:
            raise StorageError(
                f"the server has not taken over the settings within {_RELOAD_SECONDS:g} s; it does so when it"
                " answers again, or restart it"
            ) from error
        return waiting

    def note_refused_reload(self, why: Exception) -> None:
        """Tell operators that new settings were refused, and nothing was changed."""
        if self._calls is not None:
            self._calls.end("reload", f"refused: {why}")

    @property
    def alive(self) -> bool:
        """Whether the server serves, starts or drains."""
        return self._thread.is_alive() and (self._gate is None or self._gate.alive)

    def describe(self) -> list[str]:
        """Return lines of text that say which store is served, and on which addresses."""
        settings = self.settings
        lines = [
            f"serving {', '.join(settings.store_urls)}"
            if self._opened
            else f"serving a {type(self.store).__name__}"
        ]
        lines += [f"on {place}" for place in self._serving]
        lines += [f"payload at {place}" for place in self.data_addresses]
        if self.http_address:
            scheme = "https" if settings.tls else "http"
            lines.append(f"metrics and status on {scheme}://{self.http_address}/status")
        if self.publisher is not None:
            replay = self.publisher.replay_endpoint
            lines.append(
                f"KV events on {self.publisher.endpoint}" + (f", replays on {replay}" if replay else "")
            )
        if settings.unix:
            lines.append(f"workers of this host: storage = {storage_url('grpc', settings.socket_directory)}")
        return lines

    def __enter__(self) -> StorageServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # noqa: BLE001
            # `start` raises the error; once `start` has returned, the error can only be logged
            self._error = error
            if self._ready.is_set():
                _log.exception("the storage server ended with an error")
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        raise_descriptor_limit(self.settings.limits.clients)
        async with AsyncExitStack() as ends:
            self._serving = await self._open(ends)
            ends.callback(self._loop.create_task(trim_malloc_periodically()).cancel)
            self._ready.set()
            self._notifier.send("READY=1", f"STATUS=serving on {', '.join(self._serving)}")
            await self._wait(self._stopping)
            self._notifier.send("STOPPING=1")

    async def _wait(self, stopping: asyncio.Event) -> None:
        """Wait until `stopping` is set; meanwhile notify systemd's watchdog.

        An event loop that hangs does not notify the watchdog in time.
        """
        beat = self._notifier.watchdog / 3 or None
        while not stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), beat)
            if beat:
                self._notifier.send("WATCHDOG=1")

    async def _open(self, ends: AsyncExitStack) -> list[str]:
        """Open everything, the store first, and return the addresses and paths that are served.

        Adds callbacks to `ends`, which close everything in reverse order:

            drain ─▶ sockets ─▶ gate ─▶ sessions ─▶ HTTP port ─▶ arena ─▶ events ─▶ store threads and store
        """
        settings, limits = self.settings, self.settings.limits
        if _has_other_users(settings):
            make_way(settings.directory, settings.socket_directory)
        if self.store is None:
            self.store = await asyncio.to_thread(open_backend, settings.store_url)
        kind = _kind_of(settings) if self._opened else type(unwrap(self.store)).__name__
        metrics = NodeMetrics([*(principal.name for principal in settings.principals), OWNER, ANONYMOUS])
        store = DaemonStore(self.store, kind, StoreMetrics(metrics.registry))
        threads = Threads(_THREADS)
        figures = UsageFigures(self.store)
        ends.push_async_callback(self._close_store, store, threads, figures)
        await self._publish(kind, metrics, ends)
        rest = settings.host_bytes - settings.payload_bytes
        arena = HostArena(settings.payload_bytes, BLOCK_BYTES, huge_pages=False)
        ends.callback(arena.close)
        budgets = Budgets(
            payload=Budget(arena.nbytes),
            streams=Budget(limits.streams),
            transfers=Budget(max(rest - rest // 3, MESSAGE_COPIES * limits.message_bytes)),
            requests=Budget(max(rest // 3, limits.message_bytes)),
            workers=Budget(threads.count),
        )
        journal = Journal()
        calls = self._calls = self._call_log(metrics, journal, ends)
        account = Account(settings.account_file, count_failed=metrics.count_account_failed)
        self._keep_books(store, account, ends)
        access = Access(settings, store, budgets, account)
        shares = TenantShares(self.store, access.tenant_of)
        if settings.tenants:
            await asyncio.to_thread(shares.take, settings.tenants)
        attachments = Attachments(
            access, max_clients=limits.clients, max_bytes=limits.attached_bytes, calls=calls
        )
        certificates = None if settings.tls is None else Certificates(CertificateFiles.read(settings.tls))
        board = self._board = StatusBoard(
            kind, self.instance, metrics, figures, budgets, access, certificates, journal, account.hits
        )
        self._serve_http(board, metrics, access, calls, certificates, ends)
        ends.push_async_callback(attachments.close)
        streams = DataCalls(
            threads, BlockPool(arena), max_keys=limits.keys_per_batch, max_bytes=settings.object_bytes,
            message_bytes=limits.message_bytes, metrics=metrics,
        )  # fmt: skip
        shared = SharedCalls(
            threads, max_keys=limits.keys_per_batch, max_bytes=settings.object_bytes, metrics=metrics
        )
        minimum, maximum = _WIDE
        gate = self._gate = Gate(
            max_connections=limits.clients,
            max_wide=max(minimum, min(maximum, settings.host_bytes // _WIDE_BYTES)),
            max_streams=limits.streams_per_client, settling=(_HANDSHAKE_MS + 2 * _ACKNOWLEDGE_MS) / 1e3,
            count_refusal=calls.refused_connection,
            ended=lambda name: self._in_loop(sessions.end, name),
        )  # fmt: skip
        ends.callback(gate.close)
        sessions = DataSessions(access, gate, limits.streams_per_client)
        metrics.watch(settings, budgets, attachments, sessions, figures, certificates, account.hits)
        inquiries = Inquiries(threads, access, store, account, limits.keys_per_batch)
        service = Service(
            access, attachments, threads, streams, shared, TierCalls(self.store, self.instance, calls),
            board, inquiries,
            instance=self.instance, limits=_limits(settings), idle=limits.idle,
            store=kind, metrics=metrics, calls=calls, gate=gate, data=streams, sessions=sessions,
        )  # fmt: skip
        port = DataPort(
            sessions, service.answer, calls, _limits(settings), max_connections=2 * limits.clients,
            idle=limits.idle, workers=threads.count, certificates=certificates,
        )  # fmt: skip
        self._reload = Reload(settings, access, shares, sessions, certificates, calls, metrics)
        serving = await self._serve(service, attachments, access, gate, (sessions, port), certificates, ends)
        ends.callback(board.drain)
        ends.callback(asyncio.create_task(board.watch()).cancel)
        return serving

    async def _serve(
        self,
        service: Service,
        attachments: Attachments,
        access: Access,
        gate: Gate,
        data: tuple[DataSessions, DataPort],
        certificates: Certificates | None,
        ends: AsyncExitStack,
    ) -> list[str]:
        server = grpc.aio.server(options=_options(self.settings))
        standard = Standard(service.admit, SERVICE)
        server.add_generic_rpc_handlers((service.handler(), *standard.handlers()))
        others = _has_other_users(self.settings)
        directory = self._socket_directory(ends, others=others)
        private = self._bind(server, directory, certificates, others=others)
        backend = str(directory / (TLS_SOCKET if TLS_SOCKET in private else PLAIN_SOCKET))
        mutual = certificates is not None and certificates.mutual
        serving = [
            self._listen(gate, address, backend, tls=certificates is not None, mutual=mutual)
            for address in self.settings.addresses
        ]
        if self.settings.unix:
            attachments.listen(str(directory / ATTACH_SOCKET), 0o666 if others else 0o600)
            if others:
                gate.listen_local(
                    str(directory / GRPC_SOCKET), 0o666, access.uids, str(directory / PLAIN_SOCKET)
                )
            serving.append(f"unix sockets in {directory}")
        sessions, port = data
        if self.settings.data:
            sessions.ports = self._listen_data(port)
        await standard.report_serving()
        await server.start()
        gate.start()

        async def drain() -> None:
            gate.stop_accepting()
            await standard.report_shutdown()
            await asyncio.gather(port.drain(self.settings.drain), server.stop(self.settings.drain))

        ends.push_async_callback(drain)
        return serving

    def _socket_directory(self, ends: AsyncExitStack, *, others: bool) -> Path:
        """Make the directory of the sockets and return its path.

        The directory is temporary if only the gate connects to the sockets. Raises StorageError, and
        ConfigError for a directory that cannot be taken over.
        """
        if not self.settings.unix:
            try:
                # No TemporaryDirectory: a forked process that ends would remove the directory of its parent.
                made = Path(mkdtemp(prefix="tiercache-"))
            except OSError as error:
                raise StorageError(
                    f"a directory for sockets cannot be made ({error}); set TMPDIR to one that can be written"
                ) from error
            ends.callback(shutil.rmtree, made, ignore_errors=True)
            return made
        directory = self.settings.socket_directory
        prepare(directory, others=others)
        ends.callback(remove, directory)
        return directory

    def _bind(
        self, server: Any, directory: Path, certificates: Certificates | None, *, others: bool
    ) -> list[str]:
        """Bind the unix sockets on which gRPC itself listens, and return their names; raises StorageError.

        Only this user can connect to these sockets:

            GRPC_SOCKET     for workers, which connect directly if no other user is a principal here
            PLAIN_SOCKET    for the gate: connections of other users, and TCP without TLS
            TLS_SOCKET      for the gate: TCP with TLS

        If other users are principals, the gate listens on GRPC_SOCKET (`_serve`).
        """
        secure = certificates is not None and bool(self.settings.addresses)
        plain = others or (certificates is None and bool(self.settings.addresses))
        direct = self.settings.unix and not others
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

    async def _publish(self, kind: str, metrics: NodeMetrics, ends: AsyncExitStack) -> None:
        """Publish KV events, if the settings have an address for them; raises StorageError."""
        settings = self.settings.events.publisher
        if settings is not None and self.store is not None:
            source = StoreEvents(self.store, kind)
            self.publisher = await asyncio.to_thread(EventPublisher, settings, [source])
            metrics.watch_events(self.publisher)
            ends.push_async_callback(asyncio.to_thread, self.publisher.close)
            source.warn_of_silence()

    def _keep_books(self, store: DaemonStore, account: Account, ends: AsyncExitStack) -> None:
        """Follow the removals of all tiers, and write the account from time to time."""
        ends.push_async_callback(asyncio.to_thread, account.close)
        Thread(target=store.look, name="tiercache-removals", daemon=True).start()
        for name, pause, work in (
            ("removals", _LOOK_SECONDS, store.look),
            ("account", _ACCOUNT_SECONDS, account.write),
        ):
            following = Following(name, pause, work)
            following.start()
            ends.push_async_callback(asyncio.to_thread, following.close)

    def _call_log(self, metrics: NodeMetrics, journal: Journal, ends: AsyncExitStack) -> CallLog:
        settings = self.settings
        audit = AuditLog(
            settings.audit_file,
            max_bytes=settings.audit.bytes,
            kept=settings.audit.kept,
            required=settings.audit.required,
            count_lost=metrics.count_audit_lost,
        )
        ends.push_async_callback(asyncio.to_thread, audit.close)
        return CallLog(
            metrics.count_refusal, audit, instance=self.instance, slow=settings.log.slow_call, journal=journal
        )

    def _serve_http(
        self,
        board: StatusBoard,
        metrics: NodeMetrics,
        access: Access,
        calls: CallLog,
        certificates: Certificates | None,
        ends: AsyncExitStack,
    ) -> None:
        """Serve metrics, health and status, if the settings have an address for them.

        The port is closed after the gate and all sessions, so that it can be asked during a drain.
        """
        address = self.settings.http.address
        if address is None:
            return
        from tiercache.daemon.http import HttpPort, Readers, make_app

        app = make_app(board, metrics.registry, Readers(self.settings, access), calls)
        port = HttpPort(address.host, address.port, app, certificates=certificates)
        ends.callback(port.close)
        self.http_address = str(Address(address.host, port.port, address.loopback))

    def _listen_data(self, port: DataPort) -> dict[int, int]:
        """Listen for data connections on the hosts of all TCP addresses; raises StorageError.

        Returns the port for data connections for the port of each address.
        """
        found: dict[str, int] = {}
        for address in self.settings.addresses:
            if address.host not in found:
                where = Address(address.host, self.settings.data_port, address.loopback)
                try:
                    found[address.host] = port.listen(where.host, where.port)
                except OSError as error:
                    raise StorageError(
                        f"data_port: {where} cannot be served ({error}); is the port in use?"
                    ) from error
                self.data_addresses.append(str(Address(where.host, found[where.host], where.loopback)))
        return {
            parse_address(bound).port: found[address.host]
            for address, bound in zip(self.settings.addresses, self.addresses, strict=True)
        }

    def _in_loop(self, work: Callable[[str], None], name: str) -> None:
        """Let the event loop do something; any thread may call."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work, name)

    def _listen(self, gate: Gate, address: Address, backend: str, *, tls: bool, mutual: bool) -> str:
        try:
            port = gate.listen(address.host, address.port, backend, tls=tls, mutual=mutual)
        except OSError as error:
            raise StorageError(
                f"{address} cannot be served ({error}); is the port in use, or the address not of this"
                " machine?"
            ) from error
        shown = str(Address(address.host, port, address.loopback))
        self.addresses.append(shown)
        return shown

    async def _close_store(self, store: StorageBackend, threads: Threads, figures: UsageFigures) -> None:
        """Close the store when no thread works in it any more. Do not close a store in which a call hangs."""
        ended = await threads.close(self.settings.drain)
        if not (await asyncio.to_thread(figures.close, _FIGURES_SECONDS) and ended):
            _log.error(
                "calls of the store did not end within %g s; the store is left open", self.settings.drain
            )
            return
        started = time.monotonic()
        await asyncio.to_thread(store.close)
        _log.info("the store was closed in %.2f s", time.monotonic() - started)


def _limits(settings: Settings) -> pb.Limits:
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


def _kind_of(settings: Settings) -> str:
    """Return the storage type of the store to open."""
    url = settings.store_url
    return str(section_of(url)["type"]) if isinstance(url, str) else "chain"


def _has_other_users(settings: Settings) -> bool:
    """Return whether a user other than that of this process is a principal on the unix sockets."""
    return settings.unix and any(
        principal.uid not in (None, os.getuid()) for principal in settings.principals
    )
