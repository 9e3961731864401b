"""File of results: one JSON line per run, appended as soon as the run ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from tests.benchmarks.policies.matrix import INFINITE, Block, Run, infinite

FORMAT: Final = 1
"""Version of the rows. Rows of another version are not read, so their runs are made again."""
_LEFT_OUT: Final = ("published", "source", "policy", "seed", "profile")
"""Keys of a replay's row that the file leaves out or has on its own."""


class Rows:
    """Rows by command and label, the latest of each.

    Thread safety: one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # a line that a kill cut short
                if row.get("format") == FORMAT:
                    self._found[row["command"], row["policy"]] = row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def footprint(self, block: Block) -> int | None:
        """Return the bytes of the infinite cache with the default checkpoints; None if not known yet."""
        free = infinite(block.traffic, block.seed, profile=block.profile, limit=block.limit)
        row = self._found.get((free.command(), INFINITE))
        return None if row is None else int(row["capacity_bytes"])

    def missing(self, block: Block, footprint: int) -> list[Run]:
        """Return the runs of a block that are not in the file."""
        return [run for run in block.runs() if (run.command(footprint), run.policy) not in self._found]

    def add(self, file: TextIO, block: Block, run: Run, footprint: int, code: str, record: Any) -> None:
        """Append the row of a run, whose results are `record`."""
        row = {
            "format": FORMAT, "code": code, "phase": block.phase, "traffic": run.traffic.name,
            "seed": run.seed, "policy": run.policy, "size": str(run.size), "checkpoints": run.checkpoints,
            "profile": run.profile, "command": run.command(footprint),
        } | {name: value for name, value in record.items() if name not in _LEFT_OUT}  # fmt: skip
        if windows := row.pop("over_time", None):
            row["windows"] = [[one["flops"], one["flops_saved"]] for one in windows]
        file.write(json.dumps(row) + "\n")
        file.flush()
        self._found[row["command"], run.policy] = row


def opened(path: Path) -> TextIO:
    """Open the file to append, for this process alone, behind its last whole line.

    Raises SystemExit if another campaign writes to it.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SystemExit(
            f"{path}: another campaign writes to it; wait for its end, or name another file"
        ) from None
    file.seek(0)
    text = file.read()
    file.truncate(len(text[: text.rfind("\n") + 1].encode()))
    return file
