"""Stores that workers on two hosts share: on a third host, alone or below a file tier of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.hosts import network
from tests.hosts.network import GUARD, Host, Hosts
from tests.hosts.rig import CALL, PAUSE, TRANSFER, DaemonOnHost, HungError
from tests.storage_backends.mooncake import rig as mooncake
from tests.storage_backends.s3 import server as s3
from tiercache.config.urls import storage_url

OWN_BYTES = "1GiB"
SEGMENT = 256 << 20
"""Bytes that a provider of Mooncake lends."""


class MooncakeOnHost:
    """A master of Mooncake, and a provider that lends memory; nothing outlives the two."""

    parts = ("master", "provider")
    keeps = False

    def __init__(self, host: Host) -> None:
        self._pool = mooncake.Pool((SEGMENT,), host=host.address, within=host.command([]))

    @property
    def url(self) -> str:
        """The store as a worker on another host opens it."""
        return self._pool.url("hosts", deadline=f"{CALL}s", breaker_pause=f"{PAUSE}s")

    def kill(self, part: str) -> None:
        """Kill the master or the provider with SIGKILL."""
        if part == "master":
            assert self._pool.master is not None
            self._pool.master.kill()
        else:
            self._pool.providers.pop().kill()

    def start(self, part: str) -> None:
        """Start the master or the provider again."""
        if part == "master":
            self._pool.start_master()
        else:
            self._pool.provide(SEGMENT)

    def close(self) -> None:
        """End both."""
        self._pool.close()


class S3OnHost:
    """A bucket of SeaweedFS, in one process over files that outlive it."""

    parts = ("service",)
    keeps = True

    def __init__(self, host: Host, directory: Path) -> None:
        self._host, self._directory = host, directory
        self._ports = s3.free_ports(4)
        self._endpoint = f"http://{host.address}:{self._ports[-1]}"
        directory.mkdir()
        self.start()

    @property
    def url(self) -> str:
        """The store as a worker on another host opens it."""
        return storage_url(
            "s3", "/hosts", address=s3.BUCKET, endpoint=self._endpoint, allow_http="true",
            deadline=f"{TRANSFER}s", refresh=f"{PAUSE}s",
        )  # fmt: skip

    def start(self, _part: str = "service") -> None:
        """Start the process, and wait until it takes objects."""
        command = s3.command(self._directory, self._ports, self._host.address)
        with (self._directory / "log").open("w") as log:
            self._process = self._host.run(command, stdout=log, stderr=log, env=s3.environment())
        wait = f"from {s3.__name__} import takes_objects; assert takes_objects({self._endpoint!r})"
        if self._host.run([sys.executable, "-c", wait]).wait(3 * GUARD):
            raise HungError(f"the service does not serve: {(self._directory / 'log').read_text()[-2000:]}")

    def kill(self, _part: str = "service") -> None:
        """Kill it with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it."""
        self.kill()


SharedStore = DaemonOnHost | MooncakeOnHost | S3OnHost
"""A store on a host, made of processes (`parts`) that can be killed and started again.

`keeps` says whether it still has everything after a kill of any part.
"""
MAKE: dict[str, Callable[[Hosts, Path], SharedStore]] = {
    "daemon": lambda hosts, base: DaemonOnHost(hosts[2], base / "daemon"),
    "mooncake": lambda hosts, base: MooncakeOnHost(hosts[2]),
    "s3": lambda hosts, base: S3OnHost(hosts[2], base / "s3"),
}
KINDS = [above + kind for kind in MAKE for above in ("", "file+")]
"""Kinds of stores; with `file+` a worker has a file tier of its own above the shared store."""


def shared_store(kind: str, hosts: Hosts, base: Path) -> SharedStore:
    """Make the store of a kind on the third host."""
    return MAKE[kind.removeprefix("file+")](hosts, base)


def missing(kind: str) -> str:
    """Return why this machine cannot have a kind of store on hosts; empty if it can."""
    why_not = {"mooncake": mooncake.why_not, "s3": s3.why_not}.get(kind.removeprefix("file+"), str)
    return network.missing() or why_not()


def storage_of(kind: str, store: SharedStore, own: Path) -> list[str]:
    """Return the storage of a worker, with `own` as the directory of its file tier if the kind has one."""
    above = [f"file://{own}?capacity={OWN_BYTES}"] if kind.startswith("file+") else []
    return [*above, store.url]
