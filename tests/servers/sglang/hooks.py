"""CPU time of each hook of SGLang's tree and of ours over SGLang's own pools, without a server.

    PYTHONPATH=.:lab:tests/servers/sglang/stand_ins PYTHON -m tests.servers.sglang.hooks MODEL COUNT SOURCE

PYTHON is that of SGLang's environment, with SGLANG_USE_CPU_ENGINE=1; MODEL is the folder of a Qwen3-Next;
COUNT and SOURCE are those of `drive`. The trees get each request in turn. One JSON line each: the share of
tokens that was cached, a digest of all hits, and by hook the calls of a request, microseconds of one, and the
ratio to SGLang's tree.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections import defaultdict
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, SamplingParams
from sglang.srt.mem_cache import memory_pool, registry, unified_radix_cache
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_radix_cache import ComponentType, EvictParams, MatchPrefixParams, RadixKey
from sglang.srt.server_args import ServerArgs

from tests.servers.sglang.drive import NEW, PAGE, PAGES, STATES, prompts
from tiercache.integrations.sglang_tree.tree import TierCacheTree


def make_tree(name: str, model: str) -> Any:
    policy = json.dumps({"policy": name})
    server = ServerArgs(model, device="cpu", page_size=PAGE, hicache_storage_backend_extra_config=policy)
    runtime_context._CONTEXT.set_server_args(server)  # private: nothing public does without processes
    states = Qwen3NextConfig.from_pretrained(model).mamba2_cache_params
    layers, size, dtype = states.layers, PAGES * PAGE, torch.float32
    rows = memory_pool.HybridReqToTokenPool(
        size=4, mamba_size=STATES, mamba_spec_state_size=0, max_context_len=4096, device="cpu",
        enable_memory_saver=False, cache_params=states, mamba_layer_ids=layers,
        enable_mamba_extra_buffer=True, enable_overlap_schedule=False,
    )  # fmt: skip
    kv = memory_pool.HybridLinearKVPool(size, dtype, PAGE, 2, 16, [3], "cpu", rows.mamba_pool)
    pages = PagedTokenToKVPoolAllocator(size, PAGE, dtype, "cpu", kv, need_sort=False)
    parts = (ComponentType.FULL, ComponentType.MAMBA)
    params = registry.CacheInitParams(
        False, rows, pages, PAGE, tree_components=parts, enable_mamba_extra_buffer=True
    )
    if name == "sglang":
        return unified_radix_cache.UnifiedRadixCache(params)
    other = SimpleNamespace(weight_update_runners=list, model_path=model)
    return TierCacheTree(
        registry.TreeCacheBuildContext(server, params, False, True, False, False, other, other, 1, 0, None)
    )


class Scheduler:
    """Scheduler that serves one request at a time; `spent` has calls and nanoseconds by hook."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.spent = tree, defaultdict[str, Any](lambda: np.zeros(2))

    def call(self, hook: str, *arguments: Any, **more: Any) -> Any:
        began = time.thread_time_ns()
        answer = getattr(self.tree, hook)(*arguments, **more)
        self.spent[hook] += 1, time.thread_time_ns() - began
        return answer

    def ask(self, prompt: list[int]) -> int:
        """Serve a request, and return how many of its tokens were cached."""
        rows, pages = self.tree.req_to_token_pool, self.tree.token_to_kv_pool_allocator
        ids, count = array("q", [*prompt, *range(3, 3 + NEW)]), len(prompt)
        req = Req("", "", ids[:count], SamplingParams(max_new_tokens=NEW))
        key, kv = RadixKey(ids[:count], None, limit=count - 1), req.kv
        match = self.call("match_prefix", MatchPrefixParams(key=key, cow_mamba=True, req=req))
        hit = kv.cache_protected_len = match.device_prefix_len
        for _ in range(20):  # as often as SGLang asks for the batches of a prefill
            self.call("mamba_evictable_size")
        req.last_node, req.lock = match.last_device_node, self.call("lock", match.last_device_node)
        if (short := 3 - kv.holds_mamba - rows.mamba_allocator.available_size()) > 0:
            self.call("evict_for_alloc", EvictParams(mamba_num=short))
        (row,) = rows.alloc([req])
        need = -(-len(ids) // PAGE) * PAGE - hit
        if need > pages.available_size():
            self.call("evict_for_alloc", EvictParams(num_tokens=need - pages.available_size()))
        if hit:
            rows.req_to_token[row, :hit] = self.call("path_device_indices", req.last_node)[:hit]
        rows.req_to_token[row, hit : hit + need] = pages.alloc(need)
        end = match.mamba_branching_seqlen or count // PAGE * PAGE
        kv.kv_allocated_len, kv.mamba_last_track_seqlen = hit + need, end if end > hit else None
        req.full_untruncated_fill_ids = ids[:count]
        self.call("checkpoint", req, up_to=count)
        req.full_untruncated_fill_ids, req.finished_reason = ids, FINISH_LENGTH(NEW)
        self.call("checkpoint", req, up_to=len(ids) - 1)
        pages.free(rows.req_to_token[row, kv.cache_protected_len : hit + need].to(torch.int64))
        self.call("unlock", req.lock)
        self.tree.on_release(req, checkpointed=True)
        rows.free(req)
        return int(hit)


def main(model: str, count: str, source: str) -> None:
    """Print a row for each tree."""
    torch.set_num_threads(1)
    asked = list(prompts(source, int(count)))
    trees = {name: Scheduler(make_tree(name, model)) for name in ("sglang", "lru", "hvd")}
    hits = [[tree.ask(prompt) for tree in trees.values()] for prompt in asked]
    peer: dict[str, float] = {}
    for (name, tree), cached in zip(trees.items(), zip(*hits, strict=True), strict=True):
        row: dict[str, Any] = {"tree": name, "share": round(sum(cached) / sum(map(len, asked)), 4)}
        row["hits"] = sha256(json.dumps(cached).encode()).hexdigest()[:8]
        tree.spent["all"] = len(asked), sum(ns for _, ns in tree.spent.values())
        for hook, (n, ns) in tree.spent.items():
            us = ns / n / 1e3
            row[hook] = [round(n / len(asked), 2), round(us, 1), round(us / peer.setdefault(hook, us), 2)]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
