"""Workers and stores on hosts, which a test or a campaign can kill, restart and partition."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from tests.hosts.network import GUARD, Host
from tests.storage_backends.grpc.nodes import certificates, token_file

PAGE_SIZE = 64
"""Tokens in one page."""
PORT = 7070
DEADLINE = 3.0
"""Seconds that a request may wait for storage."""
CALL, TRANSFER, PAUSE = 0.5, 2.0, 0.2
"""Seconds of a call, of a call with payload, and of an open breaker."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.hosts.worker"])
DAEMON = """
directory = "{directory}"
disk_bytes = "256MiB"
host_bytes = "64MiB"
listen = ["{address}:{port}"]
unix = false
[tls]
certificate = "{certificate}"
key = "{key}"
[tenants.acme]
salt_file = "{salt}"
[[principals]]
name = "worker"
token_file = "{token}"
tenant = "acme"
verbs = ["read", "write", "admin"]
"""


class HungError(Exception):
    """A process has not answered in time."""


@dataclass(frozen=True)
class Answer:
    """The outcome of one request; `seconds` is the time of the whole answer, without the audit."""

    restored: int
    tier: str | None
    reason: str
    bytes: int
    seconds: float
    right: bool
    run: dict[str, Any] = field(repr=False)

    @property
    def hit(self) -> bool:
        """Whether anything came from storage."""
        return self.tier == "storage"


class DaemonOnHost:
    """`tiercache serve` on TCP, with TLS and a token, over a store that outlives its process."""

    parts = ("daemon",)
    keeps = True

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        key, certificate = certificates()
        directory.mkdir(0o700)
        salt = directory / "acme.salt"
        salt.touch(0o600)
        salt.write_bytes(bytes(32))
        self._config = directory / "tiercache.toml"
        self._config.write_text(
            DAEMON.format(
                directory=directory / "made", address=host.address, port=PORT, certificate=certificate,
                key=key, token=token_file(), salt=salt,
            )
        )  # fmt: skip
        self.log = directory / "log"
        self.start()

    @property
    def url(self) -> str:
        """The store as a worker on another host opens it."""
        return (
            f"grpc://{self.host.address}:{PORT}?ca={certificates()[1]}&server_name=localhost"
            f"&token_file={token_file()}&timeout={CALL}s&transfer_timeout={TRANSFER}s&breaker_pause={PAUSE}s"
        )

    def start(self, _part: str = "daemon") -> None:
        """Start the process, and wait until it serves."""
        command = [sys.executable, "-m", "tiercache.cli", "serve", "--config", str(self._config)]
        with self.log.open("w") as log:
            self.process = self.host.run(command, stdout=log, stderr=log)
        end = time.monotonic() + GUARD
        while f"on {self.host.address}" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise HungError(f"the daemon does not serve: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self, _part: str = "daemon") -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it; SIGTERM lets calls in progress end."""
        self.process.terminate()
        self.process.wait(GUARD)


class WorkerOnHost:
    """A worker process (see `tests.hosts.worker`), forked from one that has imported torch."""

    def __init__(self, host: Host, storage: Sequence[str], layers: int = 4) -> None:
        size = layers * 16 << 20
        self.host = host
        self._plan = {
            "storage": list(storage), "layers": layers, "page_size": PAGE_SIZE, "device_bytes": size,
            "host_bytes": size, "deadline": DEADLINE,
        }  # fmt: skip
        self.learned: dict[tuple[int, ...], int] = defaultdict(int)
        """Number of runs that its audit knows, by their first page."""
        self.start()

    def start(self) -> None:
        """Start the process; the first request waits until it serves."""
        self.learned.clear()
        self._channel, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_work, args=(self.host.holder, theirs, self._plan), daemon=True)
        self.process.start()
        theirs.close()
        self._starts = True

    def wait(self) -> None:
        """Wait until it serves."""
        if self._starts:
            self.answer()
            self._starts = False

    def ask(self, do: str, **values: Any) -> None:
        """Send a request, without waiting for its answer."""
        self.wait()
        self._channel.send_bytes(json.dumps({"do": do, **values}).encode())

    def answer(self) -> Any:
        """Return the next answer; raise HungError if none comes."""
        if not self._channel.poll(GUARD):
            raise HungError(f"the worker on {self.host.address} has not answered in {GUARD} s")
        try:
            return json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GUARD)
            raise HungError(f"the worker on {self.host.address} ended: {self.process.exitcode}") from None

    def call(self, do: str, **values: Any) -> Any:
        """Send a request, and return its answer."""
        self.ask(do, **values)
        return self.answer()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.join()
        self._channel.close()


def _work(holder: int, channel: Connection, plan: Mapping[str, Any]) -> None:
    """Be a worker. Only the process that is forked imports torch, and not the one of the tests."""
    from tests.hosts import worker

    worker.run(holder, channel, plan)


class Desk:
    """Requests to workers, and the runs of each, which the audits of the others must know.

    Prompts with the same first page must not be answered by two workers at the same time. `rows` has every
    answer.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._runs: dict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
        self.rows: list[Answer] = []

    def prompt(self, tokens: int = 2 * PAGE_SIZE + 20) -> list[int]:
        """Return a prompt that shares no page with another."""
        return self._random.choices(range(256), k=tokens)

    def begin(self, worker: WorkerOnHost, prompt: list[int], new: int = 2, cold: bool = True) -> None:
        """Ask a worker for an answer; with `cold`, it first empties its own tiers."""
        family = tuple(prompt[:PAGE_SIZE])
        runs = self._runs[family]
        worker.ask("serve", prompt=prompt, new=new, cold=cold, runs=runs[worker.learned[family] :])
        worker.learned[family] = len(runs)

    def end(self, worker: WorkerOnHost) -> Answer:
        """Wait for the answer."""
        row = Answer(**worker.answer())
        family = tuple(row.run["tokens"][:PAGE_SIZE])
        self._runs[family].append(row.run)
        worker.learned[family] = len(self._runs[family])
        self.rows.append(row)
        return row

    def serve(self, worker: WorkerOnHost, prompt: list[int], new: int = 2, cold: bool = True) -> Answer:
        """Let a worker answer a prompt."""
        self.begin(worker, prompt, new, cold)
        return self.end(worker)

    @property
    def wrong(self) -> list[Answer]:
        """The answers that differ from their recompute."""
        return [row for row in self.rows if not row.right]
