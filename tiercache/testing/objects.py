"""Objects to store in tests: keys, payloads and items made from names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

from blake3 import blake3

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.keys import Shard, layout_digest, object_key
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import take

NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(range(32, 64))
_layout = lru_cache(64)(lambda pool: layout_digest(pool, bytes(32), Shard()))


def page_key(name: object) -> bytes:
    """Return the page key (32 bytes) of any name."""
    return blake2b(repr(name).encode(), digest_size=32).digest()


def key(name: object, pool: PoolName = PoolName.KV) -> ObjectKey:
    """Return the key of the object of `pool` on the page `name`."""
    return object_key(pool, _layout(pool), page_key(name))


def payload(name: object, length: int) -> bytes:
    """Return `length` bytes that look random, but are always the same for the same name."""
    return blake3(repr(name).encode()).digest(length=length)


def split(data: bytearray, pieces: int, seed: int = 0) -> list[memoryview]:
    """Return views that cut `data` into `pieces` parts at random places; some may be empty."""
    cuts = sorted(Random(seed).randrange(len(data) + 1) for _ in range(pieces - 1))
    view = memoryview(data)
    return [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def to_set(
    k: ObjectKey,
    data: bytes,
    *,
    slack: int = 0,
    pieces: int = 1,
    namespace: bytes = NAMESPACE,
    parent: bytes | None = None,
    depth: int | None = None,
    value: float | None = None,
    worker: int = 0,
) -> SetItem:
    """Make an item that stores `data`, in `pieces` buffers with `slack` bytes behind the payload."""
    buffers = split(bytearray(data + b"\xee" * slack), pieces)
    found = checksum(k, [memoryview(data)], len(data))
    meta = ObjectMeta(namespace, len(data), found, parent, depth, value, worker)
    return SetItem(k, buffers, meta)


def to_get(k: ObjectKey, length: int, *, slack: int = 0, pieces: int = 1) -> GetItem:
    """Make an item that reads `length` bytes into new buffers filled with 0xAA."""
    return GetItem(k, split(bytearray(b"\xaa" * (length + slack)), pieces), length)


def content(item: GetItem) -> bytes:
    """Return the payload that a get left in its buffers."""
    return b"".join(take(item.buffers, 0, item.length))


def put(store: StorageBackend, k: ObjectKey, data: bytes, parent: bytes | None = None) -> Outcome:
    """Store one object, and return the outcome."""
    return store.set([to_set(k, data, parent=parent)])[0]


def fetch(store: StorageBackend, k: ObjectKey, length: int) -> bytes | Outcome:
    """Return one object's payload, or the outcome if it is not HIT."""
    item = to_get(k, length)
    [outcome] = store.get([item])
    return content(item) if outcome is Outcome.HIT else outcome


def chain(name: object, length: int) -> list[tuple[ObjectKey, bytes | None]]:
    """Return the keys of a sequence's pages, each with its parent's page key (None for the first page)."""
    pages = [page_key((name, depth)) for depth in range(length)]
    return [(key((name, depth)), pages[depth - 1] if depth else None) for depth in range(length)]


def state_of(name: object) -> ObjectKey:
    """Return the key of the state that is attached to the page `name`."""
    return key(name, PoolName.MAMBA)


def outcomes(items: Sequence[Outcome]) -> dict[Outcome, int]:
    """Count how often each outcome occurs."""
    return {o: items.count(o) for o in set(items)}
