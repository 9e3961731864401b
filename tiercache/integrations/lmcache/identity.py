"""Object keys made from LMCache's keys.

namespace   the settings, the model's name, the cache salt
layout      LMCache's release, the rank, the group, and the shapes and dtypes of the object
page key    the hash of the chunk, hashed with the namespace
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from threading import Lock
from typing import Any, Final, TypeVar

import msgpack
from blake3 import blake3

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.errors import InputError
from tiercache.integrations.settings import StoreSettings
from tiercache.keys import Identity, Shard, layout_digest, namespace_of, object_key
from tiercache.storage.base import NamespaceRecord

_MIN_HASH_BYTES: Final = 16
_MAX_KNOWN: Final = 1 << 12
"""Maximum number of namespaces, and of layouts, that are remembered."""
_MAX_ORDERED: Final = 1 << 16
"""Maximum number of chunks whose place in their prompts is remembered until they are stored."""

Layout = tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Shapes and dtypes of an object, as LMCache describes them."""
_row: Final = attrgetter("object_group_id", "kv_rank", "model_name", "cache_salt")
K = TypeVar("K")
V = TypeVar("V")


def layout_of(shapes: Iterable[Sequence[int]], dtypes: Iterable[object]) -> Layout:
    """Return the layout of an object that consists of tensors of these shapes and dtypes."""
    return tuple(tuple(map(int, shape)) for shape in shapes), tuple(map(str, dtypes))


class ChunkKeys:
    """Object keys of one server of LMCache, and what it has told of layouts and of the order of chunks.

    A key of LMCache has `chunk_hash`, `model_name`, `kv_rank`, `object_group_id` and `cache_salt`. LMCache
    does not tell which groups have a window or states, so all of them belong to the pool KV, in layouts of
    their own. A short hash raises InputError: it could be that of another chunk.

    Thread safety: any thread.
    """

    def __init__(self, settings: StoreSettings, chunk_size: int, release: str) -> None:
        self._settings: Final = settings
        self._chunk_size: Final = chunk_size
        self._release: Final = release
        self._lock: Final = Lock()  # guards the tables
        self._namespace_of: Final = lru_cache(_MAX_KNOWN)(lambda *named: namespace_of(self._identity(*named)))
        self._layouts: Final = OrderedDict[tuple[int, int, Layout], bytes]()
        self._places: Final = OrderedDict[bytes, tuple[bytes | None, int]]()
        """Hash of the chunk before a chunk, and number of chunks up to its end, by the chunk's hash."""

    def object_of(self, key: Any, layout: Layout) -> ObjectKey:
        """Return the object of a key."""
        place = (key.kv_rank, key.object_group_id, layout)
        with self._lock:
            digest = self._layouts.get(place)
            if digest is None:
                facts = blake3(msgpack.packb(["lmcache", self._release, *place])).digest()
                digest = layout_digest(PoolName.KV, facts, Shard())
                _put(self._layouts, place, digest, _MAX_KNOWN)
        return object_key(PoolName.KV, digest, self._page_key(key, key.chunk_hash))

    def in_all_layouts(self, key: Any) -> list[ObjectKey]:
        """Return the objects of a key in each layout that was seen of its rank and group."""
        place, page = (key.kv_rank, key.object_group_id), self._page_key(key, key.chunk_hash)
        with self._lock:
            seen = [digest for known, digest in self._layouts.items() if known[:2] == place]
        return [object_key(PoolName.KV, digest, page) for digest in seen]

    def meta(self, key: Any, nbytes: int) -> ObjectMeta:
        """Return the metadata of the object of a key, with the chunk before it if a lookup has named it."""
        with self._lock:
            before, depth = self._places.get(key.chunk_hash, (None, None))
        parent = None if before is None else self._page_key(key, before)
        return ObjectMeta(self._namespace(key), nbytes, b"", parent, depth)

    def note_order(self, keys: Sequence[Any]) -> None:
        """Note the order of chunks from a lookup, which has a whole prompt of each group and rank in turn."""
        depth = 0
        with self._lock:
            for before, key in pairwise([None, *keys]):
                follows = before is not None and _row(before) == _row(key)
                depth = depth + 1 if follows else 1
                place = (before.chunk_hash if follows else None, depth)
                _put(self._places, key.chunk_hash, place, _MAX_ORDERED)

    def record(self, model: str, salt: str) -> NamespaceRecord:
        """Return the record of the namespace of a model and a salt."""
        return self._settings.record(self._identity(model, salt))

    def _identity(self, model: str, salt: str) -> Identity:
        identity = self._settings.identity(model, "", self._chunk_size)
        if not salt:
            return identity
        # The salt is no mere label: a tenant of the same name that a setting gives has another namespace.
        tenant = f"{identity.tenant}/{salt}" if identity.tenant else salt
        return replace(identity, tenant=tenant, salt=salt.encode())

    def _namespace(self, key: Any) -> bytes:
        return self._namespace_of(key.model_name, key.cache_salt)

    def _page_key(self, key: Any, chunk_hash: bytes) -> bytes:
        if len(chunk_hash) < _MIN_HASH_BYTES:
            raise InputError(
                f"hashes of {len(chunk_hash)} bytes can be those of other tokens; start LMCache with"
                " --hash-algorithm blake3"
            )
        return blake3(chunk_hash, key=self._namespace(key)).digest()


def _put(table: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Put an entry into a table, which then forgets the oldest one beyond `limit`."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)
