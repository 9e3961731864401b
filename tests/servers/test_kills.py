"""Servers that end by `kill -9` at random moments: half an hour an engine.

ENGINES_FOLDER=... KILLS=50 pytest tests/servers/test_kills.py -m stress
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.lmcache.server import LmcacheServer
from tests.servers.server import Server
from tests.servers.sglang.server import SglangServer, SglangTreeServer
from tests.servers.vllm.server import VllmConnectorServer, VllmRanksServer, VllmServer
from tiercache.testing.hosts import PROMPTS, check

KILLS = int(os.environ.get("KILLS", "50"))

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3 * 3600)]


ENGINES = [
    SglangServer, SglangTreeServer, VllmServer, VllmConnectorServer, VllmRanksServer, LmcacheServer,
]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_the_store_is_whole_and_every_answer_right_after_many_kills(engine, hosts, tmp_path):
    """All processes are killed, and of a server with ranks first one of them."""
    kind, store, draw = hosts.kinds[-1], tmp_path / "store-{rank}", random.Random(1)
    right = hosts.right(kind)
    restored = 0
    for life in range(KILLS + 1):
        # A store of a sixth of what is written: room is made and slabs are emptied all the time.
        with hosts.start(kind, f"file://{store}?capacity=16MiB") as server, ThreadPoolExecutor(2) as others:
            found = [server.ask(asked) for asked in PROMPTS]
            check(found, right, when=f"life {life}")
            restored += sum(answer.cached for answer in found)
            if life == KILLS:
                break
            for _ in range(2):
                others.submit(_fill, server, draw.randrange(1 << 30))
            time.sleep(draw.uniform(0, 3))
            if engine is VllmRanksServer:
                os.kill(draw.choice(server.processes()), signal.SIGKILL)
                others.shutdown()  # nobody waits for an answer for ever
            left = server.kill()
            assert not left or engine is not VllmConnectorServer
    assert restored >= min(KILLS, 3) * sum(hosts.whole)  # later, old prompts may be worth more
    tool = str(Path(sys.executable).parent / "tiercache")
    for one in tmp_path.glob("store-*"):
        checked = subprocess.run([tool, "verify", "-s", one], check=False, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def _fill(server: Server, seed: int) -> None:
    draw = random.Random(seed)
    with suppress(OSError):  # until the server is killed
        while True:
            server.ask(draw.randrange(3, 250) for _ in range(draw.randrange(300, 1500)))
