"""Three hosts: two workers, and on the third what they share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.network import GUARD, Hosts
from tests.hosts.rig import Answer, Desk, WorkerOnHost
from tests.hosts.stores import SharedStore, shared_store, storage_of


@dataclass
class Three:
    """Hosts 0 and 1 with a worker each, host 2 with the store."""

    hosts: Hosts
    store: SharedStore
    workers: list[WorkerOnHost]
    desk: Desk

    def serve(self, number: int, prompt: list[int]) -> Answer:
        """Let a worker answer a prompt, with its own tiers empty."""
        return self.desk.serve(self.workers[number], prompt)

    def shared(self, prompt: list[int] | None = None) -> list[int]:
        """Return a prompt that the first worker has computed and stored, and the second restores."""
        prompt = prompt or self.desk.prompt()
        assert not self.serve(0, prompt).restored
        assert self.workers[0].call("flush")
        self.comes_back(1, prompt)
        return prompt

    def comes_back(self, number: int, prompt: list[int]) -> Answer:
        """Ask until a worker restores a prompt from storage."""
        end = time.monotonic() + GUARD
        while not (row := self.serve(number, prompt)).hit:
            assert time.monotonic() < end, "hits do not come back"
            time.sleep(0.2)
        return row

    def heal(self) -> None:
        """Heal everything behind a test; whatever it did, no answer was wrong."""
        self.hosts.shape()
        for number in range(3):
            self.hosts.heal(self.hosts[number])
        assert self.desk.wrong == []


@contextmanager
def three_hosts(kind: str, base: Path, layers: int = 4) -> Iterator[Three]:
    """Yield hosts with a store of that kind. At the end every operation of the workers must have ended."""
    with ExitStack() as ends:
        hosts = ends.enter_context(Hosts(3))
        store = shared_store(kind, hosts, base)
        ends.callback(store.close)
        workers = [
            WorkerOnHost(hosts[number], storage_of(kind, store, base / f"own-{number}"), layers)
            for number in (0, 1)
        ]
        for worker in workers:
            ends.callback(worker.kill)
        for worker in workers:
            worker.wait()
        yield Three(hosts, store, workers, Desk())
        assert [worker.call("close") for worker in workers] == [True, True]
