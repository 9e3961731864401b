"""Keys of objects made from vLLM's offload keys.

An offload key is the hash of a block and the index of its group; the key of the object is bound to everything that its bytes depend on.
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
from tiercache.storage.base import NamespaceRecord

_OF_MODELS: Final = frozenset({"bfloat16", "float16", "float32"})
"""Dtypes of KV that are the model's own dtype; its states then have the same one, unless the engine was told otherwise."""
_GROUP_BYTES: Final = 4
"""Bytes at the end of an offload key that hold the index of its KV cache group, big-endian, after the hash of the block."""


class Keys:
    """The keys of one engine: its `identity`, the `namespace` of that, the `record` for a store, and a layout for each group.

    Engines that run the same vLLM on the same model in the same way have the same keys; so do data-parallel replicas. `row_bytes` is the
    size of a row of the primary tier, and a row is what is stored: the bytes of all workers for one chunk of one group, with padding.
    Construction raises ConfigError if vLLM does not tell the dtype of the states and the settings do not either.

    Thread safety: immutable.
    """

    def __init__(self, config: OffloadingConfig, row_bytes: int, settings: StoreSettings) -> None:
        self.identity: Final = settings.identity(config.model.name, config.model.dtype, config.cache.tokens_per_hash)
        windows = any(group.sliding_window_size_in_chunks is not None for group in config.groups)
        if windows and not settings.state_dtype and config.model.dtype not in _OF_MODELS:
            raise ConfigError(
                f"the KV is {config.model.dtype}, and then vLLM does not tell the dtype of recurrent states; set state_dtype, or"
                " 'none' for a model that has none"
            )
        self.namespace: Final = namespace_of(self.identity)
        self.record: Final = NamespaceRecord(self.namespace, self.identity.public_record(), states=windows)
        self.row_bytes: Final = row_bytes
        # Keyed by the index in vLLM's own list of groups, which may have more groups than are offloaded. Values are tokens per chunk.
        per_chunk = config.cache.blocks_per_chunk
        self._chunks: Final = {group.group_id: group.tokens_per_block * per_chunk for group in config.groups}
        paged = {self._chunks[group.group_id] for group in config.groups if group.sliding_window_size_in_chunks is None}
        self._page_chunk: Final = paged.pop() if len(paged) == 1 else 0
        self._layouts: Final[Mapping[int, tuple[PoolName, bytes]]] = {
            group.group_id: _layout(config, group, row_bytes) for group in config.groups
        }

    def of(self, key: bytes) -> ObjectKey | None:
        """Return the object of an offload key; None for a key that this engine cannot have made."""
        block_hash, found = key[:-_GROUP_BYTES], self._layouts.get(_group_of(key))
        if not block_hash or found is None:
            return None
        pool, layout = found
        return object_key(pool, layout, self._page_key(key))

    def metas(self, keys: Sequence[bytes], objects: Sequence[ObjectKey], ends: Mapping[bytes, int]) -> list[ObjectMeta]:
        """Return what a store keeps beside the bytes of `objects`, which are the objects of `keys`.

        `ends` maps keys of the request to the number of tokens up to their end, as far as that is known. A page depends on the page of its
        group before it; an object of a group with a window depends on the page on which it ends, if pages end there. Depths count chunks,
        so that a page is one deeper than the page that it depends on.
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
            elif end is not None and (before := places.get((_group_of(key), (end - 1) // chunk * chunk))) is not None:
                parent = self._page_key(before)
            depth = None if end is None or not chunk else -(-end // chunk)
            metas.append(ObjectMeta(self.namespace, self.row_bytes, b"", parent, depth))
        return metas

    def _page_key(self, key: bytes) -> bytes:
        return blake3(key[:-_GROUP_BYTES], key=self.namespace).digest()


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def _layout(config: OffloadingConfig, group: OffloadingGroupConfig, row_bytes: int) -> tuple[PoolName, bytes]:
    """Return the pool and the layout digest of a group.

    vLLM does not say whether a group with a window is attention or a state, so any such group goes to the SWA pool.
    """
    window = group.sliding_window_size_in_chunks
    pool = PoolName.KV if window is None else PoolName.SWA
    parallel = config.parallel
    facts = [
        "vllm",
        vllm.__version__,  # only vLLM defines the meaning of a layout's bytes, and another version may change it
        [group.group_id, group.tokens_per_block, list(group.layer_names), window],
        [config.cache.blocks_per_chunk, row_bytes, config.worker_kv_bytes_per_block],
        [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        config.model.max_model_len,  # some models choose the factors of their rotary embedding by it
        [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        os.environ.get("VLLM_PP_LAYER_PARTITION") if parallel.pp_size > 1 else None,
    ]
    return pool, layout_digest(pool, blake3(msgpack.packb(facts)).digest(), Shard())
