"""Many clients on data connections while their daemon drains and comes back with other credentials."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.daemon.hosts import GUARD, secret, serving
from tests.storage_backends.grpc.nodes import make_certificate, scratch
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.testing.objects import fetch, key, payload, put

CLIENTS = 16
SIZE = 300_000
SECONDS = 2.0
BODY = """
directory = "{place}"
storage = "memory://?capacity=64MiB"
host_bytes = "64MiB"
listen = ["127.0.0.1:{port}"]
unix = false
drain = "3s"
[[principals]]
name = "worker"
token_file = "{place}/token"
[tls]
key = "{place}/key.pem"
certificate = "{place}/cert.pem"
"""


class Life:
    """A client that stores and reads until it is told to stop."""

    def __init__(self, number: int, section: dict[str, str]) -> None:
        self.client = GrpcBackend(read_settings(section))
        self.wrong: list[object] = []
        self.longest = 0.0
        self.rounds = 0
        self._number = number
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)
        self.client.close()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                name, data = key(f"{self._number} {self.rounds % 4}"), payload(self._number, SIZE)
                started = time.monotonic()
                stored, found = put(self.client, name, data), fetch(self.client, name, SIZE)
                self.longest = max(self.longest, time.monotonic() - started)
                fine = isinstance(found, Outcome) and found not in (
                    Outcome.ERROR,
                    Outcome.CORRUPT,
                    Outcome.HIT,
                )
                if stored is Outcome.ERROR or (found != data and not fine):
                    self.wrong.append((stored, found))
                self.rounds += 1
                time.sleep(0.05)
        except BaseException as error:  # noqa: BLE001  shown by the test
            self.wrong.append(error)


def on_data(life: Life) -> bool:
    """Whether a client is served, and its payload travels on data connections."""
    # private: only `usage` tells, and a principal without the verb admin may not ask for it
    connection = life.client._manager.peek()
    return connection is not None and connection.data is not None and not connection.data.why


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_calls_end_well_and_clients_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: nobody has to set how soon a client notices by itself that its daemon is another one
    monkeypatch.setattr("tiercache_backends.grpc.connection_manager._CHECK_SECONDS", 0.5)
    monkeypatch.setattr("tiercache_backends.grpc.data.PAUSES", (0.1, 0.2))
    place = Path(tempfile.mkdtemp(dir=scratch()))
    secret(place / "token", "0123456789abcdef" * 2)
    trusted = place / "trusted"
    trusted.write_bytes(make_certificate(place)[1].read_bytes())
    with serving(place, BODY.format(place=place, port=0)) as daemon:
        [port] = daemon.ports
        given = {"address": f"127.0.0.1:{port}", "token_file": str(place / "token"), "ca": str(trusted)}
        quick = {"timeout": f"{SECONDS}s", "transfer_timeout": f"{SECONDS}s", "breaker_pause": "100ms"}
        lives = [Life(n, given | quick) for n in range(CLIENTS)]
        until(lambda: all(life.rounds > 2 and on_data(life) for life in lives))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(GUARD) == 0
    # The clients trust the certificate that follows, too.
    trusted.write_bytes(trusted.read_bytes() + make_certificate(place)[1].read_bytes())
    secret(place / "token", "fedcba9876543210" * 2)
    with serving(place, BODY.format(place=place, port=port)):
        before = [life.rounds for life in lives]
        until(
            lambda: all(life.rounds > n + 4 and on_data(life) for n, life in zip(before, lives, strict=True))
        )
        for life in lives:
            assert fetch(life.client, key("none"), SIZE) is Outcome.MISS
            life.stop()
    assert [life.wrong for life in lives] == [[]] * CLIENTS
    assert max(life.longest for life in lives) < 4 * SECONDS + 10
