"""The storage server from start to stop: it opens store, sockets and service, and drains them at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from threading import Event, Thread
from typing import Final

from tiercache.config.files import check_files
from tiercache.config.models import Settings
from tiercache.config.urls import Address, section_of, storage_url
from tiercache.daemon.access import ANONYMOUS, OWNER, Access, Budgets
from tiercache.daemon.audit import AuditLog
from tiercache.daemon.budget import BLOCK_BYTES, MESSAGE_COPIES, BlockPool, Budget
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import CertificateFiles, Certificates
from tiercache.daemon.fleet import Fleet
from tiercache.daemon.gate import Gate
from tiercache.daemon.listeners import SETTLING_SECONDS, Listeners, has_other_users, limits_message
from tiercache.daemon.node_metrics import NodeMetrics, UsageFigures
from tiercache.daemon.payload.attachments import Attachments
from tiercache.daemon.payload.data import DataCalls
from tiercache.daemon.payload.port import DataPort, DataSessions
from tiercache.daemon.payload.shared import SharedCalls
from tiercache.daemon.payload.streams import StreamCalls
from tiercache.daemon.process import Notifier, limit_malloc, raise_descriptor_limit, trim_malloc_periodically
from tiercache.daemon.reload import Reload, ReloadCalls, Reloaded, TenantShares
from tiercache.daemon.removals import DaemonStore
from tiercache.daemon.service import Handler, Service
from tiercache.daemon.sockets import make_way
from tiercache.daemon.status import StatusBoard
from tiercache.daemon.store_calls import StoreCalls
from tiercache.daemon.store_threads import Threads, fulfil
from tiercache.daemon.tenants.account import Account, PriceList
from tiercache.errors import ConfigError, StorageError
from tiercache.events.publisher import EventPublisher
from tiercache.metrics.families import Families
from tiercache.metrics.table import STORE
from tiercache.pools import HostArena
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import Following, StoreEvents
from tiercache.storage.wrappers import unwrap

_log = logging.getLogger(__name__)

_THREADS: Final = 16
"""Number of store threads, and so the maximum number of store calls at once.

These threads serve many clients at once. A store has threads of its own for a large batch of one client."""
_FIGURES_SECONDS: Final = 1.0
"""Seconds to wait at shutdown for a pending `usage` call of the store."""
_WIDE_BYTES: Final = 24 << 20
"""Bytes of `host_bytes` (the bound on the server's memory) for one wide connection (`admission`).

`host_bytes` divided by this figure is the number of connections that may be wide at once, within the limits
of _WIDE. The figure is eight times the memory that one wide connection can make gRPC hold.
"""
_WIDE: Final = (4, 32)
"""Minimum and maximum number of connections that may be wide at once, for any `host_bytes`."""
_RELOAD_SECONDS: Final = 30.0
"""Seconds in which the event loop must take over new settings."""
_LOOK_SECONDS: Final = 5.0
"""Seconds from one look for tiers that have joined or left to the next."""
_ACCOUNT_SECONDS: Final = 60.0
"""Seconds from one write of the account to the next: what a killed daemon may lose of it."""
_PRICES_SECONDS: Final = 1.0
"""Seconds that the start waits for the records of namespaces."""
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
        self,
        settings: Settings,
        store: StorageBackend | None = None,
        *,
        notifier: Notifier | None = None,
        reload: Callable[[Collection[str]], Reloaded] | None = None,
    ) -> None:
        """Serve as the settings say.

        `reload` serves the call of that name: it gets the tiers that the client drops, reads the settings
        again, and passes both to the method `reload`.
        """
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
        self._reread: Final = reload
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

    def reload(self, settings: Settings, drop: Collection[str] = ()) -> Reloaded:
        """Take over what may change while the server serves, or nothing of it; one call at a time.

        That is: tiers, if the store is a list of them; certificates, principals with their credentials and
        rights, quotas and guarantees of tenants, and the duration of a slow call. Tiers that are not in the
        settings leave in the background, but those that `drop` names at once (`StorageBackend.retier`).

        Calls that are under way are not interrupted, and a connection keeps the certificate with which it was
        made. Raises ConfigError for settings that are not possible, and StorageError if a store fails or the
        server does not answer.
        """
        if self._loop is None or self._reload is None:
            raise ConfigError("the server does not serve yet, so it has nothing to reload")
        reloaded, apply = self._reload.prepare(settings, drop)
        done: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(fulfil, done, apply)
        except RuntimeError as error:
            raise StorageError("the server has ended, so it has nothing to reload") from error
        try:
            done.result(_RELOAD_SECONDS)
        except TimeoutError as error:
            raise StorageError(
                f"the server has not taken over the settings within {_RELOAD_SECONDS:g} s; it does so when it"
                " answers again, or restart it"
            ) from error
        return reloaded

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
        settings = self.settings
        if has_other_users(settings):
            make_way(settings.directory, settings.socket_directory)
        if self.store is None:
            self.store = await asyncio.to_thread(open_backend, settings.store_url)
        kind, url = type(unwrap(self.store)).__name__, settings.store_url
        if self._opened:
            kind = str(section_of(url)["type"]) if isinstance(url, str) else "chain"
        metrics = NodeMetrics([*(principal.name for principal in settings.principals), OWNER, ANONYMOUS])
        calls = self._calls = self._call_log(metrics, ends)
        store = DaemonStore(self.store, kind, Families(STORE, metrics.registry))
        threads, figures = Threads(_THREADS), UsageFigures(self.store)
        ends.push_async_callback(self._close_store, store, threads, figures)
        await self._publish(kind, metrics, ends)
        arena = HostArena(settings.payload_bytes, BLOCK_BYTES, huge_pages=False)
        ends.callback(arena.close)
        budgets = _budgets_of(settings, arena.nbytes)
        account = Account(settings.account_file, count_failed=metrics.count_account_failed)
        access = Access(settings, store, budgets, account)
        await self._keep_books(store, account, access.prices, ends)
        shares = TenantShares(self.store, access.tenant_of)
        if settings.tenants:
            await asyncio.to_thread(shares.take, settings.tenants)
        attachments = Attachments(access, settings.limits.attached_bytes, settings.limits.clients, calls)
        certificates = None if settings.tls is None else Certificates(CertificateFiles.read(settings.tls))
        board = self._board = StatusBoard(
            kind, self.instance, calls, figures, budgets, access, certificates, account.hits
        )
        self._serve_http(board, metrics, access, calls, certificates, ends)
        ends.push_async_callback(attachments.close)
        gate = self._gate = self._make_gate(calls, lambda peer: sessions.end(peer))
        ends.callback(gate.close)
        sessions = DataSessions(access, gate, settings.limits.streams_per_client)
        metrics.watch(settings, budgets, attachments, sessions, figures, certificates, account.hits)
        self._reload = Reload(settings, access, shares, sessions, certificates, calls, metrics, self.instance)

        limits, idle = limits_message(settings), settings.limits.idle
        objects = StoreCalls(
            threads, calls, sessions, account, board, limits, instance=self.instance, kind=kind
        )
        shared = SharedCalls(threads, limits, metrics)
        blocks = BlockPool(arena)
        streams = StreamCalls(threads, blocks, limits, metrics)
        data = DataCalls(threads, blocks, limits, metrics)
        handlers: dict[str, Handler] = {
            "Hello": objects.hello, "Exists": objects.exists, "Delete": objects.delete,
            "Describe": objects.describe, "Scan": objects.scan, "Advise": objects.advise,
            "Register": objects.register, "Namespaces": objects.namespaces, "Usage": objects.usage,
            "Flush": objects.flush,
            "Get": streams.get, "Set": streams.set, "GetInto": shared.get_into, "SetFrom": shared.set_from,
            "Status": objects.status, "History": objects.history, "Report": objects.report,
            "Reload": ReloadCalls(self._reread, calls).serve,
        }  # fmt: skip
        service = Service(
            access, attachments, calls, gate, handlers,
            {"Get": data.get, "Set": data.set, "Exists": data.exists}, limits=limits, idle=idle,
        )  # fmt: skip
        port = DataPort(
            sessions, service.answer, calls, limits, max_connections=2 * settings.limits.clients, idle=idle,
            certificates=certificates,
        )  # fmt: skip
        listeners = Listeners(settings, gate, certificates)
        serving = await listeners.open(service, access, attachments, sessions, port, ends)
        self.addresses, self.data_addresses = listeners.addresses, listeners.data_addresses
        ends.callback(board.drain)
        ends.callback(asyncio.create_task(board.watch()).cancel)
        return serving

    def _make_gate(self, calls: CallLog, ended: Callable[[str], None]) -> Gate:
        limits, (minimum, maximum) = self.settings.limits, _WIDE
        return Gate(
            max_connections=limits.clients,
            max_wide=max(minimum, min(maximum, self.settings.host_bytes // _WIDE_BYTES)),
            max_streams=limits.streams_per_client, settling=SETTLING_SECONDS,
            count_refusal=calls.refused_connection, ended=lambda name: self._in_loop(ended, name),
        )  # fmt: skip

    async def _publish(self, kind: str, metrics: NodeMetrics, ends: AsyncExitStack) -> None:
        """Publish KV events, if the settings have an address for them; raises StorageError."""
        settings = self.settings.events.publisher
        if settings is not None and self.store is not None:
            source = StoreEvents(self.store, kind)
            self.publisher = await asyncio.to_thread(EventPublisher, settings, [source])
            metrics.watch_events(self.publisher)
            ends.push_async_callback(asyncio.to_thread, self.publisher.close)
            source.warn_of_silence()

    async def _keep_books(
        self, store: DaemonStore, account: Account, prices: PriceList, ends: AsyncExitStack
    ) -> None:
        """Follow the removals of all tiers, and write the account from time to time."""
        ends.push_async_callback(asyncio.to_thread, account.close)
        Thread(target=store.look, name="tiercache-removals", daemon=True).start()
        first = Thread(target=prices.read_records, name="tiercache-prices", daemon=True)
        first.start()
        await asyncio.to_thread(first.join, _PRICES_SECONDS)
        for name, pause, work in (
            ("removals", _LOOK_SECONDS, store.look),
            ("account", _ACCOUNT_SECONDS, account.write),
            ("prices", _ACCOUNT_SECONDS, prices.read_records),
        ):
            following = Following(name, pause, work)
            following.start()
            ends.push_async_callback(asyncio.to_thread, following.close)

    def _call_log(self, metrics: NodeMetrics, ends: AsyncExitStack) -> CallLog:
        settings = self.settings
        audit = AuditLog(
            settings.audit_file,
            max_bytes=settings.audit.bytes,
            kept=settings.audit.kept,
            required=settings.audit.required,
            count_lost=metrics.count_audit_lost,
        )
        ends.push_async_callback(asyncio.to_thread, audit.close)
        return CallLog(metrics, audit, instance=self.instance, slow=settings.log.slow_call)

    def _serve_http(
        self,
        board: StatusBoard,
        metrics: NodeMetrics,
        access: Access,
        calls: CallLog,
        certificates: Certificates | None,
        ends: AsyncExitStack,
    ) -> None:
        """Serve metrics, health, status and scores, if the settings have an address for them.

        The port is closed after the gate and all sessions, so that it can be asked during a drain.
        """
        address = self.settings.http.address
        if address is None:
            return
        from tiercache.daemon.http import HttpPort, Readers, make_app

        fleet, score = None, self.settings.score
        if score.workers and self.store is not None:
            fleet = Fleet(score)
            fleet.start(StoreEvents(self.store, "store"))
            ends.push_async_callback(asyncio.to_thread, fleet.close)
        app = make_app(board, metrics.registry, Readers(self.settings, access), calls, fleet)
        port = HttpPort(address.host, address.port, app, certificates=certificates)
        ends.callback(port.close)
        self.http_address = str(Address(address.host, port.port, address.loopback))

    def _in_loop(self, work: Callable[[str], None], name: str) -> None:
        """Let the event loop do something; any thread may call."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work, name)

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


def _budgets_of(settings: Settings, arena_bytes: int) -> Budgets:
    """Return the budgets of the whole daemon, as `StorageServer` draws them."""
    limits, rest = settings.limits, settings.host_bytes - settings.payload_bytes
    return Budgets(
        payload=Budget(arena_bytes),
        streams=Budget(limits.streams),
        transfers=Budget(max(rest - rest // 3, MESSAGE_COPIES * limits.message_bytes)),
        requests=Budget(max(rest // 3, limits.message_bytes)),
        workers=Budget(_THREADS),
    )
