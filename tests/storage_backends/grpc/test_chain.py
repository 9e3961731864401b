"""A chain of tiers behind a daemon: what its clients are told of the tiers, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.chain.hooks import remove
from tests.storage_backends.grpc.nodes import daemon_settings, scratch, secret, section
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import RefusedError, StorageError, UnavailableError, UnlistedError
from tiercache.storage.base import Capabilities, ScanPage
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Wrapper
from tiercache.testing.objects import content, fetch, key, payload, put, to_get

SIZE = 5000
PRINCIPALS = {"worker": ("read", "write", "admin"), "tenant": ("read", "write")}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageServer]:
    """A daemon over memory, a file store, and a store that another owner has open."""
    owner = open_backend(f"file://{tmp_path}/broken?capacity=64MiB")
    chain = open_backend(
        [
            "memory://?capacity=16MiB&tier_name=fast",
            f"file://{tmp_path}/store?capacity=64MiB&tier_name=disk",
            f"file://{tmp_path}/broken?capacity=64MiB&tier_name=broken",
        ]
    )
    salt = secret(tmp_path / "salt", "s" * 32)
    principals = [
        {"name": name, "token_file": token_file(name), "verbs": verbs} for name, verbs in PRINCIPALS.items()
    ]
    principals[1]["tenant"] = "acme"
    settings = daemon_settings("tcp", principals=principals, tenants={"acme": {"salt_file": salt}})
    with StorageServer(settings, chain) as served:
        yield served
    chain.close()
    owner.close()


def token_file(name: str) -> Path:
    return secret(scratch() / f"{name}.chain", name.ljust(32, name[0]))


def client(node: StorageServer, name: str = "worker") -> GrpcBackend:
    return GrpcBackend(read_settings({"address": node.addresses[0], "token_file": str(token_file(name))}))


def test_a_client_is_told_of_every_tier(node: StorageServer) -> None:
    with client(node) as store:
        assert put(store, key(1), payload(1, 5000)) is Outcome.STORED
        with pytest.raises(StorageError, match="tier 'broken' lacks 1 objects"):
            store.flush()
        assert fetch(store, key(1), 5000) == payload(1, 5000)
        usage, inside = store.usage(), node.store.usage()
        assert [(tier.name, tier.kind, tier.health) for tier in usage.tiers] == [
            ("fast", "memory", "serving"),
            ("disk", "file", "serving"),
            ("broken", "file", "out"),
        ]
        assert replace(usage, details=inside.details, owners=inside.owners) == inside
        fast, disk, broken = usage.tiers
        assert (fast.read_objects, fast.read_bytes) == (1, 5000)
        assert fast.last_read is not None
        assert disk.last_read is None, "never is not 1970"
        assert (disk.written_objects, disk.written_bytes) == (1, 5000)
        assert "broken" in broken.why


def test_a_client_is_told_where_an_object_is(node: StorageServer) -> None:
    with client(node) as store:
        assert put(store, key(1), b"both") is Outcome.STORED
        with pytest.raises(StorageError, match="tier 'broken' lacks 1 objects"):
            store.flush()
        # The first tier gives the object up.
        inner = node.store.tiers[0]._store  # private: an object in one tier alone
        assert inner.delete([key(1)]) == [True]
        assert put(store, key(2), b"new") is Outcome.STORED
        described = store.describe([key(1), key(3), key(2)])
        assert [entry and entry.tier for entry in described] == ["disk", None, "fast"]
        assert {entry.key: entry.tier for entry in store.scan_all()} == {key(1): "disk", key(2): "fast"}


def test_a_tenant_is_not_told_of_tiers(node: StorageServer) -> None:
    """The tier of an object depends on what others store."""
    with client(node, "tenant") as store:
        assert put(store, key(1), b"mine") is Outcome.STORED
        [described] = store.describe([key(1)])
        assert described is not None
        assert described.tier == ""
        assert [entry.tier for entry in store.scan_all()] == [""]
        with pytest.raises(RefusedError, match="admin"):
            store.usage()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_peek_through_a_daemon_neither_counts_nor_promotes(tmp_path: Path, transport: str) -> None:
    disk = f"file://{tmp_path}/store?capacity=64MiB"
    with open_backend(disk) as store:
        put(store, key("a"), payload("a", SIZE))
    chain = open_backend(["memory://?capacity=16MiB", f"{disk}&tier_promote=always"])
    settings = daemon_settings(transport)
    with StorageServer(settings, chain) as served:
        where = str(settings.sockets) if transport == "unix" else served.addresses[0]
        with GrpcBackend(read_settings(section(transport, where))) as store:
            item = to_get(key("a"), SIZE)
            assert store.peek([item, to_get(key("b"), SIZE)]) == [Outcome.HIT, Outcome.MISS]
            assert content(item) == payload("a", SIZE)
            chain.flush()
            assert [(tier.objects, tier.read_objects) for tier in chain.usage().tiers] == [(0, 0), (1, 0)]
            assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
            chain.flush()
            assert [(tier.objects, tier.read_objects) for tier in chain.usage().tiers] == [(1, 0), (1, 1)]
    chain.close()


class Unlisted(Wrapper):
    """A store that cannot list its objects, and keeps to an order of its own."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, ordered=False, listed=False)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        raise UnlistedError("the names of its objects are not known")


def test_a_tier_whose_daemon_cannot_list_its_objects_is_not_blamed(tmp_path: Path) -> None:
    with StorageServer(daemon_settings("tcp"), Unlisted(MemoryBackend())) as served:
        with GrpcBackend(read_settings(section("tcp", served.addresses[0]))) as store:
            assert store.capabilities == Capabilities(shared=True, ordered=False, listed=False)
        tier = section("tcp", served.addresses[0], type="grpc", tier_name="away")
        with open_backend([f"file://{tmp_path}/store?capacity=64MiB&tier_name=disk", tier]) as chain:
            put(chain, key(1), payload(1, SIZE))
            chain.flush()
            for _ in range(10):
                with pytest.raises(UnlistedError, match="names of its objects"):
                    list(chain.scan_all())
            assert [tier.health for tier in chain.usage().tiers] == ["serving", "serving"]
            with pytest.raises(UnavailableError, match="'away' cannot list its objects, so what only it has"):
                remove(chain, "away")
            remove(chain, "disk", drop=True)
            assert fetch(chain, key(1), SIZE) == payload(1, SIZE)
