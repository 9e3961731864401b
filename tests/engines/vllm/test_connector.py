"""tiercache's connector where the device or a request fails it; tests/servers has it in real servers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tiercache.integrations.vllm_connector import connector
from tiercache.integrations.vllm_connector.connector import TierCacheConnector
from tiercache.integrations.vllm_connector.engine import StepWork


class Mark:
    """CUDA event: `calls` fail, and of every two marks the first is one second before the second."""

    calls: tuple[str, ...] = ()

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        self.fail("record")

    def query(self) -> bool:
        self.fail("query")
        return True

    def elapsed_time(self, end: Mark) -> float:
        return 1000.0

    def fail(self, call: str) -> None:
        if call in self.calls:
            raise RuntimeError(call)


def test_a_failing_device_costs_a_measurement_or_a_copy_and_a_wrong_hint_costs_nothing(monkeypatch, caplog):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"storage": "memory://?capacity=1MiB", "revision": "1"},
            kv_load_failure_policy="recompute", kv_role="kv_both", engine_id="measured",
        ),
        parallel_config=SimpleNamespace(
            world_size=1, tensor_parallel_size=1, decode_context_parallel_size=1,
            distributed_executor_backend="uni",
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True), speculative_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )  # fmt: skip
    groups = [SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)]
    one = TierCacheConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=groups))
    noted: list[tuple[object, float]] = []
    cache = SimpleNamespace(note_pass=lambda computed, seconds: noted.append((computed, seconds)))
    monkeypatch.setitem(connector._CACHES, "measured", cache)  # private: no cache of a whole engine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    for begin, end in (((), ()), ((), ("record",)), (("record",), ()), (("query",), ()), ((), ())):
        Mark.calls = begin
        one.bind_connector_metadata(StepWork(computed=[(0, 5)]))
        Mark.calls = end
        one.wait_for_save()
    one.bind_connector_metadata(StepWork())
    assert noted == [([(0, 5)], 1.0)] * 3
    assert caplog.text.count("RuntimeError") == 4
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 1 // 0)
    one.bind_connector_metadata(StepWork(loads=[None], saves=[None]))
    one.start_load_kv(None)
    one.wait_for_save()
    request = SimpleNamespace(
        request_id="r", mm_features=[], prompt_embeds=None, resumable=False, num_tokens=1,
        all_token_ids=[1], kv_transfer_params=None, kv_hints=SimpleNamespace(actions=[None]),
    )  # fmt: skip
    one.on_new_request(request)
    assert one.request_finished_all_groups(request, ([],)) == (False, None)
    assert caplog.text.count("no attribute 'action_type'") == 1
