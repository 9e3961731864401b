"""The backend under SGLang's real HybridCacheController: its threads, its order of calls, its factory.

Needs the environment of `make test-engines`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: make test-engines"
)

from tests.engines.damage import flip, truncate  # noqa: E402
from tests.engines.sglang import rig  # noqa: E402

TOKENS = range(rig.PAGE * 6)
PASSED = {"hicache_storage_pass_prefix_keys": True}


def stored(made: Any) -> int:
    return int(rig.store_of(made.storage_backend).usage().objects)


@pytest.mark.parametrize("layout", rig.KV_LAYOUTS)
def test_what_was_written_is_found_and_fetched(group: Any, url: str, layout: str) -> None:
    kv, mamba = rig.kv_pool(layout), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    rig.attach(made, url)
    key, hashes = rig.hashed(TOKENS)
    expected, state = [rig.page(kv, i) for i in range(6)], rig.page(mamba, 2)
    done = rig.write(made, TOKENS, hashes, range(6), {3: 2})
    assert done.completed_tokens == len(TOKENS)
    assert done.pool_storage_result.extra_pool_hit_pages == {"mamba": 1}
    assert stored(made) == 7
    found = rig.query(made, key)
    assert found.storage_hit_count == len(TOKENS)
    found = rig.query(made, key, rig.any_state())
    assert found.storage_hit_count == 4 * rig.PAGE
    assert found.query_pool_hit_pages == {"kv": 6, "mamba": 4}
    found.pool_transfers[0].host_indices = torch.tensor([7])
    tokens, hits = rig.fetch(made, found, [20, 25, 22, 21])
    assert (tokens, hits["mamba"]) == (4 * rig.PAGE, 1)
    assert [rig.page(kv, i) for i in (20, 25, 22, 21)] == expected[:4]
    assert rig.page(mamba, 7) == state
    made.detach_storage_backend()


@pytest.mark.parametrize("layout", rig.KV_LAYOUTS)
def test_a_model_without_states_may_pass_flat_pages(group: Any, url: str, layout: str) -> None:
    kv = rig.kv_pool(layout)
    made = rig.controller(kv, None, group)
    rig.attach(made, url, v1=0)
    key, hashes = rig.hashed(TOKENS)
    expected = [rig.page(kv, i) for i in range(6)]
    assert rig.write(made, TOKENS, hashes, range(6), {}).completed_tokens == len(TOKENS)
    assert stored(made) == 6
    found = rig.query(made, key)
    assert found.storage_hit_count == len(TOKENS)
    assert rig.fetch(made, found, [20, 25, 22, 21, 24, 23])[0] == len(TOKENS)
    assert [rig.page(kv, i) for i in (20, 25, 22, 21, 24, 23)] == expected
    made.detach_storage_backend()


UNTOLD = (
    "this model has states or windows, and a full store can restore them only if SGLang says which pages come"
    " before those that it writes; set interface_v1 to 1 and hicache_storage_pass_prefix_keys to true"
)


@pytest.mark.parametrize(
    ("v1", "more"), [(1, {}), (1, {"hicache_storage_pass_prefix_keys": False}), (0, PASSED)]
)
def test_a_model_with_states_is_not_kept_without_the_order_of_pages(
    group: Any, url: str, v1: int, more: dict[str, bool]
) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    with rig.started_with(**rig.extra_config(url, v1=v1), **more), pytest.raises(ValueError) as caught:
        rig.attach(made, url, v1=v1)
    assert str(caught.value) == f"hicache-storage-backend-extra-config: {UNTOLD}"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiercache")]
    made.detach_storage_backend()  # SGLang keeps a backend that refuses at the end of the attach
    with rig.started_with(**rig.extra_config(url), **PASSED):
        rig.attach(made, url)
    key, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    made.detach_storage_backend()
    without = rig.controller(rig.kv_pool(), None, group)
    with rig.started_with(**rig.extra_config(url, v1=v1), **more):
        rig.attach(without, url, v1=v1)
    without.detach_storage_backend()


def test_attached_later_nothing_of_a_model_with_states_is_stored_without_the_order_of_pages(
    group: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    rig.attach(made, url)  # by a request: what it says of prefixes, the plug-in cannot see
    key, hashes = rig.hashed(TOKENS)
    for _ in range(2):
        made.write_storage(
            rig.rows(*range(6)), list(TOKENS), hash_value=hashes, extra_pools=[rig.state_at(hashes[5], 2)]
        )
        assert made.ack_backup_queue.get(timeout=60).completed_tokens == 0
    assert stored(made) == 0
    assert caplog.text.count(f"nothing is stored: hicache-storage-backend-extra-config: {UNTOLD}") == 1
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    made.detach_storage_backend()


@pytest.mark.parametrize("form", ["toml", "json", "text"])
def test_settings_as_an_operator_writes_them(group: Any, url: str, tmp_path: Path, form: str) -> None:
    written = rig.extra_config(url) | {"hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 64}
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in written.items())
    text = "".join(lines) if form == "toml" else json.dumps(written)
    path = tmp_path / f"tiercache.{form}"
    path.write_text(text)
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    parsed, threshold, *_ = made.parse_storage_backend_extra_config(text if form == "text" else f"@{path}")
    made.attach_storage_backend(
        "dynamic", threshold, rig.MODEL, parsed, host_pools=made.mem_pool_host.entries
    )
    key, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    made.detach_storage_backend()


def test_a_longer_prompt_finds_its_prefix_and_another_prompt_nothing(group: Any, url: str) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    rig.attach(made, url)
    _, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    longer, _ = rig.hashed([*TOKENS, *range(500, 600)])
    assert rig.query(made, longer, rig.any_state()).storage_hit_count == 6 * rig.PAGE
    other, _ = rig.hashed([999, *TOKENS])
    assert rig.query(made, other, rig.any_state()).storage_hit_count == 0
    made.detach_storage_backend()


def test_a_cancelled_prefetch_leaves_everything_usable(group: Any, url: str) -> None:
    kv = rig.kv_pool()
    made = rig.controller(kv, rig.mamba_pool(), group)
    rig.attach(made, url)
    key, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    operation = made.prefetch(SimpleNamespace(rid="gone"), key, None, None, extra_pools=[rig.any_state()])
    made.terminate_prefetch(operation)
    assert made.prefetch_hit_queue.get(timeout=60) is operation
    found = rig.query(made, key, rig.any_state())
    made.terminate_prefetch(found)
    found.pool_transfers[0].host_indices = torch.tensor([7])
    assert rig.fetch(made, found, range(20, 26))[0] == 0
    assert stored(made) == 7
    found = rig.query(made, key, rig.any_state())
    found.pool_transfers[0].host_indices = torch.tensor([7])
    assert rig.fetch(made, found, range(20, 26))[0] == len(TOKENS)
    made.detach_storage_backend()


def test_detach_and_attach_again(group: Any, url: str) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    key, hashes = rig.hashed(TOKENS)
    rig.attach(made, url)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    for _ in range(2):
        made.detach_storage_backend()
        assert made.storage_backend is None
        rig.attach(made, url)
        assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    assert made.clear_storage_backend()
    assert rig.query(made, key, rig.any_state()).storage_hit_count == 0
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    made.detach_storage_backend()


def test_an_attach_that_fails_can_be_repeated(group: Any, url: str) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    for wrong in ({"revision": ""}, {"colour": "red"}, {"storage": "file:///proc/nowhere?capacity=1GiB"}):
        with pytest.raises((ValueError, OSError)):
            rig.attach(made, url, **wrong)
        assert made.storage_backend is None
    rig.attach(made, url)
    made.detach_storage_backend()


@pytest.mark.parametrize("hurt", [flip, truncate])
def test_damage_is_a_miss_and_the_next_write_repairs_it(
    group: Any, url: str, tmp_path: Path, hurt: Any
) -> None:
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    rig.attach(made, url)
    key, hashes = rig.hashed(TOKENS)
    expected, state = [rig.page(kv, i) for i in range(6)], rig.page(mamba, 2)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    made.detach_storage_backend()
    hurt(tmp_path / "store", expected[3][64:128])
    rig.attach(made, url)

    def restored() -> tuple[int, int]:
        rig.wipe(kv, *range(20, 26))
        found = rig.query(made, key, rig.any_state())
        pages = found.storage_hit_count // rig.PAGE
        if not pages:
            return 0, 0
        found.pool_transfers[0].host_indices = torch.tensor([7])
        tokens, hits = rig.fetch(made, found, range(20, 20 + pages))
        arrived = tokens // rig.PAGE
        assert [rig.page(kv, 20 + i) for i in range(arrived)] == expected[:arrived]
        if hits["mamba"]:
            assert rig.page(mamba, 7) == state
        return arrived, hits["mamba"]

    arrived, states = restored()
    assert arrived < 6
    assert states == 0  # a state without all of its pages would be a state of another text
    assert restored()[0] < 6
    assert rig.write(made, TOKENS, hashes, range(6), {5: 2}).completed_tokens == len(TOKENS)
    assert restored() == (6, 1)
    made.detach_storage_backend()


def test_another_dtype_layout_or_model_finds_nothing(group: Any, url: str) -> None:
    made = rig.controller(rig.kv_pool(), rig.mamba_pool(), group)
    rig.attach(made, url)
    key, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    made.detach_storage_backend()
    for kv, mamba, settings in [
        (rig.kv_pool("layer_first"), rig.mamba_pool(), {}),
        (rig.kv_pool(dtype=torch.float16), rig.mamba_pool(), {}),
        (rig.kv_pool(), rig.mamba_pool(dtype=torch.bfloat16), {}),
        (rig.kv_pool(), rig.mamba_pool("page_first_direct"), {}),
        (rig.kv_pool(), rig.mamba_pool(), {"revision": "r2"}),
    ]:
        other = rig.controller(kv, mamba, group)
        rig.attach(other, url, **settings)
        assert rig.query(other, key, rig.any_state()).storage_hit_count == 0
        other.detach_storage_backend()
    rig.attach(made, url)
    assert rig.query(made, key, rig.any_state()).storage_hit_count == len(TOKENS)
    made.detach_storage_backend()


def ranks(tmp_path: Path, url: str, *work: list[str]) -> list[list[dict[str, Any]]]:
    """Run one process per list of work, to the end; what each said."""
    (tmp_path / "ranks").unlink(missing_ok=True)
    script = Path(__file__).with_name("rank.py")
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                str(script),
                str(rank),
                str(len(work)),
                str(tmp_path),
                url,
                *steps,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, steps in enumerate(work)
    ]
    said = []
    for process in started:
        out, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -9), errors[-3000:]
        said.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    return said


def test_a_killed_process_finds_everything_again(tmp_path: Path, url: str) -> None:
    assert ranks(tmp_path, url, ["write:3", "die"]) == [[{"written": 80}]]
    assert ranks(tmp_path, url, ["fetch"]) == [[{"hit": 4, "tokens": 64, "states": 1, "right": True}]]


def test_two_ranks_agree_on_what_both_have(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=64MiB"
    said = ranks(tmp_path, url, ["write:3", "fetch"], ["write:1", "fetch"])
    whole = {"hit": 2, "tokens": 32, "states": 1, "right": True}  # rank 1 has no state at page 4
    assert said == [[{"written": 80}, whole], [{"written": 80}, whole]]
    # Another number of ranks cuts the pages in another way.
    assert ranks(tmp_path, url, ["fetch"]) == [[{"hit": 0}]]


def test_two_ranks_with_a_store_each(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/{{rank}}?capacity=64MiB"
    whole = {"hit": 4, "tokens": 64, "states": 1, "right": True}
    assert ranks(tmp_path, url, *[["write:3", "fetch"]] * 2) == [[{"written": 80}, whole]] * 2
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("tp")} == {
        "tp0pp0cp0dp0",
        "tp1pp0cp0dp0",
    }
