"""tiercache's connector where a pass cannot be measured; tests/servers has it in real servers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tiercache.integrations.vllm_connector import connector
from tiercache.integrations.vllm_connector.connector import StepWork, TierCacheConnector


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


def test_a_pass_that_cannot_be_measured_costs_its_measurement_alone(monkeypatch, caplog):
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
