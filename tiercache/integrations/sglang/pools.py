"""Pages of SGLang's host pools: their keys, their parts, and the memory that holds their bytes.

A page has one part for each place in memory, such as the keys of one layer. If a pool gives the addresses of
these parts (`get_page_buffer_meta`), transfers use the pool's memory without a copy. Otherwise transfers use
flat pages: SGLang copies a page into a tensor of one dimension, or out of it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from struct import unpack
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgpack
import numpy as np
import torch
from blake3 import blake3

from tiercache.core import ObjectKey, PoolName
from tiercache.keys import KEY_BYTES, Shard, layout_digest, object_keys, sglang_mask

if TYPE_CHECKING:  # so that this module can be loaded where SGLang is not installed
    from tiercache.integrations.sglang_server import Server

_log = logging.getLogger(__name__)

_FACTS: Final = (
    "layout", "dtype", "temporal_dtype", "conv_dtype", "layer_num", "num_mamba_layers", "head_num",
    "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "conv_state_shapes", "temporal_state_shape",
    "storage_format_tag", "start_layer",
    "end_layer", "target_layer_num", "head_group_num", "indexer_dtype", "dcp_size", "dcp_rank",
)  # fmt: skip
"""Attributes of host pools that determine what the pools' bytes mean.

The layout digest of a pool covers those of the attributes that the pool has.
"""

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
"""Names of trailing pools: a prefix needs only their last pages."""

_BUFFERS: Final = (
    "kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer", "index_k_buffer",
    "index_k_scale_buffer",
    "index_k_with_scale_buffer",
)  # fmt: skip
"""Attributes of host pools that hold a tensor or several tensors."""


class PageKeys:
    """Conversion of SGLang's page hashes to page keys that are bound to one namespace.

    SGLang names a page by the SHA-256 of its prefix, in hex. The hash depends on the tokens only, not on the
    model. So the page key is the hash XOR a digest of the namespace:

        page key  =  SHA-256 of the prefix  XOR  digest of the namespace          32 bytes each

    Within a namespace, different hashes give different keys. Keys of two namespaces are equal only if the two
    hashes differ in exactly the bits in which the two digests differ. This does not happen by chance. XOR
    takes 0.08 us per page; hashing again would take 0.36 us.

    Thread safety: immutable.
    """

    def __init__(self, namespace: bytes) -> None:
        self._mask = np.frombuffer(sglang_mask(namespace), np.uint64)

    def keys_of(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the page keys, 32 bytes each, for SGLang's names of pages.

        Raises ValueError for a name that is not 64 hex digits.
        """
        if not hashes:
            return []
        raw = bytes.fromhex("".join(hashes))
        if len(raw) != len(hashes) * KEY_BYTES or any(len(name) != 2 * KEY_BYTES for name in hashes):
            raise ValueError("SGLang names a page by something else than a SHA-256 in hex")
        mixed = np.frombuffer(raw, np.uint64).reshape(-1, len(self._mask)) ^ self._mask
        return list(unpack(f"{KEY_BYTES}s" * len(hashes), mixed.data))

    def sha_of(self, page_key: bytes) -> bytes:
        """Return the SHA-256, 32 bytes, that SGLang gave to the page with this key."""
        mixed: bytes = (np.frombuffer(page_key, np.uint64) ^ self._mask).tobytes()
        return mixed


def kind_of(name: str) -> PoolName | None:
    """Return the cache kind of a host pool; None for a pool that is not kept."""
    return _KINDS.get(name)


def is_trailing(name: str) -> bool:
    """Return whether a prefix needs only the last pages of this host pool, and not all of them."""
    return name in _TRAILING


class HostPages:
    """Pages of one host pool.

    Construction raises ValueError for a pool that cannot be kept, and any exception that the pool itself
    raises.

    Thread safety: any thread may call, for pages that no other thread uses.
    """

    def __init__(self, name: str, pool: Any, namespace: bytes, server: Server, shard: Shard) -> None:
        kind = kind_of(name)
        if kind is None:
            raise ValueError("its kind is not known")
        self.name, self.kind, self.pool = name, kind, pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._regions = _regions_of(pool)
        self._starts = [start for start, _ in self._regions]  # addresses, in rising order for `bisect`
        sizes = self._part_sizes()
        self.zero_copy = sizes is not None
        """Whether transfers use the pool's memory without a copy.

        If True, the bytes of a stored page have the order of the parts in `get_page_buffer_meta`. If False,
        they have the order of the flat page.
        """
        if sizes is None:
            pool.get_data_page(0, flat=True)  # raises now, at registration, if the layout has no flat pages
            page = pool.get_dummy_flat_data_page()
            sizes = [page.numel() * page.element_size()]
        self._sizes = sizes
        self.nbytes = sum(sizes)
        """Number of bytes of a page."""
        if not self.nbytes:
            raise ValueError("a page of it has no bytes")
        facts = {fact: str(getattr(pool, fact)) for fact in _FACTS if hasattr(pool, fact)}
        # Some pools copy the rows of device buffers as they are, so the layout of these buffers counts too.
        facts["device layouts"] = str([info.buffers.layout for info in getattr(pool, "_buffer_infos", ())])
        means = [name, type(pool).__name__, sorted(facts.items()), self.page_size, self.zero_copy, sizes]
        means += [server.facts(draft=_has_draft(name, pool)), namespace]
        self.layout = layout_digest(kind, blake3(msgpack.packb(means)).digest(), shard)
        """Layout digest of the pages' object keys: it covers everything on which the bytes depend."""

    def objects(self, page_keys: Sequence[bytes]) -> list[ObjectKey]:
        """Return the object keys of these pages."""
        return object_keys(self.kind, self.layout, page_keys)

    def pages(self, indices: torch.Tensor | None, count: int) -> list[int]:
        """Return the first index of each of `count` pages.

        Raises ValueError unless the indices are `count` whole pages of the pool. With pages of 4 tokens:

            indices    8  9 10 11 | 20 21 22 23        2 pages; the result is [8, 20]
        """
        size, given = self.page_size, 0 if indices is None else indices.numel()
        if indices is None or given != count * size:
            raise ValueError(f"{count} pages of {size} do not fit {given} indices")
        rows = indices.reshape(count, size)
        firsts: list[int] = rows[:, 0].tolist()
        offsets = torch.arange(size, dtype=rows.dtype, device=rows.device)
        if size > 1 and not torch.equal(rows, rows[:, :1] + offsets):
            raise ValueError("the indices of a page do not follow each other")
        if not all(0 <= first <= int(self.pool.size) - size and first % size == 0 for first in firsts):
            raise ValueError("the indices are outside of the pool, or not at the start of a page")
        return firsts

    def buffers(self, indices: torch.Tensor, count: int) -> list[list[memoryview]]:
        """Return the memory of `count` pages, each page as a list of parts.

        The caller guarantees `zero_copy`. Raises ValueError for memory outside of the pool, and if parts have
        other sizes than at registration.
        """
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        if sizes != self._sizes * count:
            raise ValueError(f"the parts of {count} pages have other sizes now than at registration")
        views, parts = self._views(pointers, sizes), len(self._sizes)
        return [views[i : i + parts] for i in range(0, len(views), parts)]

    def _views(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Return views of memory, given by address and size; raise ValueError if it is not in the pool."""
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
        """Return the number of bytes of each part of a page.

        Returns None for a pool that gives no addresses, or addresses outside the memory of its tensors.
        """
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
    """Return whether a pool holds layers of a draft model, alone or after the model's own layers."""
    layers = getattr(pool, "layer_num", None)
    packed = [getattr(pool, drafts, ()) for drafts in ("mtp_draft_buffer_infos", "mtp_draft_device_pools")]
    return name.startswith("draft") or any(packed) or getattr(pool, "target_layer_num", layers) != layers


def _regions_of(pool: Any) -> list[tuple[int, memoryview]]:
    """Return (address, bytes) of each tensor that can hold parts of a page, sorted by address.

    A tensor that lies inside another one is left out.
    """
    held: list[Any] = []
    for name in _BUFFERS:
        found = getattr(pool, name, None)
        held += found if isinstance(found, list | tuple) else [found]
    tensors = [t for t in held if isinstance(t, torch.Tensor) and t.numel() and t.device.type == "cpu"]
    places = [(t.data_ptr(), flat_bytes(t)) for t in tensors if t.is_contiguous()]
    # Of the tensors at one address the longest comes first, so that the others count as inside it.
    regions: list[tuple[int, memoryview]] = []
    end = 0  # the address after the last byte of the tensors so far
    for start, region in sorted(places, key=lambda found: (found[0], -found[1].nbytes)):
        if start + region.nbytes > end:
            regions.append((start, region))
            end = start + region.nbytes
    return regions


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor without a copy. Raises ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


_KEPT: Final = 1024
"""Maximum number of samples between two calls of `take_samples`, for reads and for writes each.

If there are more, the oldest are dropped.
"""


class Traffic:
    """Totals of the pages read and written, for each pool.

    `sampled`: keep a sample of each call that moved pages, until the next `take_samples`: number of pages,
    and their speed in units of 10^9 bytes per second.

    Thread safety: any thread may call.
    """

    def __init__(self, *, sampled: bool) -> None:
        self._sampled = sampled
        self._lock = Lock()
        self._totals: Counter[tuple[str, str, str]] = Counter()
        self._samples = {way: deque[tuple[int, float]](maxlen=_KEPT) for way in ("read", "write")}

    def count(self, way: str, pool: str, wanted: int, moved: int, nbytes: int, seconds: float) -> None:
        """Count a read or a write of `wanted` pages, of which `moved` pages of `nbytes` bytes each moved.

        `way`: "read" or "write". A page moves if it is found, or newly stored.
        """
        with self._lock:
            self._totals[pool, way, "wanted"] += wanted
            self._totals[pool, way, "moved"] += moved
            if self._sampled and moved:
                self._samples[way].append((moved, moved * nbytes / 1e9 / max(seconds, 1e-9)))

    def summary(self) -> str:
        """Return the totals as text, one phrase per pool; empty if nothing was read or written."""
        with self._lock:
            total = self._totals.copy()
        return "; ".join(
            f"pool {pool}: {total[pool, 'read', 'moved']} of {total[pool, 'read', 'wanted']} pages read,"
            f" {total[pool, 'write', 'moved']} stored of {total[pool, 'write', 'wanted']} written"
            for pool in sorted({pool for pool, *_ in total})
        )

    def take_samples(self) -> Any:
        """Return the samples as SGLang's StorageMetrics, and forget them."""
        # Import StorageMetrics only when it is needed: the import loads half of SGLang.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            reads, writes = (list(self._samples[way]) for way in ("read", "write"))
            for calls in self._samples.values():
                calls.clear()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in reads],
            backup_pgs=[pages for pages, _ in writes],
            prefetch_bandwidth=[speed for _, speed in reads],
            backup_bandwidth=[speed for _, speed in writes],
        )
