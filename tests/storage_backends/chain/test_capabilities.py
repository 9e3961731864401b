"""Capabilities of a chain and its tiers: their settings tell them, and then the open stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiercache_backends.chain.settings import parse_tiers
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.chain.hooks import add, chain_of, remove
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError, StorageError
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import capabilities_of, open_backend
from tiercache.testing.objects import key, payload, put

MEMORY = "memory://?capacity=8MiB"
SIZE = 5000


@contextmanager
def served(store: StorageBackend) -> Iterator[tuple[str, StorageServer]]:
    """A daemon over a store: its URL as a tier, and the daemon."""
    settings = daemon_settings("unix")
    with store, StorageServer(settings, store) as server:
        yield f"grpc://{settings.sockets}?timeout=1s&tier_name=far", server


def disk(path: Path) -> str:
    return f"file://{path}?capacity=16MiB"


@pytest.mark.parametrize(
    ("spec", "has", "lacks"),
    [
        (MEMORY, ("bounded", "listed"), ("persistent", "shared")),
        ("memory://?capacity=0MiB", ("listed",), ("bounded",)),
        ("s3://bucket/a", ("persistent", "shared"), ("bounded", "ordered")),
        ("mooncake://127.0.0.1:50051", ("shared", "bounded"), ("persistent", "ordered", "listed")),
        ("mooncake://127.0.0.1:50051?http=127.0.0.1:9003", ("listed",), ("ordered",)),
        (["file:///a?capacity=16MiB", "s3://bucket/a"], ("persistent",), ("bounded", "shared")),
    ],
    ids=str,
)
def test_settings_tell_what_a_store_is_capable_of(spec, has, lacks):
    able = capabilities_of(spec)
    assert [getattr(able, name) for name in has + lacks] == [True] * len(has) + [False] * len(lacks)


def test_a_prefix_of_a_bucket_is_no_directory() -> None:
    parse_tiers(["file:///kv?capacity=16MiB", "s3://bucket/kv", "s3://other/kv", "s3://bucket/kv2"])
    with pytest.raises(ConfigError, match="both at bucket/kv"):
        parse_tiers(["s3://bucket/kv", "s3://bucket/kv/"])


def test_a_chain_is_capable_of_what_its_tiers_are_now(tmp_path: Path) -> None:
    with chain_of(open_backend([MEMORY, disk(tmp_path / "a")])) as chain:
        assert (chain.capabilities.bounded, chain.capabilities.persistent) == (True, False)
        add(chain, "memory://?tier_name=endless")
        assert not chain.capabilities.bounded
        remove(chain, "endless", drop=True)
        assert chain.capabilities.bounded
        remove(chain, "memory", drop=True)
        assert not chain.capabilities.persistent, "a tier that is not may join again"
        add(chain, MEMORY, 0)


def test_a_daemon_keeps_objects_or_not_as_its_store_does(tmp_path: Path) -> None:
    with chain_of(open_backend([disk(tmp_path / "a"), disk(tmp_path / "b")])) as chain:
        with (
            served(MemoryBackend(1 << 20)) as (forgets, _),
            pytest.raises(ConfigError, match="'far' is not persistent, as the chain has been"),
        ):
            add(chain, forgets)
        with served(open_backend(disk(tmp_path / "c"))) as (keeps, _):
            add(chain, keeps)
            assert chain.capabilities.persistent
            remove(chain, "far")
        assert [tier.name for tier in chain.tiers] == ["file", "file-2"]


def test_a_flush_waits_for_a_daemon_that_keeps_objects(tmp_path: Path) -> None:
    with served(open_backend(disk(tmp_path / "c"))) as (url, server), open_backend([MEMORY, url]) as chain:
        assert put(chain, key(1), payload(1, SIZE)) is Outcome.STORED
        chain.flush()
        server.stop()
        assert put(chain, key(2), payload(2, SIZE)) is Outcome.STORED
        with pytest.raises(StorageError, match="lacks 1 objects that are written through to it"):
            chain.flush()
