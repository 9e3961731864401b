"""SGLang: a storage backend for its hierarchical cache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "tiercache", "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}'

What the JSON may say: `tiercache.integrations.settings`. Read `keys`, `server` (what it was told),
`pools` (what SGLang's host pools are made of), `backend`.
"""

from tiercache.integrations.sglang.backend import TierCacheStorage

__all__ = ["TierCacheStorage"]
