"""Storage backend for SGLang's hierarchical cache, selected by options of SGLang's server.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "tiercache", "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}'

`tiercache.integrations.settings` explains `storage`, `revision` and further settings. A table `events`
(`endpoint`, `replay`, `topic`, `buffer`, `public`) publishes what is in the store.

Words of SGLang that the modules use:

    host pool       the host memory for one kind of cached object; its pages are named by indices
    anchor pool     the host pool of the KV, which is registered first
    sidecar pool    any other host pool, such as that of the recurrent states
    flat page       a copy of one page as a tensor of one dimension
    attach          the start, in which SGLang makes the backend and registers all host pools

Read `sglang_server` beside this package first (settings of SGLang's server), then `pools` (the pages of host
pools, their keys, and what SGLang's metrics count of them), `events` (for routers), and `backend`.
"""

from tiercache.integrations.sglang.backend import TierCacheStorage

__all__ = ["TierCacheStorage"]
