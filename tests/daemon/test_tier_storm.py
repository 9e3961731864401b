"""Eight clients that store and read while an operator changes every tier, and one tier dies."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.daemon import test_tiers
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.storage.base import GetItem
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, put

SIZE = 20_000
SEED = 20261123


def url(path: Path, name: str) -> str:
    """A tier that is not taken for sick on a busy machine."""
    return test_tiers.url(path, name, more="&tier_deadline=60s")


class Client(threading.Thread):
    """Stores objects of its own, and reads what it has stored.

    A read is a hit of the right bytes, or a miss while a tier dies. No answer may be UNAVAILABLE, because
    every call is answered within its deadline.
    """

    def __init__(self, number: int, store: GrpcBackend, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.number, self.store, self.stopping = number, store, stop
        self.acknowledged: list[str] = []
        self.wrong: list[str] = []
        self.reads = 0

    def run(self) -> None:
        rng = random.Random(SEED + self.number)
        while not self.stopping.is_set():
            name = f"{self.number}-{len(self.acknowledged)}"
            stored = put(self.store, key(name), payload(name, SIZE))
            if stored in (Outcome.STORED, Outcome.HIT):
                self.acknowledged.append(name)
            elif stored is not Outcome.THROTTLED:
                self.wrong.append(f"{name}: a set answers {stored}")
            for _ in range(4):
                self.read(rng.choice(self.acknowledged or [name]))

    def read(self, name: str, *, must: bool = False) -> None:
        buffer = bytearray(SIZE)
        [outcome] = self.store.get([GetItem(key(name), [memoryview(buffer)], SIZE)])
        if outcome is Outcome.HIT and bytes(buffer) != payload(name, SIZE):
            self.wrong.append(f"{name}: wrong bytes")
        elif outcome is not Outcome.HIT and (must or outcome is not Outcome.MISS):
            self.wrong.append(f"{name}: a get answers {outcome}")
        self.reads += 1


def client_of(node: StorageServer) -> GrpcBackend:
    where = {"path": str(node.settings.socket_directory)}
    return GrpcBackend(read_settings({**where, "timeout": "30s", "transfer_timeout": "60s"}))


@pytest.mark.slow
def test_tiers_change_under_eight_clients(tmp_path: Path) -> None:
    far = StorageServer(daemon_settings("unix"), open_backend("memory://?capacity=64MiB"))
    far.start()
    place = f"grpc://{far.settings.socket_directory}?tier_name=far&tier_deadline=1s&timeout=1s"
    settings = daemon_settings("unix", storage=(url(tmp_path, "a"), url(tmp_path, "b"), place))
    stop = threading.Event()
    with StorageServer(settings) as node, client_of(node) as operator:
        clients = [Client(n, client_of(node), stop) for n in range(8)]
        for client in clients:
            client.start()
        for change in changes(node, tmp_path, place, far):
            done = [len(client.acknowledged) for client in clients]
            change()
            wait_for_progress(clients, done)
        stop.set()
        for client in clients:
            client.join(120)
            assert not client.is_alive()
        assert [tier.name for tier in operator.usage().tiers] == ["d", "a"]
        for client in clients:
            for name in client.acknowledged:
                client.read(name, must=True)
        assert [client.wrong for client in clients] == [[]] * 8
        assert sum(client.reads for client in clients) > 100
        for client in clients:
            client.store.close()


def changes(node: StorageServer, path: Path, place: str, far: StorageServer) -> list[Any]:
    """Every kind of change; each is over before the next begins.

    The tier that dies is never the first: it would take its own objects with it.
    """
    a, b, c, d = (url(path, name) for name in "abcd")
    shy = f"{b}&tier_write=write_through_selective&tier_write_after=2&tier_promote=always"

    def to(*storage: str, drop: Sequence[str] = ()) -> Callable[[], None]:
        def change() -> None:
            node.reload(node.settings.model_copy(update={"storage": storage}), drop)
            assert node.store is not None
            node.store.retier(storage).left.result(120)

        return change

    return [
        to(c, a, b, place),
        to(a, c, place, b),
        to(a, c, place, shy),
        to(c, place, shy),
        to(d, place, shy),
        far.stop,
        to(d, place, shy, a),
        to(d, shy, a, drop=["far"]),
        to(d, a),
    ]


def wait_for_progress(clients: list[Client], since: list[int]) -> None:
    """Wait until every client has stored three more objects, with the tiers as they are now."""
    waited = threading.Event()
    for _ in range(1200):
        if all(len(c.acknowledged) >= n + 3 or c.wrong for c, n in zip(clients, since, strict=True)):
            return
        waited.wait(0.05)
    raise AssertionError("the clients do not get on")
