"""`tiercache serve` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COMMAND = [sys.executable, "-m", "tiercache.cli"]
GUARD = 300
"""Seconds after which a process hangs."""


@contextmanager
def serving(*arguments: object, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a daemon; yield it with its addresses and its summary; kill it at the end if it still lives."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "-o", "jsonl", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said: dict[str, Any] = {}
        for row in map(json.loads, process.stdout):
            said |= row["summary"] if "summary" in row else {row["transport"]: row["address"]}
            if "summary" in row:
                yield process, said
                return
        raise AssertionError(process.communicate()[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
