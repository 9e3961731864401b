"""Stand-ins for what SGLang 0.5.23 has for CUDA only, so that it serves on a CPU: a plug-in of SGLang.

Copies between device and host pools are kernels for CUDA; torch's indexing is in their place, and torch code
in that of Qwen3-Next's kernels. Nothing of SGLang's scheduler, trees, controllers and storage is replaced.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_loaded = False


def load() -> None:
    """Put the stand-ins in place, once in each process."""
    global _loaded
    if not _loaded:
        _loaded = True
        _copies()
        _states()
        _pinned_memory()
        if file := os.environ.get("TIERCACHE_HOOK_TIMES"):
            _hook_times(Path(file))


def _at(indices: Tensor) -> Tensor:
    return indices.to(device="cpu", dtype=torch.long)


def _copies() -> None:
    """Copy between the pools of device and host by indexing."""
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def place(pool: Any, which: int, layer: int, rows: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Return a tensor of the host pool, and the index of the rows of one layer in it."""
        buffer = pool.kv_buffer[which]
        if pool.layout == "layer_first":
            return buffer[layer], (rows,)
        if pool.layout == "page_first":
            return buffer, (rows, layer)
        assert pool.layout == "page_first_direct", f"no stand-in copies the layout {pool.layout}"
        return buffer, (rows // pool.page_size, layer, rows % pool.page_size)

    def load_layer(
        pool: Any, device_pool: Any, host_rows: Any, rows: Any, layer: int, _: Any, *, is_draft: bool = False
    ) -> None:
        if is_draft or 0 <= layer < pool.target_layer_num:
            for which, buffers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
                host, index = place(pool, which, layer, _at(host_rows))
                buffers[layer][_at(rows)] = host[index]

    def back_up(pool: Any, device_pool: Any, host_rows: Any, rows: Any, _: Any) -> None:
        for which, buffers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
            for layer in range(pool.layer_num):
                host, index = place(pool, which, layer, _at(host_rows))
                host[index] = buffers[layer][_at(rows)]

    # SGLang passes these by name.
    def load_states(
        src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, *_: Any, **__: Any
    ) -> None:
        if src_indices.numel():
            dst[_at(dst_indices)] = src[_at(src_indices), layer_id].reshape(-1, *dst.shape[1:])

    def back_up_states(
        src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, num_layers: int, *_: Any, **__: Any
    ) -> None:
        if src_indices.numel():
            for layer in range(num_layers):
                taken = src_layers[layer][_at(src_indices)]
                dst[_at(dst_indices), layer] = taken.reshape(-1, *dst.shape[2:])

    common._cuda_host_register = common._cuda_host_unregister = lambda *_, **__: None
    MHATokenToKVPoolHost.load_to_device_per_layer = load_layer
    MHATokenToKVPoolHost.backup_from_device_all_layer = back_up
    MambaPoolHost._copy_tensor_pf_lf = staticmethod(load_states)
    MambaPoolHost._copy_tensor_all_layers_lf_pf = staticmethod(back_up_states)


def _states() -> None:
    """Compute a Qwen3-Next, and let its prefill keep states as on a GPU (SGLang's `extra_buffer`)."""
    import sgl_kernel.mamba  # noqa: F401  puts its operations in place
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    def norm(self: Any, x: Tensor, g: Tensor, *_: Any, **__: Any) -> Tensor:
        made = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        activate = torch.sigmoid if self.activation == "sigmoid" else torch.nn.functional.silu
        return (made * self.weight.float() * activate(g.float())).to(x.dtype)

    def gate(x: Tensor, weight: Tensor, shared: Tensor, output: Tensor, *, do_add: bool) -> None:
        made = shared.float() * torch.sigmoid(x.float() @ weight.float())[:, None]
        output.copy_((output.float() + made if do_add else made).to(output.dtype))

    def tracker(*, all_layers: bool) -> Callable[..., None]:
        """A function that copies states from the slots of running requests to those that the tree keeps."""

        def track(
            conv: Tensor, ssm: Tensor, sources: Any, mask: Any, targets: Any, batch: int, *_: Any, **__: Any
        ) -> None:
            for n in mask[:batch].nonzero().flatten().tolist():
                source, target = int(sources[n]), int(targets[n])
                if source >= 0 and target >= 0:
                    for states in (conv, ssm):
                        view = states if not all_layers else states.transpose(0, 1)
                        view[target] = view[source]

        return track

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    fused_norm_gate.FusedRMSNormGated.forward = norm
    elementwise._launch_fused_gate_sigmoid_mul = gate
    for module in (mamba_state_scatter_triton, hybrid_linear_attn_backend):
        module.track_mamba_states_if_needed = tracker(all_layers=False)
        module.track_mamba_states_all_layers = tracker(all_layers=True)


def _pinned_memory() -> None:
    """Leave memory unpinned, which torch refuses to pin without CUDA."""
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    for name in ("zeros", "empty", "tensor", "full", "ones"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def unpinned(*arguments: Any, **more: Any) -> Tensor:
        more.pop("pin_memory", None)
        return make(*arguments, **more)

    return unpinned


HOOKS = (
    "match_prefix", "inc_lock_ref", "dec_lock_ref", "checkpoint", "evict", "evict_for_alloc",
    "evictable_size", "mamba_evictable_size", "path_device_indices", "init_load_back", "check_hicache_events",
)  # fmt: skip
"""Calls of the scheduler on its tree of prefixes."""


def _hook_times(file: Path) -> None:
    """Write the number and the CPU microseconds of each hook of the tree, whichever it is, to `file`."""
    from sglang.srt.mem_cache import registry

    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    depth = 0

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*arguments: Any, **more: Any) -> Any:
            nonlocal depth
            depth, began = depth + 1, time.thread_time()
            try:
                return call(*arguments, **more)
            finally:
                depth -= 1
                if not depth:  # what a hook calls itself counts as its own
                    spent[name][0] += 1
                    spent[name][1] += (time.thread_time() - began) * 1e6
                    if name == "checkpoint":
                        file.write_text(json.dumps(spent))

        return hook

    def making(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            tree = make(*arguments)
            for name in HOOKS:
                setattr(tree, name, timed(name, getattr(tree, name)))
            return tree

        return made

    found = registry.get_radix_cache_factory
    registry.default_radix_cache_factory = making(registry.default_radix_cache_factory)
    registry.get_radix_cache_factory = lambda name: (make := found(name)) and making(make)
