"""The account of a daemon: what each tenant stored, read and saved in each hour.

One line of JSON for each hour and tenant in which something happened since the line before, in a file beside
the audit log. A reader adds up the lines of an hour:

    {"hour": 1763982000, "tenant": "red", "read_objects": 64, "restored_tokens": 4096, ...}

What happened since the last line is lost if the process is killed, and never more.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

from tiercache.daemon.audit import append, size_of
from tiercache.storage.hits import Hits

_log = logging.getLogger(__name__)

HOUR_S: Final = 3600
MAX_HOURS: Final = 90 * 24
"""Number of hours of which rows are kept."""
_MAX_BYTES: Final = 16 << 20
"""Size of the file at which its lines are added up, unless they were not long ago."""
_MAX_LINE: Final = 4096
_PATIENCE_S: Final = 2.0
"""Seconds to wait at the end for the last write."""
_MAX_FUTURE: Final = 2**40


@dataclass(slots=True)
class Counts(Hits):
    """Figures of what one tenant did in some time.

    Thread safety: that of the owner.
    """

    written_objects: int = 0
    written_bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    missed_objects: int = 0
    """Objects that a get asked for, and that were not there."""
    found_objects: int = 0
    """Objects that were looked up, and were there."""
    absent_objects: int = 0
    """Objects that were looked up, and were not there."""
    unpriced_tokens: int = 0
    """Restored tokens of models whose FLOPs are not known."""
    saved_flops: float = 0.0
    """FLOPs of a prefill of the other restored tokens."""

    def add(self, other: Counts) -> None:
        """Add all counts of `other`."""
        for name in NAMES:
            if more := getattr(other, name):
                setattr(self, name, getattr(self, name) + more)


NAMES: Final = tuple(field.name for field in fields(Counts))
_AMOUNTS: Final = {"saved_flops", "prefill_seconds", "read_seconds"}
Rows = dict[tuple[int, str], Counts]
"""Counts by hour (its begin in seconds since 1970) and tenant ("": no tenant)."""


class Account:
    """Counts by hour and tenant, in memory until `write`, then in a file.

    A file that cannot be written is no reason to stop: the counts stay in memory, and are written later.

    Thread safety: any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        count_failed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.time,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        """Keep the account in `path`; `count_failed` counts writes that failed."""
        self.path: Final = path
        self.clock: Final = clock
        self._count_failed: Final = count_failed
        self._max_bytes = max_bytes
        self._lock: Final = Lock()
        self._file_lock: Final = Lock()
        self._pending: Rows = {}
        self._totals: dict[str, Counts] = {}
        self._is_failing = False
        self._compact_at = max_bytes

    def add(self, tenant: str, counts: Counts) -> None:
        """Count something that happened just now."""
        hour = max(0, int(self.clock()) // HOUR_S * HOUR_S)
        with self._lock:
            self._pending.setdefault((hour, tenant), Counts()).add(counts)
            self._totals.setdefault(tenant, Counts()).add(counts)

    def hits(self) -> dict[str, Hits]:
        """Return the prompt tokens of each tenant since the start of this process."""
        with self._lock:
            return {tenant: Hits.total([counts]) for tenant, counts in self._totals.items()}

    def write(self) -> bool:
        """Append what was counted since the last call; return False if that was not possible."""
        with self._file_lock:
            with self._lock:
                pending, self._pending = self._pending, {}
            try:
                if pending:
                    self._append(pending)
                    pending = {}
                if size_of(self.path) > self._compact_at:
                    self._compact()
            except OSError as error:
                with self._lock:
                    for key, counts in pending.items():
                        self._pending.setdefault(key, Counts()).add(counts)
                self._fail(error)
                return False
            if self._is_failing:
                self._is_failing = False
                _log.warning("the account %s is written again", self.path)
            return True

    def close(self) -> None:
        """Write the rest, if the disk takes it within a moment."""
        # A daemon thread: a disk that hangs must not keep the process from its end.
        last = Thread(target=self.write, name="tiercache-account-end", daemon=True)
        last.start()
        last.join(_PATIENCE_S)

    def rows(self, tenant: str | None = None) -> Rows:
        """Return all rows, the oldest hour first; with `tenant`, only those of that tenant.

        Raises OSError.
        """
        with self._file_lock:
            found = self._read()
            with self._lock:
                for key, counts in self._pending.items():
                    found.setdefault(key, Counts()).add(counts)
        return {
            (hour, name): counts for (hour, name), counts in sorted(found.items()) if tenant in (None, name)
        }

    def _append(self, rows: Rows) -> None:
        append(self.path, b"".join(_line(hour, tenant, counts) for (hour, tenant), counts in rows.items()))

    def _compact(self) -> None:
        """Write one line for each hour and tenant, without hours beyond MAX_HOURS; raises OSError."""
        rows = self._read()
        # The latest hours that have rows, not those before now: a clock that was wrong once costs nothing.
        kept = set(sorted({hour for hour, _ in rows})[-MAX_HOURS:])
        beside = self.path.with_name(self.path.name + ".new")
        with suppress(FileNotFoundError):
            beside.unlink()
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as out:
            for (hour, tenant), counts in sorted(rows.items()):
                if hour in kept:
                    out.write(_line(hour, tenant, counts))
            out.flush()
            os.fsync(out.fileno())
        beside.replace(self.path)
        self._compact_at = max(self._max_bytes, 2 * size_of(self.path))

    def _read(self) -> Rows:
        found: Rows = {}
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return found
        with open(file, "rb") as lines:
            while line := lines.readline(_MAX_LINE):
                row = _parsed(line)
                if row is not None:
                    found.setdefault(row[0], Counts()).add(row[1])
        return found

    def _fail(self, error: OSError) -> None:
        self._count_failed()
        if not self._is_failing:
            self._is_failing = True
            _log.error("the account %s cannot be written: %s", self.path, error.strerror or error)


def _line(hour: int, tenant: str, counts: Counts) -> bytes:
    values = {name: value for name in NAMES if (value := getattr(counts, name))}
    return json.dumps({"hour": hour, "tenant": tenant, **values}).encode() + b"\n"


def _parsed(line: bytes) -> tuple[tuple[int, str], Counts] | None:
    """Return the row of a line; None for a line that is cut or damaged."""
    try:
        found: Any = json.loads(line)
        hour, tenant = found["hour"], found["tenant"]
        counts = Counts(**{name: found[name] for name in NAMES if name in found})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = all((_is_amount if name in _AMOUNTS else _is_count)(getattr(counts, name)) for name in NAMES)
    is_row = sound and _is_count(hour) and hour < _MAX_FUTURE and isinstance(tenant, str)
    return ((hour, tenant), counts) if is_row else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300
