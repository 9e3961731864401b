"""The audit log: who asked for what with the verb admin, who was refused, and what came of it.

One line of JSON for each record, in a file that only grows until it is set aside:

    audit.jsonl ──▶ audit.jsonl.1 ──▶ audit.jsonl.2 ──▶ … ──▶ deleted
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Final

_log = logging.getLogger(__name__)

_MAX_WAITING: Final = 1024
"""Maximum number of records that wait for the disk; further ones are lost."""
_PATIENCE_S: Final = 2.0
"""Seconds that a call waits for its record, if it may not be served without; also the wait at the end."""


class AuditLog:
    """Append-only file of records, which a thread of its own writes.

    A record that cannot be written is counted and logged. With `required`, the call that it would tell of is
    refused before anything is done.

    Thread safety: any thread; `require` the event loop's.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, kept: int, required: bool, count_lost: Callable[[], object]
    ) -> None:
        """Write to `path`, and keep `kept` files of at most `max_bytes` beside it, one at least."""
        self.path: Final = path
        self.required: Final = required
        self._max_bytes = max_bytes
        self._kept = kept
        self._count_lost = count_lost
        self._waiting: Queue[tuple[bytes, Future[bool]] | None] = Queue(_MAX_WAITING)
        self._is_failing = False
        # A daemon thread: a disk that hangs must not keep the process from its end.
        self._writer = Thread(target=self._run, name="tiercache-audit", daemon=True)
        self._writer.start()

    def record(self, event: str, fields: Mapping[str, Any]) -> Future[bool]:
        """Write a record soon; the future says whether it is on the disk, and never raises."""
        told = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        line = json.dumps(told, ensure_ascii=True, default=str).encode() + b"\n"
        written: Future[bool] = Future()
        try:
            self._waiting.put_nowait((line, written))
        except Full:
            written.set_result(self._lose(f"{_MAX_WAITING} records wait already"))
        return written

    async def require(self, event: str, fields: Mapping[str, Any]) -> bool:
        """Write a record before its event happens; return False if the event must not happen without."""
        written = self.record(event, fields)
        if not self.required:
            return True
        # Not `wait_for`, which would cancel the record.
        await asyncio.wait([asyncio.wrap_future(written)], timeout=_PATIENCE_S)
        return written.result() if written.done() else self._lose(f"no answer in {_PATIENCE_S:g} s")

    def close(self) -> None:
        """Wait a moment for the records that are under way."""
        with suppress(Full):
            self._waiting.put(None, timeout=_PATIENCE_S)
        self._writer.join(_PATIENCE_S)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            line, written = waiting
            try:
                self._append(line)
            except OSError as error:
                written.set_result(self._lose(error.strerror or str(error)))
                continue
            if self._is_failing:
                self._is_failing = False
                _log.warning("the audit log %s is written again", self.path)
            written.set_result(True)

    def _lose(self, why: str) -> bool:
        """Count a record that is not written, and say so if it is the first; return False."""
        self._count_lost()
        if not self._is_failing:
            self._is_failing = True
            _log.error("the audit log %s cannot be written: %s", self.path, why)
        return False

    def _append(self, line: bytes) -> None:
        """Append a line, whole or not at all; raises OSError."""
        size = size_of(self.path)
        if size and size + len(line) > self._max_bytes:
            self._set_aside()
        append(self.path, line)

    def _set_aside(self) -> None:
        names = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self._kept + 1))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)


def append(path: Path, data: bytes) -> None:
    """Append whole lines to a file of the daemon's user and sync it; raises OSError, with nothing appended.

    The file is opened for each call, because an operator may move it away at any time. A missing file is
    made, and a symbolic link is not followed. After a crash the last line may be cut; what follows then
    begins on a line of its own.
    """
    file = _open(path)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            if os.write(file, data) != len(data):
                raise OSError("the disk is full")
            os.fdatasync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or 0 if there is none."""
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)
