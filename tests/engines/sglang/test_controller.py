"""The backend under SGLang's real HybridCacheController: its threads, its order of calls, its factory."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines.sglang import rig

TOKENS = rig.TOKENS
PASSED = {"hicache_storage_pass_prefix_keys": True}


@pytest.mark.parametrize("layout", rig.KV_LAYOUTS)
def test_what_was_written_is_found_and_fetched(group: Any, url: str, layout: str) -> None:
    engine = rig.Engine(group, rig.kv_pool(layout))
    engine.attach(url)
    key, hashes = rig.hashed(TOKENS)
    done = rig.write(engine.made, TOKENS, hashes, range(6), {3: 2})
    assert done.completed_tokens == len(TOKENS)
    assert done.pool_storage_result.extra_pool_hit_pages == {"mamba": 1}
    assert engine.objects == 7
    assert rig.query(engine.made, key).storage_hit_count == len(TOKENS)
    assert engine.query().query_pool_hit_pages == {"kv": 6, "mamba": 4}
    assert engine.restored() == (4, 1)
    found = engine.query()
    found.pool_transfers[0].host_indices = torch.tensor([7])
    assert rig.fetch(engine.made, found, [30, 35, 32, 31])[0] == 4 * rig.PAGE
    assert [rig.page(engine.kv, i) for i in (30, 35, 32, 31)] == engine.expected[:4]
    engine.detach()


UNTOLD = (
    "a full store keeps what can be restored only if SGLang says which pages come before those that it"
    " writes; set interface_v1 to 1 and hicache_storage_pass_prefix_keys to true"
)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"hicache_storage_pass_prefix_keys": False}, PASSED | {"interface_v1": 0}],
    ids=["not said", "false", "flat pages"],
)
def test_nothing_is_kept_without_the_order_of_pages(engine, url, wrong):
    settings = rig.extra_config(url) | wrong
    with rig.started_with(**settings), pytest.raises(ValueError) as caught:
        engine.attach(url, interface_v1=settings["interface_v1"])
    assert str(caught.value).endswith(f"hicache-storage-backend-extra-config: {UNTOLD}")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiercache")]
    engine.detach()  # SGLang keeps a backend that refuses at the end of the attach
    with rig.started_with(**rig.extra_config(url), **PASSED):
        engine.attach(url)
    engine.write()
    assert engine.hit() == len(TOKENS)


def test_attached_later_nothing_is_stored_without_the_order_of_pages(engine, url, caplog):
    engine.attach(url)  # by a request: what it says of prefixes, the plug-in cannot see
    _, hashes = rig.hashed(TOKENS)
    for _ in range(2):
        engine.made.write_storage(
            rig.rows(*range(6)), list(TOKENS), hash_value=hashes, extra_pools=[rig.state_at(hashes[5], 2)]
        )
        assert engine.made.ack_backup_queue.get(timeout=60).completed_tokens == 0
    assert engine.objects == 0
    assert caplog.text.count(f"nothing is stored: hicache-storage-backend-extra-config: {UNTOLD}") == 1
    engine.write()
    assert engine.hit() == len(TOKENS)


@pytest.mark.parametrize("form", ["toml", "json", "text"])
def test_settings_as_an_operator_writes_them(engine: rig.Engine, url: str, tmp_path: Path, form: str) -> None:
    written = rig.extra_config(url) | {"hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 64}
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in written.items())
    text = "".join(lines) if form == "toml" else json.dumps(written)
    path = tmp_path / f"tiercache.{form}"
    path.write_text(text)
    made = engine.made
    parsed, threshold, *_ = made.parse_storage_backend_extra_config(text if form == "text" else f"@{path}")
    made.attach_storage_backend(
        "dynamic", threshold, rig.MODEL, parsed, host_pools=made.mem_pool_host.entries
    )
    engine.write()
    assert engine.hit() == len(TOKENS)


def test_a_cancelled_prefetch_leaves_everything_usable(engine: rig.Engine, url: str) -> None:
    engine.attach(url)
    engine.write()
    made, key = engine.made, rig.hashed(TOKENS)[0]
    operation = made.prefetch(SimpleNamespace(rid="gone"), key, None, None, extra_pools=[rig.any_state()])
    made.terminate_prefetch(operation)
    assert made.prefetch_hit_queue.get(timeout=60) is operation
    found = engine.query()
    made.terminate_prefetch(found)
    found.pool_transfers[0].host_indices = torch.tensor([7])
    assert rig.fetch(made, found, range(20, 26))[0] == 0
    assert engine.objects == 7
    assert engine.restored() == (6, 1)


def test_attach_after_a_failed_one_detach_and_attach_again(engine: rig.Engine, url: str) -> None:
    for wrong in ({"revision": ""}, {"colour": "red"}, {"storage": "file:///proc/nowhere?capacity=1GiB"}):
        with pytest.raises((ValueError, OSError)):
            engine.attach(url, **wrong)
        assert engine.made.storage_backend is None
    engine.attach(url)
    engine.write()
    for _ in range(2):
        engine.detach()
        assert engine.made.storage_backend is None
        engine.attach(url)
        assert engine.hit() == len(TOKENS)
    assert engine.made.clear_storage_backend()
    assert engine.hit() == 0
    engine.write()
    assert engine.hit([*TOKENS, *range(500, 600)]) == len(TOKENS), "the prefix of a longer prompt"
    assert engine.hit([999, *TOKENS]) == 0
