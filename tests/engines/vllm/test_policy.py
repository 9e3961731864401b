"""`hvd` in vLLM's own CPU tier, beside vLLM's own policies: the same contract, by the same random calls."""

from __future__ import annotations

import inspect
from random import Random

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from tiercache.integrations.vllm_connector import register

NAMES = {"lru": None, "arc": None, "hvd": None, "HvdCachePolicy": "tiercache.integrations.vllm_policy"}
PLACES = 8


def keys_of(path: str, group: int = 0) -> list[OffloadKey]:
    """Keys of a sequence: each depends on all before it."""
    return [make_offload_key(path[:end].encode().ljust(64), group) for end in range(1, len(path) + 1)]


class Calls:
    """Calls as vLLM's manager makes them, at random; `chunks` is a plain model of what is stored."""

    def __init__(self, policy: CachePolicy, seed: int) -> None:
        self.policy, self.draw = policy, Random(seed)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self.counts = {"evicted": 0, "refused": 0}
        self.names_request = "req_context" in inspect.signature(CachePolicy.insert).parameters

    def request(self, number: int) -> None:
        context = ReqContext(str(number))
        path = "".join(self.draw.choice("ab") for _ in range(self.draw.randint(1, 9)))
        groups = [keys_of(path), keys_of(path, 1) if self.draw.random() < 0.5 else []]
        for keys in groups:
            for n, key in enumerate(keys):
                context.set_offload_key_position(key, 16 * (n + 1))
        wanted = [*groups[0], *groups[1][-1:]]
        found = [key for key in wanted if key in self.chunks and self.chunks[key].is_ready]
        for key in found:
            if self.chunks[key].ref_cnt == 0:
                self.policy.mark_non_evictable(key)
            self.chunks[key].ref_cnt += 1
        new = [key for key in wanted if key not in self.chunks]
        if new:
            self.policy.on_store_miss(new, context)
        if self.room(len(new), set(wanted)):
            for key in new:
                self.chunks[key] = ChunkStatus(0)
                told = (context,) if self.names_request else ()
                self.policy.insert(key, self.chunks[key], *told)
            for key in new:
                if self.draw.random() < 0.1:  # its store failed
                    self.policy.remove(key)
                    del self.chunks[key]
                else:
                    self.chunks[key].ref_cnt = 0
                    self.policy.mark_evictable(key)
        for key in found:
            self.chunks[key].ref_cnt -= 1
            if self.chunks[key].ref_cnt == 0:
                self.policy.mark_evictable(key)
        if self.draw.random() < 0.9:
            self.policy.on_request_finished([found + new], set(new), set(found), context)

    def room(self, wanted: int, protected: set[OffloadKey]) -> bool:
        """Whether there is room: as many go as are asked for, and none that is protected or used, or none."""
        short = wanted - (PLACES - len(self.chunks))
        if short <= 0:
            return True
        may_go = {key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0} - protected
        gone = self.policy.evict(short, protected)
        assert (gone is None) == (len(may_go) < short)
        taken = [key for key, _ in gone or ()]
        assert len(set(taken)) == len(taken) == (0 if gone is None else short)
        assert set(taken) <= may_go
        assert all(self.chunks.pop(key) is chunk for key, chunk in gone or ())
        self.counts["refused" if gone is None else "evicted"] += 1
        return gone is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_as_many_go_as_are_asked_for_or_none(name: str, seed: int) -> None:
    for _ in range(2):  # vLLM loads plug-ins more than once
        register()
    calls = Calls(CachePolicyFactory.get_cache_policy_cls(name, NAMES[name])(PLACES), seed)
    for number in range(400):
        calls.request(number)
        assert all(calls.policy.get(key) is chunk for key, chunk in calls.chunks.items())
        if number == 300:
            calls.policy.clear()
            calls.chunks.clear()
    assert all(calls.counts.values())
