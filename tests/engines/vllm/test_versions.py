"""A release of vLLM that does not tell what the tier needs: the tier says so and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDER = Path(sys.prefix) / "older"
"""The folder in which `make test-engines` has the release of older.txt."""
ENGINE = """
import sys, threading
from dataclasses import fields
import vllm
from vllm.v1.kv_offload import config as made
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from tiercache.errors import ConfigError

def of(kind, **facts):
    return kind(**{each.name: facts.get(each.name, 1) for each in fields(kind)})

tier = {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm", "storage": sys.argv[1],
        "revision": "r1"}
config = of(
    made.OffloadingConfig,
    groups=(of(made.OffloadingGroupConfig, tokens_per_block=16, layer_names=("layers.0",), group_id=0),),
    model=of(made.OffloadingModelConfig, name="some/model", dtype="bfloat16"),
    cache=of(made.OffloadingCacheConfig, tokens_per_hash=16),
    parallel=of(made.OffloadingParallelConfig, rank=0, data_parallel_index=0),
    worker_kv_bytes_per_block=4096, enable_kv_cache_events=False, engine_id="older-release",
    replicated_layout=False, canonical_layout=False, kv_cache_layout=None,
    extra_config={"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]},
)
threads = set(threading.enumerate())
try:
    TieringOffloadingSpec(config).get_manager()
except ConfigError as error:
    assert set(threading.enumerate()) <= threads
    print(error)
"""


@pytest.mark.skipif(not OLDER.exists(), reason="an older vLLM is not installed: make test-engines")
def test_a_release_that_tells_too_little_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, f"file://{tmp_path}/store?capacity=64MiB"],
        env=os.environ | {"PYTHONPATH": str(OLDER), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "vLLM 0.32.0 does not tell a tier max_model_len and sliding_window_size_in_chunks, so TierCacheTier"
        " could restore wrong bytes; it needs vLLM 0.33"
    ]
    assert not (tmp_path / "store").exists()
    assert not [name for name in os.listdir("/dev/shm") if "older-release" in name]
