"""Suspend processes, fork them, and find ports for them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tiercache.errors import ClosedError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import key


def in_child(work: Callable[[], object]) -> int:
    """Fork; return the id of a process that does `work` and ends, with status 0 if nothing was raised."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def works_in_a_child(work: Callable[[], object]) -> bool:
    """Do `work` in a forked process; return whether nothing was raised."""
    return os.waitpid(in_child(work), 0)[1] == 0


def refuses_a_child(store: StorageBackend) -> bool:
    """Return whether a store turns a forked process away, and can be closed in it."""

    def use() -> None:
        with pytest.raises(ClosedError):
            store.exists([key("a")])
        store.close()

    return works_in_a_child(use)


def suspend(pid: int) -> None:
    """Send SIGSTOP and return once no thread of the process runs.

    The kernel queues the signal at once, but threads that run or are ready go on until each has heeded it: on
    a busy machine one of them may still answer a request in between.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_suspended(pid)


def wait_suspended(pid: int, seconds: float = 120) -> None:
    """Wait until every thread of a process that was sent SIGSTOP stands still or has ended."""
    end = time.monotonic() + seconds
    while any(state not in "TtZX" for state in _states(pid)):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """List the state letters of proc(5), one for each thread; X for one that ended meanwhile."""
    found = []
    with suppress(OSError):  # the process is gone
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                found.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
            except OSError:
                found.append("X")
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
