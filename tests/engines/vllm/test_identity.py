"""Engines that differ in anything that bytes depend on share no object; wrong settings are refused."""

from __future__ import annotations

import gc
import os
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from tests.engines.vllm.rig import FULL, LAYERS, MISS, ROW, WINDOW, Engine, config, groups, key, keys
from tiercache.core import ObjectKey
from tiercache.errors import ConfigError
from tiercache.integrations.settings import StoreSettings
from tiercache.integrations.vllm.identity import Keys
from tiercache.storage.registry import open_backend


@pytest.fixture
def tier(tmp_path: Path) -> dict[str, object]:
    return {"storage": f"file://{tmp_path}/store?capacity=64MiB", "revision": "r1"}


@pytest.fixture
def full(tier: dict[str, object]) -> dict[str, object]:
    """A store that holds "a", of both groups."""
    with Engine(tier) as engine:
        engine.store("a")
        engine.store("a", group=WINDOW)
        engine.evict()
        assert engine.found("a") == engine.found("a", group=WINDOW) == [True]
    return tier


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "r2"}, {"tenant": "other"}, {"quantization": "fp8"}, {"model": "another/model"},
        {"dtype": "float16"}, {"max_model_len": 131_072},
    ],
    ids=str,
)  # fmt: skip
def test_another_engine_never_hits(full: dict[str, object], change: dict[str, Any]) -> None:
    settings = {
        name: value for name, value in change.items() if name in ("revision", "tenant", "quantization")
    }
    with Engine(full | settings, **{name: change[name] for name in change.keys() - settings}) as engine:
        assert engine.answers([*keys("a"), *keys("a", group=WINDOW)])[-1] == [MISS, MISS]
        engine.store("a")
        engine.evict()
        assert engine.found("a") == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"layer_names": LAYERS[FULL][::-1]},
        {"layer_names": (*LAYERS[FULL], "layers.3")},
        {"tokens_per_block": 32},
        {"sliding_window_size_in_chunks": 1},
        {"sliding_window_size_in_chunks": 4},
    ],
    ids=str,
)
def test_a_group_that_is_made_otherwise_never_hits_and_the_others_do(full, change):
    with Engine(full, groups=groups(**change)) as engine:
        assert engine.found("a") == [False]
        assert engine.found("a", group=WINDOW) == [True]
    with Engine(full, groups=groups(window=2)) as engine:
        assert (engine.found("a"), engine.found("a", group=WINDOW)) == ([True], [False])


def test_each_of_these_alone_makes_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, settings = config({}), StoreSettings(storage=["memory://"], revision="r1")

    def made(row: int = ROW, **change: Any) -> ObjectKey | None:
        return Keys(replace(plain, **change), row, settings).of(key("a"))

    found = {made(), made(), made(row=2 * ROW)}
    for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"):
        found.add(made(parallel=replace(plain.parallel, **{name: 8})))
    for name in ("blocks_per_chunk", "tokens_per_hash"):
        found.add(made(cache=replace(plain.cache, **{name: 8})))
    for other in (
        {"worker_kv_bytes_per_block": 6000}, {"kv_cache_layout": "LBHNC"}, {"kv_cache_layout": None},
        {"canonical_layout": True}, {"replicated_layout": True},
    ):  # fmt: skip
        found.add(made(**other))
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    found.add(made())
    assert len(found) == 2 + 5 + 2 + 5 + 1


def test_a_release_that_tells_too_little_is_refused_in_one_sentence() -> None:
    """The configuration lacks the two fields that vLLM 0.32 does not have."""
    plain, settings = config({}), StoreSettings(storage=["memory://"], revision="r1")
    model = SimpleNamespace(name="some/model", dtype="bfloat16")
    older: Any = replace(plain, model=model, groups=(SimpleNamespace(group_id=0, tokens_per_block=16),))
    with pytest.raises(ConfigError) as refused:
        Keys(older, ROW, settings)
    assert str(refused.value) == (
        f"vLLM {vllm.__version__} does not tell a tier max_model_len and sliding_window_size_in_chunks, so"
        " TierCacheTier could restore wrong bytes; it needs vLLM 0.33"
    )


@pytest.mark.parametrize(
    "change", [{"data_parallel_index": 1}, {"rows": 30}, {"engine_id": "another"}], ids=str
)
def test_what_the_bytes_do_not_depend_on_hits(full: dict[str, object], change: dict[str, Any]) -> None:
    with Engine(full, **change) as engine:
        assert engine.found("a") == engine.found("a", group=WINDOW) == [True]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"revision": None}, "secondary tier TierCacheTier needs 'revision'"),
        ({"revision": 7}, "secondary tier TierCacheTier, setting 'revision': 7 is no revision"),
        ({"storage": None}, "secondary tier TierCacheTier needs 'storage'"),
        ({"storage": "floppy:///a"}, "storage type 'floppy' is unknown"),
        ({"stroage": "file:///a"}, "secondary tier TierCacheTier has no setting 'stroage'"),
        ({"queued_rows": 0}, "secondary tier TierCacheTier, setting 'queued_rows': 0 is not possible"),
        ({"queued_rows": True}, "secondary tier TierCacheTier, setting 'queued_rows': True is not possible"),
        (
            {"locality": "NEAR"},
            "secondary tier TierCacheTier, setting 'locality': 'NEAR' is not possible; use LOCAL or REMOTE",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_leaves_nothing(tier, change, says):
    given = {name: value for name, value in (tier | change).items() if value is not None}
    refused(given, says)
    with Engine(tier) as engine:
        engine.store("a")


def test_replicas_that_cannot_share_a_store_are_told_so(tier: dict[str, Any]) -> None:
    refused(
        tier,
        "can be opened by one process at a time, and this engine has several; use lmdb://",
        data_parallel_size=2,
    )
    with Engine(
        tier | {"storage": str(tier["storage"]).replace("store", "store-{rank}")},
        data_parallel_size=2,
        data_parallel_index=1,
    ):
        pass
    assert sorted(
        path.name for path in Path(str(tier["storage"]).removeprefix("file://")).parent.glob("store-*")
    ) == ["store-1"]


def test_a_quantized_kv_hides_the_dtype_of_states_which_has_to_be_said(tier: dict[str, Any]) -> None:
    refused(tier, "vLLM does not tell the dtype of recurrent states; set state_dtype", dtype="fp8_e4m3")
    for state_dtype in ("bfloat16", "float32"):
        with Engine(tier | {"state_dtype": state_dtype}, dtype="fp8_e4m3") as engine:
            assert engine.found("a", group=WINDOW) == [False]
            engine.store("a", group=WINDOW)
    with Engine(tier, dtype="fp8_e4m3", groups=groups()[:1]) as engine:  # no group could have a state
        engine.store("a")


def refused(given: dict[str, Any], says: str, **changes: Any) -> None:
    """The engine does not start; no thread, no shared memory and no lock of a store stays behind."""
    threads, engine_id = set(threading.enumerate()), f"refused-{uuid.uuid4().hex}"
    with pytest.raises(ConfigError) as caught:
        Engine(given, engine_id=engine_id, **changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert not [name for name in os.listdir("/dev/shm") if engine_id in name]
    if str(given.get("storage")).startswith("file://"):
        open_backend(given["storage"]).close()
