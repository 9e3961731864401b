"""The null store: its books beside those of the `memory` store."""

from __future__ import annotations

from collections.abc import Sequence

from tests.storage.integrity import check_tables
from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.objects import NAMESPACE, key, page_key
from tiercache_lab.replay.store import NullStore

CAPACITY = 1000
LENGTHS = {PoolName.KV: 90, PoolName.MAMBA: 210}

Name = tuple[int, int, PoolName]


def object_of(name: Name) -> ObjectKey:
    return key(name[:2], name[2])


def item(name: Name, length: int = 0) -> SetItem:
    sequence, depth, pool = name
    before = depth if pool is PoolName.MAMBA else depth - 1
    parent = page_key((sequence, before)) if before else None
    return SetItem(object_of(name), [], ObjectMeta(NAMESPACE, length or LENGTHS[pool], b"", parent, depth))


def asked(names: Sequence[Name]) -> list[GetItem]:
    return [GetItem(object_of(name), [], LENGTHS[name[2]]) for name in names]


def filled(*names: Name) -> NullStore:
    store = NullStore(CAPACITY)
    assert set(store.set([item(name) for name in names])) == {Outcome.STORED}
    return store


def there(store: NullStore, *names: Name) -> list[bool]:
    return store.exists([object_of(name) for name in names])


def test_payload_bytes_alone_count() -> None:
    store = filled((4, 1, PoolName.KV))
    batch = [(n, depth, PoolName.KV) for n in (0, 2) for depth in range(1, 9)]
    outcomes = store.set([item(name) for name in batch])
    assert outcomes == [Outcome.STORED] * 11 + [Outcome.THROTTLED] * 5
    assert there(store, (4, 1, PoolName.KV)) == [False]
    assert (store.usage().used_bytes, store.peak, store.written_bytes) == (11 * 90, 11 * 90, 12 * 90)
    assert (store.evicted, store.read_bytes) == (1, 0)
    assert store.get(asked(batch[9:12])) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
    assert store.peek(asked(batch[:1])) == [Outcome.HIT]
    assert store.read_bytes == 2 * 90, "a look is no read"
    assert store.set([item((5, 1, PoolName.KV), CAPACITY + 1)]) == [Outcome.THROTTLED]
    assert store.evicted == 1, "an object that does not fit at all evicts nothing"
    check_tables(store)
