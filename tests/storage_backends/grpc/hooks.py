"""The conformance hooks of a store behind a daemon: a node of this process, a client beside it, and the inner
store's hooks behind both.

The first who opens a store in a path starts the node; whoever opens it while that lives is one more client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import GrpcSettings, read_settings

from tests.storage.backends import FileHooks, MemoryHooks, OwnConformance
from tests.storage_backends.chain.hooks import ChainHooks
from tests.storage_backends.grpc.nodes import daemon_settings, section
from tiercache.core import ObjectKey
from tiercache.daemon import StorageServer
from tiercache.errors import StorageError
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import key


class Client(GrpcBackend):
    """A client, and perhaps the node that it is the first client of, which ends with it."""

    node: StorageServer | None = None

    def __init__(
        self, settings: GrpcSettings, node: StorageServer | None = None, directory: Path | None = None
    ) -> None:
        self.node, self._directory = node, directory
        super().__init__(settings)

    def close(self) -> None:
        super().close()
        node, self.node = self.node, None
        if node is not None:
            node.stop()
            (marker_of(self._directory) if self._directory else Path("/nowhere")).unlink(missing_ok=True)


def marker_of(path: Path) -> Path:
    return path.with_name(path.name + ".served")


class ServedHooks(OwnConformance):
    """Through a daemon. A subclass names the way there and has the inner store's hooks as its next base."""

    transport: ClassVar[str]

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        marker = marker_of(path)
        if marker.exists():
            return Client(read_settings(json.loads(marker.read_text())))
        node = StorageServer(daemon_settings(self.transport), super().open_store(path, capacity))
        node.start()
        where = str(node.settings.socket_directory) if self.transport == "unix" else node.addresses[0]
        given = section(self.transport, where)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(given))
        return Client(read_settings(given), node, path)

    def behind(self, store: StorageBackend) -> StorageBackend:
        if not isinstance(store, Client):
            return store
        assert store.node is not None
        assert store.node.store is not None
        return store.node.store

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        super().corrupt(self.behind(store), k)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        super().flip(self.behind(store), k, bit)

    def truncate(self, store: StorageBackend, k: ObjectKey) -> None:
        super().truncate(self.behind(store), k)

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        super().swap(self.behind(store), a, b)

    def pass_time(self, store: StorageBackend, seconds: float) -> None:
        super().pass_time(self.behind(store), seconds)

    def check(self, store: StorageBackend) -> None:
        super().check(self.behind(store))


class UnixMemory(ServedHooks, MemoryHooks):
    transport = "unix"


class TcpMemory(ServedHooks, MemoryHooks):
    transport = "tcp"


class TlsMemory(ServedHooks, MemoryHooks):
    transport = "tls"


class UnixFile(ServedHooks, FileHooks):
    transport = "unix"


class UnixChain(ServedHooks, ChainHooks):
    transport = "unix"
    parts = (MemoryHooks, FileHooks)
    small = 16 << 20
    truncate = OwnConformance.truncate  # a chain has no medium of its own
    test_two_processes_see_one_store = None  # the second process counts every copy


def open_client(transport: str, node: StorageServer, **more: Any) -> GrpcBackend:
    """A client of a node."""
    where = str(node.settings.socket_directory) if transport == "unix" else node.addresses[0]
    given: Mapping[str, Any] = section(transport, where, **more)
    return GrpcBackend(read_settings(given))


def answers(store: StorageBackend) -> bool:
    """Whether the store can be asked."""
    try:
        return store.exists([key("none")]) == [False]
    except StorageError:
        return False
