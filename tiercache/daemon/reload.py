"""Settings that a daemon takes over while it serves, from its file: tiers, quotas, principals, certificates.

SIGHUP, Reload ──▶ read the file ──▶ check all ──▶ tiers and quotas ──▶ certificates, principals, log
                                 nothing has changed if this fails      cannot fail
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import Any, Final

from grpc import StatusCode

from tiercache.config.files import check_files
from tiercache.config.models import Settings, Tenant
from tiercache.config.urls import section_of
from tiercache.daemon.access import Access, Refusal, read_tokens
from tiercache.daemon.call import Call
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import CertificateFiles, Certificates
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.port import DataSessions
from tiercache.daemon.store_threads import fulfil
from tiercache.errors import ConfigError, InputError, RefusedError, StorageError, TierCacheError
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.shares import Share, Shares, limits_of
from tiercache.storage.tiers import PREFIX
from tiercache.storage.wrappers import unwrap
from tiercache.wire.v1 import storage_pb2 as pb

_MAX_RUNNING: Final = 16
"""Maximum number of reloads that are under way; they wait for each other."""
_MAX_DROPPED: Final = 64
"""Maximum number of tiers that a reload may drop."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Difference that a reload has made."""

    changed: Sequence[str]
    """Tiers and quotas that have changed, in words."""
    at_next_start: Sequence[str]
    """Names of changed settings that take effect at the next start only."""


class TenantShares:
    """Quotas and guarantees that a daemon's store keeps for its tenants.

    Thread safety: any thread; changes wait for each other.
    """

    def __init__(self, store: StorageBackend, owner_of: Callable[[bytes], str]) -> None:
        """Keep shares in `store`; `owner_of` returns the tenant of a namespace, or "" (`Shares.owner_of`)."""
        self._store: Final = store
        self._owner_of: Final = owner_of
        self._lock: Final = Lock()
        self._limits: Mapping[str, Share] = {}

    def take(
        self,
        tenants: Mapping[str, Tenant] | None,
        tiers: Sequence[str] | None = None,
        drop: Collection[str] = (),
    ) -> list[str]:
        """Keep the limits of these tenants from now on, in these tiers of a chain, and evict what is beyond.

        None stands for the tenants, or the store, of before. Returns what has changed, in words. Raises
        ConfigError or StorageError, with nothing changed, if that is not possible.
        """
        with self._lock:
            limits = self._limits if tenants is None else limits_of(tenants)
            changed = [name for name, share in limits.items() if self._limits.get(name, Share()) != share]
            shares = Shares(self._owner_of, limits) if limits != self._limits else None
            if shares is not None:
                shares.check(0, "")
            what: Sequence[str] = ()
            if tiers is not None:
                what = unwrap(self._store).retier(tiers, drop, shares).what
            elif shares is not None:
                self._store.share(shares)
            self._limits = limits
            return [*what, *(f"quota of {name}" for name in changed)]


class Reload:
    """Change of the settings of a daemon that serves: all that can change does, or nothing.

    Thread safety: `prepare` any thread, one at a time; what it returns the event loop's.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        shares: TenantShares,
        sessions: DataSessions,
        certificates: Certificates | None,
        calls: CallLog,
        metrics: NodeMetrics,
        instance: bytes,
    ) -> None:
        self._first: Final = settings
        self._tiers: Sequence[str] = settings.store_urls
        self._instance: Final = instance.hex()
        self._access = access
        self._shares = shares
        self._sessions = sessions
        self._certificates = certificates
        self._calls = calls
        self._metrics = metrics

    def prepare(self, settings: Settings, drop: Collection[str] = ()) -> tuple[Reloaded, Callable[[], None]]:
        """Read every file that these settings name, and change tiers and quotas only.

        Returns what is changed, and what makes the rest of the change. Raises ConfigError or StorageError,
        with nothing changed. `drop`: see `StorageBackend.retier`.
        """
        check_files(settings)
        first, names = self._first, set(Settings.model_fields) - {"principals", "tls", "log"}
        waiting = {name for name in names if getattr(settings, name) != getattr(first, name)}
        if _salts(settings) == _salts(first):  # quotas and guarantees change at once
            waiting.discard("tenants")
        tiers = None
        was, now = first.storage, settings.storage
        if isinstance(was, tuple) and isinstance(now, tuple):  # a chain, whose tiers change at once
            tiers = now
            waiting.discard("storage")
        if drop and tiers is None:
            raise ConfigError(
                "this daemon serves one store without tiers, so none can be dropped; write storage as a list"
            )
        if _is_mutual(settings) != _is_mutual(first):
            waiting.add("tls")
        if _frame(settings) != _frame(first):
            waiting.add("principals")
        principals = read_tokens(settings.principals)
        files = None if settings.tls is None else CertificateFiles.read(settings.tls)
        for url in tiers or ():
            if url not in self._tiers:
                _check_other(url, self._instance)
        changed = self._shares.take(None if "tenants" in waiting else settings.tenants, tiers, drop)
        self._tiers = tiers or self._tiers
        reloaded = Reloaded(changed, sorted(waiting))

        def apply() -> None:
            if self._certificates is not None and files is not None and "tls" not in waiting:
                self._certificates.use(files)
            removed = set(self._access.tenants)
            if "principals" not in waiting:
                self._metrics.add_principals(principal.name for principal, _ in principals)
                self._sessions.end_all_of(self._access.reload(principals))
            removed.difference_update(self._access.tenants)
            self._calls.slow = settings.log.slow_call
            told = {"at_next_start": sorted(waiting), "removed": sorted(removed), "changed": changed}
            told |= {"dropped": list(drop)}
            self._calls.end("reload", "done", None, **{key: ", ".join(found) for key, found in told.items()})

        return reloaded, apply


def _check_other(url: str, instance: str) -> None:
    """Raise ConfigError if a tier is this daemon, whose calls would go round for ever."""
    own = {name: value for name, value in section_of(url).items() if not name.startswith(PREFIX)}
    if own.get("type") == "grpc":
        with suppress(StorageError), open_backend(own) as store:
            if getattr(store, "ping")().instance == instance:  # noqa: B009  not of the contract
                raise ConfigError("this tier would be the daemon itself; name another daemon")


class ReloadCalls:
    """Handler of the call Reload, which goes on when its client is gone.

    A principal without a tenant and without a list of namespaces needs the verb admin for it.

    Thread safety: the event loop's thread.
    """

    def __init__(self, reload: Callable[[Collection[str]], Reloaded] | None, calls: CallLog) -> None:
        """Let `reload` take over what the daemon's file has now; None if there is no file."""
        self._reload: Final = reload
        self._calls: Final = calls
        self._running: list[Future[pb.ReloadReply]] = []

    async def serve(self, call: Call) -> None:
        """Serve Reload."""
        permissions = call.caller.permissions
        if not permissions.operates:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{permissions.name} may not change this daemon: that needs the verb admin without a tenant"
                " and without a list of namespaces",
            )
        request = await call.request(pb.ReloadRequest)
        if self._reload is None:
            raise Refusal(
                StatusCode.FAILED_PRECONDITION,
                "this daemon was not started from a file that it could read again",
            )
        self._running = [other for other in self._running if not other.done()]
        if len(self._running) >= _MAX_RUNNING:
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED, f"{_MAX_RUNNING} reloads are under way; wait for their end"
            )
        drop = request.drop[:_MAX_DROPPED]
        await self._calls.begin("reload", drop=", ".join(drop))
        made: Future[pb.ReloadReply] = Future()
        self._running.append(made)
        work = partial(copy_context().run, _reply, partial(self._reload, drop))
        # On a thread of its own: files that cannot be read must not keep the daemon from its end.
        Thread(target=fulfil, args=(made, work), name="tiercache-reload", daemon=True).start()
        reply = await asyncio.shield(asyncio.wrap_future(made))
        await call.send(reply.SerializeToString())


def _reply(reload: Callable[[], Reloaded]) -> pb.ReloadReply:
    """Reload, and return what has become of it."""
    try:
        found = reload()
    except TierCacheError as error:
        kind = pb.RELOAD_ERROR_CONFIG if isinstance(error, InputError) else pb.RELOAD_ERROR_STORAGE
        kind = pb.RELOAD_ERROR_REFUSED if isinstance(error, RefusedError) else kind
        return pb.ReloadReply(error=kind, why=str(error))
    return pb.ReloadReply(changed=found.changed, at_next_start=found.at_next_start)


def _salts(settings: Settings) -> dict[str, Any]:
    return {name: tenant.salt_file for name, tenant in settings.tenants.items()}


def _is_mutual(settings: Settings) -> bool | None:
    """Return whether clients must show a certificate; None without TLS."""
    return None if settings.tls is None else settings.tls.client_ca is not None


def _frame(settings: Settings) -> Any:
    """Return what principals must have in common with those of the start.

    These are the tenants, whether there are several principals (which divides the budgets), whether other
    users may use the unix sockets, and whether callers on TCP are asked for credentials.
    """
    uids = {principal.uid for principal in settings.principals}
    several = bool(settings.principals) and (len(settings.principals) > 1 or os.getuid() not in uids)
    asked = any(principal.uid is None for principal in settings.principals)
    return _salts(settings), several, bool(uids - {None, os.getuid()}), asked
