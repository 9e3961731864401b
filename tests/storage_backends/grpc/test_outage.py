"""A daemon that is killed, stopped, cut off or replaced: an answer in time, and hits come back."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.examples import slow_after
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.hooks import answers, open_client
from tests.storage_backends.grpc.nodes import daemon_settings, scratch, section
from tests.storage_backends.grpc.test_planes import connection_of
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ClosedError, UnavailableError
from tiercache.storage.base import Capabilities, GetItem, NamespaceRecord
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, fetch, key, payload, put, to_get

SIZE = 20_000
HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
QUICK = {"timeout": "500ms", "transfer_timeout": "700ms", "breaker_pause": "200ms"}
DEADLINE = 30.0
"""Far more than the two timeouts together, also on a busy machine, and far less than a call that hangs."""


def directory() -> Path:
    return Path(tempfile.mkdtemp(dir=scratch()))


@pytest.fixture(params=slow_after(1, ["unix", "tcp"]))
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(request.param, directory(), f"file://{tmp_path}/store?capacity=16MiB") as running:
        yield running


def client_of(daemon: Daemon, **more: Any) -> GrpcBackend:
    return GrpcBackend(read_settings(section(daemon.transport, daemon.where, **{**QUICK, **more})))


def timed(call: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    result = call()
    assert time.monotonic() - begun < DEADLINE
    return result


def is_away(client: GrpcBackend) -> None:
    """Every call says so in time, and soon at once."""
    assert timed(lambda: client.get([to_get(key("a"), SIZE)] * 2)) == [UNAVAILABLE] * 2
    assert timed(lambda: put(client, key("b"), payload("b", SIZE))) is UNAVAILABLE
    timed(lambda: client.register_namespace(NamespaceRecord(OTHER_NAMESPACE, {"model": "n"})))
    for ask in (
        client.flush,
        client.scan,
        client.usage,
        client.namespaces,
        client.ping,
        lambda: client.describe([key("a")]),
        lambda: client.exists([key("a")]),
        lambda: client.delete([key("a")]),
    ):
        with pytest.raises(UnavailableError, match="start the daemon"):
            timed(ask)
    took = []
    for _ in range(8):  # one of them may be let through, to see whether the daemon is back
        begun = time.monotonic()
        assert client.get([to_get(key("a"), SIZE)]) == [UNAVAILABLE]
        took.append(time.monotonic() - begun)
    assert min(took) < 0.5, "the breaker is open, so that no time-out is waited for"


def store_first(client: GrpcBackend) -> None:
    """Store an object; on a busy machine the first calls may be too slow for these deadlines."""
    until(lambda: put(client, key("a"), payload("a", SIZE)) in (STORED, HIT))


def comes_back(client: GrpcBackend) -> None:
    until(lambda: fetch(client, key("a"), SIZE) == payload("a", SIZE))


def test_a_daemon_that_is_killed_and_started_again(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        store_first(client)
        assert client.capabilities == Capabilities(persistent=True, shared=True, bounded=True)
        client.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        first = client.ping()
        assert first.transport == daemon.transport
        assert {"admin", "read", "write"} <= set(first.verbs)
        daemon.kill()
        is_away(client)
        daemon.start()
        comes_back(client)
        assert client.ping().instance != first.instance
        assert {record.namespace for record in client.namespaces()} == {NAMESPACE, OTHER_NAMESPACE}


def test_a_daemon_that_is_stopped_and_goes_on(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        store_first(client)
        daemon.stop()
        is_away(client)
        daemon.go_on()
        comes_back(client)


def test_a_worker_starts_before_its_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    where = directory()
    with GrpcBackend(read_settings(section("unix", str(where), **QUICK))) as client:
        assert client.capabilities == Capabilities(persistent=False, shared=True, bounded=False)
        client.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        item, before = to_get(key("a"), SIZE), b"\xaa" * SIZE
        is_away(client)
        assert client.get([item]) == [UNAVAILABLE]
        assert b"".join(item.buffers) == before
        assert len(caplog.records) == 1, "told once"
        with StorageServer(daemon_settings("unix", where), MemoryBackend(1 << 20)):
            until(lambda: put(client, key("a"), payload("a", SIZE)) in (STORED, HIT))
            assert client.capabilities == Capabilities(shared=True, bounded=True)
            assert {record.namespace for record in client.namespaces()} == {NAMESPACE, OTHER_NAMESPACE}


def test_a_daemon_that_starts_anew_learns_again_that_there_are_states() -> None:
    where = directory()
    plain, hybrid = (
        NamespaceRecord(NAMESPACE, {"model": "m"}),
        NamespaceRecord(NAMESPACE, {"model": "m"}, states=True),
    )
    with GrpcBackend(read_settings(section("unix", str(where), **QUICK))) as client:
        for _ in range(2):
            client.register_namespace(hybrid)
            client.register_namespace(plain)
            with StorageServer(daemon_settings("unix", where), MemoryBackend(1 << 20)):
                until(lambda: put(client, key("a"), payload("a", SIZE)) is STORED)
                assert client.namespaces() == [hybrid]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_restart_between_two_calls_is_noticed(transport: str) -> None:
    """Nothing failed in between; what a daemon must know is told to the new one all the same."""
    where = directory()
    with StorageServer(daemon_settings(transport, where), MemoryBackend()) as node:
        client = open_client(transport, node, **QUICK)
        address = node.addresses
        client.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        assert len(client.namespaces()) == 1
        connection_of(client).checked -= 60  # as if the call above had been a minute ago
    with (
        client,
        StorageServer(
            daemon_settings(transport, where, **({"listen": address} if address else {})), MemoryBackend()
        ),
    ):
        until(lambda: answers(client))
        until(lambda: client.exists([]) == [] and answers(client) and len(client.namespaces()) == 1)


def test_an_outage_keeps_nobody_s_buffers(daemon: Daemon) -> None:
    with client_of(daemon) as client:
        daemon.kill()
        for _ in range(6):
            data = bytearray(SIZE)
            view = memoryview(data)
            assert client.get([GetItem(key("a"), [view], SIZE)]) == [UNAVAILABLE]
            view.release()
            data.clear()  # raises BufferError if anybody still looks at it


def test_close_waits_for_calls_and_turns_others_away(daemon: Daemon) -> None:
    client = client_of(daemon, transfer_timeout="5s")
    store_first(client)
    daemon.slow(0.5)
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(fetch(client, key("a"), SIZE)))
    thread.start()
    until(daemon.entered)
    client.close()
    thread.join(30)
    assert answers == [payload("a", SIZE)]
    client.close()
    with pytest.raises(ClosedError):
        client.get([])
