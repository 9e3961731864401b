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
from typing import Any, ClassVar, Self

from tests.waiting import until
from tiercache.testing.hosts import Host

START_S = 900
"""Most seconds that a start may take; it takes 30 to 40 s of a quiet core."""
ANSWER_S = 600
"""Most seconds that an answer may take."""
STOP_S = 90


Storage = str | list[str] | Mapping[str, Any]
"""Address of a store, addresses of its tiers, or settings of an integration that name it."""


def settings(storage: Storage, **more: object) -> dict[str, Any]:
    """Return the settings that an engine passes on to tiercache."""
    named = dict(storage) if isinstance(storage, Mapping) else {"storage": storage}
    return {"revision": "r1", **named, **more}


class Server(Host):
    """One server of a model, with or without a store below its cache. Leaving its `with` block stops it.

    An engine's class is made of an environment, a model, a port, a log, and the URL of a store or None.

    Thread safety: one thread, except `post`.
    """

    ENVIRONMENT: ClassVar[str]
    """Name of the engine's environment, which `make test-servers` makes."""
    MARK: ClassVar[str] = ".serves"
    """Name of the file that says that the environment has all that is needed."""
    KINDS: ClassVar[Sequence[str]] = ("attention", "hybrid")
    """Kinds of models that are served, the most demanding last."""
    PAGE: ClassVar[int]
    """Tokens of a page; states are as far apart."""
    LEAVES: ClassVar[str] = "nothing"
    """Pattern of the files of shared memory that the engine leaves when it is asked to end."""
    DTYPES: ClassVar[Mapping[str, str]]
    """Number format of each model. In float32 a cached prefix changes no answer by rounding."""

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]) -> None:
        """Start the server; `ready` waits until it answers."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._shared: set[Path] = set()
        """Files of shared memory that its processes had mapped."""
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
        if kind is None:
            self.stop()
        else:  # what has failed is to be seen, and not how the server ends after it
            self.kill()

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

    def post(self, path: str, document: Mapping[str, Any] | None = None, timeout: float = ANSWER_S) -> Any:
        """Return the answer to a POST: parsed if it is JSON, else its text."""
        request = urllib.request.Request(
            self.url + path, json.dumps(document or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
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
        """Ask the server to end, as an operator does; its processes and its shared memory have to be gone."""
        self._note_shared_memory()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            until(lambda: not self._left(), STOP_S)
            assert "memory leak" not in self.said().lower()
        except AssertionError:
            raise AssertionError(f"the server leaves {self._left()}:\n{self.tail()}") from None
        finally:
            self.kill()

    def _left(self) -> list[int | Path]:
        self.process.poll()
        files = (path for path in self._shared if path.exists() and not path.match(self.LEAVES))
        return [*self.processes(), *files]

    def kill(self) -> list[Path]:
        """End all processes of the server, and nothing else; return the shared memory that it leaves."""
        self._note_shared_memory()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        until(lambda: not self.processes(), STOP_S)
        left = [path for path in self._shared if path.exists()]
        for path in left:
            path.unlink(missing_ok=True)
        return left

    def lose(self, pid: int) -> None:
        """Kill one process, and wait until the others have ended because of it."""
        self._note_shared_memory()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not self._left(), STOP_S)

    def _note_shared_memory(self) -> None:
        for pid in self.processes():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                mapped = (Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line)
                self._shared |= {path for path in mapped if path.is_file()}

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
