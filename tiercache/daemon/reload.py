"""Settings that a daemon takes over while it serves: certificates, principals and what is a slow call.

Quotas of tenants are taken over as well, by `quotas`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from tiercache.config.files import check_certificates, check_files
from tiercache.config.models import Settings
from tiercache.daemon.access import Access, read_tokens
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.certificates import CertificateFiles, Certificates
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.sessions import DataSessions


class Reload:
    """Change of the settings of a daemon that serves: all that can change does, or nothing.

    Thread safety: `prepare` any thread, one at a time; what it returns the event loop's.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        sessions: DataSessions,
        certificates: Certificates | None,
        calls: CallLog,
        metrics: NodeMetrics,
    ) -> None:
        self._first: Final = settings
        self._access = access
        self._sessions = sessions
        self._certificates = certificates
        self._calls = calls
        self._metrics = metrics

    def prepare(self, settings: Settings) -> tuple[list[str], Callable[[], None]]:
        """Read every file that these settings name, and change nothing yet; raises ConfigError.

        Returns the names of settings that take effect at the next start only, and what makes the change.
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

        def apply() -> None:
            if self._certificates is not None and files is not None and "tls" not in waiting:
                self._certificates.use(files)
            removed = set(self._access.tenants)
            if "principals" not in waiting:
                self._metrics.add_principals(principal.name for principal, _ in principals)
                self._sessions.end_all_of(self._access.reload(principals))
            removed.difference_update(self._access.tenants)
            self._calls.slow = settings.log.slow_call
            self._calls.end(
                "reload", "done", at_next_start=", ".join(sorted(waiting)), removed=", ".join(sorted(removed))
            )

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
