"""A daemon of tiercache for the servers of a test, as an operator starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.processes import suspend
from tests.waiting import until


class Daemon:
    """`tiercache serve` in a directory; servers of this host reach it at `url`."""

    def __init__(self, directory: Path, disk: str = "256MiB") -> None:
        self.directory = directory
        self.url = f"grpc://{directory}/run?timeout=2s&transfer_timeout=2s"
        self._disk = disk
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemon, and return when it serves."""
        self.directory.mkdir(exist_ok=True)
        log = self.directory.with_suffix(".log")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "tiercache"), "serve",
                    "--directory", str(self.directory), "--disk-bytes", self._disk,
                ],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        until(lambda: "workers of this host" in log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, f"the daemon ended:\n{log.read_text()}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def hang(self) -> None:
        suspend(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
