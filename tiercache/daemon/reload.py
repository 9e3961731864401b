"""Settings that a daemon takes over while it serves: certificates, principals, quotas, the slow call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final

from tiercache.config.files import check_certificates, check_files
from tiercache.config.models import Settings, Tenant
from tiercache.daemon.access import Access, read_tokens
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import CertificateFiles, Certificates
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.port import DataSessions
from tiercache.storage.base import StorageBackend
from tiercache.storage.shares import Share, Shares, limits_of


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

    def take(self, tenants: Mapping[str, Tenant]) -> list[str]:
        """Keep the limits of these tenants from now on, and evict what is beyond; return what has changed.

        Returns names of tenants. Raises ConfigError, with nothing changed, if the store cannot keep them.
        """
        limits = limits_of(tenants)
        with self._lock:
            changed = [name for name, share in limits.items() if self._limits.get(name, Share()) != share]
            if limits != self._limits:
                shares = Shares(self._owner_of, limits)
                shares.check(0, "")
                self._store.share(shares)
                self._limits = limits
            return changed


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
    ) -> None:
        self._first: Final = settings
        self._access = access
        self._shares = shares
        self._sessions = sessions
        self._certificates = certificates
        self._calls = calls
        self._metrics = metrics

    def prepare(self, settings: Settings) -> tuple[list[str], Callable[[], None]]:
        """Read every file that these settings name, and change quotas only; raises ConfigError.

        Returns the names of settings that take effect at the next start only, and what makes the change. If
        the store cannot keep the quotas, nothing is changed.
        """
        check_files(settings)
        check_certificates(settings)
        first, names = self._first, set(Settings.model_fields) - {"principals", "tls", "log"}
        waiting = {name for name in names if getattr(settings, name) != getattr(first, name)}
        if _salts(settings) == _salts(first):  # quotas and guarantees change at once
            waiting.discard("tenants")
        if _is_mutual(settings) != _is_mutual(first):
            waiting.add("tls")
        if _frame(settings) != _frame(first):
            waiting.add("principals")
        principals = read_tokens(settings.principals)
        files = None if settings.tls is None else CertificateFiles.read(settings.tls)
        quotas = [] if "tenants" in waiting else self._shares.take(settings.tenants)

        def apply() -> None:
            if self._certificates is not None and files is not None and "tls" not in waiting:
                self._certificates.use(files)
            removed = set(self._access.tenants)
            if "principals" not in waiting:
                self._metrics.add_principals(principal.name for principal, _ in principals)
                self._sessions.end_all_of(self._access.reload(principals))
            removed.difference_update(self._access.tenants)
            self._calls.slow = settings.log.slow_call
            names = {"at_next_start": sorted(waiting), "removed": sorted(removed), "quotas": quotas}
            self._calls.end("reload", "done", None, **{key: ", ".join(found) for key, found in names.items()})

        return sorted(waiting), apply


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
