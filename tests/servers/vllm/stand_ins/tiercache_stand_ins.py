"""Stand-ins for what vLLM 0.32 lacks on a CPU, so that its tiers serve there: a general plug-in of vLLM.

vLLM copies between device and primary tier with CUDA; torch's indexing on a thread is in its place. 0.32 does
not tell a tier the longest context and the windows of groups; it is told them here as in 0.33, from the same
sources. Nothing of vLLM's scheduler, connector, manager and tiers is replaced.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


def load() -> None:
    """Put the stand-ins in place; vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    offloading_connector.build_offloading_config = _told
    TieringOffloadingSpec.get_worker = _worker
    # It promises states from inside a pass, which the operation for CPUs does not return: passes end there.
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _told(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Make vLLM's configuration of its tiers, with what 0.33 adds to it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, scheduler
    from vllm.v1.kv_cache_interface import iter_layer_specs

    made = config.build_offloading_config(vllm_config, kv_cache_config)
    for group in made.groups:
        spec = next(iter(iter_layer_specs(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec)))
        tokens = group.tokens_per_block * made.cache.blocks_per_chunk
        window = scheduler.get_sliding_window_size_in_chunks(spec, tokens)
        object.__setattr__(group, "sliding_window_size_in_chunks", window)
    object.__setattr__(made.model, "max_model_len", vllm_config.model_config.max_model_len)
    return made


def _worker(spec: Any, kv_caches: Any) -> Copies:
    """Take the place of `TieringOffloadingSpec.get_worker`, which refuses a CPU."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    if spec._worker is None:
        assert spec.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        spec._worker = Copies(kv_caches, region)
    return spec._worker


class Copies:
    """vLLM's `OffloadingWorker` where the device is host memory, for chunks of one block.

    Thread safety: one thread, beside the one that copies.
    """

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region, self._refs = region, kv_caches.group_data_refs
        self._device = [
            each.tensor.view(torch.int8).view((-1, each.page_size_bytes)) for each in kv_caches.tensors
        ]
        self._host = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._thread = ThreadPoolExecutor(1, "copies")
        self._jobs: dict[int, Future[Any]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy blocks of the device into rows of the primary tier."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, src_spec, dst_spec, to_host=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy rows of the primary tier into blocks of the device."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, dst_spec, src_spec, to_host=False)
        return True

    def get_finished(self) -> list[Any]:
        """Return the results of the jobs that ended since the last call."""
        ended = [number for number, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(number).result() for number in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        for number in job_ids & self._jobs.keys():
            self._jobs[number].result()

    def shutdown(self) -> None:
        """End the thread, and give up the region."""
        self._thread.shutdown()
        self._host.clear()
        self._region.cleanup()

    def _copy(self, number: int, blocks: Any, rows: Any, *, to_host: bool) -> Any:
        """Copy between the blocks of all groups, one group after the other, and as many rows."""
        from vllm.v1.kv_offload.base import TransferResult

        began, moved, at = time.monotonic(), 0, 0
        for refs, count in zip(self._refs, blocks.group_sizes, strict=True):
            on_device, on_host = (
                torch.from_numpy(spec.block_ids[at : at + count]).long() for spec in (blocks, rows)
            )
            for ref in refs:
                size = ref.page_size_bytes
                device, host = (tensors[ref.tensor_idx][:, :size] for tensors in (self._device, self._host))
                if to_host:
                    host[on_host] = device[on_device]
                else:
                    device[on_device] = host[on_host]
                moved += size * count
            at += count
        return TransferResult(
            job_id=number, success=True, transfer_size=moved, transfer_time=time.monotonic() - began
        )
