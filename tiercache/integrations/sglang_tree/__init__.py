"""The cache of SGLang itself: tiercache's index and eviction policies in the place of SGLang's prefix tree.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --radix-cache-backend tiercache

SGLang finds the option when tiercache is installed in its environment (entry point `sglang.srt.plugins`).
`--hicache-storage-backend-extra-config '{"policy": "lru"}'` sets what `tree.Settings` describes, and
`--enable-hierarchical-cache` adds the host. The storage backend of `tiercache.integrations.sglang` belongs to
SGLang's own tree; the two cannot be used together.

Read `lent` (SGLang's tensors and allocators as device pools, and how a pass waits for loads) before `tree`.
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
