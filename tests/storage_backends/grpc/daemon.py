"""A daemon in a process of its own, which tests stop, continue and kill; its store answers as late as it is
told.

python -m tests.storage_backends.grpc.daemon TRANSPORT DIRECTORY STORE[,STORE...] [HOST:PORT]

It prints its address when it serves. A file `slow` in DIRECTORY has the seconds that a get or set waits in
the store before it begins; a smaller number there also ends the waiting of calls under way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Self

from tests.processes import suspend
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Wrapper


class Slow(Wrapper):
    """Waits before gets and sets, as long as a file says."""

    file: Path

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        self.dawdle()
        return super().get(items)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        self.dawdle()
        return super().set(items)

    def dawdle(self) -> None:
        begun = time.monotonic()
        with suppress(FileNotFoundError):
            self.file.with_name("entered").touch()
            while time.monotonic() - begun < float(self.file.read_text()):
                time.sleep(0.01)


class Daemon:
    """The process, as a test sees it."""

    def __init__(
        self, transport: str, directory: Path, store: str = "memory://", address: str = "127.0.0.1:0"
    ) -> None:
        self.transport, self.directory, self.store, self.address = transport, directory, store, address
        self.start()

    def start(self) -> None:
        module = "tests.storage_backends.grpc.daemon"
        command = [
            sys.executable, "-m", module, self.transport, str(self.directory), self.store, self.address,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the daemon did not start"

    @property
    def where(self) -> str:
        return str(self.directory) if self.transport == "unix" else self.address

    def slow(self, seconds: float) -> None:
        (self.directory / "entered").unlink(missing_ok=True)
        (self.directory / "next").write_text(str(seconds))
        (self.directory / "next").replace(self.directory / "slow")

    def entered(self) -> bool:
        return (self.directory / "entered").exists()

    def stop(self) -> None:
        suspend(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=120)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.kill()


def main(transport: str, directory: str, store: str, address: str) -> None:
    tiers = store.split(",")
    slow = Slow(open_backend(tiers if len(tiers) > 1 else store))
    slow.file = Path(directory) / "slow"
    listen = {} if transport == "unix" else {"listen": (address,)}
    node = StorageServer(daemon_settings(transport, Path(directory), **listen), slow)
    node.start()
    print(node.addresses[0] if node.addresses else "unix", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: (node.stop(), sys.exit(0)))
    Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
