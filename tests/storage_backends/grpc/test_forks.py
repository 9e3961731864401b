"""Processes that are forked while a client or a daemon of this process has connections."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.processes import in_child
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch, section
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import ClosedError
from tiercache.testing.objects import fetch, key, payload, put

SIZE = 200_000


def directory() -> Path:
    return Path(tempfile.mkdtemp(dir=scratch()))


def held(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def client_of(daemon: Daemon, **more: str) -> GrpcBackend:
    return GrpcBackend(read_settings(section(daemon.transport, daemon.where, **more)))


def own(daemon: Daemon, n: int) -> None:
    """Store and read objects with another client."""
    with client_of(daemon) as client:
        for turn in range(5):
            assert put(client, key(f"child {n} {turn}"), payload(turn, SIZE)) is Outcome.STORED
            assert fetch(client, key(f"child {n} {turn}"), SIZE) == payload(turn, SIZE)


def test_forks_while_calls_are_under_way() -> None:
    """The parent's calls go on, on its own connections; children are refused, and served by their own."""
    with Daemon("tcp", directory()) as daemon, client_of(daemon) as client:
        put(client, key("first"), payload("first", SIZE))
        own(daemon, -1)
        before, over, odd = held(daemon), threading.Event(), list[object]()

        def work(n: int) -> None:
            for turn in range(10_000):
                name, data = key(f"{n} {turn % 4}"), payload(10 * n + turn % 4, SIZE)
                answer, found = put(client, name, data), fetch(client, name, SIZE)
                if answer not in (Outcome.STORED, Outcome.HIT) or found != data:
                    odd.append((n, turn, answer))
                if over.is_set():
                    return

        def refused() -> None:
            for call in (lambda: fetch(client, key("first"), SIZE), lambda: client.exists([key("first")])):
                with pytest.raises(ClosedError, match="open it again in this process"):
                    call()
            client.close()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        children = [in_child(refused) for _ in range(3)]
        workers = [get_context("fork").Process(target=own, args=(daemon, n)) for n in range(2)]
        for worker in workers:
            worker.start()
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
        for worker in workers:
            worker.join(60)
        over.set()
        for thread in threads:
            thread.join(60)
        assert (odd, [worker.exitcode for worker in workers]) == ([], [0, 0])
        # The parent had one data connection, and has at most one for each of its threads now.
        until(lambda: held(daemon) <= before + len(threads))


def test_a_child_keeps_no_connection_of_its_parent_open() -> None:
    """A connection that a call has given up ends, although a child has a copy of its descriptor."""
    with Daemon("tcp", directory()) as daemon, client_of(daemon, transfer_timeout="500ms") as client:
        put(client, key("a"), payload("a", SIZE))
        before = held(daemon)
        child = in_child(lambda: time.sleep(600))
        try:
            daemon.slow(1)
            assert fetch(client, key("a"), SIZE) is Outcome.UNAVAILABLE
            until(lambda: held(daemon) < before)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


EMBEDDED = """
import os, sys
from tiercache.config.models import Settings
from tiercache.daemon import StorageServer
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend
from tiercache.testing.objects import fetch, key, put

settings = Settings(directory=sys.argv[1], listen=("127.0.0.1:0",), unix=False, host_bytes=96 << 20)
with StorageServer(settings.check(), MemoryBackend()) as node:
    child = os.fork()
    if not child:
        node.stop()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with GrpcBackend(read_settings({"address": node.addresses[0]})) as client:
        put(client, key("a"), b"right")
        assert fetch(client, key("a"), 5) == b"right"
"""


def test_a_process_that_is_forked_by_a_daemon_ends_without_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EMBEDDED, str(tmp_path)], check=True, timeout=60)
