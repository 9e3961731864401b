"""The cache of SGLang itself: tiercache's index and eviction policies in the place of SGLang's prefix tree.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --radix-cache-backend tiercache

SGLang finds the option when tiercache is installed in its environment (entry point `sglang.srt.plugins`).
`--hicache-storage-backend-extra-config '{"policy": "lru"}'` sets what `settings.CacheSettings` describes;
`--enable-hierarchical-cache` adds the host, and `--hicache-storage-backend dynamic` a store, with
`settings.StoreSettings`. The storage backend of `tiercache.integrations.sglang` is for SGLang's own tree.

Read `lent` (SGLang's tensors and allocators as device pools, and how a pass waits for loads) and `store`
(its arguments, and what is fetched while a request waits) before `tree`.
"""

from __future__ import annotations


def register() -> None:
    """Tell SGLang of `--radix-cache-backend tiercache`. SGLang calls this in each of its processes."""
    # SGLang loads plug-ins before it reads its arguments, so that nothing heavy is imported here.
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend("tiercache", _make)


def _make(context: object) -> object:
    from tiercache.integrations.sglang_tree.tree import TierCacheTree

    return TierCacheTree(context)
