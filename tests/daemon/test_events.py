"""KV events of a daemon: a subscriber knows what each tier holds, whatever becomes of the tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import FOOTPRINT

from tests.events.rig import ANY, NAMESPACE, Follower, item, store_pages, truth
from tests.storage_backends.chain.hooks import add, remove
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.config.models import EventsSettings
from tiercache.core import PoolName
from tiercache.daemon import StorageServer
from tiercache.events import EventKind, Medium, Place
from tiercache.events.base import Resident
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend

EVENTS = EventsSettings(endpoint=ANY.endpoint, replay=ANY.replay)


def url(path: Path, name: str, capacity: str = "16MiB") -> str:
    return f"file://{path / name}?capacity={capacity}&tier_name={name}"


def contents(chain) -> dict[Place, set[Resident]]:
    """Objects in the stores of a chain's tiers, apart from canaries."""
    found = {}
    for tier in chain.observed_tiers():
        if there := tier.residence.scan().entries:
            named = {Resident(e.key.pool, e.key.layout, e.key.page_key) for e in there}
            found[Place(Medium.STORAGE, tier.name)] = named
    return found


def test_a_subscriber_follows_all_tiers_through_their_changes(tmp_path):
    chain = open_backend([f"memory://?capacity={30 * FOOTPRINT.of(64)}&tier_name=ram", url(tmp_path, "ssd")])
    with StorageServer(daemon_settings("unix", events=EVENTS), chain) as node:
        client = GrpcBackend(read_settings({"path": str(node.settings.socket_directory)}))
        with client, Follower(node.publisher) as follower:
            client.register_namespace(NamespaceRecord(NAMESPACE, {"page_size": 64}))
            for number in range(1, 6):
                store_pages(client, 10, number)
            client.set([item(10, 5, PoolName.MAMBA)])
            follower.until(lambda: len(contents(chain)) == 2 and follower.map.places() == contents(chain))
            told = [event for batch in follower.batches for event in batch.events]
            sizes = {event.group.page_size for event in told if event.kind is EventKind.STORED}
            assert sizes == {64}
            # A tier that joins is told with all that it has.
            with open_backend(url(tmp_path, "old").replace("&tier_name=old", "")) as other:
                store_pages(other, 7, 99)
            add(chain, url(tmp_path, "old"))
            follower.until(lambda: len(contents(chain)) == 3 and follower.map.places() == contents(chain))
            assert len(follower.map.places()[Place(Medium.STORAGE, "old")]) >= 7
            # One that leaves is cleared.
            remove(chain, "ssd")
            follower.until(lambda: follower.map.places() == contents(chain))
            store_pages(client, 3, 100)
            follower.until(lambda: follower.map.places() == contents(chain))
            client.delete([item(1, 100).key, item(3, 99).key])
            follower.until(lambda: follower.map.places() == contents(chain))
            with Follower(node.publisher) as late:
                late.until(lambda: late.map.places() == contents(chain))


@pytest.mark.parametrize("kind", ["memory", "file", "lmdb"])
def test_a_store_alone_is_told_under_its_kind(tmp_path, kind):
    place = f"?capacity={32 * FOOTPRINT.of(64)}" if kind == "memory" else f"{tmp_path}/a?capacity=4MiB"
    store = open_backend(f"{kind}://{place}")
    nbytes = 64 if kind == "memory" else 20_000
    with StorageServer(daemon_settings("unix", events=EVENTS), store) as node:
        with Follower(node.publisher) as follower:
            for chain in range(60):
                store.set([item(n, chain, nbytes=nbytes) for n in (1, 2, 3, 4, 5)])
            assert 0 < len(truth(store)) < 300
            follower.until(lambda: [*follower.map.places().values()] == [truth(store)])
            [place] = follower.map.places()
            assert kind in place.tier.lower()
        assert node.publisher.figures()["events_snapshots_total"] == 1
        assert any("KV events on tcp://127.0.0.1" in line for line in node.describe())


def test_a_store_of_another_daemon_is_told_by_that_daemon_alone(caplog):
    with StorageServer(daemon_settings("unix", events=EVENTS), open_backend("memory://")) as inner:
        client = GrpcBackend(read_settings({"path": str(inner.settings.socket_directory)}))
        with StorageServer(daemon_settings("unix", events=EVENTS), client) as outer:
            assert "no KV events are published of GrpcBackend" in caplog.text
            store_pages(client, 3)
            with Follower(inner.publisher) as follower, Follower(outer.publisher) as other:
                follower.until(lambda: follower.map.places())
                other.read(0.5)
                assert not other.map.places()
