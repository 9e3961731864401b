"""Notifications to systemd that a service is ready, is stopping, or is alive (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """Sender of notifications to the service manager that started this process, if there is one.

    Thread safety: any thread.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watchdog = environment.get("WATCHDOG_USEC", "")
        mine = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog = int(watchdog) / 1e6 if self._address and mine and watchdog.isdigit() else 0.0
        """Seconds within which the service manager expects the next `WATCHDOG=1`; 0 if it expects none."""

    def send(self, *lines: str) -> None:
        """Send lines such as `READY=1`; do nothing without a service manager, and ignore errors of sending."""
        if self._address.startswith(("/", "\0")):
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.connect(self._address)
                sock.sendall("\n".join(lines).encode())
