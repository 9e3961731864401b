"""Quotas and guarantees of tenants through a real daemon: floods, reloads, who may know them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tiercache_backends.file.records import FOOTPRINT
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import call
from tests.daemon.hosts import until
from tests.examples import slow_after
from tests.storage.late import Late
from tests.storage_backends.grpc.nodes import daemon_settings, scratch, secret
from tiercache.cli.readiness import warnings_about as check
from tiercache.cli.terminal import Exit, code_of
from tiercache.config.models import Settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.daemon.node_metrics import UsageFigures
from tiercache.errors import ConfigError, UnansweredError, UnavailableError
from tiercache.storage.shares import OwnerUse
from tiercache.testing.conformance.hooks import STORED, THROTTLED
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import key, payload, to_set

SIZE = 40_960
MIB = 1 << 20
TENANTS = ("ash", "birch", "cedar")
PRINCIPALS: dict[str, dict[str, Any]] = {
    "operator": {"verbs": ("read", "write", "admin")},
    "observer": {"verbs": ("observe",)},
    "worker": {"verbs": ("read", "write")},
    "fenced": {"verbs": ("read", "write", "admin"), "namespaces": ("ab" * 32,)},
    **{name: {"verbs": ("read", "write", "admin"), "tenant": name} for name in TENANTS},
}


def settings_of(folder: Path, storage: Any = "", limits: dict[str, dict[str, Any]] | None = None) -> Settings:
    """A daemon with three tenants on unix and TCP; `limits` by tenant."""
    tenants = {}
    for name in TENANTS:
        salt = secret(folder / f"{name}.salt", name * 20)
        tenants[name] = {"salt_file": salt, **(limits or {}).get(name, {})}
    principals = []
    for name, rights in PRINCIPALS.items():
        file = secret(scratch() / f"{name}.quotas", name.ljust(32, "x"))
        principals.append({"name": name, "token_file": file, **rights})
    more = {"storage": storage} if storage else {"disk_bytes": 16 * MIB}
    return daemon_settings(
        "unix", unix=True, listen=("127.0.0.1:0",), principals=principals, tenants=tenants, **more
    )


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start a daemon, whose figures are seldom old, and return its clients by name."""
    monkeypatch.setattr(UsageFigures.__init__, "__defaults__", (0.1,))
    ends: list[Any] = []

    def start(storage: Any = "", **limits: dict[str, Any]) -> Callable[[str], GrpcBackend]:
        node = StorageServer(settings_of(tmp_path, storage, limits))
        node.start()
        ends.append(node.stop)

        def client(name: str) -> GrpcBackend:
            token = str(scratch() / f"{name}.quotas")
            section = {"address": node.addresses[0], "token_file": token, "timeout": "20s"}
            store = GrpcBackend(read_settings(section))
            ends.append(store.close)
            return store

        client.node = node  # type: ignore[attr-defined]
        return client

    yield start
    for end in reversed(ends):
        end()


def put(store: Any, name: object) -> Outcome:
    [answer] = store.set([to_set(key(name), payload(name, SIZE))])
    return answer


def use_of(client: Any, tenant: str) -> OwnerUse:
    """Use of a tenant, as the store of a daemon counts it at this instant."""
    return client.node.store.usage().owners[tenant]  # type: ignore[no-any-return]


def held(store: Any, names: list[Any]) -> int:
    return sum(store.exists([key(name) for name in names]))


@pytest.mark.parametrize("storage", slow_after(2, ["", "memory://?capacity=16MiB", "chain"]))
def test_three_tenants_that_flood_at_once(serve: Any, tmp_path: Path, storage: str) -> None:
    if storage == "chain":
        storage = ("memory://?capacity=4MiB", f"file://{tmp_path}/f?capacity=16MiB")  # type: ignore[assignment]
    client = serve(storage, ash={"guarantee": 4 * MIB}, birch={"quota": 3 * MIB, "guarantee": MIB})
    ash, names = client("ash"), list(range(30))
    assert [put(ash, name) for name in names] == [STORED] * 30  # 1.2 MB, twice in a chain
    done, used = Event(), [0]

    def flood(name: str) -> None:
        with client(name) as store:
            for n in range(0, 600, 20):
                items = [to_set(key((name, n + i)), payload(n + i, SIZE)) for i in range(20)]
                assert set(store.set(items)) <= {STORED, THROTTLED}

    def work() -> None:
        try:
            run_all(*(lambda name=name: flood(name) for name in ("birch", "cedar", "worker")))
        finally:
            done.set()

    def watch() -> None:
        while not done.is_set():
            used.append(use_of(client, "birch").used_bytes)

    run_all(work, watch)
    birch = use_of(client, "birch")
    assert held(ash, names) == 30, "what is guaranteed stays"
    assert birch.used_bytes > 0
    assert max(used) <= 3 * MIB
    assert birch.evicted_objects > 0
    assert use_of(client, "cedar").used_bytes > 0
    assert put(ash, "new") is STORED
    if not isinstance(storage, tuple):
        # Others may evict what it has above its guarantee, when its own flood is over.
        assert max(used) > 2 * MIB, "its quota evicts no more than it needs"


def test_a_change_whose_client_left_is_told_as_what_it_was(tmp_path: Path) -> None:
    """The client is told that it may go on, and the audit log has its end; the command exits with 7."""
    may_go_on = Event()
    store = Late(MemoryBackend(16 * MIB), {"delete"}, lambda: may_go_on.wait(60))
    with StorageServer(settings_of(tmp_path), store) as node:
        section = {"address": node.addresses[0], "token_file": str(scratch() / "operator.quotas")}

        def outcomes() -> list[str]:
            records = map(json.loads, node.settings.audit_file.read_text().splitlines())
            return [record["outcome"] for record in records if record["event"] == "delete"]

        with GrpcBackend(read_settings({**section, "timeout": "1s"})) as operator:
            assert put(operator, 1) is STORED
            with pytest.raises(UnansweredError, match="may be done, or go on there: look again") as told:
                operator.delete([key(1)])
            assert "\n" not in str(told.value)
            assert code_of(told.value) is Exit.UNKNOWN
            until(lambda: len(outcomes()) == 2)
            may_go_on.set()
            until(lambda: len(outcomes()) == 3)
            assert outcomes() == ["asked", "goes on; the client left", "done"]
            assert operator.exists([key(1)]) == [False]
            assert put(operator, 2) is STORED
        may_go_on.clear()
        url = f"grpc://{node.addresses[0]}?timeout=1s&token_file={section['token_file']}"
        done = call("flush", "--all", "--yes", "-s", url, ok=Exit.UNKNOWN)
        assert "may be done, or go on there" in done.err
        assert "start the daemon" not in done.err
        may_go_on.set()
    node.stop()
    with (
        closing(GrpcBackend(read_settings({**section, "timeout": "1s"}))) as gone,
        pytest.raises(UnavailableError, match="start the daemon there") as refused,
    ):
        gone.delete([key(1)])
    assert not isinstance(refused.value, UnansweredError), "it was not sent"


def test_who_may_know_quotas(serve: Any) -> None:
    client = serve(ash={"quota": 4 * MIB})
    put(client("ash"), 1)

    def known(name: str) -> dict[str, int | None]:
        return {row["name"]: row["quota_bytes"] for row in client(name).status()["tenants"]}

    everything = {"ash": 4 * MIB, "birch": None, "cedar": None}
    until(lambda: known("operator") == everything)  # the figures are a moment old
    assert known("observer") == everything
    assert known("ash") == {"ash": 4 * MIB}
    assert known("birch") == {"birch": None}
    assert known("worker") == known("fenced") == {}
    until(lambda: client("ash").status()["tenants"][0]["used_bytes"] == FOOTPRINT.of(SIZE))
    said = call("status", "-s", f"grpc://{client.node.settings.socket_directory}").out
    assert "4.0 MiB" in said


def test_a_reload_takes_over_quotas(serve: Any, tmp_path: Path) -> None:
    client = serve(ash={"quota": 4 * MIB})
    ash, names = client("ash"), list(range(50))
    assert [put(ash, name) for name in names] == [STORED] * 50
    new = settings_of(tmp_path, "", {"ash": {"quota": MIB}, "cedar": {"guarantee": MIB}})
    assert (
        "tenants" not in client.node.reload(new.model_copy(update=_same(client.node.settings))).at_next_start
    )
    use = use_of(client, "ash")
    assert use.quota_bytes == MIB >= use.used_bytes
    assert use.evicted_objects == 50 - held(ash, names) > 0
    assert use_of(client, "cedar").guarantee_bytes == MIB
    bad = settings_of(tmp_path, "", {"ash": {"guarantee": 90 * MIB}})
    with pytest.raises(ConfigError, match="the guarantees of tenants ash add up to"):
        client.node.reload(bad.model_copy(update=_same(client.node.settings)))
    assert use_of(client, "ash").quota_bytes == MIB
    audit = client.node.settings.audit_file
    until(lambda: audit.exists() and "quota of cedar" in audit.read_text())  # a thread writes it
    records = map(json.loads, audit.read_text().splitlines())
    assert [one["changed"] for one in records if one["event"] == "reload"] == ["quota of ash, quota of cedar"]
    with StorageServer(settings_of(tmp_path, f"file://{tmp_path}/f?capacity=16MiB")) as other:
        changed = new.model_copy(update={**_same(other.settings), "tenants": {"ash": new.tenants["ash"]}})
        assert "tenants" in other.reload(changed).at_next_start, "tenants come and go at the next start only"


def _same(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("directory", "sockets", "listen", "storage")}


@pytest.mark.parametrize(
    ("limits", "storage", "said"),
    [
        ({"guarantee": 2, "quota": 1}, "", "tenants.ash: guarantee (2) is more than quota (1); lower"),
        ({"guarantee": "20MiB"}, "", "the guarantees of tenants ash add up to 20.0 MiB, more than the"),
        ({"guarantee": "9MiB"}, "memory://?capacity=8MiB", "more than the 8.0 MiB of the memory store"),
        (
            {"quota": 5},
            "grpc://127.0.0.1:1",
            "tenant ash has a quota or a guarantee, which a store of type grpc cannot keep; use a store or a"
            " tier of type memory or file, or remove them",
        ),
        ({"quota": 5}, "s3://bucket/x?region=eu", "which a store of type s3 cannot keep"),
        ({"quota": 5}, ("grpc://127.0.0.1:1", "grpc://127.0.0.1:2"), "of type grpc and grpc cannot keep"),
        ({"quota": 5}, ("memory://", "grpc://127.0.0.1:2"), "tier 'memory' has no capacity in its URL"),
        (
            {"guarantee": "8MiB"},
            ("memory://?capacity=8MiB", "grpc://127.0.0.1:2"),
            "more than the 7.9 MiB of the tiers that keep shares",
        ),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_kept_are_refused(tmp_path, limits, storage, said):
    with pytest.raises((ConfigError, ValueError)) as caught:
        check(settings_of(tmp_path, storage, {"ash": limits}), files=False, ports=False)
    assert said in str(caught.value)
    assert "ash" in str(caught.value) or "tier 'memory'" in str(caught.value)


def test_a_tier_without_quotas_beside_one_with(serve: Any, tmp_path: Path) -> None:
    with StorageServer(daemon_settings("tcp")) as below:
        token = scratch() / "token"
        url = f"grpc://{below.addresses[0]}?token_file={token}"
        tiers = ("memory://?capacity=8MiB", url)
        warned = check(settings_of(tmp_path, tiers, {"ash": {"quota": MIB}}), files=False, ports=False)
        assert [line for line in warned if "do not count what a tier of type grpc holds" in line]
        client = serve(tiers, ash={"quota": MIB})
        ash = client("ash")
        for name in range(40):
            put(ash, name)
        assert use_of(client, "ash").used_bytes <= MIB
        assert use_of(client, "ash").quota_bytes == MIB


def test_figures_of_tenants(serve: Any) -> None:
    client = serve(ash={"quota": MIB})
    metrics = client.node._board._metrics  # private: what a scrape reads

    def value(name: str, tenant: str) -> list[float]:
        row = metrics.rows[f"node_tenant_{name}"]
        return [one.value for one in metrics.samples(row) if one.labels == {"tenant": tenant}]

    assert value("used_bytes", "cedar") == value("throttled_objects_total", "cedar") == [0]
    until(lambda: value("quota_bytes", "ash") == [MIB])
    assert value("quota_bytes", "cedar") == []
    ash = client("ash")
    for name in range(30):
        put(ash, name)
    put(ash, "big" * 20)
    [answer] = ash.set([to_set(key("big"), bytes(2 * MIB))])
    assert answer is THROTTLED
    until(lambda: value("throttled_objects_total", "ash") == [1])
    assert value("evicted_objects_total", "ash")[0] > 0
    board = client.node._board  # private: the document of each reader
    whole = {row["name"]: row for row in board.document(None)["tenants"]}
    assert list(whole) == list(TENANTS)
    assert (whole["ash"]["quota_bytes"], whole["ash"]["throttled_objects"]) == (MIB, 1)
    own = ash.status()["tenants"]
    assert [row["name"] for row in own] == ["ash"]
    assert client("worker").status()["tenants"] == []
