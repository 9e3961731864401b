"""Quotas and guarantees of tenants through a real daemon: floods, changes, who may know and change them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
from tests.storage_backends.grpc.nodes import daemon_settings, scratch
from tiercache.cli.checks import warnings_about as check
from tiercache.cli.terminal import Exit, code_of
from tiercache.config.models import Settings
from tiercache.core import ObjectKey, Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError, RefusedError, StorageError, UnansweredError, UnavailableError
from tiercache.storage.shares import Shares
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import key, payload, to_set

STORED, THROTTLED = Outcome.STORED, Outcome.THROTTLED
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
        salt = folder / f"{name}.salt"
        salt.touch(0o600)
        salt.write_text(name * 20)
        tenants[name] = {"salt_file": salt, **(limits or {}).get(name, {})}
    principals = []
    for name, rights in PRINCIPALS.items():
        file = scratch() / f"{name}.quotas"
        file.touch(0o600)
        file.write_text(name.ljust(32, "x"))
        principals.append({"name": name, "token_file": file, **rights})
    more = {"storage": storage} if storage else {"disk_bytes": 16 * MIB}
    return daemon_settings(
        "unix", unix=True, listen=("127.0.0.1:0",), principals=principals, tenants=tenants, **more
    )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a daemon, and return its clients by name."""
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


def held(store: Any, names: list[Any]) -> int:
    return sum(store.exists([key(name) for name in names]))


@pytest.mark.parametrize("storage", slow_after(2, ["", "memory://?capacity=16MiB", "lmdb", "chain"]))
def test_three_tenants_that_flood_at_once(serve: Any, tmp_path: Path, storage: str) -> None:
    if storage == "lmdb":
        storage = f"lmdb://{tmp_path}/lmdb?capacity=16MiB"
    if storage == "chain":
        storage = ("memory://?capacity=4MiB", f"file://{tmp_path}/f?capacity=16MiB")  # type: ignore[assignment]
    client = serve(storage, ash={"guarantee": 4 * MIB}, birch={"quota": 3 * MIB, "guarantee": MIB})
    ash, names = client("ash"), list(range(30))
    assert [put(ash, name) for name in names] == [STORED] * 30  # 1.2 MB, twice in a chain
    operator, done = client("operator"), Event()

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
            assert operator.quotas()["birch"].used_bytes <= 3 * MIB

    run_all(work, watch)
    use = operator.quotas()
    assert held(ash, names) == 30, "what is guaranteed stays"
    assert 0 < use["birch"].used_bytes <= 3 * MIB
    assert use["birch"].evicted_objects > 0
    assert use["cedar"].used_bytes > 0
    assert put(ash, "new") is STORED
    if not isinstance(storage, tuple):
        assert use["birch"].used_bytes > 2 * MIB, "no more was evicted than was needed"


def test_an_operator_changes_quotas_while_the_daemon_serves(serve: Any) -> None:
    client = serve()
    ash, operator = client("ash"), client("operator")
    names = list(range(40))
    assert [put(ash, name) for name in names] == [STORED] * 40
    with pytest.raises(RefusedError, match=r"tenant ash has 1.6 MiB, more than a quota of 1.0 MiB"):
        operator.set_quota("ash", {"quota": MIB}, evict=False)
    assert held(ash, names) == 40
    use = operator.set_quota("ash", {"quota": MIB, "guarantee": MIB // 2})
    assert (use.quota_bytes, use.guarantee_bytes) == (MIB, MIB // 2)
    assert use.used_bytes <= MIB
    assert use.evicted_objects == 40 - held(ash, names) > 0
    with pytest.raises(ConfigError, match=r"tenant ash: the guarantee .* is more than the quota"):
        operator.set_quota("ash", {"guarantee": 2 * MIB})
    with pytest.raises(ConfigError, match="the guarantees of tenants ash, birch add up to"):
        operator.set_quota("birch", {"guarantee": 15 * MIB})
    use = operator.set_quota("ash", {"quota": None})
    assert (use.quota_bytes, use.guarantee_bytes) == (None, MIB // 2)
    with pytest.raises(StorageError, match="there is no tenant 'oak'; there are ash, birch, cedar"):
        operator.set_quota("oak", {"quota": 1})
    client.node.stop()
    records = [json.loads(row) for row in client.node.settings.audit_file.read_text().splitlines()]
    changes = [
        (one["principal"], one["tenant"], one.get("quota"), one.get("guarantee"), one["outcome"][:6])
        for one in records
        if one["event"] == "set_quota"
    ]
    assert ("operator", "ash", "1MiB", "512KiB", "done") in changes
    assert ("operator", "ash", "1MiB", None, "failed") in changes
    assert ("operator", "ash", "none", None, "done") in changes


class LateStore(MemoryBackend):
    """A store that makes changes when it may."""

    def __init__(self) -> None:
        super().__init__(16 * MIB)
        self.may_go_on = Event()
        self.may_go_on.set()

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        assert self.may_go_on.wait(60)
        return super().delete(keys)

    def share(self, shares: Shares, *, evict: bool = True) -> None:
        assert self.may_go_on.wait(60)
        super().share(shares, evict=evict)


@pytest.mark.parametrize("change", ["set_quota", "delete"])
def test_a_change_whose_client_left_is_told_as_what_it_was(tmp_path: Path, change: str) -> None:
    """The client is told that it may go on, and the audit log has its end; the command exits with 7."""
    store = LateStore()
    with StorageServer(settings_of(tmp_path), store) as node:
        section = {"address": node.addresses[0], "token_file": str(scratch() / "operator.quotas")}

        def ask(client: GrpcBackend) -> object:
            if change == "delete":
                return client.delete([key(1)])
            return client.set_quota("ash", {"quota": MIB})

        def outcomes() -> list[str]:
            records = map(json.loads, node.settings.audit_file.read_text().splitlines())
            return [record["outcome"] for record in records if record["event"] == change]

        with GrpcBackend(read_settings({**section, "timeout": "1s"})) as operator:
            assert put(operator, 1) is STORED
            store.may_go_on.clear()
            with pytest.raises(UnansweredError, match="may be done, or go on there: look again") as told:
                ask(operator)
            assert "\n" not in str(told.value)
            assert code_of(told.value) is Exit.UNKNOWN
            until(lambda: len(outcomes()) == 2)
            store.may_go_on.set()
            until(lambda: len(outcomes()) == 3)
            assert outcomes() == ["asked", "goes on; the client left", "done"]
            assert operator.exists([key(1)]) == [change != "delete"]
            assert operator.quotas("ash")["ash"].quota_bytes == (MIB if change == "set_quota" else None)
        store.may_go_on.clear()
        if change == "set_quota":
            url = f"grpc://{node.addresses[0]}?timeout=1s&token_file={section['token_file']}"
            done = call("quota", "set", "ash", "2MiB", "-s", url, ok=Exit.UNKNOWN)
            assert "may be done, or go on there" in done.err
            assert "start the daemon" not in done.err
        store.may_go_on.set()
    node.stop()
    with (
        closing(GrpcBackend(read_settings({**section, "timeout": "1s"}))) as gone,
        pytest.raises(UnavailableError, match="start the daemon there") as refused,
    ):
        ask(gone)
    assert not isinstance(refused.value, UnansweredError), "it was not sent"


def test_who_may_know_and_change_quotas(serve: Any) -> None:
    client = serve(ash={"quota": 4 * MIB})
    put(client("ash"), 1)
    assert client("ash").quotas() == client("observer").quotas("ash")
    assert client("ash").quotas("ash")["ash"].used_bytes == FOOTPRINT.of(SIZE)
    assert list(client("operator").quotas()) == list(client("observer").quotas()) == list(TENANTS)
    with pytest.raises(RefusedError, match="birch belongs to tenant birch, and may know the quota of that"):
        client("birch").quotas("ash")
    with pytest.raises(RefusedError, match="birch belongs to tenant birch"):
        client("birch").quotas("oak")
    for name in ("worker", "fenced"):
        with pytest.raises(RefusedError, match=f"{name} may not know the quotas of tenants"):
            client(name).quotas()
    for name in ("ash", "fenced", "worker", "observer"):
        with pytest.raises(RefusedError, match=f"{name} may "):
            client(name).set_quota("ash", {"quota": None})
    assert client("operator").quotas("ash")["ash"].quota_bytes == 4 * MIB


def test_a_reload_takes_over_quotas(serve: Any, tmp_path: Path) -> None:
    client = serve(ash={"quota": 4 * MIB})
    operator, ash = client("operator"), client("ash")
    for name in range(50):
        put(ash, name)
    operator.set_quota("birch", {"quota": 5})
    new = settings_of(tmp_path, "", {"ash": {"quota": MIB}, "cedar": {"guarantee": MIB}})
    assert "tenants" not in client.node.reload(new.model_copy(update=_same(client.node.settings)))
    use = operator.quotas()
    assert use["ash"].quota_bytes == MIB >= use["ash"].used_bytes
    assert use["birch"].quota_bytes is None, "a change lasts until a reload"
    assert use["cedar"].guarantee_bytes == MIB
    bad = settings_of(tmp_path, "", {"ash": {"guarantee": 90 * MIB}})
    with pytest.raises(ConfigError, match="the guarantees of tenants ash add up to"):
        client.node.reload(bad.model_copy(update=_same(client.node.settings)))
    assert operator.quotas()["ash"].quota_bytes == MIB
    with StorageServer(settings_of(tmp_path, f"file://{tmp_path}/f?capacity=16MiB")) as other:
        changed = new.model_copy(update={**_same(other.settings), "tenants": {"ash": new.tenants["ash"]}})
        assert "tenants" in other.reload(changed), "tenants come and go at the next start only"


def _same(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("directory", "sockets", "listen", "storage")}


def test_counts_are_right_after_a_restart(tmp_path: Path) -> None:
    storage, used = f"file://{tmp_path}/f?capacity=16MiB", []
    for _ in range(2):
        with StorageServer(settings_of(tmp_path, storage, {"ash": {"quota": 2 * MIB}})) as node:
            section = {"address": node.addresses[0], "timeout": "20s"}
            with GrpcBackend(read_settings({**section, "token_file": str(scratch() / "ash.quotas")})) as ash:
                if not used:
                    for name in range(70):
                        put(ash, name)
                used.append(ash.quotas()["ash"].used_bytes)
                if len(used) == 2:
                    assert put(ash, "more") is STORED
                    assert ash.quotas()["ash"].used_bytes <= 2 * MIB
    assert used[0] == used[1] > MIB


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
            " tier of type memory, file or lmdb, or remove them",
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
def test_limits_that_cannot_be_kept_are_refused(
    tmp_path: Path, limits: dict[str, Any], storage: Any, said: str
) -> None:
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
        assert ash.quotas()["ash"].used_bytes <= MIB
        assert ash.quotas()["ash"].quota_bytes == MIB


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
    whole = {row.name: row for row in board.document(None).tenants}
    assert list(whole) == list(TENANTS)
    assert (whole["ash"].quota_bytes, whole["ash"].throttled_objects) == (MIB, 1)
    own = ash.status()["tenants"]
    assert [row["name"] for row in own] == ["ash"]
    assert client("worker").status()["tenants"] == []


def test_the_command_line(serve: Any) -> None:
    client = serve(ash={"quota": "3MiB"})
    for name in range(40):
        put(client("ash"), name)
    where = ("-s", f"grpc://{client.node.settings.socket_directory}")
    said = call("quota", "list", *where).out
    assert "1.6 MiB (53%)" in said
    assert "3.0 MiB" in said
    rows = json.loads(call("quota", "list", *where, "-o", "json").out)
    assert [row["tenant"] for row in rows] == list(TENANTS)
    assert set(rows[0]) == {
        "tenant", "used_bytes", "quota_bytes", "guarantee_bytes", "evicted_objects", "throttled_objects",
    }  # fmt: skip
    assert json.loads(call("quota", "list", "ash", *where, "-o", "json").out) == rows[:1]
    said = call("quota", "set", "ash", "1MiB", "--no-evict", *where, ok=5).error
    assert (
        "tenant ash has 1.6 MiB, more than a quota of 1.0 MiB; delete some of it, or omit --no-evict" in said
    )
    said = call("quota", "set", "ash", "1MiB", "--guarantee", "512KiB", *where).out
    assert "To make it last, set there:" in said
    assert '[tenants.ash]\nquota = "1MiB"\nguarantee = "512KiB"\n' in said
    [row] = call("quota", "list", "ash", *where, "-o", "jsonl").lines
    assert (row["quota_bytes"], row["used_bytes"] <= MIB) == (MIB, True)
    assert call("quota", "set", "ash", "none", "--guarantee", "none", *where).out.endswith("[tenants.ash]\n")
    assert "nothing to change" in call("quota", "set", "ash", *where, ok=2).error
    assert "is not a size" in call("quota", "set", "ash", "many", *where, ok=2).error
    assert "there is no tenant 'oak'; there are ash" in call("quota", "list", "oak", *where, ok=1).error
    assert "ash" in call("status", *where).out
    client.node.stop()
    said = call("quota", "list", "-s", client.node.settings.directory / "store", ok=2).error
    assert "is served by no daemon, and only a daemon has tenants" in said
