"""KV events of SGLang's third tier: what a router that knows SGLang's classes learns of a store."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.utils import hash_str_to_int64

from tests.engines.sglang import rig
from tests.engines.zmq_reader import Reader
from tests.events import golden
from tests.processes import free_port
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch
from tiercache.errors import ConfigError, StorageError
from tiercache.events.settings import EventSettings
from tiercache.integrations.settings import of_rank
from tiercache.integrations.sglang.events import encode_pages

DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """A subscriber that keeps the stored pages with their parents, as SGLang's events say it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.holds: dict[int, int | None] = {}
        self.probes: set[int] = set()

    def apply(self, payload: bytes) -> None:
        for event in DECODER.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.holds.clear()
                continue
            assert event.medium == StorageMedium.DISK.value
            if isinstance(event, BlockStored):
                assert (event.token_ids, event.block_size) == ([], rig.PAGE)
                parents = [event.parent_block_hash, *event.block_hashes]
                self.holds |= dict(zip(event.block_hashes, parents, strict=False))
            else:
                assert isinstance(event, BlockRemoved)
                for each in event.block_hashes:
                    del self.holds[each]

    def until(self, holds: dict[int, int | None]) -> None:
        while {name: parent for name, parent in self.holds.items() if name not in self.probes} != holds:
            self.apply(self.reader.read()[1])

    def snapshot(self) -> None:
        for _, payload in self.reader.replay(0):
            self.apply(payload)


def chained(names: Sequence[str], parent: str | None = None) -> dict[int, int | None]:
    """Pages in a row, as SGLang's own events name them."""
    hashes = [hash_str_to_int64(name) for name in names]
    return dict(zip(hashes, [None if parent is None else hash_str_to_int64(parent), *hashes], strict=False))


@contextmanager
def told(url: str, *pools: Any) -> Iterator[tuple[Any, Router]]:
    """A backend with events, and a router that follows it."""
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    made = rig.backend(url, *pools, events={"endpoint": ports[0], "replay": ports[1]})
    try:
        with Reader(*ports) as reader:
            router, numbers = Router(reader), count()

            def probe() -> None:
                [name] = rig.keys(f"probe {next(numbers)}")
                router.probes.add(hash_str_to_int64(name))
                assert write(made, [name]) == [True]

            reader.connected(probe)
            router.snapshot()
            yield made, router
    finally:
        made.close()


def write(made: Any, names: Sequence[str], before: Sequence[str] = ()) -> Any:
    info = HiCacheStorageExtraInfo(prefix_keys=list(before))
    return made.batch_set_v1(list(names), rig.rows(*range(len(names))), info)


def drop(made: Any, *names: str) -> None:
    """Let the store lose pages behind the backend's back."""
    # private: SGLang deletes all objects of a store or none
    objects = made._pools["kv"].objects(rig.page_keys_of(made, names))
    assert all(rig.store_of(made).delete(objects))


@pytest.mark.parametrize("url", ["file://{}?capacity=64MiB", "memory://?capacity=64MiB"])
def test_a_router_learns_what_is_stored_and_what_is_gone(tmp_path: Path, url: str) -> None:
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    a, b, c, d = rig.keys("a", "b", "c", "d")
    with told(url.format(tmp_path / "store"), kv, mamba) as (made, router):
        write(made, [a, b, c])
        router.until(chained([a, b, c]))
        made.batch_set_v2([rig.state_at(c, 2)])  # states are told to nobody: SGLang has no events of them
        write(made, [d], [a, b, c])
        router.until(chained([a, b, c, d]))
        drop(made, d, c)
        router.until(chained([a, b]))
        write(made, [c], [a, b])
        router.until(chained([a, b, c]))
        router.snapshot()
        router.until(chained([a, b, c]))
        made.clear()
        router.probes.clear()
        router.until({})


def test_hashes_are_those_of_sglangs_own_events(url: str) -> None:
    """A router can join what SGLang says of device and host with what the store says."""
    key, names = rig.hashed(range(rig.PAGE * 6))
    root = SimpleNamespace(parent=None, key=rig.hashed([])[0], hash_value=[])
    node = SimpleNamespace(parent=root, key=key, hash_value=None)
    recorder = KVCacheEventRecorder(enabled=True, page_size=rig.PAGE)
    recorder.record_store(node, medium=StorageMedium.CPU)
    [event] = recorder.take()
    hashes = event.block_hashes
    assert len(hashes) == 6
    with told(url, rig.kv_pool()) as (made, router):
        write(made, names)
        router.until(dict(zip(hashes, [event.parent_block_hash, *hashes], strict=False)))


def test_a_server_that_starts_again_tells_what_is_there(url: str) -> None:
    names, kv = rig.keys(*range(5)), rig.kv_pool()
    made = rig.backend(url, kv)
    assert write(made, names) == [True] * 5
    made.close()
    with told(url, kv) as (made, router):
        router.until(chained(names))


@pytest.mark.parametrize("kind", ["lmdb", "grpc"])
def test_of_a_store_of_many_reads_and_queries_show_what_is_gone(shared: str, kind: str) -> None:
    kv = rig.kv_pool()
    a, b, c = rig.keys("a", "b", "c")
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("unix", scratch())) if kind == "grpc" else None
        url = shared if daemon is None else f"grpc://{daemon.where}?timeout=1s"
        made, router = stack.enter_context(told(url, kv))
        write(made, [a, b, c])
        router.until(chained([a, b, c]))
        drop(made, c)
        assert made.batch_exists([a, b, c]) == 2
        router.until(chained([a, b]))
        drop(made, b)
        assert made.batch_get_v1([a, b], rig.rows(7, 8)) == [True, False]
        router.until(chained([a]))
        if daemon is not None:
            daemon.kill()
            assert made.batch_exists([a]) == 0
        router.snapshot()
        router.until(chained([a]))  # out of reach is not gone


def test_one_rank_tells_and_each_replica_has_its_port(tmp_path: Path) -> None:
    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    events = {"endpoint": ports[0], "replay": ports[1]}
    ranks = [
        rig.backend(
            f"file://{tmp_path}/{{rank}}?capacity=64MiB", rig.kv_pool(), rank=rank, size=2, events=events
        )
        for rank in (1, 0)
    ]
    for made in ranks:
        made.close()
    first, third = (of_rank(EventSettings(**events), replica) for replica in (0, 2))
    assert (first.endpoint, first.replay) == (ports[0], ports[1])
    for was, now in zip(ports, (third.endpoint, third.replay), strict=True):
        assert int(now.rpartition(":")[2]) == int(was.rpartition(":")[2]) + 2
    assert of_rank(EventSettings(endpoint="ipc:///run/events"), 1).endpoint == "ipc:///run/events-1"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "events have no authentication"),
        ({"endpoint": "tcp://127.0.0.1:5557", "port": 1}, "events has no setting 'port'; it has buffer,"),
        ({"replay": "tcp://127.0.0.1:5557"}, "events needs 'endpoint'"),
        ({"endpoint": 5557}, "events, setting 'endpoint': 5557 is not a line of text"),
        ("tcp://127.0.0.1:5557", "events is not a table"),
    ],
)
def test_wrong_settings_fail_the_attach_in_one_sentence(url: str, events: Any, said: str) -> None:
    for _ in range(2):  # the store was not left open
        with pytest.raises(ConfigError, match="hicache-storage-backend-extra-config") as failure:
            rig.backend(url, rig.kv_pool(), events=events)
        assert said in str(failure.value)
    rig.backend(url, rig.kv_pool()).close()


def test_a_port_in_use_fails_the_attach_and_leaves_nothing_open(group: Any, url: str) -> None:
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StorageError, match="cannot be bound for KV events"):
            rig.attach(made, url, events={"endpoint": endpoint})
    rig.attach(made, url, events={"endpoint": "tcp://127.0.0.1:0"})
    made.detach_storage_backend()


def test_sglang_reads_our_batches_as_it_reads_its_own() -> None:
    stored, *others = golden.EVENTS
    ours = DECODER.decode(encode_pages(golden.TIME, [replace(stored, tokens=()), *others]))
    assert ours == DECODER.decode(golden.SGLANG)
    assert msgspec.msgpack.encode(ours) == golden.SGLANG
