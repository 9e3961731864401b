"""A storage backend for SGLang's hierarchical cache. These options of SGLang's server select it:

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "tiercache", "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}'

`tiercache.integrations.settings` lists the settings in the JSON. Modules to read: `keys`, `server` (settings of SGLang's server), `pools`
(the pages of SGLang's host pools), `backend`.
"""

from tiercache.integrations.sglang.backend import TierCacheStorage

__all__ = ["TierCacheStorage"]
