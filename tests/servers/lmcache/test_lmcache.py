"""LMCache's adapter in LMCache's own process; `tests.servers.test_servers` has the one under vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.servers.conftest import environment_of
from tests.servers.daemon import Daemon
from tests.servers.lmcache.server import LmcacheServer
from tests.servers.vllm.server import STAND_INS


@pytest.mark.integration
def test_lives_of_the_adapter_over_every_store(tmp_path: Path) -> None:
    python = str(environment_of(LmcacheServer) / "bin" / "python")
    with Daemon(tmp_path / "node") as daemon:
        command = [python, "-m", "tests.servers.lmcache.within", str(tmp_path), daemon.url]
        paths = f"{STAND_INS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # they have the type `slow`
        environment = {**os.environ, "LMCACHE_LOG_LEVEL": "WARNING", "PYTHONPATH": paths}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
