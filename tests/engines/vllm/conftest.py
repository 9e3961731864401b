"""Replacements for modules that vLLM's offloading tiers import, for a machine without CUDA.

Some of vLLM's dependencies are not needed either. Nothing is replaced where all of them are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class OffloadingConnectorStats:
    """Takes metrics and keeps none of them."""

    def is_empty(self) -> bool:
        return True

    def increase_counter(self, *_: Any, **__: Any) -> None: ...

    def observe_histogram(self, *_: Any, **__: Any) -> None: ...

    def set_gauge(self, *_: Any, **__: Any) -> None: ...


class CudaRTLibrary:
    """Placeholder for a class that vLLM names in an annotation."""


class CPUOffloadingWorker:
    """Placeholder for a class that vLLM names in annotations.

    The real one copies between the GPU and the primary tier, in vLLM's worker processes, which the tests
    do not start.
    """


def check_shm_free_space(*_: Any, **__: Any) -> None:
    """Accept every size: the tests do not check the free space in /dev/shm."""


def is_local_first_rank() -> bool:
    """Tell vLLM's logger that this process is the one that logs."""
    return True


def _stub(name: str, what: Any) -> None:
    module = ModuleType(name)
    setattr(module, what.__name__, what)
    sys.modules[name] = module


if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("zmq") is None:
    # Prometheus metrics of the connector; imports every connector there is, and with them the engine,
    # transformers and an HTTP server.
    _stub("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics", OffloadingConnectorStats)
    # Of the message queue between processes only one function is used; imports torch.distributed's groups,
    # zmq and psutil.
    _stub("vllm.distributed.device_communicators.shm_broadcast", check_shm_free_space)
    # The CUDA runtime, with which workers pin the region; imports the same.
    _stub("vllm.distributed.device_communicators.cuda_wrapper", CudaRTLibrary)
    # vLLM's logger asks which process should say things once; imports the same.
    _stub("vllm.distributed.parallel_state", is_local_first_rank)
    # The worker's side; imports vLLM's compiled kernels.
    _stub("vllm.v1.kv_offload.cpu.gpu_worker", CPUOffloadingWorker)
