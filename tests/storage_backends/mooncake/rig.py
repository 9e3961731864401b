"""A Mooncake pool for tests: a real master and real providers, which all end with the test.

    with own_network(), Pool() as pool:                       # in a network namespace of this process
        store = open_backend(pool.url("name"))

    with Pool(host="10.7.0.1", within=["ip", "netns", "exec", "h1"]) as pool: ...      # in a given one
    pool.provide(host="10.7.0.2", within=["ip", "netns", "exec", "h2"])

Mooncake's clients listen on all addresses, so they run in a network namespace, which needs root.
"""

from __future__ import annotations

import ctypes
import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from tests.processes import suspend
from tiercache.config.urls import storage_url
from tiercache.errors import ConfigError
from tiercache_lab import children

_ports = itertools.count(20951)
"""Ports of masters: one for each pool, for a client whose store is closed stays with its master."""
HTTP_PORT = 9903
SEGMENT = 128 << 20
_CLONE_NEWNET = 0x40000000
_PATIENCE = 30.0


def why_not() -> str:
    """The reason for which no pool can be started here; empty if there is none."""
    from tiercache_backends.mooncake.library import library

    if os.getuid():
        return "only root makes network namespaces, and Mooncake's clients listen on all addresses"
    try:
        library()
    except ConfigError as error:
        return str(error)
    return ""


def require() -> None:
    """Skip the test if no pool can be started."""
    if reason := why_not():
        pytest.skip(reason)


_namespaces: list[int] = []
"""Descriptor of the namespace that `own_network` has made."""


@contextmanager
def own_network() -> Iterator[None]:
    """Put this thread into the one network namespace of this process, as Mooncake shares connections."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.setns(_namespaces[0], _CLONE_NEWNET) if _namespaces else libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        try:
            if not _namespaces:
                _namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
                subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=_PATIENCE)
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)


class Process:
    """A process of the pool, as a test sees it."""

    def __init__(self, arguments: Sequence[str], within: Sequence[str], log: int) -> None:
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(p or os.curdir for p in (root, *sys.path))
        self.process = subprocess.Popen(
            [*within, *children.command("tests.storage_backends.mooncake.process", *arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR"},
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip() == "ready", f"a provider did not start: {line!r}"

    def stop(self) -> None:
        suspend(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_PATIENCE)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Pool:
    """A master and its providers."""

    def __init__(
        self,
        segments: Sequence[int] = (SEGMENT, SEGMENT),
        *,
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
        log: int = subprocess.DEVNULL,
        master: Sequence[str] = (),
    ) -> None:
        """Start a master at `host`, and a provider of each segment (in bytes) beside it.

        `within`: command that runs another in a network namespace. `master`: further flags of the master.
        """
        self.host, self.port = host, next(_ports)
        self._within, self._log, self._flags = within, log, master
        self.providers: list[Process] = []
        self.master: Process | None = None
        try:
            self.start_master()
            for segment in segments:
                self.provide(segment, wait=False)
            for provider in self.providers:
                provider.ready()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Address of the master for its clients."""
        return f"{self.host}:{self.port}"

    def start_master(self) -> None:
        self.master = Process(
            [
                "master", "-rpc_address", self.host, "-rpc_port", str(self.port),
                "-metrics_host", self.host, "-metrics_port", str(HTTP_PORT), "-client_ttl", "3",
                *self._flags,
            ],
            self._within,
            self._log,
        )  # fmt: skip
        end = time.monotonic() + _PATIENCE
        while not self._answers():
            assert self.master.process.poll() is None, "the master ended"
            assert time.monotonic() < end, "the master does not answer"
            time.sleep(0.05)

    def provide(
        self,
        segment: int = SEGMENT,
        *,
        host: str = "",
        within: Sequence[str] | None = None,
        wait: bool = True,
    ) -> Process:
        """Start a provider of `segment` bytes at `host`, within its network namespace."""
        started = Process(
            ["provider", host or self.host, self.address, str(segment)],
            self._within if within is None else within,
            self._log,
        )
        self.providers.append(started)
        if wait:
            started.ready()
        return started

    def section(self, prefix: str, **settings: Any) -> Mapping[str, Any]:
        """Section of the configuration of a store in the pool, which can list its objects."""
        return {"address": self.address, "prefix": prefix, "http": f"{self.host}:{HTTP_PORT}", **settings}

    def url(self, prefix: str, **settings: Any) -> str:
        """URL of a store in the pool, which can list its objects."""
        found = dict(self.section(prefix, **settings))
        return storage_url("mooncake", address=found.pop("address"), **found)

    def close(self) -> None:
        for process in (*self.providers, *([self.master] if self.master else ())):
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answers(self) -> bool:
        if self._within:
            script = f"import socket; socket.create_connection(({self.host!r}, {self.port}), 1)"
            command = [*self._within, sys.executable, "-c", script]
            return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=_PATIENCE).returncode == 0
        connection = http.client.HTTPConnection(self.host, HTTP_PORT, timeout=1)
        try:
            socket.create_connection((self.host, self.port), 1).close()
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
