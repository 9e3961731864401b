"""The storage backend under SGLang's own factory and host pools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from tests.engines.sglang import rig
from tests.engines.sglang.rig import (
    PAGE,
    PAGES,
    SLOTS,
    any_state,
    backend,
    keys,
    kv_pool,
    mamba_pool,
    page,
    page_keys_of,
    rows,
    state_at,
    store_of,
)
from tiercache.errors import ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.integrations.sglang_tree.lent import LentPages, lent_pools


@pytest.mark.parametrize(
    ("pool", "layout", "dtype"),
    [
        *product([kv_pool], rig.KV_LAYOUTS, rig.DTYPES),
        *product([rig.mla_pool], rig.KV_LAYOUTS[:3], ["bfloat16", "float16", "float8_e4m3fn"]),
    ],
)
def test_pages_come_back_into_other_slots(url, pool, layout, dtype, caplog):
    caplog.set_level("INFO", "tiercache")
    kv = pool(layout, getattr(torch, dtype))
    store = backend(url, kv, mla=pool is rig.mla_pool)
    assert pool is kv_pool or "zero copy" in caplog.text
    names = keys("a", "b", "c")
    expected = [page(kv, i) for i in (1, 2, 3)]
    untouched = page(kv, 11)
    assert store.batch_set_v1(names, rows(1, 2, 3)) == [True] * 3
    assert store.batch_get_v1([*names, *keys("d")], rows(7, 5, 9, 11)) == [True, True, True, False]
    assert [page(kv, i) for i in (7, 5, 9)] == expected
    assert page(kv, 11) == untouched
    assert store.batch_exists([*names, *keys("d")]) == 3
    assert store.exists(names[2])
    assert not store.exists(keys("d")[0])
    store.close()
    store.close()


@pytest.mark.parametrize("layout", rig.MAMBA_LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_states_come_back_into_other_slots(url: str, layout: str, dtype: str) -> None:
    mamba = mamba_pool(layout, getattr(torch, dtype), torch.bfloat16 if "8" not in dtype else torch.float16)
    store = backend(url, kv_pool(), mamba)
    [name] = keys("state")
    expected = page(mamba, 3)
    assert store.batch_set_v2([state_at(name, 3)]) == {PoolName.MAMBA: [True]}
    assert store.batch_get_v2([state_at(name, SLOTS - 1)]) == {PoolName.MAMBA: [True]}
    assert page(mamba, SLOTS - 1) == expected
    assert store.batch_get_v2([state_at(keys("none")[0], 2)]) == {PoolName.MAMBA: [False]}


def test_zero_copy_where_addresses_are_told_and_a_copy_where_not(url, caplog):
    caplog.set_level("INFO", "tiercache")
    kv, mamba = kv_pool(), mamba_pool(side=True)
    store = backend(url, kv, mamba)
    assert "pool kv, layout page_first" in caplog.text
    assert [r.message.split(", ")[-1] for r in caplog.records if "bytes a page" in r.message] == [
        "zero copy",
        "page by page",
    ]
    expected, copies = page(mamba, 3), []
    copying = mamba.get_data_page
    mamba.get_data_page = lambda *args, **kwargs: copies.append(args) or copying(*args, **kwargs)
    [name] = keys("state")
    for _ in range(2):
        assert store.batch_set_v2([state_at(name, 3)]) == {PoolName.MAMBA: [True]}
    assert len(copies) == 1  # what is stored already is not copied again
    mamba.get_data_page = copying
    assert store.batch_get_v2([state_at(name, 5)]) == {PoolName.MAMBA: [True]}
    assert page(mamba, 5) == expected
    store.close()
    # The flat page and the parts of it are not in the same order, so they are not the same object.
    store = backend(url, kv, mamba_pool())
    assert store.batch_get_v2([state_at(name, 5)]) == {PoolName.MAMBA: [False]}


@pytest.mark.parametrize("name", ["SWA", "AUXILIARY_SWA", "INDEXER", "DRAFT", "DRAFT_SWA", "DRAFT_INDEXER"])
def test_pools_that_go_with_the_kv(url: str, name: str) -> None:
    kv, side = kv_pool(), kv_pool(layers=2)
    rig.fill(side, seed=9)
    pool = PoolName[name]
    store = backend(url, kv, more={pool: side})
    names, expected = keys(0, 1, 2), [page(side, i) for i in range(3)]
    assert store.batch_set_v1(names, rows(0, 1, 2)) == [True] * 3
    assert store.batch_set_v2([PoolTransfer(pool, rows(0, 1), keys=names[:2])]) == {pool: [True, True]}
    found = store.batch_exists_v2(names, [PoolTransfer(pool)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (
        2,
        {"kv": 3, pool.value: 2},
        [1, 2],
    )
    assert store.batch_get_v2([PoolTransfer(pool, rows(9, 8, 7), keys=names)]) == {pool: [True, True, False]}
    assert [page(side, 9), page(side, 8)] == expected[:2]
    # A window of two pages is stored at the end of page 2 only.
    windows = store.batch_exists_v2(
        names, [PoolTransfer(pool, keys=["_", "_"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    )
    assert windows.restorable_prefix_pages == [1, 2]


def test_states_and_pages_are_restorable_together(url: str) -> None:
    kv, mamba = kv_pool(), mamba_pool()
    store = backend(url, kv, mamba)
    names = keys(*range(5))
    assert store.batch_set_v1(names, rows(*range(5))) == [True] * 5
    for slot, at in ((2, 1), (3, 3)):
        assert store.batch_set_v2([state_at(names[at], slot)]) == {PoolName.MAMBA: [True]}
    found = store.batch_exists_v2([*names, *keys("x")], [any_state()])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (
        4,
        {"kv": 5, "mamba": 4},
        [2, 4],
    )
    # A pool that is not kept, and a policy that we do not know: nothing is restorable, and what the others
    # have is told all the same.
    for unknown in (
        PoolTransfer(PoolName.DEEPSEEK_V4_C4),
        PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS),
    ):
        found = store.batch_exists_v2(names, [unknown])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        assert found.extra_pool_hit_pages == {"kv": 5, unknown.name.value: 0}
    assert store.batch_exists_v2([], [any_state()]).kv_hit_pages == 0
    assert store.batch_exists_v2(names, None).kv_hit_pages == 5


def test_one_bad_page_of_a_batch_fails_alone(url: str) -> None:
    kv, mamba = kv_pool(), mamba_pool()
    store = backend(url, kv, mamba)
    names = keys(*range(3))
    assert store.batch_set_v1(names, rows(0, 1, 2)) == [True] * 3
    assert store.batch_get_v1([names[0], *keys("absent"), names[2]], rows(10, 11, 12)) == [True, False, True]
    wrong = PoolTransfer(PoolName.SWA, rows(0), keys=keys("a"))  # never registered
    stored = store.batch_set_v2([wrong, state_at(names[0], 1)])
    assert stored == {PoolName.SWA: [False], PoolName.MAMBA: [True]}
    assert store.batch_get_v2([state_at(names[0], SLOTS), state_at(names[0], 5)]) == {PoolName.MAMBA: [True]}


def test_indices_that_are_not_pages_of_the_pool_are_refused(url: str) -> None:
    kv = kv_pool()
    store = backend(url, kv)
    before = bytes(kv.kv_buffer.reshape(-1).view(torch.uint8).numpy())
    assert store.batch_set_v1(keys("a"), rows(0)) == [True]
    outside, page0 = [rows(kv.page_num), rows(-1)], rows(0)
    for indices in (*outside, page0 + 1, page0.flip(0), page0[:-1], rows(0, 1), page0 * 2, None):
        assert store.batch_get_v1(keys("a"), indices) == [False]
        assert store.batch_set_v1(keys("b"), indices) == [False]
    assert not store.exists(keys("b")[0])
    assert bytes(kv.kv_buffer.reshape(-1).view(torch.uint8).numpy()) == before


def test_addresses_that_are_not_the_pools_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, other = kv_pool(), kv_pool()
    store = backend(url, kv)
    names = keys("a")
    assert store.batch_set_v1(names, rows(0)) == [True]
    truth, before = kv.get_page_buffer_meta, page(other, 0)
    base, end = kv.kv_buffer.data_ptr(), kv.kv_buffer.data_ptr() + kv.kv_buffer.nbytes
    [k, v], sizes = truth(rows(5))
    for told in [
        ([other.kv_buffer.data_ptr(), v], sizes), ([base - 1, v], sizes), ([k, end - sizes[1] + 1], sizes),
        ([0, v], sizes),
        ([k], sizes[:1]), ([k, v, v], [*sizes, sizes[1]]), ([k, v], [sizes[0] * 2, sizes[1]]),
        ([k, v], [sizes[0] - 1, sizes[1] + 1]),
    ]:  # fmt: skip
        monkeypatch.setattr(kv, "get_page_buffer_meta", lambda _, told=told: told)
        assert store.batch_get_v1(names, rows(5)) == [False], told
        assert store.batch_set_v1(keys("b"), rows(5)) == [False], told
    monkeypatch.setattr(kv, "get_page_buffer_meta", truth)
    assert page(other, 0) == before
    assert not store.exists(keys("b")[0])
    assert store.batch_get_v1(names, rows(5)) == [True]


def test_nothing_raises_into_the_controller(url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = backend(url, kv_pool())
    unknown = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, host_indices=rows(0), keys=keys("a"))
    assert store.batch_set_v2([unknown]) == {PoolName.DEEPSEEK_V4_C4: [False]}
    store.close()
    assert store.batch_get_v1(keys("a"), rows(0)) == [False]
    assert store.batch_set_v1(keys("a"), rows(0)) == [False]
    assert store.batch_set_v2([state_at(keys("a")[0], 0)]) == {PoolName.MAMBA: [False]}
    assert store.batch_exists(keys("a")) == 0
    assert store.batch_exists_v2(keys("a"), []).kv_hit_pages == 0
    assert "batch_get_v1 failed" in caplog.text


@pytest.mark.parametrize("error", [UnavailableError, RefusedError, StorageError])
def test_a_store_that_cannot_be_asked_has_nothing_and_takes_writes(url, caplog, error):
    kv = kv_pool("layer_first")
    store = backend(url, kv, mamba_pool())

    def fail(found: object) -> list[bool]:
        raise error("no answer")

    asking, store_of(store).exists = store_of(store).exists, fail
    assert store.batch_exists(keys("a")) == 0
    assert store.batch_exists_v2(keys("a"), [any_state()]).kv_hit_pages == 0
    assert store.batch_set_v1(keys("a", "b"), rows(0, 1)) == [True] * 2
    assert not [record for record in caplog.records if record.exc_info]
    store_of(store).exists = asking
    assert store.batch_exists(keys("a", "b")) == 2


def test_a_pool_that_cannot_be_kept_ends_the_attach(url: str, shared: str) -> None:
    broken = SimpleNamespace(page_size=1, size=4, dtype=torch.bfloat16)
    unknown = kv_pool()
    heads = kv_pool()
    for more, settings, sentence in [
        ({PoolName.MAMBA: broken}, {}, r"prefixes need all of its pools: mamba \(SimpleNamespace: "),
        (
            {PoolName.DEEPSEEK_V4_C4: unknown},
            {},
            r"deepseek_v4_c4 \(MHATokenToKVPoolHost: its kind is not known\)",
        ),
        (
            {PoolName.DRAFT: heads},
            {"mla": True, "rank": 1, "size": 2, "storage": shared},
            "one rank write for all",
        ),
    ]:
        with pytest.raises(ValueError, match=sentence):
            backend(
                settings.pop("storage", url), rig.mla_pool() if settings else kv_pool(), more=more, **settings
            )
        backend(url, kv_pool()).close()  # nothing is left open
    anchor = LogicalHostPool(PAGE * PAGES, PAGE)  # that of DeepSeek-V4, whose bytes are all in sidecars
    shows = pytest.raises(ValueError, match="cannot keep this model: its host pool LogicalHostPool shows no")
    with shows, rig.server_says("auto"):
        backend(url, anchor)


def test_a_pool_that_comes_after_the_attach_and_cannot_be_kept(url, caplog):
    store = backend(url, kv_pool())
    store.register_mem_host_pool_v2(
        SimpleNamespace(page_size=1, size=4, dtype=torch.bfloat16), PoolName.MAMBA
    )
    assert "pool mamba is not kept" in caplog.text
    assert store.batch_set_v1(keys("a"), rows(0)) == [True]
    assert store.batch_exists_v2(keys("a"), [any_state()]).kv_hit_pages == 0
    assert store.batch_set_v2([state_at(keys("a")[0], 0)]) == {PoolName.MAMBA: [False]}


def test_the_place_of_the_tree_takes_no_kv_with_scales_and_no_other_layout() -> None:
    def lent(quantized: Any = None, *, fp4: bool = False) -> None:
        kind = memory_pool.MHATokenToKVPoolFP4 if fp4 else memory_pool.MHATokenToKVPool
        kv = kind(4 * PAGE, PAGE, torch.bfloat16, 2, 64, 2, "cpu", False, quant_method=quantized)
        allocator = SimpleNamespace(get_kvcache=lambda: kv, page_size=PAGE, device="cpu")
        lent_pools(LentPages(allocator, PAGE), allocator, None, None)

    lent()
    native = get_kv_cache_quant_method("nvfp4", num_layers=2, device="cpu", native_scale_layout=True)
    native.configure_attention_backends("trtllm_mha", "trtllm_mha")  # these scales have a layout of their own
    mixed = get_kv_cache_quant_method("fp4_mx_block16")
    for quantized, fp4 in [(native, False), (mixed, False), (None, True)]:
        with pytest.raises(ConfigError, match="cannot serve KV with scales"):
            lent(quantized, fp4=fp4)
    with envs.SGLANG_USE_HND_KVCACHE.override(True), pytest.raises(ConfigError, match="layout than NHD"):
        lent()


def test_an_engine_that_is_restarted_in_place_registers_its_pools_again(url: str) -> None:
    kv, mamba = kv_pool(), mamba_pool()
    store = backend(url, kv, mamba)
    [name] = keys("state")
    assert store.batch_set_v2([state_at(name, 3)]) == {PoolName.MAMBA: [True]}
    other = mamba_pool()
    rig.wipe(other, *range(SLOTS))
    store.register_mem_host_pool_v2(other, PoolName.MAMBA)
    assert store.batch_get_v2([state_at(name, 4)]) == {PoolName.MAMBA: [True]}
    assert page(other, 4) == page(mamba, 3)


def test_queries_reads_and_writes_at_once(url: str) -> None:
    kv, mamba = kv_pool(), mamba_pool()
    store = backend(url, kv, mamba)
    names = keys(*range(8))
    expected = [page(kv, i) for i in range(8)]
    states = [page(mamba, i) for i in range(4)]

    def write(_: int) -> None:
        assert store.batch_set_v1(names, rows(*range(8))) == [True] * 8
        for i in range(4):
            assert store.batch_set_v2([state_at(names[i], i)]) == {PoolName.MAMBA: [True]}

    def query(_: int) -> None:
        found = store.batch_exists_v2(names, [any_state()])
        assert (
            found.restorable_prefix_pages == [p for p in range(1, 5) if p <= found.kv_hit_pages]
            or not found.kv_hit_pages
        )

    def read(turn: int) -> None:
        for i, there in enumerate(store.batch_get_v1(names, rows(*range(8 + 8 * turn, 16 + 8 * turn)))):
            assert not there or page(kv, 8 + 8 * turn + i) == expected[i]
        for i in range(4):
            if store.batch_get_v2([state_at(names[i], 4 + 2 * turn + i % 2)])[PoolName.MAMBA][0]:
                assert page(mamba, 4 + 2 * turn + i % 2) == states[i]

    def repeat(what: Any, turn: int) -> None:
        for _ in range(20):
            what(turn)

    with ThreadPoolExecutor(9) as threads:
        for work in [
            threads.submit(repeat, what, turn) for turn in range(3) for what in (write, query, read)
        ]:
            work.result(60)


def test_clear_forgets_this_model_only(shared: str) -> None:
    kv = kv_pool()
    store = backend(shared, kv, rank=0, size=2)
    assert store.batch_set_v1(keys("a"), rows(0)) == [True]
    store.close()
    other = backend(shared, kv, revision="r2")
    assert other.batch_set_v1(keys("a"), rows(0)) == [True]
    other.clear()
    assert other.batch_exists(keys("a")) == 0
    other.close()
    store = backend(shared, kv, rank=0, size=2)
    assert store.batch_exists(keys("a")) == 1
    store.close()
    neighbour = backend(shared, kv, rank=1, size=2)
    neighbour.clear()
    neighbour.close()
    store = backend(shared, kv, rank=0, size=2)
    assert store.batch_exists(keys("a")) == 0


def test_a_clear_that_leaves_something_says_so(url: str) -> None:
    store = backend(url, kv_pool())
    assert store.batch_set_v1(keys("a", "b"), rows(0, 1)) == [True] * 2
    deleting = store_of(store).delete
    store_of(store).delete = lambda found: [False] * len(found)
    with pytest.raises(OSError, match="2 of 2 objects of this model could not be deleted"):
        store.clear()
    store_of(store).delete = deleting
    store.clear()
    assert store.batch_exists(keys("a")) == 0


def test_stats_are_those_since_the_last_call(url: str, caplog: pytest.LogCaptureFixture) -> None:
    kv = kv_pool()
    store = backend(url, kv, metrics=True)
    store.batch_set_v1(keys(0, 1), rows(0, 1))
    store.batch_set_v1(keys(0, 1), rows(0, 1))
    store.batch_get_v1(keys(0, 1, "absent"), rows(4, 5, 6))
    stats = store.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert min(*stats.backup_bandwidth, *stats.prefetch_bandwidth) > 0
    assert store.get_stats().backup_pgs == []
    caplog.set_level("INFO", "tiercache")
    store.close()
    assert "closed; pool kv: 2 of 3 pages read, 2 stored of 4 written" in caplog.text


def parents_in(store: Any) -> dict[bytes, bytes | None]:
    return {e.key.page_key: e.meta.parent for e in store_of(store).scan_all() if e.key.pool == "kv"}


def test_parents_and_depths_are_those_of_the_prefix_that_is_told(shared: str) -> None:
    store = backend(shared, kv_pool(), mamba_pool())
    names = keys(*range(5))
    store.batch_set_v1(names[:2], rows(0, 1), HiCacheStorageExtraInfo(prefix_keys=[]))
    store.batch_set_v1(names[2:4], rows(2, 3), HiCacheStorageExtraInfo(prefix_keys=names[:2]))
    store.batch_set_v2([state_at(names[3], 1)], HiCacheStorageExtraInfo(prefix_keys=names[:3]))
    pages = page_keys_of(store, names)
    found = list(store_of(store).scan_all())
    assert [e.meta.parent for e in found if e.key.pool == "mamba"] == [pages[3]]
    entries = [e for e in found if e.key.pool == "kv"]
    assert {e.key.page_key: (e.meta.parent, e.meta.depth) for e in entries} == {
        page: (parent, i + 1) for i, (page, parent) in enumerate(zip(pages[:4], [None, *pages], strict=False))
    }
    store.batch_set_v1(names[4:], rows(4))
    assert parents_in(store)[pages[4]] is None


def test_a_namespace_has_states_as_soon_as_there_is_a_pool_of_them(shared: str) -> None:
    kv = kv_pool()
    store = backend(shared, kv)
    assert [record.states for record in store_of(store).namespaces()] == [False]
    store.batch_exists_v2(keys(0), [any_state()])
    assert [record.states for record in store_of(store).namespaces()] == [True], "a query may say so first"
    store.close()
    store = backend(shared, kv, mamba_pool(), revision="r2")
    assert {record.identity["revision"]: record.states for record in store_of(store).namespaces()} == {
        "r1": True,
        "r2": True,
    }
    store.close()
    store = backend(shared, kv, more={PoolName.INDEXER: kv_pool()}, revision="r3")
    assert {record.identity["revision"]: record.states for record in store_of(store).namespaces()}[
        "r3"
    ] is False


def test_pages_that_are_copied_hang_on_the_pages_before_them(shared, monkeypatch):
    kv = kv_pool()
    monkeypatch.delattr(type(kv), "get_page_buffer_meta")  # a pool that tells no addresses
    store = backend(shared, kv)
    names = keys(*range(5))
    store.batch_set_v1(names[:2], rows(0, 1), HiCacheStorageExtraInfo(prefix_keys=[]))
    store.batch_set_v1([names[3]], rows(3))
    store.batch_set_v1(names[2:], rows(2, 3, 4), HiCacheStorageExtraInfo(prefix_keys=names[:2]))
    pages = page_keys_of(store, names)
    parents = {e.key.page_key: e.meta.parent for e in store_of(store).scan_all()}
    assert parents == dict(zip(pages, [None, pages[0], pages[1], None, pages[3]], strict=True))
