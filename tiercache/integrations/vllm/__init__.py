"""Secondary tier for vLLM's `TieringOffloadingSpec`, written for vLLM 0.33.0.

    vllm serve ... --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368, "secondary_tiers": [{
            "type": "TierCacheTier", "module_path": "tiercache.integrations.vllm",
            "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}]}}'

Words of vLLM that the modules use:

    primary tier      vLLM's tier below the GPU, in shared host memory; this package is the next tier below
    group             layers whose KV cache vLLM manages together; a group may have a window, so that a
                      prefix needs only the latest tokens of this group
    chunk             `blocks_per_chunk` adjacent blocks of one group; vLLM offloads whole chunks
    row               one place of the primary tier: the bytes of all workers for one chunk, with padding
    offload key       a hash that stands for all tokens up to the chunk's end, and the index of its group
    store, load       a job that copies rows to this tier, or from this tier (a load is a "promotion")

Besides the settings of `integrations.settings` the tier has three settings of its own. `queued_rows` is the
maximum number of rows that pending store jobs may hold (default: a quarter of all rows). `locality` is
"LOCAL" or "REMOTE", for filters of requests. `enable_kv_events` (default: false) lets vLLM's publisher tell
what the tier has stored and what is gone.

Each data-parallel replica is a process of its own. With lmdb:// or the grpc:// address of a daemon, replicas
share what they store. Any other storage needs {rank} in its path, so that each replica has its own store.

While the engine runs, `revision` must name its weights. Do not use the tier if weights are replaced in place,
as in reinforcement learning. The new weights would hit what the old weights computed, because a reset of
vLLM's cache does not clear secondary tiers.

Read the modules in this order: `identity` (object keys made from offload keys), `jobs` (transfers), `tier`.
"""

from tiercache.integrations.vllm.tier import TierCacheTier

__all__ = ["TierCacheTier"]
