"""Settings of the daemon's process as a whole: malloc, limit of descriptors, notifications to systemd."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import socket
from contextlib import suppress
from typing import Final

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 16 << 20
"""Size in bytes from which glibc makes a separate mapping for an allocation.

Messages should be smaller: to fault in the pages of a new mapping costs as much as to copy the message."""
_KEPT_BYTES: Final = 8 << 20
"""Free bytes that may stay at the end of the heap until the next trim."""
_ARENAS: Final = 1
"""Number of glibc's malloc arenas.

glibc gives the free end of the first arena back to the system. Of any other arena glibc gives back only the
free pages in the middle, and keeps megabytes at the end."""
_TRIM_SECONDS: Final = 2.0
"""Seconds between two trims."""
_libc = ctypes.CDLL(None)


def limit_malloc() -> None:
    """Make the whole process allocate from one malloc arena that can be trimmed; glibc only.

    In this arena messages reuse the memory of earlier messages. Call this before threads are started: a
    running thread may have a malloc arena of its own, which later threads would share.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


async def trim_malloc_periodically() -> None:
    """Give free memory back to the system every _TRIM_SECONDS, until cancelled.

    One trim takes a few milliseconds in a thread. Call this when the daemon has started.
    """
    gc.collect()
    gc.freeze()  # exempts objects made at the start from collections: they live as long as the daemon
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        await asyncio.to_thread(_trim_malloc)


def _trim_malloc() -> None:
    # gRPC leaves a reference cycle for every call, with the call's metadata. Collect only the two young
    # generations: a full collection takes long, because it examines all objects of a large store.
    gc.collect(1)
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def raise_descriptor_limit(clients: int) -> None:
    """Raise the process's limit on descriptors to the number that all clients together can use.

    Clients use descriptors for connections and attached memory. The new limit allows 32 descriptors for each
    client and 1024 for everything else, but it is never above the hard limit. A failure is ignored.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 32 * clients
    if resource.RLIM_INFINITY not in (soft, hard):
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Notifier:
    """Sender of notifications to the service manager that started this process, if there is one.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the zero byte with which an abstract address begins.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watchdog = os.environ.get("WATCHDOG_USEC", "")
        mine = os.environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog = int(watchdog) / 1e6 if self._address and mine and watchdog.isdigit() else 0.0
        """Seconds within which the service manager expects the next `WATCHDOG=1`; 0 if it expects none."""

    def send(self, *lines: str) -> None:
        """Send lines such as `READY=1` (sd_notify(3)); do nothing without a service manager.

        Errors of sending are ignored.
        """
        if self._address.startswith(("/", "\0")):
            with (
                suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
            ):
                sock.connect(self._address)
                sock.sendall("\n".join(lines).encode())
