"""A worker whose device works behind its back, without a device: torch's copies happen later, in a stream of
a `SimulatedDevice`.

The forward passes stay where they are, on the thread; what passes between them and the transfer engine, the
slots, is written and read when the stream comes to it. Whoever does not wait reads old bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tests.integrations.transformers.models import loaded
from tests.integrations.transformers.serving import serving
from tests.transfer.machines import always
from tests.transfer.simulated_cuda import SimulatedDevice, SimulatedEvent
from tiercache.core import PoolName
from tiercache.integrations.transformers import device as copies
from tiercache.integrations.transformers.device import PoolTensors, Slots
from tiercache.integrations.transformers.layout import StateSlots
from tiercache.integrations.transformers.runner import ModelRunner, no_wait
from tiercache.integrations.transformers.stream import TorchStream
from tiercache.integrations.transformers.worker import Worker
from tiercache.pools import DevicePool, HostPool
from tiercache.storage.base import StorageBackend
from tiercache.transfer.cuda import CudaEngine


class SimulatedStream(TorchStream):
    """Torch's current stream on a simulated device; keeps all fences that were made."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.fences: list[SimulatedEvent] = []
        with device.current():
            self.handle = device.create_stream(urgent=False)

    def run(self, work: Callable[[], object]) -> None:
        self.device.run(self.own, work)

    @property
    def own(self) -> int:
        assert self.handle is not None
        return self.handle

    def fence(self) -> Any:
        self.fences.append(self.device.event(self.own))
        return self.fences[-1]

    def synchronize(self) -> None:
        with self.device.current():
            self.device.synchronize_stream(self.own)

    def close(self) -> None:
        self.synchronize()
        with self.device.current():
            for fence in self.fences:
                self.device.destroy_event(fence.cuda_event)
            self.device.destroy_stream(self.own)


class LateRunner(ModelRunner):
    """The runner of a worker whose copies are queued in `stream`, each export taking `pause` seconds."""

    def __init__(self, like: ModelRunner, stream: SimulatedStream, pause: float) -> None:
        super().__init__(like.model, like.page_size)
        self.tail_mode = like.tail_mode
        self.stream, self.pause = stream, pause

    def allocate_pools(self, page_slots: int, state_slots: int) -> PoolTensors:
        pool = super().allocate_pools(page_slots, state_slots)

        def late() -> None:
            time.sleep(self.pause)
            for tensor in (*pool.kv.values(), *pool.states.values()):
                tensor.zero_()

        self.stream.run(late)
        return pool

    def export_pages(self, cache: DynamicCache, pool: PoolTensors, first_page: int, slots: Slots) -> None:
        index = torch.as_tensor(np.asarray(slots))
        taken = super().allocate_pools(len(index), 0)  # the cache goes on before the stream comes to it
        copies.export_pages(cache, taken, first_page, range(len(index)))

        def late() -> None:
            time.sleep(self.pause)
            for at in pool.kv:
                pool.pages(*at).index_copy_(0, index, taken.pages(*at))

        self.stream.run(late)

    def export_state(self, cache: DynamicCache, pool: PoolTensors, slots: StateSlots) -> None:
        taken = super().allocate_pools(0, 1)
        copies.export_state(cache, taken, 0)

        def late() -> None:
            time.sleep(self.pause)
            for name in self.layout.state_geometries:
                slot = slots if isinstance(slots, int) else slots[name]
                for at, tensor in pool.of(name).items():
                    tensor[slot] = taken.states[at][0]

        self.stream.run(late)

    def restore(
        self,
        pool: PoolTensors,
        page_slots: Slots,
        state_slots: StateSlots | None,
        *,
        wait_layer: Callable[[int], None] = no_wait,
        tokens: int | None = None,
    ) -> DynamicCache:
        for layer in self.layout.layers:
            wait_layer(layer.layer)
        cache = self.new_cache()
        self.stream.run(lambda: copies.fill(cache, pool, page_slots, state_slots, no_wait, tokens))
        self.stream.synchronize()  # for the forward, which reads the cache on this thread
        return cache


class OnSimulated:
    """An engine factory: the CUDA engine over the worker's pools, as if they were on the device."""

    def __init__(self, device: SimulatedDevice, **settings: Any) -> None:
        self.device = device
        choose = always(settings.pop("method", None))
        self.settings = {"choose": choose, "group_bytes": 1} | settings  # layer by layer, however small
        self._memory: list[np.ndarray] = []

    def __call__(
        self, pools: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool]
    ) -> CudaEngine:
        # private: a device knows the memory of its tensors by itself
        tensors: list[Any] = [tensor for pool in pools.values() for tensor in pool._tensors.values()]
        self._memory = [self.device.adopt(tensor.view(torch.uint8).numpy()) for tensor in tensors]
        there = {
            # private: the same pool, as if it were on another device
            name: DevicePool(p.geometry, p.segments, p.capacity, "cuda:0", p._tensors)
            for name, p in pools.items()
        }
        return CudaEngine(there, hosts, device=self.device, **self.settings)


@contextmanager
def simulated(
    name: str,
    storage: StorageBackend | None = None,
    *,
    device: SimulatedDevice | None = None,
    stream: Callable[[SimulatedDevice], SimulatedStream] = SimulatedStream,
    pause: float = 0.0,
    engine: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Worker]:
    """A worker on a simulated device, and at its end nothing that was taken there and not given back."""
    device = device or SimulatedDevice(jitter=0.001)
    torch_stream = stream(device)
    runner = LateRunner(loaded(name)[0], torch_stream, pause)
    # here, because memory is the device's as long as that lives
    factory = OnSimulated(device, **(engine or {}))
    with serving(name, storage, runner=runner, engine=factory, stream=torch_stream, **options) as worker:
        yield worker
    if device.lost is None:
        torch_stream.close()
        assert device.leftovers == {}
