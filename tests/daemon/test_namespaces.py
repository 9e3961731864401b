"""Floods of namespaces and records: they harm nobody but the tenant whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.storage_backends.grpc.nodes import secret
from tiercache.config.models import Settings
from tiercache.daemon.access import Access, Budgets
from tiercache.daemon.budget import Budget
from tiercache.daemon.reload import TenantShares
from tiercache.daemon.tenants.fairness import MAX_NAMESPACES, MAX_RECORD_BYTES, NamespaceBounds
from tiercache.daemon.tenants.store import TenantStore
from tiercache.errors import RefusedError
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.conformance.hooks import STORED, THROTTLED
from tiercache.testing.objects import fetch, key, put, to_set

NAMES = ("ash", "birch", "")
BATCH = 500
STORES = {
    "memory": ["memory://?capacity=64MiB"],
    "file": ["file://{}/f?capacity=64MiB"],
    "chain": ["memory://?capacity=64MiB", "file://{}/f?capacity=64MiB"],
}


def view_of(access: Access, name: str) -> StorageBackend:
    return access.authenticate(f"Bearer {name or 'operator':x<32}", {}).store


@pytest.fixture(params=STORES)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Access]]:
    """Open a store as a daemon of two tenants does; the second call opens it again."""
    principals, tenants, stores = [], {}, []
    for name in NAMES:
        token = secret(tmp_path / f"{name}.token", f"{name or 'operator':x<32}")
        verbs = ("read", "write") if name else ("read", "write", "admin")
        principals.append({"name": name or "operator", "token_file": token, "verbs": verbs, "tenant": name})
        if name == "ash":
            fenced = secret(tmp_path / "fenced.token", f"{'fenced':x<32}")
            spaces = ((b"mine" * 8).hex(),)
            principals.append({"name": "fenced", "token_file": fenced, "tenant": name, "namespaces": spaces})
        if name:
            tenants[name] = {"salt_file": secret(tmp_path / f"{name}.salt", name * 20)}
    settings = Settings(principals=principals, tenants=tenants)

    def begin() -> Access:
        while stores:
            stores.pop().close()
        urls = [url.format(tmp_path) for url in STORES[request.param]]
        stores.append(open_backend(urls if len(urls) > 1 else urls[0]))
        access = Access(settings, stores[0], Budgets(*(Budget(1 << 20) for _ in range(5))))
        TenantShares(stores[0], access.tenant_of).take(settings.tenants)
        return access

    begin.kind = request.param  # type: ignore[attr-defined]
    yield begin
    for store in stores:
        store.close()


def flood(view: StorageBackend, count: int) -> int:
    """Store `count` objects, each in a namespace of its own; return how many were stored."""
    stored = 0
    for first in range(0, count, BATCH):
        numbers = range(first, first + BATCH)
        outcomes = view.set([to_set(key(("flood", n)), b"x", namespace=b"flood %d" % n) for n in numbers])
        assert set(outcomes) <= {STORED, THROTTLED}
        stored += outcomes.count(STORED)
    return stored


def test_a_flood_of_namespaces_harms_its_tenant_alone(start: Callable[[], Access]) -> None:
    access = start()
    ash, birch, operator = (view_of(access, name) for name in NAMES)
    assert put(birch, key(0), b"birch") is put(ash, key(0), b"ash") is STORED
    assert flood(ash, 4_000) == MAX_NAMESPACES - 1
    for n in range(1, 4):
        assert birch.set([to_set(key(n), b"birch", namespace=b"%d" % n)]) == [STORED]
        assert operator.set([to_set(key(n), b"operator", namespace=b"%d" % n)]) == [STORED]
    # What the tenant has is still there, and is still added to; only further namespaces are refused.
    items = [to_set(key("old"), b"ash"), to_set(key("new"), b"ash", namespace=b"new")]
    assert ash.set(items) == [STORED, THROTTLED]
    assert fetch(ash, key(0), 3) == b"ash"
    # A namespace that the settings name is no further one.
    fenced = view_of(access, "fenced")
    assert fenced.set([to_set(key("fenced"), b"x", namespace=b"mine" * 8)]) == [STORED]
    assert fetch(birch, key(0), 5) == b"birch"
    access = start()
    ash, birch = view_of(access, "ash"), view_of(access, "birch")
    assert birch.set([to_set(key("last"), b"birch", namespace=b"last")]) == [STORED]
    assert ash.set([to_set(key("new"), b"ash", namespace=b"new")]) == [STORED]


def test_a_flood_of_records_harms_its_tenant_alone(start: Callable[[], Access]) -> None:
    access = start()
    ash, birch, operator = (view_of(access, name) for name in NAMES)
    identity = {"model": "m" * 3000}
    taken = 0
    for n in range(200):
        try:
            ash.register_namespace(NamespaceRecord(b"%d" % n, identity))
            taken += 1
        except RefusedError as error:
            assert "use fewer or shorter identities" in str(error)  # noqa: PT017
    assert taken == MAX_RECORD_BYTES // 3030
    ash.register_namespace(NamespaceRecord(b"0", identity))
    ash.register_namespace(NamespaceRecord(b"0", {"model": "short"}))
    for view in (birch, operator):
        view.register_namespace(NamespaceRecord(b"first", {"model": "m"}))
        assert b"first" in {record.namespace for record in view.namespaces()}
        assert put(view, key(1), b"abc") is STORED
    assert len(view_of(start(), "ash").namespaces()) == (taken if start.kind != "memory" else 0)


def test_the_records_of_a_tenant_are_few(tmp_path: Path) -> None:
    bounds = NamespaceBounds(lambda name: name[:1].decode())
    with closing(TenantStore(open_backend("memory://"), bounds=bounds)) as store:
        for n in range(MAX_NAMESPACES):
            store.register_namespace(NamespaceRecord(b"a%d" % n, {}))
        with pytest.raises(RefusedError, match="1024 namespaces"):
            store.register_namespace(NamespaceRecord(b"a", {}))
        store.register_namespace(NamespaceRecord(b"a0", {"model": "m"}))
        store.register_namespace(NamespaceRecord(b"b", {}))
