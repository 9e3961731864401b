"""A real server of an engine, as a process of its own: started, asked over HTTP, flushed, stopped, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

START_S = 900
"""Most seconds that a start may take; it takes 30 to 40 s of a quiet core."""
ANSWER_S = 600
"""Most seconds that an answer may take."""
STOP_S = 90


class Answer(NamedTuple):
    """Answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    """Logarithm of the probability of each token."""
    cached: int
    """Number of the prompt's tokens that were not computed, as the server counts them."""


class Server:
    """One server. Leaving its `with` block stops it.

    Thread safety: one thread, except `post`.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]) -> None:
        """Start the server; `ready` waits until it answers."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            self.ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self.stop()

    def ready(self) -> None:
        """Wait until the server is healthy; AssertionError quotes its log if it ends or takes too long."""
        end = time.monotonic() + START_S
        while not self._is_healthy():
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            assert time.monotonic() < end, f"the server does not start:\n{self.tail()}"
            time.sleep(0.25)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def post(self, path: str, document: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to a POST: parsed if it is JSON, else its text."""
        request = urllib.request.Request(
            self.url + path, json.dumps(document or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            body = answer.read().decode()
        try:
            return json.loads(body)
        except ValueError:
            return body

    def said(self) -> str:
        """The whole log."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(line[:300] for line in self.said().splitlines()[-lines:])

    def stop(self) -> None:
        """Ask the server to end, as an operator does, and make sure that all its processes have."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """End all processes of the server at once; its session has only what it started."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        end = time.monotonic() + STOP_S
        while self.processes():
            assert time.monotonic() < end, "processes of the server do not end"
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Processes of the server's session that have not ended."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] not in "ZX":
                found.append(int(folder.name))
        return found
