"""SGLang's controller over every store that a URL can name, a daemon that dies, and a pool below a disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.below import DiskOverPool, chain  # noqa: F401
from tests.engines.sglang import rig
from tests.storage_backends.grpc.daemon import Daemon
from tests.waiting import until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    sockets = Path(tempfile.mkdtemp(prefix="tc-"))  # a unix socket's path must be short
    with Daemon("unix", sockets, f"file://{tmp_path}/served?capacity=64MiB") as daemon:
        yield daemon
    shutil.rmtree(sockets)


@pytest.mark.parametrize("kind", ["file", "lmdb", "memory", "grpc"])
def test_every_store_gives_back_what_it_was_given(
    engine: rig.Engine, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    url = {"memory": "memory://?capacity=64MiB"}.get(kind, f"{kind}://{tmp_path}/store?capacity=64MiB")
    if kind == "grpc":
        url = f"grpc://{request.getfixturevalue('daemon').where}"
    engine.attach(url)
    assert engine.restored() == (0, 0)
    assert engine.write() == len(rig.TOKENS)
    assert engine.restored() == (6, 1)
    assert engine.made.clear_storage_backend()
    assert engine.restored() == (0, 0)


def test_a_daemon_that_dies_is_a_miss_and_hits_come_back_with_it(engine: rig.Engine, daemon: Daemon) -> None:
    engine.attach(f"grpc://{daemon.where}?timeout=2s")
    engine.write()
    assert engine.restored() == (6, 1)
    daemon.stop()
    assert engine.hit() == 0
    daemon.kill()
    assert engine.hit() == 0
    assert engine.write() == 0
    for left in daemon.directory.glob("*.sock"):
        os.unlink(left)
    daemon.start()
    until(lambda: engine.restored() == (6, 1))


def test_a_pool_serves_without_the_disk_above_it_and_a_lost_provider_is_a_miss(
    engine: rig.Engine,
    chain: DiskOverPool,  # noqa: F811
) -> None:
    def restart() -> None:
        engine.detach()
        chain.lose_disk()
        engine.attach(chain.urls)

    engine.attach(chain.urls)
    assert engine.write() == len(rig.TOKENS)
    chain.until_below(engine.store, len(engine.expected) + 1)
    restart()
    assert engine.restored() == (6, 1)
    restart()
    chain.lose_provider()
    engine.restored()
    chain.lose_provider()
    assert engine.restored() == (0, 0)
    # The master may still name what the providers had, so that a write of the same pages finds them stored.
    others = range(1000, 1000 + len(rig.TOKENS))
    assert engine.write(others) == len(others)
    assert engine.restored(others) == (6, 1)
    engine.detach()
