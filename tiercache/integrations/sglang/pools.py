"""The pages of SGLang's host pools: their parts, and the memory that holds their bytes.

Transfers need no copy if the pool tells addresses (`get_page_buffer_meta`); otherwise they use flat pages, which costs a copy.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import torch
from blake3 import blake3

from tiercache.core import ObjectKey, PoolName
from tiercache.integrations.sglang.server import Server
from tiercache.keys import Shard, layout_digest, object_keys

_log = logging.getLogger(__name__)

_FACTS: Final = (
    "layout", "dtype", "temporal_dtype", "conv_dtype", "layer_num", "num_mamba_layers", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "conv_state_shapes", "temporal_state_shape", "storage_format_tag", "start_layer",
    "end_layer", "target_layer_num", "head_group_num", "indexer_dtype", "dcp_size", "dcp_rank",
)  # fmt: skip
"""Attributes of host pools that determine what their bytes mean; all that a pool has become part of its layout digest."""

_KINDS: Final = {
    "kv": PoolName.KV,
    "mamba": PoolName.MAMBA,
    "swa": PoolName.SWA,
    "auxiliary_swa": PoolName.SWA,
    "indexer": PoolName.INDEXER,
    "draft": PoolName.DRAFT,
    "draft_indexer": PoolName.DRAFT,
    "draft_swa": PoolName.DRAFT,
}
"""Cache kinds by the names of SGLang's pools."""


_TRAILING: Final = frozenset({"mamba", "swa", "auxiliary_swa", "draft_swa"})
"""Names of pools of which a prefix needs only the last pages."""

_BUFFERS: Final = (
    "kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer", "index_k_buffer", "index_k_scale_buffer",
    "index_k_with_scale_buffer",
)  # fmt: skip
"""Attributes of host pools that hold a tensor or several tensors."""


def kind_of(name: Any) -> PoolName | None:
    """Return the cache kind of a pool of SGLang's; None for a pool that is not kept."""
    return _KINDS.get(str(getattr(name, "value", name)))


def is_trailing(name: Any) -> bool:
    """Return whether a prefix needs only the last pages, and at least one, of this pool of SGLang's."""
    return str(getattr(name, "value", name)) in _TRAILING


class HostPages:
    """The pages of one host pool.

    The bytes of a page are the parts that `get_page_buffer_meta` names, in its order, or else the flat page, whose order differs. `layout`
    is the digest under which they are kept: a difference in pool, class, layout, dtype, size of a part, release of SGLang, identity
    (`namespace`) or rank gives another object. With `flat` the caller passes pages as flat tensors of its own.
    Construction raises ValueError for a pool that cannot be kept, and whatever the pool itself raises.

    Thread safety: any thread, for pages that no other thread uses.
    """

    def __init__(self, name: str, pool: Any, namespace: bytes, server: Server, shard: Shard, *, flat: bool = False) -> None:
        kind = kind_of(name)
        if kind is None:
            raise ValueError("its kind is not known")
        self.name, self.kind, self.pool = name, kind, pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._regions = [] if flat else _regions_of(pool)
        self._starts = [start for start, _ in self._regions]
        sizes = self._part_sizes()
        self.zero_copy = sizes is not None
        if sizes is None:
            pool.get_data_page(0, flat=True)  # raises now, at registration, if the layout has no flat pages
            page = pool.get_dummy_flat_data_page()
            sizes = [page.numel() * page.element_size()]
        self._sizes = sizes
        self.nbytes = sum(sizes)
        if not self.nbytes:
            raise ValueError("a page of it has no bytes")
        facts = {fact: str(getattr(pool, fact)) for fact in _FACTS if hasattr(pool, fact)}
        # The order on the device of what the host keeps row by row; only pools with `_buffer_infos` tell it.
        facts["device layouts"] = str([info.buffers.layout for info in getattr(pool, "_buffer_infos", ())])
        of_server = server.facts(draft=_has_draft(name, pool))
        means = [name, type(pool).__name__, sorted(facts.items()), self.page_size, self.zero_copy, sizes, of_server, namespace]
        self.layout = layout_digest(kind, blake3(msgpack.packb(means)).digest(), shard)

    def objects(self, page_keys: Sequence[bytes]) -> list[ObjectKey]:
        """Return the keys of the objects of these pages in the store."""
        return object_keys(self.kind, self.layout, page_keys)

    def pages(self, indices: torch.Tensor | None, count: int) -> list[int]:
        """Return the first index of each of `count` pages. Raises ValueError unless the indices are that many whole pages of the pool."""
        size = self.page_size
        if indices is None or indices.numel() != count * size:
            raise ValueError(f"{count} pages of {size} do not fit {0 if indices is None else indices.numel()} indices")
        rows = indices.reshape(count, size)
        firsts: list[int] = rows[:, 0].tolist()
        if size > 1 and not torch.equal(rows, rows[:, :1] + torch.arange(size, dtype=rows.dtype, device=rows.device)):
            raise ValueError("the indices of a page do not follow each other")
        if not all(0 <= first <= int(self.pool.size) - size and first % size == 0 for first in firsts):
            raise ValueError("the indices are outside of the pool, or not at the start of a page")
        return firsts

    def buffers(self, indices: torch.Tensor, count: int) -> list[list[memoryview]]:
        """Return the memory of `count` pages, each as a list of parts; the pool must tell addresses (`zero_copy`).

        Raises ValueError for memory that is not the pool's own, and if parts have other sizes than at registration.
        """
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        if sizes != self._sizes * count:
            raise ValueError(f"{count} pages are told to have parts of other sizes than at the registration")
        views, parts = self._views(pointers, sizes), len(self._sizes)
        return [views[i : i + parts] for i in range(0, len(views), parts)]

    def _views(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return views of memory by address and size. Raises ValueError for memory outside of the pool."""
        views = []
        for pointer, size in zip(pointers, sizes, strict=True):
            index = bisect_right(self._starts, pointer) - 1
            start, region = self._regions[index]
            offset = pointer - start
            if index < 0 or offset + size > region.nbytes:
                raise ValueError("a buffer is not in the pool's memory")
            views.append(region[offset : offset + size])
        return views

    def _part_sizes(self) -> list[int] | None:
        """Return the bytes of each part of a page; None for a pool that does not tell addresses within the memory that it shows."""
        if not self._regions:
            return None
        try:
            pointers, sizes = self.pool.get_page_buffer_meta(torch.arange(self.page_size))
            self._views(pointers, sizes)
        except (AttributeError, NotImplementedError, ValueError, AssertionError) as error:
            _log.info("tiercache: pool %s is copied page by page: %s", self.name, error)
            return None
        return [int(size) for size in sizes]


def _has_draft(name: str, pool: Any) -> bool:
    """Return whether a pool holds layers of a draft model, alone or after those of the model itself."""
    layers = getattr(pool, "layer_num", None)
    packed = [getattr(pool, drafts, ()) for drafts in ("mtp_draft_buffer_infos", "mtp_draft_device_pools")]
    return name.startswith("draft") or any(packed) or getattr(pool, "target_layer_num", layers) != layers


def _regions_of(pool: Any) -> list[tuple[int, memoryview]]:
    """Return the memory of the tensors that can hold parts of a page: (address, bytes), sorted by address, without overlaps."""
    held: list[Any] = []
    for name in _BUFFERS:
        found = getattr(pool, name, None)
        held += found if isinstance(found, list | tuple) else [found]
    tensors = [t for t in held if isinstance(t, torch.Tensor) and t.numel() and t.device.type == "cpu" and t.is_contiguous()]
    regions: list[tuple[int, memoryview]] = []
    end = 0
    for start, region in sorted(((t.data_ptr(), flat_bytes(t)) for t in tensors), key=lambda found: (found[0], -found[1].nbytes)):
        if start + region.nbytes > end:
            regions.append((start, region))
            end = start + region.nbytes
    return regions


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor without a copy. Raises ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
