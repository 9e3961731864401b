"""KV connector of vLLM: tiercache's index, host tier and store below the device cache of vLLM.

    vllm serve MODEL --enable-prefix-caching --kv-transfer-config '{
        "kv_connector": "TierCacheConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_bytes": "32GiB", "storage": "file:///var/lib/tiercache?capacity=200GiB",
            "revision": "<of the weights>"}}'

vLLM finds the connector when tiercache is installed in its environment (entry point `vllm.general_plugins`).
`engine.ConnectorSettings` describes the settings.

Words of vLLM that the modules use:

    group     layers whose cache vLLM manages together; a request has a table of blocks for each group
    block     one place of all tensors; the block of one group has the bytes of a page, or of a state, of the
              layers of that group

Read `blocks` (vLLM's tensors as device pools), `cache` (what a rank finds, loads and saves, by a controller),
`promises` (what all ranks promise), `engine` (what vLLM's configuration, processes and requests tell) and
`connector` (what vLLM calls) in this order. `cache` and `promises` know nothing of vLLM.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

NAME: Final = "TierCacheConnector"
"""Name by which vLLM is told to use the connector."""


def register() -> None:
    """Tell vLLM of the connector, and of the policy in `tiercache.integrations.vllm_policy`.

    vLLM calls this in each of its processes, at times more than once.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:  # it is not known yet
        module = "tiercache.integrations.vllm_connector.connector"
        KVConnectorFactory.register_connector(NAME, module, NAME)
    with suppress(ImportError, ValueError):  # another vLLM has no such policies, or knows this one already
        from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

        module = "tiercache.integrations.vllm_policy"
        CachePolicyFactory.register_cache_policy("hvd", module, "HvdCachePolicy")
