"""A secondary tier for vLLM's `TieringOffloadingSpec` (written for 0.33.0), below the GPU and the primary tier in shared memory.

    vllm serve ... --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368, "secondary_tiers": [{
            "type": "TierCacheTier", "module_path": "tiercache.integrations.vllm",
            "storage": "file:///var/lib/tiercache?capacity=200GiB", "revision": "<of the weights>"}]}}'

Besides the settings of `integrations.settings` the tier takes `queued_rows` (rows of the primary tier that stores may hold back, by default
a quarter of them) and `locality` ("LOCAL" or "REMOTE", for filters of requests). Data-parallel replicas share what they store; each is a
process of its own, so their storage is lmdb://, the grpc:// address of a daemon, or has {rank} in its path.

`revision` names the weights for as long as the engine runs. Do not use the tier where weights are replaced in place, as in reinforcement
learning: the new weights would hit what the old ones computed, because a reset of vLLM's cache does not clear secondary tiers.

Modules to read: `identity` (keys of objects made from vLLM's keys), `jobs` (transfers), `tier`.
"""

from tiercache.integrations.vllm.tier import TierCacheTier

__all__ = ["TierCacheTier"]
