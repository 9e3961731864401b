"""Device pools over SGLang's tensors, whose slots SGLang's own allocators hand out; loads into them."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.managers.cache_controller import LayerDoneCounter
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool

from tiercache.controller.lent_slots import LentLoad
from tiercache.core import Locations, PoolName
from tiercache.errors import ConfigError, PoolFullError
from tiercache.pools import DevicePool, by_layer, page_geometry_of, state_geometry_of
from tiercache.pools.device import Tensors

_KEPT: Final = 4
"""Number of batches whose loads are remembered: one is computed while the next is prepared."""


class LentSource:
    """Slots of an allocator of SGLang. Slot i has the rows [i * size, (i + 1) * size).

    Thread safety: the scheduler's thread.
    """

    def __init__(self, allocator: Any, size: int = 1) -> None:
        self.held = 0
        """Number of slots that the cache holds: present, and being loaded."""
        self._allocator = allocator
        self._size = size
        self._row = torch.arange(size, device=allocator.device)

    @property
    def available(self) -> int:
        """Number of free slots."""
        return int(self._allocator.available_size()) // self._size

    def alloc(self, n: int) -> Locations:
        """Take `n` slots for the cache; PoolFullError, with nothing taken, if fewer are free."""
        rows = self._allocator.alloc(n * self._size) if n else torch.empty(0, dtype=torch.int64)
        if rows is None:
            raise PoolFullError(f"{n} slots are wanted and {self.available} are free; evict first")
        self.held += n
        return self.slots(rows[:: self._size])

    def free(self, slots: npt.ArrayLike) -> None:
        """Give slots of the cache back to SGLang."""
        self.held -= np.size(slots)
        self.release(slots)

    def release(self, slots: npt.ArrayLike) -> None:
        """Give slots of a request back to SGLang."""
        self._allocator.free(self._tensor(slots))

    def slots(self, rows: torch.Tensor) -> Locations:
        """Return the slots of which these are the first rows: int64, shape [slots]."""
        found: Locations = np.floor_divide(rows.cpu().numpy(), self._size, dtype=np.int64)
        return found

    def _tensor(self, slots: npt.ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(slots, np.int64)).to(self._row.device)


class LentPages(LentSource):
    """Pages of SGLang's allocator of KV. Thread safety: as `LentSource`."""

    def release(self, slots: npt.ArrayLike) -> None:
        """Give pages of a request back to SGLang."""
        self._allocator.free_page_ids(self._tensor(slots))

    def rows(self, pages: npt.ArrayLike) -> torch.Tensor:
        """Return the rows of pages, in order: int64, shape [pages * page_size], on the device."""
        return torch.add(self._row, self._tensor(pages)[:, None], alpha=self._size).view(-1)


def lent_pools(
    pages: LentPages, allocator: Any, states: LentSource | None, requests: Any
) -> dict[PoolName, DevicePool]:
    """Return the device pools over the tensors of SGLang's KV pool, and of its pool of states.

    `pages` and `states` are the sources of their slots; `states` is None for a model without.

    Raises ConfigError for pools of another kind.
    """
    kv = allocator.get_kvcache()
    layers: list[int] = []
    if type(kv) is HybridLinearKVPool:
        layers, kv = list(kv.full_attention_layer_id_mapping), kv.full_kv_pool
    layers = layers or list(range(kv.start_layer, kv.start_layer + kv.layer_num))
    scaled = any("scale_buffer" in name and held is not None for name, held in vars(kv).items())
    if scaled or getattr(kv, "kv_cache_layout", "nhd") != "nhd":
        raise ConfigError(
            "--radix-cache-backend tiercache cannot serve KV with scales of its own, or in another layout"
            " than NHD; use another --kv-cache-dtype, or leave SGLANG_USE_HND_KVCACHE out"
        )
    if type(kv) is MHATokenToKVPool:
        tensors: Tensors = by_layer("k", kv.k_buffer, layers) | by_layer("v", kv.v_buffer, layers)
    elif type(kv) is MLATokenToKVPool:
        tensors = by_layer("latent", kv.kv_buffer, layers)
    else:
        raise ConfigError(
            f"--radix-cache-backend tiercache cannot serve this model: its KV is in a {type(kv).__name__};"
            " leave the option out"
        )
    size = int(allocator.page_size)
    pools = {PoolName.KV: DevicePool.from_tensors(page_geometry_of(tensors, size), tensors, pages)}
    if states is not None:
        # private: nothing public tells whether the slots have a part in further pools
        if type(requests.mamba_pool) is not MambaPool or requests.mamba_pool._slot_siblings:
            raise ConfigError(
                "--radix-cache-backend tiercache cannot serve this model: its states are in a"
                f" {type(requests.mamba_pool).__name__} with further pools; leave the option out"
            )
        held, layers = requests.mamba_pool.mamba_cache, list(requests.mamba_map)
        tensors = by_layer("ssm", held.temporal, layers)
        for place, conv in enumerate(held.conv):
            tensors = {**tensors, **by_layer(f"conv{place}", conv, layers)}
        geometry = state_geometry_of(tensors, size)
        pools[PoolName.MAMBA] = DevicePool.from_tensors(geometry, tensors, states)
    return pools


class PassLoads(LayerDoneCounter):  # type: ignore[misc]  # SGLang has no types
    """Loads from the host, which SGLang's pools wait for before they read a layer.

    The loads of a batch get a number, which SGLang passes on with the batch.

    Thread safety: one thread, SGLang's scheduler.
    """

    def __init__(self, stream: int | None) -> None:
        """`stream`: handle of the stream in which SGLang computes; None if this thread computes."""
        self.consumer_index = -1
        """Number of the batch that is computed; -1 if it waits for nothing."""
        self._stream = stream
        self._next: list[LentLoad] = []
        self._batches = deque[tuple[int, list[LentLoad]]](maxlen=_KEPT)
        self._count = 0

    def add_load(self, load: LentLoad) -> None:
        """Let the batch that is being prepared wait for a load."""
        self._next.append(load)

    def end_batch(self) -> int:
        """Return the number of the batch that has been prepared; -1 if it waits for nothing."""
        if not self._next:
            return -1
        self._batches.append((self._count, self._next))
        self._next, self._count = [], self._count + 1
        return self._count - 1

    def set_consumer(self, index: int) -> None:
        """Say which batch is computed next."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Return, or let the stream go on, only once `layer` is in its slots."""
        for number, loads in self._batches:
            if number == self.consumer_index:
                for load in loads:
                    load.wait_layer(layer, self._stream)
