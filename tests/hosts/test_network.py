"""The hosts themselves: what crosses the bridge, what does not, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        peer.sendall(bytes(int(peer.recv(100))))
"""
CLIENT = """
import socket, sys
try:
    peer = socket.create_connection((sys.argv[1], 9000), timeout=float(sys.argv[3]))
    peer.sendall(sys.argv[2].encode())
    got = 0
    while data := peer.recv(1 << 20):
        got += len(data)
    print(got)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        server = hosts[1].run([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        with server:
            assert server.stdout.readline() == b"up\n"
            yield hosts
            server.kill()


def fetched(hosts: Hosts, number: int, address: str = "", seconds: float = 30) -> str:
    """Let the first host ask the second for so many bytes; return how many came, or the error."""
    command = [sys.executable, "-c", CLIENT, address or hosts[1].address, str(number), str(seconds)]
    with hosts[0].run(command, stdout=subprocess.PIPE, text=True) as client:
        return client.communicate(timeout=120)[0].strip()


@pytest.mark.parametrize("how", ["silence", "unplug"])
def test_nothing_crosses_a_partition_until_it_heals(hosts: Hosts, how: str) -> None:
    hosts.shape(0.001)
    try:
        getattr(hosts, how)(hosts[1])
        assert fetched(hosts, 1, seconds=0.3) == "TimeoutError"
        hosts.heal(hosts[1])
        assert fetched(hosts, 1) == "1"
    finally:
        hosts.heal(hosts[1])
        hosts.shape()


def test_nothing_is_left_of_hosts(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        hosts.shape(0.001)
        holders = [hosts[0].holder, hosts[1].holder]
        # A shell that has left the process that started it, and that no one waits for.
        hosts[0].run(["sh", "-c", "sleep 1000 & echo $! >" + str(tmp_path / "left")]).wait()
    ended(*holders, int((tmp_path / "left").read_text()))


DIES = """
import os, signal, sys, time
from tests.hosts.network import Hosts
with Hosts(2) as hosts:
    hosts.shape(0.001)
    worker = hosts[0].run(["sleep", "1000"])
    time.sleep(0.2)
    print(hosts[0].holder, hosts[1].holder, worker.pid, hosts._wire.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_hosts_whose_process_was_killed() -> None:
    done = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    ended(*pids)


def ended(*pids: int) -> None:
    """Wait until processes have ended; fail if one does not."""
    end = time.monotonic() + 60
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.02)
