"""The daemon's metrics after calls over real sockets: right figures, and scrapes that nothing delays."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiercache_backends.chain.health import Health
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import Client, Daemon, Worker, secret, status, until
from tests.daemon.test_attach import Region, places
from tests.daemon.web import ask
from tests.storage.late import Late
from tiercache.config.models import Settings
from tiercache.config.rules import is_exposed
from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.daemon import StorageServer
from tiercache.daemon.http import routes
from tiercache.daemon.node_metrics import UsageFigures
from tiercache.errors import StorageError
from tiercache.metrics import NODE, TABLE
from tiercache.metrics.families import label_sets
from tiercache.metrics.table import HEALTHS
from tiercache.storage.base import SetItem, StorageBackend, TierReport, Usage
from tiercache.storage.vectors import parts
from tiercache.storage.wrappers import Wrapper
from tiercache.testing.objects import key, payload, put, to_set
from tiercache.wire import attachment, messages
from tiercache.wire.methods import GRPC_SOCKET, METHODS, SESSION_METADATA
from tiercache.wire.v1 import attach_pb2
from tiercache.wire.v1 import storage_pb2 as pb

SIZE = 5000
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
TOKENS = {"reader": "reader-" + "r" * 24, "writer": "writer-" + "w" * 24}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)


class Scrape:
    """All samples of one scrape."""

    def __init__(self, address: str) -> None:
        status, text, _ = ask(address, "/metrics")
        assert status == 200
        self.samples = {
            (s.name.removeprefix("tiercache_"), *sorted(s.labels.items()))
            : s.value for family in text_string_to_metric_families(text) for s in family.samples
        }  # fmt: skip

    def __call__(self, name: str, **where: str) -> float:
        found = [
            value
            for (shown, *labels), value in self.samples.items()
            if shown == name and where.items() <= dict(labels).items()
        ]
        assert found, (name, where)
        return sum(found)


def settings_of(path: Path, **more: Any) -> Settings:
    given = {
        "directory": path, "host_bytes": "512MiB", "listen": ["127.0.0.1:0"], "unix": False,
        "http": {"listen": "127.0.0.1:0", "public": True}, "drain": 2,
    }  # fmt: skip
    return Settings(**(given | more)).check()  # type: ignore[arg-type]


@contextmanager
def serving(
    path: Path, store: StorageBackend | None = None, **more: Any
) -> Iterator[tuple[StorageServer, Client]]:
    with StorageServer(settings_of(path, **more), store or MemoryBackend()) as node:
        target = f"unix:{path}/run/{GRPC_SOCKET}" if more.get("unix") else node.addresses[0]
        with Client(target) as client:
            yield node, client


def store(client: Client, items: list[SetItem], metadata: Any = None) -> list[int]:
    """Set items, and return their outcomes."""
    header = pb.SetHeader(
        keys=messages.keys([item.key for item in items]), metas=[messages.meta(item.meta) for item in items]
    )
    views = [buffer[: item.meta.length] for item in items for buffer in item.buffers]
    requests = [
        pb.SetRequest(header=None if number else header, payload=payload).SerializeToString()
        for number, payload in enumerate(parts(views, 1 << 20))
    ]
    [reply] = client.stream("Set", iter(requests), metadata=metadata)
    return list(pb.OutcomesReply.FromString(reply).outcomes)


def exists(keys: list[ObjectKey]) -> pb.ExistsRequest:
    return pb.ExistsRequest(keys=messages.keys(keys))


def get(keys: list[ObjectKey], length: int = SIZE) -> bytes:
    return pb.GetRequest(keys=messages.keys(keys), lengths=[length] * len(keys)).SerializeToString()


def bearer(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {TOKENS[name]}")]


def ended(node: StorageServer, calls: int) -> Scrape:
    """A scrape after so many calls have ended at the node's side, a moment after the client was told."""
    until(lambda: Scrape(node.http_address)("node_calls_total") >= calls)
    return Scrape(node.http_address)


NOT_OF_EVERY_STORE = {
    f"node_store_{name}" for name in ("evicted_objects_total", "restorable_bytes", "dead_bytes", "orphans")
} | {row.name for row in NODE if row.name.startswith(("node_tier_", "node_tenant_"))}


def test_every_label_set_is_at_0_from_the_start(tmp_path: Path) -> None:
    principals = [{"name": name, "token_file": token(tmp_path, name)} for name in TOKENS]
    with serving(tmp_path, principals=principals) as (node, _):
        scrape = Scrape(node.http_address)
        known = {"principal": [*TOKENS, "owner", "anonymous"], "version": ["x"], "store": ["MemoryBackend"]}
        for row in TABLE:
            if row.name.startswith(("node_", "store_")) and row.kind.__name__ == "Counter":
                for labels in label_sets(row, known):
                    if labels[1:] == ("namespaces", "returned"):
                        continue  # the account has read the records
                    if row.name not in {"node_disk_written_bytes_total", *NOT_OF_EVERY_STORE}:
                        given = dict(zip(row.label_names, labels, strict=True))
                        assert scrape(row.name, **given) == 0, (row.name, labels)
        assert scrape("node_call_seconds_count", method="Get") == 0
        idle = ("held_bytes", "calls_under_way", "last_read_seconds", "sessions")
        assert [scrape(f"node_{name}") for name in idle] == [0] * 4
        assert scrape("node_held_limit_bytes", budget="payload") > 1 << 20
        assert scrape("node_calls_limit") == 256
        assert scrape("node_workers") == 16
        assert scrape("node_build_info") == 1
        assert time.time() - scrape("node_start_time_seconds") < 60
        assert scrape("node_resident_bytes") > 1 << 20
        shown = {name for name, *_ in scrape.samples}
        rows = {row.name for row in NODE if row.kind.__name__ != "Histogram"} - NOT_OF_EVERY_STORE
        # Without TLS there is no certificate, and not every system counts what is written.
        assert rows - shown <= {"node_disk_written_bytes_total", "node_certificate_expires_seconds"}


def test_figures_add_up_after_known_calls(tmp_path: Path) -> None:
    items = [to_set(key(n), payload(n, SIZE)) for n in range(3)] + [
        to_set(key(9, PoolName.MAMBA), payload(9, SIZE))
    ]
    damaged = to_set(key("bad"), payload("bad", SIZE))
    damaged.buffers[0][0] ^= 1
    with serving(tmp_path) as (node, client):
        client.call("Hello", b"")
        assert len(store(client, [*items, damaged])) == 5
        asked = [key(0), key(1), key("x"), key(9, PoolName.MAMBA), key("y", PoolName.MAMBA)]
        client.call("Exists", exists(asked))
        frames = client.stream("Get", iter([get([key(0), key(2), key("x")])]))
        assert sum(len(pb.GetReply.FromString(frame).payload) for frame in frames) == 2 * SIZE
        assert client.refused("Exists", exists([key(0)]), timeout=None) is INVALID
        assert client.refused("Exists", b"\xff\xff\xff") is INVALID
        assert client.refused("Exists", exists([key(n) for n in range(4097)])) is INVALID
        assert client.refused("Get", get([key(0)], 1 << 40)) is INVALID
        keys = messages.keys([key(0)])
        assert client.refused("Delete", pb.DeleteRequest(keys=keys)) is grpc.StatusCode.PERMISSION_DENIED
        into = pb.GetIntoRequest(keys=keys, lengths=[SIZE])
        assert client.refused("GetInto", into) is grpc.StatusCode.FAILED_PRECONDITION
        scrape = ended(node, 10)
    assert {method: scrape("node_calls_total",
      method=method) for method in METHODS if scrape("node_calls_total", method=method)} == {
        "Hello": 1, "Set": 1, "Exists": 4, "Get": 2, "Delete": 1, "GetInto": 1,
    }  # fmt: skip
    assert scrape("node_calls_total", code="OK") == 4
    assert scrape("node_calls_total", method="Exists", code="INVALID_ARGUMENT") == 3
    assert (
        scrape("node_calls_total", code="PERMISSION_DENIED")
        == scrape("node_calls_total", code="FAILED_PRECONDITION")
        == 1
    )
    assert scrape("node_call_seconds_count") == 10
    assert scrape("node_call_seconds_count", method="Exists") == 4
    assert scrape("node_refused_total", reason="deadline") == 1
    assert scrape("node_refused_total", reason="limit") == 2
    assert scrape("node_refused_total", reason="malformed") == 2
    assert scrape("node_refused_total", reason="permission") == 1
    assert scrape("node_refused_total") == 6
    assert (
        scrape("node_principal_calls_total", principal="anonymous")
        == scrape("node_principal_calls_total")
        == 10
    )
    assert scrape("node_payload_bytes_total", plane="stream", direction="in") == 5 * SIZE
    assert scrape("node_payload_bytes_total", plane="stream", direction="out") == 2 * SIZE
    assert scrape("node_payload_bytes_total", plane="shared") == 0
    assert scrape("node_principal_bytes_total", principal="anonymous", direction="in") == 5 * SIZE
    assert scrape("node_principal_bytes_total") == 7 * SIZE
    assert scrape("node_damaged_objects_total") == 1
    assert scrape("node_lookups_total", operation="exists", pool="kv", result="hit") == 2
    assert scrape("node_lookups_total", operation="exists", pool="kv", result="miss", reason="absent") == 1
    assert scrape("node_lookups_total", operation="exists", pool="mamba", result="hit") == 1
    assert scrape("node_lookups_total", operation="exists") == 5
    assert scrape("node_lookups_total", operation="get", pool="kv", result="hit") == 2
    assert scrape("node_lookups_total", operation="get", result="miss", reason="absent") == 1
    assert scrape("node_lookups_total", tier="storage") == 8
    assert 0 <= time.time() - scrape("node_last_read_seconds") < 60
    assert scrape("store_items_total", store="MemoryBackend", operation="set", outcome="stored") == 4
    assert scrape("store_bytes_total", operation="set") == 4 * SIZE
    assert scrape("store_calls_total", operation="get") == 1
    idle = ("store_calls_under_way", "node_calls_under_way", "node_held_bytes", "node_workers_busy")
    assert [scrape(name) for name in idle] == [0] * 4


def test_callers_are_told_apart_and_no_label_is_theirs_to_choose(tmp_path: Path) -> None:
    principals = [
        {"name": "reader", "token_file": token(tmp_path, "reader"), "verbs": ["read"]},
        {"name": "writer", "token_file": token(tmp_path, "writer")},
    ]
    with serving(tmp_path, principals=principals) as (node, client):
        before = Scrape(node.http_address).samples.keys()
        for _ in range(3):
            client.call("Exists", exists([key(0)]), metadata=bearer("reader"))
        store(client, [to_set(key(0), payload(0, SIZE))], bearer("writer"))
        assert client.refused("Set", metadata=bearer("reader")) is grpc.StatusCode.PERMISSION_DENIED
        guessed = [("authorization", "Bearer " + "guessed-" * 4)]
        assert client.refused("Exists", exists([key(0)]), metadata=guessed) is UNAUTHENTICATED
        assert client.refused("Hello") is UNAUTHENTICATED
        assert client.refused("/tiercache.wire.v1.Storage/Nonsense") is grpc.StatusCode.UNIMPLEMENTED
        scrape = ended(node, 7)
    assert scrape.samples.keys() == before
    assert scrape("node_principal_calls_total", principal="reader") == 4
    assert scrape("node_principal_calls_total", principal="writer") == 1
    assert scrape("node_principal_bytes_total", principal="writer", direction="in") == SIZE
    assert scrape("node_refused_total", reason="unauthenticated") == 2
    assert scrape("node_refused_total", reason="permission") == 1
    assert scrape("node_calls_total") == 7, "not what does not exist"


def test_sessions_and_shared_memory(tmp_path: Path) -> None:
    inner = MemoryBackend()
    put(inner, key(0), payload(0, SIZE))
    with (
        serving(tmp_path, inner, unix=True, listen=[]) as (node, _),
        Region(1 << 20) as mine,
        Worker(Daemon(None, tmp_path, [], tmp_path)) as client,  # type: ignore[arg-type]
    ):
        region = client.attach(mine.fd, 1 << 20).region
        assert region
        attachment.send(client.sock, attach_pb2.Request(attach=attach_pb2.Attach(bytes=77)))
        assert client.answer().refusal
        scrape = Scrape(node.http_address)
        assert scrape("node_sessions") == 1
        assert scrape("node_attached_bytes") == 1 << 20
        assert scrape("node_refused_total", reason="malformed") == 1
        into = pb.GetIntoRequest(
            keys=messages.keys([key(0)]), lengths=[SIZE], places=places([(region, 0, 8192)])
        )
        assert client.call("GetInto", into).outcomes == [messages.NUMBER_OF[Outcome.HIT]]
        assert mine.map[:SIZE] == payload(0, SIZE)
        meta = messages.meta(to_set(key(1), payload(1, SIZE)).meta)
        mine.map[8192 : 8192 + SIZE] = payload(1, SIZE)
        request = pb.SetFromRequest(
            keys=messages.keys([key(1)]), metas=[meta], places=places([(region, 8192, 8192)])
        )
        for _ in range(2):  # the second time it is there already, and nothing is moved
            client.call("SetFrom", request)
        assert client.refused("GetInto", into, metadata=[(SESSION_METADATA, b"x" * 32)]) is UNAUTHENTICATED
        scrape = ended(node, 4)
        assert scrape("node_payload_bytes_total", plane="shared", direction="in") == SIZE
        assert scrape("node_payload_bytes_total", plane="shared", direction="out") == SIZE
        assert scrape("node_payload_bytes_total", plane="stream") == 0
        assert scrape("node_principal_bytes_total", principal="owner") == 2 * SIZE
        assert scrape("node_lookups_total", operation="get", result="hit") == 1
        client.sock.close()
        until(lambda: Scrape(node.http_address)("node_sessions") == 0)
        assert Scrape(node.http_address)("node_attached_bytes") == 0


def test_a_client_that_leaves_and_one_that_stands_still(tmp_path: Path) -> None:
    go_on = threading.Event()
    slow = Late(MemoryBackend(), {"exists"}, lambda: waits(go_on))
    limits = {"idle": 0.3, "streams": 4, "streams_per_client": 4}
    with serving(tmp_path, slow, limits=limits) as (node, client):
        request = exists([key(0)]).SerializeToString()
        waiting = [client.stream("Exists", iter([request])) for _ in range(3)]
        until(lambda: Scrape(node.http_address)("store_calls_under_way") == 3)
        scrape = Scrape(node.http_address)
        assert scrape("node_calls_under_way", method="Exists") == scrape("node_calls_under_way") == 3
        assert scrape("node_workers_busy") == 3
        waiting[0].cancel()
        until(lambda: Scrape(node.http_address)("node_calls_total", method="Exists", code="CANCELLED") == 1)
        go_on.set()
        for late in waiting[1:]:
            assert len(list(late)) == 1

        def nothing() -> Iterator[bytes]:
            go_on.wait(30)
            time.sleep(2)
            yield from ()

        assert status(client.stream("Set", nothing())) is grpc.StatusCode.DEADLINE_EXCEEDED
        scrape = ended(node, 4)
        assert scrape("node_refused_total", reason="idle") == scrape("node_refused_total") == 1
        assert scrape("node_calls_total", method="Set", code="DEADLINE_EXCEEDED") == 1
        assert scrape("node_calls_under_way") == 0


def test_too_many_calls_are_busy(tmp_path: Path) -> None:
    go_on = threading.Event()
    slow = Late(MemoryBackend(), {"flush"}, lambda: waits(go_on))
    with serving(tmp_path, slow, limits={"streams": 2, "streams_per_client": 8}) as (node, client):
        waiting = [client.stream("Flush", iter([b""])) for _ in range(2)]
        until(lambda: Scrape(node.http_address)("store_calls_under_way") == 2)
        assert client.refused("Hello") is grpc.StatusCode.RESOURCE_EXHAUSTED
        go_on.set()
        for late in waiting:
            assert len(list(late)) == 1
        assert ended(node, 3)("node_refused_total", reason="busy") == 1


class Told(Wrapper):
    """Says what the test says, when the test says so."""

    def __init__(self, inner: StorageBackend, tell: Callable[[], Usage]) -> None:
        super().__init__(inner)
        self._tell = tell

    def usage(self) -> Usage:
        return self._tell()


WORTH = {"restorable_bytes": 20, "dead_bytes": 10, "orphans": 1}


def test_the_store_s_figures(tmp_path: Path) -> None:
    store = Told(
        MemoryBackend(), lambda: Usage(3, 30, 40, 50, {"evicted": 7, "corrupt": 2, "io": "direct"} | WORTH)
    )
    with serving(tmp_path, store) as (node, _):
        until(lambda: Scrape(node.http_address)("node_store_objects") == 3)
        scrape = Scrape(node.http_address)
    assert scrape("node_store_payload_bytes") == 30
    assert scrape("node_store_used_bytes") == 40
    assert scrape("node_store_capacity_bytes") == 50
    assert scrape("node_store_evicted_objects_total") == 7
    assert scrape("node_store_corrupt_objects_total") == 2
    assert scrape("node_store_restorable_bytes") == 20
    assert scrape("node_store_dead_bytes") == 10
    assert scrape("node_store_orphans") == 1
    assert scrape("node_store_figures_age_seconds") < 30
    assert scrape("store_calls_total", operation="usage") == 0, "our own questions are not counted as calls"


def test_the_figures_of_tiers(tmp_path: Path) -> None:
    assert tuple(map(str, Health)) == HEALTHS
    tiers = [
        TierReport(
            name="fast", kind="memory", health="serving", objects=3, used_bytes=40, capacity_bytes=50,
            read_objects=5, read_bytes=6, written_objects=7, written_bytes=8, waiting=9, dropped=10,
            last_read=11.5,
        ),
        TierReport(name="disk", kind="file", health="out", why="it does not answer", lost_calls=12),
    ]  # fmt: skip
    store = Told(MemoryBackend(), lambda: Usage(3, 30, 40, 0, {}, tiers))
    with serving(tmp_path, store) as (node, _):
        until(lambda: Scrape(node.http_address)("node_store_objects") == 3)
        scrape = Scrape(node.http_address)
        shown = {
            (name, *(value for label, value in labels if label in ("tier", "health"))): number
            for (name, *labels), number in scrape.samples.items()
            if name.startswith("node_tier_")
        }
        known = {("node_tier_health", health, tier.name): health == tier.health
                 for tier in tiers for health in HEALTHS}  # fmt: skip
        figures = {
            "read_objects_total": (5, 0), "read_bytes_total": (6, 0), "written_objects_total": (7, 0),
            "written_bytes_total": (8, 0), "waiting_objects": (9, 0), "dropped_objects_total": (10, 0),
            "lost_calls_total": (0, 12), "last_read_seconds": (11.5, 0),
        }  # fmt: skip
        known |= {
            (f"node_tier_{name}", tier.name): value
            for name, values in figures.items()
            for tier, value in zip(tiers, values, strict=True)
        }
        in_use = {"objects": 3, "used_bytes": 40, "capacity_bytes": 50}  # not known of a tier that is out
        assert shown == known | {(f"node_tier_{name}", "fast"): value for name, value in in_use.items()}


def test_a_store_that_hangs_holds_up_no_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UsageFigures.__init__, "__defaults__", (0.1,))
    hangs, go_on, asked = threading.Event(), threading.Event(), []

    def tell() -> Usage:
        asked.append(threading.current_thread().name)
        if hangs.is_set():
            go_on.wait(60)
        return Usage(len(asked), 0, 0, 0)

    with serving(tmp_path, Told(MemoryBackend(), tell)) as (node, client):
        until(lambda: Scrape(node.http_address)("node_store_objects") >= 2)
        hangs.set()
        before = Scrape(node.http_address)("node_store_objects")
        time.sleep(0.2)
        threads = threading.active_count()
        start = time.monotonic()
        for _ in range(10):
            scrape = Scrape(node.http_address)
            client.call("Hello", b"")
        assert time.monotonic() - start < 30
        assert scrape("node_store_objects") in (before, before + 1)
        assert scrape("node_store_figures_age_seconds") > 0
        assert threading.active_count() <= threads + 1, "one question, however often somebody scrapes"
        asked_by_then = len(asked)
        go_on.set()
        until(lambda: Scrape(node.http_address)("node_store_objects") > asked_by_then)
        assert {*asked} == {"tiercache-figures"}


def test_a_node_ends_although_its_store_is_asked_for_figures(tmp_path: Path) -> None:
    go_on, inner = threading.Event(), MemoryBackend()
    with serving(tmp_path, Late(inner, {"usage"}, lambda: go_on.wait(60))) as (node, _):
        Scrape(node.http_address)
    assert not node.alive
    assert inner.exists([key(0)]) == [False], "it is left open, like after a kill"
    go_on.set()


def test_figures_of_a_store_that_fails_stay(caplog: pytest.LogCaptureFixture) -> None:
    go_on, asked = threading.Event(), count(1)

    def tell() -> Usage:
        number = next(asked)
        if number == 2:
            raise StorageError("no")
        if number > 2:
            go_on.wait(30)
        return Usage(5, 6, 7, 8) if number > 2 else Usage(1, 2, 3, 4)

    figures = UsageFigures(Told(MemoryBackend(), tell), every=0.01)
    until(lambda: "usage figures of the store could not be read: no" in caplog.text)
    assert figures.latest().objects == 1, "the second answer failed"
    go_on.set()
    until(lambda: figures.latest().objects == 5)
    assert figures.detail("evicted") is None
    assert figures.close(30)


def test_a_port_in_use_stops_the_node_before_it_serves(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = settings_of(
            tmp_path, unix=True, listen=[], http={"listen": f"127.0.0.1:{taken.getsockname()[1]}"}
        )
        with pytest.raises(StorageError, match=r"^http.listen: .* cannot be served"):
            StorageServer(settings, MemoryBackend()).start()
        assert not (tmp_path / "run" / GRPC_SOCKET).exists()


def test_who_can_call_without_saying_who_it_is(tmp_path: Path) -> None:
    exposed_to = {"listen": ["0.0.0.0:0"], "insecure_bind": True}
    assert not is_exposed(settings_of(tmp_path))
    assert is_exposed(settings_of(tmp_path, **exposed_to))
    reader = {"name": "reader", "token_file": token(tmp_path, "reader")}
    assert not is_exposed(settings_of(tmp_path, **exposed_to, principals=[reader]))
    with serving(tmp_path, **exposed_to) as (node, _):
        assert Scrape(node.http_address)("node_insecure_bind") == 1


def waits(event: threading.Event) -> None:
    assert event.wait(30)


def token(path: Path, name: str) -> Path:
    return secret(path / f"{name}.token", TOKENS[name] + "\n")
