"""A daemon of tiercache for the servers of a test, as an operator starts it."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.cli.serving import serving
from tests.processes import suspend
from tiercache.testing.hosts import Node


class Daemon(Node):
    """`tiercache serve` in a directory; servers of this host reach it at `url`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"grpc://{directory}/run?timeout=2s&transfer_timeout=2s"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemon, and return when it serves."""
        self.directory.mkdir(exist_ok=True)
        self._life = ExitStack()
        arguments = ("--directory", self.directory, "--disk-bytes", "256MiB")
        self.process, _ = self._life.enter_context(serving(*arguments))

    def stop(self) -> None:
        self.go_on()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._life.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._life.close()

    def hang(self) -> None:
        suspend(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
