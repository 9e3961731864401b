"""SGLang's own host pools and controller on a CPU, but for streams of a device and the launcher of ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt import runtime_context
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tiercache.integrations import sglang_server as server

PAGE, PAGES, SLOTS = 16, 40, 12
MODEL = "some/model"
KV_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MAMBA_LAYOUTS = ["page_first", "page_first_direct"]
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]


def kv_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    layers: int = 3,
    pages: int = PAGES,
    heads: int = 2,
    page: int = PAGE,
    dim: int = 64,
) -> Any:
    """A host pool of `pages` pages, filled with noise."""
    tensors = [
        torch.zeros(page * 4, heads, dim, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
        for _ in range(2 * layers)
    ]
    pointers = torch.zeros(layers, dtype=torch.uint64)
    buffers = KVBuffers(
        k=tuple(tensors[:layers]),
        v=tuple(tensors[layers:]),
        k_data_ptrs=pointers,
        v_data_ptrs=pointers,
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=page, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = MHATokenToKVPoolHost(
        info, 2.0, 0, page, layout, pin_memory=False, device_capacity_tokens=page * pages // 2,
        start_layer=0, end_layer=layers,
    )  # fmt: skip
    fill(pool)
    return pool


def mla_pool(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> Any:
    """A host pool of latent attention's pages, filled with noise."""
    buffers = tuple(torch.zeros(PAGE * 4, 1, 576, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=torch.zeros(layers, dtype=torch.uint64),
        layer_indices=tuple(range(layers)), device_layer_num=layers,
        page_size=PAGE, kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dim=576, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE * PAGES // 2, start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
    )  # fmt: skip
    fill(pool)
    return pool


@contextlib.contextmanager
def server_says(kv_cache_dtype: str = "auto", **more: Any) -> Iterator[dict[str, Any]]:
    """A process in which SGLang has published its configuration, as servers do before they make pools."""
    model = dict.fromkeys(server.MODEL_SETTINGS) | {
        "model_path": "some/model",
        "quantization_param_path": None,
        "dtype": "auto",
    }
    spec = dict.fromkeys(server.DRAFT_SETTINGS) | {
        name: value for name, value in more.items() if name.startswith("speculative")
    }
    model |= {"kv_cache_dtype": kv_cache_dtype} | {
        name: value for name, value in more.items() if name not in spec
    }
    bags = {"model": SimpleNamespace(**model), "spec": SimpleNamespace(**spec)}
    # private: SGLang publishes its configuration from a whole server's arguments only
    with mock.patch.object(runtime_context._CONTEXT, "_config_bags", bags):
        yield bags


@contextlib.contextmanager
def started_with(**settings: Any) -> Iterator[None]:
    """A server that was started with these settings of a store, and not one to which it is attached later."""
    memory = SimpleNamespace(
        hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=json.dumps(settings)
    )
    context = runtime_context._CONTEXT  # private: as in `server_says`
    with mock.patch.object(context, "_config_bags", (context._config_bags or {}) | {"memory": memory}):
        yield


def mamba_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.float32,
    conv: torch.dtype = torch.bfloat16,
    *,
    side: bool = False,
) -> Any:
    """A host pool of `SLOTS` states of noise; `side` adds something for which SGLang has no addresses."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(4, 6, 8, 16, 16, dtype=dtype),
        conv=(torch.zeros(4, 6, 40, 3, dtype=conv),),
        extra_checkpoint_buffers=(torch.zeros(6, 5),) if side else (),
    )
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=SLOTS // 2, pin_memory=False, layout=layout)
    fill(pool)
    return pool


def fill(pool: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in (
        pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    ):
        flat = buffer.reshape(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def wipe(pool: Any, *pages: int) -> None:
    for index in pages:
        pool.set_from_flat_data_page(
            index * (pool.page_size or 1), torch.zeros_like(pool.get_dummy_flat_data_page())
        )


def keys(*names: object) -> list[str]:
    """Page hashes as SGLang makes them: SHA-256 in hex."""
    return [hashlib.sha256(repr(name).encode()).hexdigest() for name in names]


def rows(*pages: int, size: int = PAGE) -> torch.Tensor:
    """The host indices of these pages."""
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def page(pool: Any, index: int) -> bytes:
    """The bytes of one page, through SGLang's own eyes."""
    return bytes(
        pool.get_data_page(index * (pool.page_size or 1), flat=True).contiguous().view(torch.uint8).numpy()
    )


def extra_config(url: str, **settings: Any) -> dict[str, Any]:
    """Make the value that an operator passes as --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "tiercache", "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage", "interface_v1": 1,
        "storage": url, "revision": "r1",
    } | settings  # fmt: skip


OPENED: list[Any] = []
"""Backends that are closed at the end of a test, if the test does not."""


def backend(
    url: str, kv: Any, mamba: Any = None, *, rank: int = 0, size: int = 1, mla: bool = False,
    model: str = MODEL,
    metrics: bool = False, more: dict[Any, Any] | None = None, stage: tuple[int, int] = (0, 1),
    context: tuple[int, int] = (0, 1),
    **settings: Any,
) -> Any:  # fmt: skip
    """A backend as the controller makes and registers one, through SGLang's own factory."""
    config = HiCacheStorageConfig(
        tp_rank=rank, tp_size=size, pp_rank=stage[0], pp_size=stage[1], attn_cp_rank=context[0],
        attn_cp_size=context[1],
        is_mla_model=mla, enable_storage_metrics=metrics,
        is_page_first_layout=True, model_name=model, extra_config=extra_config(url, **settings),
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, kv)
    OPENED.append(made)
    try:
        with started_with(hicache_storage_pass_prefix_keys=True):
            made.register_mem_pool_host(kv)
    except ValueError:
        made.close()  # as the controller does
        raise
    pools = {PoolName.KV: kv} | ({PoolName.MAMBA: mamba} if mamba is not None else {}) | (more or {})
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    made.on_host_pools_registered()
    return made


def state_at(key: str, slot: int) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName.MAMBA,
        host_indices=torch.tensor([slot]),
        keys=[key],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


def store_of(made: Any) -> Any:
    """The store below a storage backend."""
    # private: SGLang's interface tells neither the parents of pages nor what is stored of other models
    return made._store


def page_keys_of(made: Any, names: Sequence[str]) -> list[bytes]:
    """The keys under which a storage backend stores these pages."""
    # private: SGLang knows its own hashes of pages only
    return list(made._keys.keys_of(names))


def any_state() -> PoolTransfer:
    """How a query names a pool of states: only the number of keys counts."""
    return PoolTransfer(
        name=PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


class _Event:
    """Stand-in on the CPU for a device's event and stream; all work is complete at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Devices(SimpleNamespace):
    __name__ = "cpu"
    Event = _Event
    Stream = _Event

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_event=lambda _: None)


@contextlib.contextmanager
def on_a_cpu(rank: int = 0, size: int = 1) -> Iterator[None]:
    """The four replaced symbols, for a controller of tensor-parallel rank `rank` of `size`."""
    parallel = SimpleNamespace(
        attn_dcp_size=1, attn_dcp_rank=0, tp_rank=rank, tp_size=size, attn_tp_rank=rank, attn_tp_size=size,
        attn_dp_rank=0, pp_rank=0,
        pp_size=1,
    )  # fmt: skip
    with (
        mock.patch.object(cache_controller, "device_module", _Devices()),
        mock.patch.object(l2_transfer, "device_module", _Devices()),
        mock.patch.object(cache_controller, "get_parallel", return_value=parallel),
        mock.patch.object(cache_controller, "is_dp_attention_enabled", return_value=False),
    ):
        yield


def controller(kv: Any, mamba: Any, group: Any, layers: int = 3) -> HybridCacheController:
    """SGLang's controller over these host pools; nothing is attached yet."""
    device = MHATokenToKVPool(
        size=PAGE * 4, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=64, layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    entries = [PoolEntry(PoolName.KV, kv, device, lambda layer: layer, is_primary_index_anchor=True)]
    if mamba is not None:
        entries.append(PoolEntry(PoolName.MAMBA, mamba, None, lambda layer: layer))
    return HybridCacheController(
        SimpleNamespace(get_kvcache=lambda: device), HostPoolGroup(entries), PAGE, group,
        threading.Event(), model_name=MODEL,
    )  # fmt: skip


def attach(made: HybridCacheController, url: str, **settings: Any) -> None:
    made.attach_storage_backend(
        "dynamic", prefetch_threshold=PAGE, model_name=MODEL,
        storage_backend_extra_config=extra_config(url, **settings),
        host_pools=made.mem_pool_host.entries,
    )  # fmt: skip


def write(
    made: HybridCacheController,
    tokens: Sequence[int],
    hashes: list[str],
    pages: Sequence[int],
    states: dict[int, int],
) -> Any:
    """Back up pages of the KV, and states, from slots by page number; return the acknowledged operation."""
    transfers = [state_at(hashes[at], slot) for at, slot in states.items()]
    made.write_storage(
        rows(*pages), list(tokens), hash_value=hashes, prefix_keys=[], extra_pools=transfers or None
    )
    return made.ack_backup_queue.get(timeout=60)


def hashed(tokens: Sequence[int]) -> tuple[RadixKey, list[str]]:
    """Tokens as SGLang's tree names them, and the hashes of their pages."""
    key = RadixKey(array("q", tokens))
    return key, get_storage_hash_str(key, None, page_size=PAGE)


def query(made: HybridCacheController, key: RadixKey, *transfers: PoolTransfer) -> Any:
    """Ask storage what it has of a sequence; returns the operation with its hit."""
    made.prefetch(SimpleNamespace(rid="request"), key, None, None, extra_pools=list(transfers) or None)
    return made.prefetch_hit_queue.get(timeout=60)


def fetch(made: HybridCacheController, operation: Any, pages: Sequence[int]) -> tuple[int, dict[str, int]]:
    """Bring a hit into these pages, as the tree would; return the tokens that came, and each sidecar's."""
    operation.host_indices = rows(*pages)
    made.prefetch_buffer.put(operation)
    tokens, hits = 0, {}
    while True:
        ack = made.ack_prefetch_queue.get(timeout=60)
        tokens = tokens if ack.completed_tokens is None else ack.completed_tokens
        hits = hits if ack.pool_hits is None else ack.pool_hits
        if ack.completed_req:
            return tokens, hits


TOKENS = range(PAGE * 6)


class Engine:
    """SGLang's controller over pools of noise, of which six pages and a state are stored and come back."""

    def __init__(self, group: Any, kv: Any = None, mamba: Any = None) -> None:
        self.kv, self.mamba = kv or kv_pool(), mamba or mamba_pool()
        self.made = controller(self.kv, self.mamba, group)
        self.expected, self.state = [page(self.kv, i) for i in range(6)], page(self.mamba, 2)

    @property
    def store(self) -> Any:
        return store_of(self.made.storage_backend)

    @property
    def objects(self) -> int:
        return int(self.store.usage().objects)

    def attach(self, url: Any, **settings: Any) -> None:
        attach(self.made, url, **settings)

    def detach(self) -> None:
        if self.made.storage_backend is not None:
            self.made.detach_storage_backend()

    def write(self, tokens: Sequence[int] = TOKENS, state: int = 5) -> Any:
        """Back up six pages, and a state at one of them; return the tokens that were stored."""
        return write(self.made, tokens, hashed(tokens)[1], range(6), {state: 2}).completed_tokens

    def query(self, tokens: Sequence[int] = TOKENS) -> Any:
        """Ask for what can be restored of these tokens, with a state."""
        return query(self.made, hashed(tokens)[0], any_state())

    def hit(self, tokens: Sequence[int] = TOKENS) -> int:
        """Return the tokens that storage has, by a query."""
        return int(self.query(tokens).storage_hit_count)

    def restored(self, tokens: Sequence[int] = TOKENS) -> tuple[int, int]:
        """Return the pages and states that come back, all compared; a query may still name what was lost."""
        found = self.query(tokens)
        pages = found.storage_hit_count // PAGE
        if not pages:
            return 0, 0
        found.pool_transfers[0].host_indices = torch.tensor([7])
        wipe(self.kv, *range(20, 20 + pages))
        wipe(self.mamba, 7)
        tokens_here, hits = fetch(self.made, found, range(20, 20 + pages))
        arrived, states = tokens_here // PAGE, hits.get("mamba", 0)
        assert [page(self.kv, 20 + i) for i in range(arrived)] == self.expected[:arrived]
        assert not states or page(self.mamba, 7) == self.state
        return arrived, states


@contextlib.contextmanager
def group_of_one(directory: Path) -> Iterator[Any]:
    """A process group that agrees with itself."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/group", rank=0, world_size=1
    )
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()
