"""L2 adapter for LMCache's multiprocess server, written for LMCache 0.5.6.

    lmcache server --l1-size-gb 64 --eviction-policy LRU --l2-adapter '{"type": "plugin",
    "module_path": "tiercache.integrations.lmcache", "class_name": "TierCacheL2", "adapter_params": {
        "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}}'

Words of LMCache that the modules use:

    L1              LMCache's host memory; this adapter is a tier below it
    chunk           `--chunk-size` tokens, known by a hash of all tokens up to the chunk's end
    group, rank     an object is what one rank has of one chunk for one group of layers
    cache salt      text that keeps the caches of users apart; here it names a tenant
    task            a batch of keys to store, look up or load; it is submitted, ends later, and then its event
                    fd is signalled and its result can be fetched once

The contract, as LMCache's controllers rely on it:

1. Only calls about the whole store wait for it, for a few of its deadlines at most. Each task ends, with a
   miss for every object of which there is any doubt. The store is opened as a chain, also if it is one URL:
   then each of its calls ends within `tier_deadline`.
2. Stores of this process read into L1 and write from it, without a copy; a load that is given up withholds
   its objects from LMCache until it returns. Other stores get memory that belongs to their calls.
3. Loaded bytes are verified, and their key covers all that the adapter is told: model, rank, group, shapes
   and dtypes, salt, LMCache's release, and the settings. Stored keys are digests.
4. Nothing is locked: an object that is evicted between lookup and load is a miss of the load.
5. The store evicts by itself. LMCache is told what comes and goes, for its accounts and its events.

There is one more setting than those of `integrations.settings`: `chunk_size`, LMCache's `--chunk-size`, by
which tokens are counted (256). At most a quarter of L1 waits to be stored.

Read the modules in this order: `identity` (object keys), `tasks` (threads and results), `adapter`.
"""

from __future__ import annotations

__all__ = ["TierCacheL2"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tiercache.integrations.lmcache.adapter import TierCacheL2  # the other modules need no LMCache

    return TierCacheL2
