"""Identity of objects: servers that differ in anything that the bytes depend on share no object."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.server_args import ServerArgs

from tests.engines.sglang import rig
from tests.engines.sglang.rig import backend, keys, kv_pool, mamba_pool, page, rows, state_at
from tiercache.integrations import sglang_server as server


def test_a_restart_finds_everything_and_another_identity_nothing(shared: str) -> None:
    kv = kv_pool()
    store = backend(shared, kv)
    names, expected = keys(*range(3)), [page(kv, i) for i in range(3)]
    assert store.batch_set_v1(names, rows(0, 1, 2)) == [True] * 3
    store.close()
    again = backend(shared, kv)
    assert again.batch_get_v1(names, rows(10, 11, 12)) == [True] * 3
    assert [page(kv, i) for i in (10, 11, 12)] == expected
    again.close()
    larger = backend(shared, kv_pool(pages=rig.PAGES * 2))  # the size of the pool means nothing
    assert larger.batch_exists(names) == 3
    larger.close()
    tagged = kv_pool()
    tagged.storage_format_tag = "another"
    for pool, changes in [
        (kv, {"revision": "r2"}), (kv, {"tenant": "other"}), (kv, {"quantization": "fp8"}),
        (kv, {"model": "some/other"}),
        (kv, {"rank": 1, "size": 2}), (kv, {"rank": 0, "size": 2}), (tagged, {}),
        (kv_pool("layer_first"), {}), (kv_pool("page_head"), {}), (kv_pool(dtype=torch.float16), {}),
        (kv_pool(layers=2), {}),
        (kv_pool(heads=4), {}), (kv_pool(dtype=torch.float8_e4m3fn), {}),
    ]:  # fmt: skip
        other = backend(shared, pool, **changes)
        assert other.batch_exists(names) == 0, changes
        assert other.batch_get_v1(names, rows(1, 2, 3)) == [False] * 3
        other.close()


def test_states_of_another_dtype_or_layout_are_not_found(shared: str) -> None:
    names, mamba = keys("a"), mamba_pool()
    store = backend(shared, kv_pool(), mamba)
    assert store.batch_set_v1(names, rows(0)) == [True]
    assert store.batch_set_v2([state_at(names[0], 2)]) == {PoolName.MAMBA: [True]}
    for pool, hit in (
        (mamba, 1),
        (mamba_pool(dtype=torch.bfloat16), 0),
        (mamba_pool("page_first_direct"), 0),
    ):
        store.close()
        store = backend(shared, kv_pool(), pool)
        assert store.batch_exists_v2(names, [rig.any_state()]).kv_hit_pages == hit


def test_the_kinds_of_eight_bits_never_meet(url: str) -> None:
    def there(dtype: Any = torch.uint8, **settings: Any) -> bool:
        store = backend(url, kv_pool(dtype=dtype), **settings)
        found = store.exists(keys("a")[0])
        assert store.batch_set_v1(keys("a"), rows(0)) == [True]
        store.close()
        return bool(found)

    # A server's pools hold both kinds as bytes; its configuration says which.
    for dtype in ("fp8_e4m3", "fp8_e5m2", "auto"):
        with rig.server_says(dtype):
            assert not there()
            assert there()
    assert not there(torch.float8_e4m3fn)
    assert not there(torch.float8_e5m2)
    # Where nothing says so, the operator has to.
    with pytest.raises(ValueError, match="nothing says of which dtype; set kv_dtype"):
        backend(url, kv_pool(dtype=torch.uint8))
    assert not there(kv_dtype="fp8_e4m3")
    assert there(kv_dtype="fp8_e4m3")
    assert not there(kv_dtype="fp8_e5m2")


def test_what_the_server_was_told_is_part_of_the_identity(url, tmp_path, monkeypatch):
    pools = {PoolName.DRAFT: kv_pool(layers=1)}

    def there(**settings: Any) -> tuple[bool, bool]:
        """Look for the KV page and for the draft model's page, then store both; return what was found."""
        store = backend(url, kv_pool(), more=pools, **settings)
        found = store.batch_exists_v2(keys("a"), [PoolTransfer(PoolName.DRAFT)]).extra_pool_hit_pages
        assert store.batch_set_v1(keys("a"), rows(0)) == [True]
        assert store.batch_set_v2([PoolTransfer(PoolName.DRAFT, rows(0), keys=keys("a"))]) == {
            PoolName.DRAFT: [True]
        }
        store.close()
        return bool(found["kv"]), bool(found["draft"])

    with rig.server_says():
        assert there() == (False, False)
        assert there() == (True, True)
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    for told in (
        {"model_path": "some/fine-tune"}, {"revision": "abc"},
        {"json_model_override_args": '{"rope_scaling": 4}'}, {"quantization": "fp8"},
        {"dtype": "half"}, {"kv_cache_dtype": "fp8_e4m3"}, {"load_format": "dummy"},
        {"context_length": 131072},
        {"quantization_param_path": str(scales)},
    ):  # fmt: skip
        with rig.server_says(**told):
            assert there() == (False, False), told
            assert there() == (True, True), told
    scales.write_text('{"0": 2}')
    with rig.server_says(quantization_param_path=str(scales)):
        assert there() == (False, False)
    with (
        rig.server_says(quantization_param_path=str(tmp_path / "gone")),
        pytest.raises(ValueError, match="the KV scales in"),
    ):
        there()
    for told in (
        {"speculative_draft_model_path": "/eagle/v2"},
        {"speculative_draft_kv_cache_dtype": "fp8_e5m2"},
    ):
        with rig.server_says(**told):
            assert there() == (True, False), told
            assert there() == (True, True), told
    # How layers are divided among stages counts where there are stages.
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "8,4,12")
    with rig.server_says():
        assert there() == (True, True)


def test_the_real_server_says_all_of_that(url: str, caplog: pytest.LogCaptureFixture) -> None:
    bags = namespace_of(ServerArgs)
    assert {bags.get(name) for name in (*server.MODEL_SETTINGS, "quantization_param_path")} == {"model"}
    assert {bags.get(name) for name in server.DRAFT_SETTINGS} == {"spec"}
    with rig.server_says() as said:
        del said["model"].context_length  # as in another release
        backend(url, kv_pool()).close()
    assert (
        "this SGLang does not report context_length; if you set any of these, add its value to tiercache's"
        " setting revision" in caplog.text
    )


def test_latent_pages_are_one_ranks_and_everybodys_but_states_are_not(shared: str) -> None:
    mha, latent, mamba = kv_pool(), rig.mla_pool(), mamba_pool()
    names = keys("a")
    first = backend(shared, latent, mamba, rank=0, size=4, mla=True)
    assert first.batch_set_v1(names, rows(0)) == [True]
    assert first.batch_set_v2([state_at(names[0], 1)]) == {PoolName.MAMBA: [True]}
    first.close()
    fourth = backend(shared, latent, mamba, rank=3, size=4, mla=True)
    assert fourth.batch_exists(names) == 1
    assert fourth.batch_exists_v2(names, [rig.any_state()]).kv_hit_pages == 0
    fourth.close()
    # Pages with heads are every rank's own, whatever the model is said to be: a draft model's, say.
    sharded = backend(shared, mha, rank=0, size=4, mla=True)
    assert sharded.batch_set_v1(names, rows(0)) == [True]
    sharded.close()
    other = backend(shared, mha, rank=3, size=4, mla=True)
    assert other.batch_exists(names) == 0


@pytest.mark.parametrize("mla", [False, True])
def test_every_rank_has_its_own(shared: str, mla: bool) -> None:
    kv, mamba = rig.mla_pool() if mla else kv_pool(), mamba_pool()
    [name] = keys("a")
    ranks = [(tensor, stage, context) for tensor in range(2) for stage in range(2) for context in range(2)]

    def of(tensor: int, stage: int, context: int) -> Any:
        return backend(
            shared, kv, mamba, rank=tensor, size=2, stage=(stage, 2), context=(context, 2), mla=mla
        )

    first = of(1, 0, 1)
    assert first.batch_set_v1([name], rows(0)) == [True]
    assert first.batch_set_v2([state_at(name, 1)]) == {PoolName.MAMBA: [True]}
    first.close()
    found = {}
    for rank in ranks:
        store = of(*rank)
        found[rank] = store.exists(name), store.batch_get_v2([state_at(name, 2)])[PoolName.MAMBA][0]
        store.close()
    pages = {rank for rank, (page_there, _) in found.items() if page_there}
    assert pages == ({(0, 0, 1), (1, 0, 1)} if mla else {(1, 0, 1)})
    assert [rank for rank, (_, state_there) in found.items() if state_there] == [(1, 0, 1)]


@pytest.mark.parametrize(
    "odd", ["", "x", "0" * 63, "0" * 65, "0" * 128, "zz" * 32, " " * 64, "00 " * 21 + "0"]
)
def test_a_page_with_a_name_of_another_form_is_not_kept(url: str, odd: str) -> None:
    store = backend(url, kv_pool())
    for names in ([odd], [*keys("a"), odd]):
        assert store.batch_set_v1(names, rows(*range(len(names)))) == [False] * len(names)
        assert store.batch_exists(names) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"revision": ""}, "setting 'revision': '' is no revision; write a commit, a digest or a date"),
        ({"revision": 7}, "setting 'revision': 7 is no revision"),
        ({"storage": []}, "setting 'storage': [] names no store; write a URL"),
        ({"storage": ["file:///a", "file:///a"]}, "are both at /a; a directory or daemon can be one tier"),
        ({"colour": "red"}, "has no setting 'colour'; it has events, kv_dtype, profile, quantization"),
        ({"storage": "nowhere"}, "is not a URL"),
        ({"size": 2}, "can be opened by one process at a time, and this engine has several"),
        ({"storage": "file:///tmp/{rank}?capacity=64MiB", "size": 2, "mla": True}, "one rank writes the KV"),
    ],
)
def test_a_wrong_setting_ends_the_attach_in_one_sentence(url, changes, sentence):
    changes = dict(changes)
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        backend(changes.pop("storage", url), kv_pool(), **changes)
    assert "\n" not in str(error.value)
    # Nothing is left open behind it.
    backend(url, kv_pool()).close()
