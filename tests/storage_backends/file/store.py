"""A `file` store for tests, and what its directory takes on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import EIO
from pathlib import Path
from typing import Any

from tiercache_backends.file import FileBackend
from tiercache_backends.file.catalog import Catalog

from tests.faults import Effect, FaultEnv
from tiercache.storage.env import Env

CAPACITY = 16 << 20


def opened(path: Path, capacity: int = CAPACITY, env: Env | None = None) -> FileBackend:
    return FileBackend(str(path), capacity, env=env)


def catalog_of(store: FileBackend) -> Catalog:
    """The catalog of a store, as it is on the disk."""
    # private: records are read, and damaged, behind the store's calls
    return store._catalog


def is_log(fd: int) -> bool:
    """Whether an open file is a log of the catalog."""
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".log")


def at_log(env: FaultEnv, effect: Effect, *, at: int = 1, times: int = 1) -> list[int]:
    """Replace some writes to the catalog's log by `effect`; return a list that grows with each write."""
    seen: list[int] = []

    def chosen(real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if is_log(arguments[0]):
            seen.append(arguments[2])
            if at <= len(seen) < at + times:
                return effect(real, arguments)
        return real(*arguments)

    env.add("pwritev", chosen, times=10**9)
    return seen


def fail_log(env: FaultEnv, *, at: int = 1, times: int = 1, error: int = EIO) -> None:
    """Let some writes to the catalog's log fail."""

    def effect(_real: Callable[..., Any], _arguments: tuple[Any, ...]) -> Any:
        raise OSError(error, os.strerror(error))

    at_log(env, effect, at=at, times=times)
