"""Object keys made from vLLM's offload keys.

    offload key   =  hash of a block (any length)  |  index of the group (4 bytes, big-endian)

A group is a set of layers whose KV cache vLLM manages together. An object key depends on the offload key and
on everything else on which the object's bytes depend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgpack
import vllm
from blake3 import blake3
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from tiercache.core import ObjectKey, ObjectMeta, PoolName
from tiercache.errors import ConfigError
from tiercache.integrations.settings import StoreSettings
from tiercache.keys import Shard, layout_digest, namespace_of, object_key

_OF_MODELS: Final = frozenset({"bfloat16", "float16", "float32"})
"""KV dtypes that show the model's own dtype.

With one of these, recurrent states have the same dtype, unless a setting says otherwise.
"""
_GROUP_BYTES: Final = 4
"""Number of bytes of the group's index at the end of an offload key."""


class Keys:
    """Object keys and metadata of one engine.

    Engines that run the same vLLM on the same model in the same way have the same keys. Data-parallel
    replicas therefore have the same keys too.

    An object is a row of vLLM's primary tier: the bytes of all workers for one chunk of one group, with
    padding. `row_bytes` is the size of a row. Construction raises ConfigError if neither vLLM nor the
    settings name the dtype of recurrent states, and under a vLLM that does not tell what it needs.

    Thread safety: immutable.
    """

    def __init__(self, config: OffloadingConfig, row_bytes: int, settings: StoreSettings) -> None:
        _check(config)
        model, dtype = config.model.name, config.model.dtype
        self.identity: Final = settings.identity(model, dtype, config.cache.tokens_per_hash)
        windows = any(group.sliding_window_size_in_chunks is not None for group in config.groups)
        if windows and not settings.state_dtype and dtype not in _OF_MODELS:
            raise ConfigError(
                f"for KV of dtype {dtype} vLLM does not tell the dtype of recurrent states;"
                " set state_dtype, or 'none' for a model that has no states"
            )
        self.namespace: Final = namespace_of(self.identity)
        self.record: Final = settings.record(self.identity, states=windows)
        self.row_bytes: Final = row_bytes
        # Tokens per chunk, by the index of the group among all groups of vLLM. Some may not be offloaded.
        per_chunk = config.cache.blocks_per_chunk
        self._chunks: Final = {group.group_id: group.tokens_per_block * per_chunk for group in config.groups}
        whole = [group.group_id for group in config.groups if group.sliding_window_size_in_chunks is None]
        paged = {self._chunks[group] for group in whole}
        self._page_chunk: Final = paged.pop() if len(paged) == 1 else 0
        """Tokens per chunk of the groups without a window; 0 if these groups have different chunks."""
        self._layouts: Final[Mapping[int, tuple[PoolName, bytes]]] = {
            group.group_id: _layout(config, group, row_bytes) for group in config.groups
        }

    def of(self, key: bytes) -> ObjectKey | None:
        """Return the object of an offload key; None for a key that does not belong to this engine."""
        block_hash, found = key[:-_GROUP_BYTES], self._layouts.get(_group_of(key))
        if not block_hash or found is None:
            return None
        pool, layout = found
        return object_key(pool, layout, self._page_key(key))

    def metas(
        self, keys: Sequence[bytes], objects: Sequence[ObjectKey], ends: Mapping[bytes, int]
    ) -> list[ObjectMeta]:
        """Return the metadata of `objects`, which are the objects of `keys`.

        `ends` has, for a key of the request, the number of tokens up to the end of its chunk. A key whose end
        is not known is left out.

        A page is an object of a group without a window, and depends on the page before it in its group. An
        object of a group with a window depends on the page that ends at the same token, if there is one. In
        chunks of 64 tokens:

            tokens         0        64       128      192
            pages          |-- 1 ---|-- 2 ---|-- 3 ---|      parents: 3 -> 2 -> 1
            with window                               W      parent: page 3

        A depth is a number of chunks, so that a page is one deeper than its parent.
        """
        places = {(_group_of(key), end): key for key, end in ends.items()}
        metas: list[ObjectMeta] = []
        for key, page in zip(keys, objects, strict=True):
            end, chunk = ends.get(key), self._chunks[_group_of(key)]
            parent = None
            if page.pool is PoolName.SWA:
                chunk = self._page_chunk
                if chunk and end is not None and end % chunk == 0:
                    parent = page.page_key
            elif end is not None:
                # The page before this one ends where this page begins: at a multiple of `chunk` tokens.
                before = places.get((_group_of(key), (end - 1) // chunk * chunk))
                if before is not None:
                    parent = self._page_key(before)
            depth = None if end is None or not chunk else -(-end // chunk)
            metas.append(ObjectMeta(self.namespace, self.row_bytes, b"", parent, depth))
        return metas

    def _page_key(self, key: bytes) -> bytes:
        return blake3(key[:-_GROUP_BYTES], key=self.namespace).digest()


def _check(config: OffloadingConfig) -> None:
    # Another length may mean other factors of the rotary embedding, and states would be taken for pages.
    facts = (config.model, "max_model_len"), (config.groups[0], "sliding_window_size_in_chunks")
    if missing := [name for part, name in facts if not hasattr(part, name)]:
        raise ConfigError(
            f"vLLM {vllm.__version__} does not tell a tier {' and '.join(missing)}, so TierCacheTier could"
            " restore wrong bytes; it needs vLLM 0.33"
        )


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def _layout(config: OffloadingConfig, group: OffloadingGroupConfig, row_bytes: int) -> tuple[PoolName, bytes]:
    """Return the pool and the layout digest of a group.

    A group with a window holds either sliding-window attention or recurrent states. vLLM does not say which,
    so every group with a window belongs to the SWA pool.
    """
    window = group.sliding_window_size_in_chunks
    pool = PoolName.KV if window is None else PoolName.SWA
    parallel = config.parallel
    facts = [
        "vllm",
        # Another version of vLLM may give the bytes of the same layout another meaning.
        vllm.__version__,
        [group.group_id, group.tokens_per_block, list(group.layer_names), window],
        [config.cache.blocks_per_chunk, row_bytes, config.worker_kv_bytes_per_block],
        [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        config.model.max_model_len,  # some models choose the factors of their rotary embedding by this number
        [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        os.environ.get("VLLM_PP_LAYER_PARTITION") if parallel.pp_size > 1 else None,
    ]
    return pool, layout_digest(pool, blake3(msgpack.packb(facts)).digest(), Shard())
