"""Ownership of a store directory: one owner, or several that share it, and read-only openers.

A shared store is one that several processes may own at the same time. Two files are locked with flock:

    LOCK      A single owner locks this file exclusively, and writes its pid into the file in ASCII. The
              owners of a shared store share the lock; read-only openers share it too.
    OPENING   Only shared stores have this file. An owner locks it exclusively while it opens or closes the
              store. Read-only openers that found no owner share the lock until they close the store.

Two processes that open a shared store:

    process A                                          process B
    1. locks OPENING
    2. locks LOCK exclusively, so A is the sole owner;
       then shares LOCK
                                                       3. waits for OPENING
    4. checks and opens the environment
    5. unlocks OPENING (`admit_others`)
                                                       6. locks OPENING; cannot lock LOCK exclusively,
                                                          so B is not the sole owner and checks nothing

Without OPENING, B could map the environment during step 4, while A checks or replaces the environment's file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiercache.errors import StoreLockedError
from tiercache.storage.env import Env, close_quietly

CHECK_SECONDS: Final = 120.0
"""Seconds that the check of a small database in a child process may take before it counts as damaged."""
_OPENING_SECONDS: Final = CHECK_SECONDS + 30
"""Seconds to wait for another process that opens or closes a shared store and may be running its check."""
_POLL_SECONDS: Final = 0.01
"""Seconds between two tries to lock OPENING."""


def wait_for_lock(env: Env, take: Callable[[int], bool], fd: int, seconds: float, pause: float) -> bool:
    """Call `take` until it gets the lock of a file; return False after so many seconds.

    `pause`: most seconds between two tries; the first pauses are shorter.
    """
    deadline, step = env.monotonic() + seconds, pause / 8
    while not take(fd):
        if env.monotonic() > deadline:
            return False
        env.sleep(step)
        step = min(2 * step, pause)
    return True


class OwnerLock:
    """Lock of the directory `path`, held from `take` or `look` to `release`.

    `read_only`: the lock is for a reader, which writes nothing.

    Thread safety: one caller at a time.
    """

    def __init__(self, env: Env, path: str, *, read_only: bool) -> None:
        self._env = env
        self.path: Final = path
        self._read_only = read_only
        self._shared = False
        self.fd = -1
        """Open file LOCK; -1 if it is not held."""
        self._opening_fd = -1
        self.sole = True
        """Whether this process alone has the store open; for a shared owner, valid until `admit_others`."""

    def take(self, *, shared: bool) -> None:
        """Become the only owner or, with `shared`, one of several owners.

        Raises StoreLockedError or OSError.
        """
        self._shared = shared
        self.fd = self._env.open(self.at("LOCK"), os.O_RDWR | os.O_CREAT)
        if shared:
            # OPENING keeps all other processes from opening or closing the store until `admit_others`. So
            # `sole` cannot change until then.
            self._begin()
        self.sole = self._env.try_lock(self.fd)
        if shared:
            if not self._env.try_share(self.fd):
                raise StoreLockedError(
                    f"{self.path} is in use by a process that does not share it; close it there first"
                )
            return
        if not self.sole:
            if self._env.try_share(self.fd):
                raise StoreLockedError(
                    f"{self.path} is open for reading in another process; try again when that is closed"
                )
            raise self._locked()
        # The pid is for error messages only. So a store opens even if a full disk does not take the pid.
        with suppress(OSError):
            self._env.ftruncate(self.fd, 0)
            self._env.pwritev(self.fd, [memoryview(f"{self._env.getpid()}\n".encode())], 0)

    def look(self, *, shared: bool) -> None:
        """Lock the directory for a reader, without writing anything.

        Without `shared`, this method shares LOCK, which keeps owners out. With `shared`, there are two cases.
        If the store has no owner, this method shares OPENING, which keeps owners out too. If the store has
        owners, this method shares LOCK with them.
        """
        self._shared = shared
        if not {"LOCK", *(["OPENING"] if shared else [])} <= set(self._env.listdir(self.path)):
            return  # the directory is a copy that no process has opened
        if shared:
            self._begin(os.O_RDONLY)
        self.fd = self._env.open(self.at("LOCK"), os.O_RDONLY)
        self.sole = shared and self._env.try_lock(self.fd)
        if self.sole:
            # There is no owner. Release the exclusive lock at once, because other read-only openers make the
            # same test.
            self.fd = self._close(self.fd)
        elif not self._env.try_share(self.fd):
            raise self._locked()
        self.sole |= not shared

    def admit_others(self) -> None:
        """Let other processes open a shared store.

        A read-only opener that found no owner keeps owners out until `release`.
        """
        if not (self._read_only and self.sole):
            self._opening_fd = self._close(self._opening_fd)

    def is_last(self) -> bool:
        """Return whether this owner alone has the store open. If so, no other can open it until `release`."""
        if self._shared:
            self._begin()
        return self._env.try_lock(self.fd)

    def release(self) -> None:
        """Give up all locks. A second call does nothing."""
        self.fd, self._opening_fd = self._close(self.fd), self._close(self._opening_fd)

    def _begin(self, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        """Lock OPENING: exclusively for an owner, shared for a read-only opener.

        Raises StoreLockedError after `_OPENING_SECONDS`.
        """
        self._opening_fd = self._env.open(self.at("OPENING"), flags)
        take = self._env.try_share if self._read_only else self._env.try_lock
        if not wait_for_lock(self._env, take, self._opening_fd, _OPENING_SECONDS, _POLL_SECONDS):
            raise StoreLockedError(
                f"{self.path} is being opened or closed by another process that makes no progress; end that"
                " process"
            )

    def _locked(self) -> StoreLockedError:
        owner = bytearray(32)
        self._env.preadv(self.fd, [memoryview(owner)], 0)
        pid = owner.rstrip(b"\0").decode("ascii", "replace").strip() or "unknown"
        who = "this process" if pid == str(self._env.getpid()) else f"process {pid}"
        return StoreLockedError(
            f"{self.path} is in use by {who} (pid {pid}); close that store, or give this one a directory of"
            " its own"
        )

    def _close(self, fd: int) -> int:
        if fd >= 0:
            # Closing alone does not release the lock if a forked process has a copy of the descriptor.
            with suppress(OSError):
                self._env.unlock(fd)
            close_quietly(self._env, fd)
        return -1

    def at(self, name: str) -> str:
        """Return the path of a name in the directory."""
        return os.path.join(self.path, name)
