"""The campaign's side of the nursery: order a process, stop or kill it, and read what it acknowledged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from random import Random
from types import TracebackType
from typing import Self

from tests.campaign.actors import ACT, Part
from tests.campaign.model import Verdict
from tests.campaign.report import ROOT
from tests.processes import wait_suspended


class Nursery:
    """One process that forks others for a part each (see `actors`), one after the other, for one thread."""

    def __enter__(self) -> Self:
        # In a session of its own: Ctrl-C is for the campaign, which then ends the nursery in order.
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self._pid_fd = -1
        self.words: dict[str, str] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid_fd >= 0:
            self.end()
        self._process.communicate()

    def start(self, part: Part) -> None:
        """Let a process be born; it begins with its part at once."""
        self.words = {}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(part)) + "\n")
        self._process.stdin.flush()
        self.hear("pid")
        # By descriptor: the number may be another process's when the writer has ended by itself.
        with suppress(ProcessLookupError):  # it ended by itself already
            self._pid_fd = os.pidfd_open(int(self.words["pid"]))

    def hear(self, word: str) -> bool:
        """Read until the writer said it; False where it ended before."""
        assert self._process.stdout is not None
        while word not in self.words:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the nursery ended while its writer was to say {word!r}")
            said, _, rest = line.rstrip("\n").partition(" ")
            self.words[said] = rest
            if said == "ended" and word != "ended":
                return False
        return True

    def live(self, random: Random, seconds: float) -> None:
        """Let the writer live for a random while, now and then not until its store is open."""
        if random.random() < 0.2:
            time.sleep(random.uniform(0, 0.012))
        elif self.hear("verdict" if self.judges else "open"):
            time.sleep(random.uniform(0, seconds))

    judges = False

    def stop(self) -> None:
        """Suspend the writer; on return none of its threads runs."""
        self._send(signal.SIGSTOP)
        wait_suspended(int(self.words["pid"]))

    def kill(self) -> None:
        """kill -9, and wait for the end. Raises RuntimeError where the writer had died by itself."""
        status = self.end()
        if "died" in self.words:
            raise RuntimeError(json.loads(self.words["died"]))
        if status != -signal.SIGKILL:
            raise RuntimeError(f"the writer ended with status {status}")

    def end(self) -> int:
        """kill -9, and wait for the end: its status, as the writer may have ended by itself."""
        self._send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end: its exit status, or the negative number of the signal."""
        self.hear("ended")
        if self._pid_fd >= 0:
            os.close(self._pid_fd)
        self._pid_fd = -1
        return int(self.words["ended"])

    def played(self, part: Part) -> int:
        """Let a part be played to its end: the exit status, or the negative number of the signal."""
        self.start(part)
        return self.wait()

    def looked(self, part: Part) -> Verdict:
        """Let a process read the store, and return its verdict; raise RuntimeError if it reports none."""
        status = self.played(part)
        if "verdict" not in self.words:
            raise RuntimeError(self.died or f"who looked ended with status {status}")
        verdict = Verdict(**json.loads(self.words["verdict"]))
        verdict.found = {int(name): turn for name, turn in verdict.found.items()}
        return verdict

    @property
    def died(self) -> str:
        """The last line of what the process raised; empty where it raised nothing."""
        return json.loads(self.words.get("died", '""')).strip().rpartition("\n")[2]

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it ended by itself, which `kill` reports
            if self._pid_fd >= 0:
                signal.pidfd_send_signal(self._pid_fd, number)


def spread(calls: int, count: int, random: Random) -> list[int]:
    """Pick numbers from 1 to `calls`, spread evenly; all of them, where there are not enough."""
    if count >= calls:
        return list(range(1, calls + 1))
    return [random.randint(calls * n // count + 1, calls * (n + 1) // count) for n in range(count)]
