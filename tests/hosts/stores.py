"""Stores that workers on two hosts share: on a third host, alone or below a file tier of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.hosts import network
from tests.hosts.network import Host, Hosts
from tests.hosts.rig import CALL, PAUSE, DaemonOnHost
from tests.storage_backends.mooncake import rig as mooncake

OWN_BYTES = "1GiB"
SEGMENT = 256 << 20
"""Bytes that a provider of Mooncake lends."""


class SharedStore(Protocol):
    """A store on a host, made of processes that can be killed and started again."""

    @property
    def url(self) -> str:
        """The store as a worker on another host opens it."""
        ...

    parts: tuple[str, ...]
    """Names of its processes."""
    keeps: bool
    """Whether it still has everything after a kill of any part."""

    def kill(self, part: str) -> None:
        """Kill a part with SIGKILL."""
        ...

    def start(self, part: str) -> None:
        """Start a part that was killed, and wait until it serves."""
        ...

    def close(self) -> None:
        """End all parts."""
        ...


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


def _mooncake(hosts: Hosts, _base: Path) -> SharedStore:
    return MooncakeOnHost(hosts[2])


def _daemon(hosts: Hosts, base: Path) -> SharedStore:
    return DaemonOnHost(hosts[2], base / "daemon")


KINDS: dict[str, Callable[[Hosts, Path], SharedStore]] = {
    "daemon": _daemon,
    "file+daemon": _daemon,
    "mooncake": _mooncake,
    "file+mooncake": _mooncake,
}
"""Each kind, and how its store is made."""


def missing(kind: str) -> str:
    """Return why this machine cannot have a kind of store on hosts; empty if it can."""
    return network.missing() or (mooncake.why_not() if kind.endswith("mooncake") else "")


def storage_of(kind: str, store: SharedStore, own: Path) -> list[str]:
    """Return the storage of a worker, with `own` as the directory of its file tier if the kind has one."""
    above = [f"file://{own}?capacity={OWN_BYTES}"] if kind.startswith("file+") else []
    return [*above, store.url]
