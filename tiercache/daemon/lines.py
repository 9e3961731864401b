"""Files of lines that only grow: what is appended is there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
