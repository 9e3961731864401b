"""Storage v2: hit policies over one backend, order of writes, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_backends.memory import MemoryBackend

from tests.examples import example_count
from tests.faulty import Outage
from tests.storage.backends import Watching
from tiercache.core import HitPolicy, ObjectKey, Outcome, PoolName, PoolTransfer, Reason
from tiercache.errors import InputError, SlotError
from tiercache.geometry import Geometry, kv_geometry, state_geometry
from tiercache.keys import Shard
from tiercache.pools import HostArena, HostPool
from tiercache.storage.base import NamespaceRecord, SetItem
from tiercache.storage.hybrid import HybridStorage, is_outage
from tiercache.storage.vectors import copy_out
from tiercache.testing.objects import NAMESPACE, page_key

KV, MAMBA, SWA, INDEXER = PoolName.KV, PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER
BLOCK = 4096
RECORD = NamespaceRecord(NAMESPACE, {"model": "m"})


class FilledPool(HostPool):
    """A pool of 16 objects in an arena of their own, which are named by their numbers."""

    def __init__(self, geometry: Geometry) -> None:
        blocks = 16 * -(-geometry.nbytes // BLOCK)
        super().__init__(geometry, HostArena(blocks * BLOCK, BLOCK, huge_pages=False))
        self._objects = self.alloc(16)

    def blocks(self, handles: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return super().blocks(self._objects[np.asarray(handles, np.int64)])

    def fill(self, handle: int, seed: int) -> bytes:
        data = np.random.default_rng(seed).bytes(self.geometry.padded_nbytes)
        copy_out(memoryview(data), self.buffers_of([handle])[0])
        return data[: self.geometry.nbytes]

    def payload(self, handle: int) -> bytes:
        return b"".join(self.buffers_of([handle])[0])[: self.geometry.nbytes]


class Spy(MemoryBackend):
    """Counts calls, and fails what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.exists_calls = 0
        self.sets: list[SetItem] = []
        self.failing: set[tuple[PoolName, bytes]] = set()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self.exists_calls += 1
        return super().exists(keys)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        self.sets += items
        return [
            Outcome.ERROR if (i.key.pool, i.key.page_key) in self.failing else super(Spy, self).set([i])[0]
            for i in items
        ]


def kv_pool() -> FilledPool:
    return FilledPool(kv_geometry([0, 1], 2, 24, "bfloat16", 16))


def state_pool() -> FilledPool:
    return FilledPool(state_geometry([(0, "conv", (8, 100), "float32"), (1, "ssm", (9, 300), "float32")], 16))


def storage(*pools: HostPool) -> tuple[HybridStorage, Spy]:
    backend = Spy()
    hybrid = HybridStorage(backend, namespace=RECORD)
    for pool in pools:
        hybrid.register_pool(pool)
    return hybrid, backend


def pages(*depths: int) -> list[bytes]:
    return [page_key(d) for d in depths]


def kv(*depths: int) -> PoolTransfer:
    return PoolTransfer(KV, pages(*depths), np.array(depths, np.int64))


def states(*depths: int) -> PoolTransfer:
    return PoolTransfer(MAMBA, pages(*depths), np.array(depths, np.int64), HitPolicy.TRAILING_PAGES)


ASK_STATES = PoolTransfer(MAMBA, hit_policy=HitPolicy.TRAILING_PAGES)


def test_the_worked_example() -> None:
    hybrid, backend = storage(kv_pool(), state_pool())
    hybrid.batch_set_v2([kv(*range(6)), states(1, 3)])
    backend.exists_calls = 0
    result = hybrid.batch_exists_v2(pages(*range(8)), [PoolTransfer(KV), ASK_STATES])
    assert (result.restorable_prefix_pages, result.kv_hit_pages, result.extra_pool_hit_pages) == (
        (2, 4),
        4,
        {MAMBA: 4},
    )
    assert backend.exists_calls == 1
    assert hybrid.batch_exists_v2(pages(*range(8)), [ASK_STATES]) == result, "the anchor is always asked for"


@st.composite
def presences(draw: st.DrawFn) -> tuple[int, int, dict[PoolName, tuple[HitPolicy, int, set[int]]]]:
    n = draw(st.integers(0, 9))
    prefix = draw(st.integers(0, n))
    pools = {}
    for name in draw(st.lists(st.sampled_from([MAMBA, SWA, INDEXER]), unique=True)):
        policy = draw(st.sampled_from(list(HitPolicy)))
        pools[name] = (policy, draw(st.integers(1, 12)), draw(st.sets(st.integers(0, 9))))
    pools[KV] = (HitPolicy.ALL_PAGES, 1, draw(st.sets(st.integers(0, 9)) | st.just(set(range(10)))))
    return n, prefix, pools


@settings(max_examples=example_count(200), deadline=None)
@given(presences())
def test_exists_agrees_with_brute_force(case):
    n, prefix, pools = case
    built = [FilledPool(replace(kv_pool().geometry, pool=name)) for name in pools]
    hybrid, backend = storage(*built)
    for name, (_, _, stored) in pools.items():
        hybrid.batch_set_v2([PoolTransfer(name, pages(*sorted(stored)), np.array(sorted(stored), np.int64))])
    backend.exists_calls = 0
    asked = [
        PoolTransfer(name, hit_policy=policy, trailing=trailing)
        for name, (policy, trailing, _) in pools.items()
    ]
    result = hybrid.batch_exists_v2(pages(*range(n)), asked, known=prefix)

    def restores(name: PoolName, p: int) -> bool:
        policy, trailing, stored = pools[name]
        have = stored | set(range(prefix)) if name is KV else stored
        return set(range(0 if policy is HitPolicy.ALL_PAGES else max(0, p - trailing), p)) <= have

    run = max((p for p in range(n + 1) if restores(KV, p)), default=0)
    expected = [p for p in range(1, run + 1) if all(restores(name, p) for name in pools)]
    assert list(result.restorable_prefix_pages) == expected
    assert result.kv_hit_pages == max(expected, default=0)
    assert result.extra_pool_hit_pages == {
        name: max((p for p in range(1, run + 1) if restores(name, p)), default=0)
        for name in pools
        if name is not KV
    }
    assert backend.exists_calls == 1


def test_objects_come_back_and_outcomes_keep_their_order() -> None:
    kvs, mamba = kv_pool(), state_pool()
    hybrid, _ = storage(kvs, mamba)
    page, state = kvs.fill(2, 1), mamba.fill(2, 2)
    assert hybrid.batch_set_v2([states(2), kv(2, 2)]) == {
        MAMBA: [Outcome.STORED],
        KV: [Outcome.STORED, Outcome.HIT],
    }
    target = PoolTransfer(KV, pages(9, 2, 2), np.array([5, 6, 7]))
    got = hybrid.batch_get_v2([target, PoolTransfer(MAMBA, pages(2), np.array([4]))])
    assert got == {KV: [Outcome.MISS, Outcome.HIT, Outcome.HIT], MAMBA: [Outcome.HIT]}
    assert (kvs.payload(6), kvs.payload(7), mamba.payload(4)) == (page, page, state)


def test_slack_is_zeroed_and_the_store_gets_parents_and_depths() -> None:
    kvs, mamba = kv_pool(), state_pool()
    hybrid, backend = storage(kvs, mamba)
    kvs.fill(1, 1)
    pages_part = PoolTransfer(KV, pages(0, 1), np.array([0, 1]), depths=[1, 2], parents=[b"", page_key(0)])
    hybrid.batch_set_v2([pages_part, states(1)])
    assert not any(b"".join(kvs.buffers_of([1])[0])[kvs.geometry.nbytes :])
    metas = {(i.key.pool, i.key.page_key): i.meta for i in backend.sets}
    assert [(metas[KV, page_key(d)].parent, metas[KV, page_key(d)].depth) for d in (0, 1)] == [
        (None, 1),
        (page_key(0), 2),
    ]
    assert metas[MAMBA, page_key(1)].parent == page_key(1), "a state hangs on its own page"
    assert metas[MAMBA, page_key(1)].namespace == NAMESPACE


def test_a_pool_of_states_is_told_to_the_store() -> None:
    hybrid, backend = storage(kv_pool())
    assert backend.namespaces() == [RECORD]
    hybrid.register_pool(state_pool())
    assert backend.namespaces() == [hybrid.namespace] == [replace(RECORD, states=True)]
    another = HybridStorage(backend, namespace=RECORD)
    another.register_pool(kv_pool())
    assert backend.namespaces() == [replace(RECORD, states=True)], "fewer pools take nothing back"


def test_states_alone_need_no_pages() -> None:
    hybrid, backend = storage(state_pool())
    assert backend.namespaces() == [RECORD], "no KV is useless without them"
    assert hybrid.batch_set_v2([replace(states(1, 4), depths=[2, 5])]) == {MAMBA: [Outcome.STORED] * 2}
    assert [(i.meta.parent, i.meta.depth) for i in backend.sets] == [(None, 2), (None, 5)]
    for prefix in (0, 3):
        result = hybrid.batch_exists_v2(pages(*range(6)), [ASK_STATES], known=prefix)
        assert (result.restorable_prefix_pages, result.kv_run_pages) == ((2, 5), 6)
    assert backend.exists_calls == 2
    windows = PoolTransfer(MAMBA, hit_policy=HitPolicy.TRAILING_PAGES, trailing=2)
    assert hybrid.batch_exists_v2(pages(0, 1, 4), [windows]).restorable_prefix_pages == (3,)
    with pytest.raises(InputError, match="pool kv is not registered"):
        hybrid.batch_set_v2([kv(1)])
    hybrid.register_pool(kv_pool())
    assert backend.namespaces() == [replace(RECORD, states=True)]
    hybrid.batch_set_v2([states(7)])
    assert backend.sets[-1].meta.parent == page_key(7)


def test_pages_go_first_and_states_over_failed_pages_are_held_back() -> None:
    hybrid, backend = storage(kv_pool(), state_pool())
    backend.failing = {(KV, page_key(2))}
    answer = hybrid.batch_set_v2([states(0, 1, 2, 3, 9), kv(0, 1, 2, 3)])
    assert answer[KV] == [Outcome.STORED, Outcome.STORED, Outcome.ERROR, Outcome.STORED]
    assert answer[MAMBA] == [
        Outcome.STORED, Outcome.STORED, Outcome.THROTTLED, Outcome.THROTTLED, Outcome.THROTTLED,
    ]  # fmt: skip
    assert [i.key.pool for i in backend.sets] == [KV] * 4 + [MAMBA] * 2


def test_with_parents_only_descendants_of_a_failed_page_are_held_back() -> None:
    hybrid, backend = storage(kv_pool(), state_pool())
    backend.failing = {(KV, page_key(0))}
    two = PoolTransfer(KV, pages(0, 1, 5, 6), np.arange(4), parents=[b"", page_key(0), b"", page_key(5)])
    assert hybrid.batch_set_v2([two, states(1, 6)])[MAMBA] == [Outcome.THROTTLED, Outcome.STORED]


def test_an_object_that_is_there_is_a_hit_and_part_of_the_batch_that_the_store_sees() -> None:
    hybrid, backend = storage(kv_pool())
    hybrid.batch_set_v2([kv(1)])
    backend.sets.clear()
    assert hybrid.batch_set_v2([kv(1)]) == {KV: [Outcome.HIT]}
    assert [item.meta.checksum for item in backend.sets] == [b""], "the store computes it where it writes"


def test_ranks_and_layouts_do_not_meet() -> None:
    backend = Spy()
    first, second = (HybridStorage(backend, namespace=RECORD, shard=Shard(r, 2)) for r in range(2))
    for hybrid in (first, second):
        hybrid.register_pool(kv_pool())
    first.batch_set_v2([kv(0)])
    assert first.batch_exists_v2(pages(0), []).kv_hit_pages == 1
    assert second.batch_exists_v2(pages(0), []).kv_hit_pages == 0


def test_bad_input_is_refused_before_anything_is_touched() -> None:
    hybrid, backend = storage(kv_pool())
    with pytest.raises(InputError, match="register_pool"):
        hybrid.batch_exists_v2(pages(0), [ASK_STATES])
    for known in (-1, 2):
        with pytest.raises(InputError, match=f"{known} of 1 pages cannot be known"):
            hybrid.batch_exists_v2(pages(0), [], known)
    with pytest.raises(InputError, match="without keys"):
        hybrid.batch_exists_v2(pages(0), [kv(0)])
    with pytest.raises(InputError, match="another geometry"):
        hybrid.register_pool(FilledPool(kv_geometry([0], 2, 24, "bfloat16", 16)))
    hybrid.register_pool(kv_pool())
    assert backend.sets == []
    assert backend.exists_calls == 0


class Odd(bytes):
    """Bytes all the same."""


NO_TRAILING: list[Any] = [0, 2**31 + 1, 2**63, 1.0, None, True, "1", np.float64(1), [1], math.nan]
NO_KEYS: list[Any] = [
    [bytes(31)], [b""], ["x" * 32], [None], [bytearray(32)], [np.zeros(32, np.uint8)],
    bytes(32), "x" * 32, None, {bytes(32): 1}, iter([bytes(32)]), np.array([b"x" * 32]),
]  # fmt: skip
WRONG: list[Any] = [
    *({"keys": keys, "handles": np.arange(1)} for keys in NO_KEYS),
    *({"trailing": trailing} for trailing in NO_TRAILING),
    *({"handles": handles} for handles in (
        np.array([], np.int64), np.array([1, 2]), np.array([-(2**63)]), np.array([1.0]), np.array([True]),
        np.array([[1]]), np.array(1), np.array([None]), [1], None,
    )),
    *({"depths": depths} for depths in (
        [1, 2], [-1], [2**32], [2**70], [1.0], [None], [True], 1, "1", {1: 1},
        np.array([1.5]), np.array([[1]]), np.array([True]),
    )),
    *({"parents": parents} for parents in (
        [b"", b""], [b"x"], [bytes(64)], ["x" * 32], [None], [bytearray(32)], bytes(32), None, {b""},
    )),
    *({"hit_policy": policy} for policy in ("trailing", "all_pages", None, 1, True)),
    *({"pool": pool} for pool in (MAMBA, "nothing", None, [], {}, 3)),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_a_transfer_that_cannot_be_is_refused_before_anything_is_touched(wrong: dict[str, Any]) -> None:
    class Untouched(MemoryBackend):
        def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
            raise AssertionError("nothing may be asked")

        get = set = exists  # type: ignore[assignment]

    pool = kv_pool()
    hybrid = HybridStorage(Untouched(), namespace=RECORD)
    hybrid.register_pool(pool)
    before = [pool.fill(handle, 7) for handle in range(16)]
    bad = replace(kv(1), **wrong)
    calls: list[Callable[[], object]] = [
        lambda: hybrid.batch_get_v2([kv(0), bad]),
        lambda: hybrid.batch_set_v2([kv(0), bad]),
        lambda: hybrid.batch_get_v2([bad]),
    ]
    if "trailing" in wrong or "hit_policy" in wrong:
        calls.append(lambda: hybrid.batch_exists_v2(pages(0), [replace(PoolTransfer(KV), **wrong)]))
    if "keys" in wrong:
        calls.append(lambda: hybrid.batch_exists_v2(wrong["keys"], []))
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
    assert [pool.payload(handle) for handle in range(16)] == before


@pytest.mark.parametrize(
    "transfers", [None, 5, [None], ["kv"], [kv(0), {}], kv(0), iter([kv(0)])], ids=range(7)
)
def test_calls_take_lists_of_transfers(transfers: Any) -> None:
    hybrid, _ = storage(kv_pool())
    for call in (
        lambda: hybrid.batch_get_v2(transfers),
        lambda: hybrid.batch_set_v2(transfers),
        lambda: hybrid.batch_exists_v2([], transfers),
    ):
        with pytest.raises(InputError, match="list of PoolTransfer"):
            call()


def test_what_is_right_is_taken_in_every_form() -> None:
    hybrid, backend = storage(kv_pool(), state_pool())
    keys = tuple(map(Odd, pages(0, 1)))
    for handles in (np.array([0, 1], np.uint8), np.array([0, 1], np.int32)):
        backend.sets.clear()
        hybrid.batch_set_v2(
            [PoolTransfer(KV, keys, handles, depths=np.array([1, 2]), parents=(b"", keys[0]))]
        )  # type: ignore[arg-type]
        assert [(i.meta.parent, i.meta.depth, type(i.meta.depth)) for i in backend.sets] == [
            (None, 1, int),
            (keys[0], 2, int),
        ]
        assert hybrid.batch_get_v2((PoolTransfer(KV, keys, handles),)) == {KV: [Outcome.HIT] * 2}
    assert hybrid.batch_get_v2([PoolTransfer(KV), PoolTransfer(MAMBA, handles=np.array([]))]) == {
        KV: [],
        MAMBA: [],
    }
    for trailing in (1, 2**31, np.int64(1), np.uint64(2)):
        asked = PoolTransfer(MAMBA, hit_policy=HitPolicy.TRAILING_PAGES, trailing=trailing)
        assert hybrid.batch_exists_v2(keys, [asked]).kv_run_pages == 2
    named = hybrid.batch_exists_v2(keys, [PoolTransfer("kv")], known=1)
    assert (named.kv_hit_pages, named.extra_pool_hit_pages) == (2, {})


def test_one_handle_serves_two_keys_of_a_set_and_not_of_a_get() -> None:
    arenas = [HostArena(1 << 20, BLOCK, huge_pages=False) for _ in range(2)]
    pools = [HostPool(kv_pool().geometry, arenas[0]), HostPool(state_pool().geometry, arenas[1])]
    hybrid, _ = storage(*pools)
    handles = [pool.alloc(3) for pool in pools]
    assert set(handles[0]) & set(handles[1]), "arenas number their blocks alike"
    twice = PoolTransfer(KV, pages(0, 1), handles[0][[0, 0]])
    assert hybrid.batch_set_v2([twice]) == {KV: [Outcome.STORED] * 2}
    ones = [PoolTransfer(KV, pages(n), handles[0][:1]) for n in range(2)]
    for transfers in ([twice], ones):
        with pytest.raises(InputError, match="given twice"):
            hybrid.batch_get_v2(transfers)
    both = [PoolTransfer(KV, pages(0), handles[0][:1]), PoolTransfer(MAMBA, pages(0), handles[1][:1])]
    assert hybrid.batch_get_v2(both) == {KV: [Outcome.HIT], MAMBA: [Outcome.MISS]}
    with pytest.raises(SlotError):
        hybrid.batch_get_v2([PoolTransfer(KV, pages(0), np.array([2**40]))])
    for arena in arenas:
        arena.close()


def test_every_outcome_but_success_has_a_reason_of_its_own() -> None:
    reasons = {outcome: outcome.reason for outcome in Outcome}
    assert [o for o, reason in reasons.items() if reason is Reason.NONE] == [Outcome.HIT, Outcome.STORED]
    assert len(set(reasons.values())) == len(Outcome) - 1
    assert {o for o in Outcome if is_outage(o.reason)} == {Outcome.UNAVAILABLE, Outcome.REFUSED}


def test_during_an_outage_what_is_not_answered_has_its_reason() -> None:
    backend = Outage(MemoryBackend())
    hybrid = HybridStorage(backend, namespace=RECORD)
    hybrid.register_pool(kv_pool())
    hybrid.register_pool(state_pool())
    hybrid.batch_set_v2([kv(0, 1), states(1)])
    found = hybrid.batch_exists_v2(pages(0, 1), [ASK_STATES])
    assert (found.kv_hit_pages, found.reason) == (2, Reason.NONE)
    assert hybrid.batch_exists_v2(pages(7), [ASK_STATES]).reason is Reason.NONE, "absent is no outage"

    backend.begin()
    nothing = hybrid.batch_exists_v2(pages(0, 1), [ASK_STATES])
    assert (nothing.restorable_prefix_pages, nothing.reason) == ((), Reason.UNAVAILABLE)
    assert hybrid.batch_exists_v2([], []).reason is Reason.NONE, "nothing was asked"
    assert hybrid.holds({KV: pages(0, 1)}) == ({KV: [False, False]}, Reason.UNAVAILABLE)
    assert hybrid.batch_get_v2([kv(0, 1)]) == {KV: [Outcome.UNAVAILABLE] * 2}
    assert hybrid.batch_set_v2([kv(3), states(3)]) == {KV: [Outcome.UNAVAILABLE], MAMBA: [Outcome.THROTTLED]}

    backend.end()
    assert hybrid.batch_exists_v2(pages(0, 1), [ASK_STATES]) == found
    assert hybrid.batch_get_v2([kv(0, 1)]) == {KV: [Outcome.HIT] * 2}


def test_a_pool_s_memory_is_made_known_to_the_store() -> None:
    backend = Watching()
    hybrid = HybridStorage(backend, namespace=RECORD)
    arena = HostArena(1 << 20, BLOCK, huge_pages=False)
    hybrid.register_pool(HostPool(kv_pool().geometry, arena))
    hybrid.register_pool(HostPool(state_pool().geometry, arena))
    with pytest.raises(InputError, match="another geometry"):
        hybrid.register_pool(HostPool(kv_geometry([0], 2, 24, "bfloat16", 16), arena))
    assert backend.attached == [arena, arena]
    arena.close()
