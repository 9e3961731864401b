"""SGLang's controller over every store that a URL can name, and over a daemon that dies.

Needs the environment of `make test-engines`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
pytest.importorskip(
    "sglang.srt.mem_cache.hicache_storage", reason="SGLang is not installed: make test-engines"
)

from tests.engines.sglang import rig  # noqa: E402
from tests.storage_backends.grpc.daemon import Daemon  # noqa: E402

TOKENS = range(rig.PAGE * 6)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    sockets = Path(tempfile.mkdtemp(prefix="tc-"))  # a unix socket's path must be short
    with Daemon("unix", sockets, f"file://{tmp_path}/served?capacity=64MiB") as daemon:
        yield daemon
    shutil.rmtree(sockets)


def restored(made: Any, kv: Any, mamba: Any, expected: list[bytes], state: bytes) -> int:
    """Pages that come back, with their state; all of them compared."""
    key, _ = rig.hashed(TOKENS)
    found = rig.query(made, key, rig.any_state())
    pages: int = found.storage_hit_count // rig.PAGE
    if pages:
        found.pool_transfers[0].host_indices = torch.tensor([7])
        tokens, hits = rig.fetch(made, found, range(20, 20 + pages))
        assert (tokens // rig.PAGE, hits["mamba"]) == (pages, 1)
        assert [rig.page(kv, 20 + i) for i in range(pages)] == expected[:pages]
        assert rig.page(mamba, 7) == state
    return pages


@pytest.mark.parametrize("kind", ["file", "lmdb", "memory", "grpc"])
def test_every_store_gives_back_what_it_was_given(
    group: Any, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    url = {"memory": "memory://?capacity=64MiB"}.get(kind, f"{kind}://{tmp_path}/store?capacity=64MiB")
    if kind == "grpc":
        url = f"grpc://{request.getfixturevalue('daemon').where}"
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    rig.attach(made, url)
    expected, state = [rig.page(kv, i) for i in range(6)], rig.page(mamba, 2)
    _, hashes = rig.hashed(TOKENS)
    assert restored(made, kv, mamba, expected, state) == 0
    assert rig.write(made, TOKENS, hashes, range(6), {5: 2}).completed_tokens == len(TOKENS)
    assert restored(made, kv, mamba, expected, state) == 6
    assert made.clear_storage_backend()
    assert restored(made, kv, mamba, expected, state) == 0
    made.detach_storage_backend()


def test_a_daemon_that_dies_is_a_miss_and_hits_come_back_with_it(group: Any, daemon: Daemon) -> None:
    kv, mamba = rig.kv_pool(), rig.mamba_pool()
    made = rig.controller(kv, mamba, group)
    rig.attach(made, f"grpc://{daemon.where}?timeout=2s")
    expected, state = [rig.page(kv, i) for i in range(6)], rig.page(mamba, 2)
    key, hashes = rig.hashed(TOKENS)
    rig.write(made, TOKENS, hashes, range(6), {5: 2})
    assert restored(made, kv, mamba, expected, state) == 6
    daemon.stop()
    assert rig.query(made, key, rig.any_state()).storage_hit_count == 0
    daemon.kill()
    assert rig.query(made, key, rig.any_state()).storage_hit_count == 0
    assert rig.write(made, TOKENS, hashes, range(6), {5: 2}).completed_tokens == 0
    for left in daemon.directory.glob("*.sock"):
        os.unlink(left)
    daemon.start()
    deadline = time.monotonic() + 60
    while restored(made, kv, mamba, expected, state) != 6:
        assert time.monotonic() < deadline, "hits did not come back"
        time.sleep(0.2)
    made.detach_storage_backend()
