"""`hvd` in a real KVCR, whose copies NIXL makes: what it keeps, and that nothing it is told breaks it."""

from __future__ import annotations

import random
import uuid
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.policy import KVCachePolicy, LRUPolicy
from kvcr.types import (
    BlockKey,
    BlockMeta,
    CacheTier,
    MemoryRef,
    PlacementAction,
    QueryStatus,
    RegionDescriptor,
)

from tests.waiting import until
from tiercache.integrations.kvcr import G3HvdPolicy, HvdPolicy

NBYTES, SLOTS, ROWS = 256, 24, 16


class Cache:
    """A KVCR with memory of its own for some blocks; a block's bytes are made of its key."""

    def __init__(self, policy: KVCachePolicy) -> None:
        self.rows, self.own = np.zeros((ROWS, NBYTES), np.uint8), np.zeros((SLOTS, NBYTES), np.uint8)
        self.name = f"test-{uuid.uuid4()}"
        region = RegionDescriptor(addr=self.rows.ctypes.data, size=NBYTES, count=ROWS)
        self.kvcr = KVCR(
            KVCRConfig(
                nixl_agent_name=self.name,
                pool_layouts=[("", NBYTES)],
                nixl_listen_port=0,
                operation_timeout_ms=20_000,
                abandon_timeout_ms=40_000,
            ),
            KVCRBindings(lambda keys: 0, lambda: (), lambda handle: True, policy=policy),
            KVCRBackendConfigs([region], LocalDramOptions([("", self.own.ctypes.data, self.own.nbytes)])),
        )

    def run(self, keys: list[BlockKey], *, store: bool) -> bool:
        """Store blocks, or load them and compare; return whether all of it was done."""
        for row, key in enumerate(keys):
            self.rows[row] = np.frombuffer((key * NBYTES)[:NBYTES], np.uint8) if store else 0
        call = self.kvcr.deposit if store else self.kvcr.deliver
        places = [[MemoryRef(end_point_name=self.name, element_index=row)] for row in range(len(keys))]
        handle, found = call(dict(zip(keys, places, strict=True))), []
        until(lambda: found.extend(op for op in self.kvcr.poll_completed() if op[0] == handle) or found)
        done = all(entry.success for _, entries in found for entry in entries.values())
        if done:
            assert all(bytes(self.rows[row]) == (key * NBYTES)[:NBYTES] for row, key in enumerate(keys))
        return done

    def close(self) -> None:
        self.kvcr.close()

    def serve(self, keys: list[BlockKey], *, align: bool = True) -> int:
        """Load what is there of a prompt, store the rest; return the number of blocks that hit."""
        hits = 0
        for status, _ in self.kvcr.query(keys):
            if status is not QueryStatus.HIT:
                break
            hits += 1
        assert not hits or self.run(keys[:hits], store=False)
        self.run(keys, store=True)
        if align:
            self.kvcr.align_sequence(keys, True)
        return hits


def keys_of(path: str) -> list[BlockKey]:
    return [BlockKey(path[:end].encode().rjust(16, b"-")) for end in range(1, len(path) + 1)]


@pytest.mark.parametrize("align", [True, False])
def test_the_policy_follows_what_kvcr_stores(align: bool, caplog: pytest.LogCaptureFixture) -> None:
    """KVCR logs answers that it cannot use, and errors of a policy, and goes on without it."""
    draw, policy = random.Random(1), HvdPolicy()
    with closing(Cache(policy)) as made:
        for _ in range(200):
            path = "".join(draw.choice("abc") for _ in range(draw.randint(1, 9)))
            made.serve(keys_of(path), align=align)
        kept = policy._until  # private: KVCR asks for it block by block
        assert len(kept) == SLOTS * align
        assert all(status is QueryStatus.HIT for status, _ in made.kvcr.query([*map(BlockKey, kept)]))
    assert "failed" not in caplog.text
    assert "invalid" not in caplog.text


def test_a_prompt_that_comes_again_outlives_those_that_do_not() -> None:
    def hits(policy: KVCachePolicy) -> int:
        with closing(Cache(policy)) as made:
            paths = ["abcdefgh" if n % 8 == 0 else chr(256 + n) * 4 for n in range(240)]
            found = [made.serve(keys_of(path)) for path in paths]
        return sum(found[120:])

    assert hits(LRUPolicy()) == 0 < hits(HvdPolicy())


BLOCK = BlockMeta(BlockKey(b"a"), 1, 0, None, frozenset())


def test_whatever_is_told_a_score_is_a_number() -> None:
    draw, policy, numbers = random.Random(2), HvdPolicy(), [0, -1, 7, 1 << 62]
    for n in range(3000):
        keys = draw.sample([b"", b"a", b"b" * 99, bytes([n % 256])], draw.randint(1, 3))
        metas = [
            replace(
                BLOCK, block_key=BlockKey(key), access_count=draw.choice(numbers),
                position=draw.choice(numbers), last_access=draw.choice([None, 0.0, -5.0, n / 7, 1e9]),
            )
            for key in keys
        ]  # fmt: skip
        policy.on_align_sequence(metas, draw.random() < 0.5)
        for meta in metas:
            score = policy.eviction_score(meta, draw.choice([CacheTier.LOCAL_G2, CacheTier.G3]))
            assert type(score) is float
            assert np.isfinite(score)
            if draw.random() < 0.3:
                policy.on_remove(meta)


def test_what_memory_evicts_is_dropped_or_moves_to_the_tier_that_is_asked_for() -> None:
    drop = (PlacementAction.DROP, None)
    assert HvdPolicy().decide_eviction(BLOCK, CacheTier.LOCAL_G2) == drop
    below = G3HvdPolicy()
    assert below.required_tiers == {CacheTier.G3}
    moved = below.decide_eviction(BLOCK, CacheTier.LOCAL_G2), below.decide_eviction(BLOCK, CacheTier.G3)
    assert moved == ((PlacementAction.MOVE_TO, CacheTier.G3), drop)
