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
from contextlib import suppress
from errno import ENOENT, ESTALE
from typing import Final

from tiercache.errors import StoreLockedError
from tiercache.storage.env import Env, close_quietly

CHECK_SECONDS: Final = 120.0
"""Seconds that the check of a small database in a child process may take before it counts as damaged."""
_OPENING_SECONDS: Final = CHECK_SECONDS + 30
"""Seconds to wait for another process that opens or closes a shared store and may be running its check."""
_POLL_SECONDS: Final = 0.01
"""Seconds between two tries to lock OPENING."""


def is_there(env: Env, path: str) -> bool:
    """Return whether a file or directory exists at a path. Raises OSError if the look-up fails."""
    try:
        env.lstat(path)
    except FileNotFoundError:
        return False
    return True


class OwnerLock:
    """Lock of the directory `path`, held from `take` or `look` to `release`.

    `read_only`: the lock is for a reader, which writes nothing.

    Thread safety: one caller at a time; any thread may call `check_there`.
    """

    def __init__(self, env: Env, path: str, *, read_only: bool) -> None:
        self._env = env
        self._path = path
        self._read_only = read_only
        self._shared = False
        self._lock_fd: int | None = None
        self._opening_fd: int | None = None
        self.sole = True
        """Whether this process alone has the store open; for a shared owner, valid until `admit_others`."""

    def take(self, *, shared: bool) -> None:
        """Become the only owner or, with `shared`, one of several owners.

        Raises StoreLockedError or OSError.
        """
        self._shared = shared
        self._lock_fd = self._env.open(self._at("LOCK"), os.O_RDWR | os.O_CREAT)
        if shared:
            self._join()
        else:
            self._own()
        self._identity = self._env.fstat(self._lock_fd)

    def look(self, *, shared: bool) -> None:
        """Lock the directory for a reader, without writing anything.

        Without `shared`, this method shares LOCK, which keeps owners out. With `shared`, there are two cases.
        If the store has no owner, this method shares OPENING, which keeps owners out too. If the store has
        owners, this method shares LOCK with them.
        """
        self._shared = shared
        if not shared:
            if not is_there(self._env, self._at("LOCK")):
                return  # the directory is a copy, without LOCK, that no process has opened
            self._lock_fd = self._env.open(self._at("LOCK"), os.O_RDONLY)
            if not self._env.try_share(self._lock_fd):
                raise self._locked(self._lock_fd)
            return
        if not is_there(self._env, self._at("OPENING")) or not is_there(self._env, self._at("LOCK")):
            return
        self._begin(os.O_RDONLY)
        self._lock_fd = self._env.open(self._at("LOCK"), os.O_RDONLY)
        self.sole = self._env.try_lock(self._lock_fd)
        if self.sole:
            # There is no owner. Release the exclusive lock at once, because other read-only openers make the
            # same test.
            self._close(self._lock_fd)
            self._lock_fd = None
        elif not self._env.try_share(self._lock_fd):
            raise self._locked(self._lock_fd)

    def admit_others(self) -> None:
        """Let other processes open a shared store.

        A read-only opener that found no owner keeps owners out until `release`.
        """
        if not (self._read_only and self.sole):
            self._close(self._opening_fd)
            self._opening_fd = None

    def is_last(self) -> bool:
        """Return whether this owner alone has the store open. If so, no other can open it until `release`."""
        if not self._shared:
            return True
        self._begin()
        return self._env.try_lock(self._held())

    def check_there(self) -> None:
        """Raise OSError if the directory that was opened is no longer found under its name."""
        try:
            found = self._env.lstat(self._at("LOCK"))
        except FileNotFoundError as error:
            raise OSError(
                ENOENT,
                f"{self._path} was removed or moved while it was open; close the store and open it again",
            ) from error
        if (found.st_dev, found.st_ino) != (self._identity.st_dev, self._identity.st_ino):
            raise OSError(
                ESTALE, f"{self._path} was replaced while it was open; close the store and open it again"
            )

    def release(self) -> None:
        """Give up all locks. A second call does nothing."""
        for fd in (self._lock_fd, self._opening_fd):
            if fd is not None:
                # Closing alone does not release the lock if a forked process has a copy of the descriptor.
                with suppress(OSError):
                    self._env.unlock(fd)
                self._close(fd)
        self._lock_fd = self._opening_fd = None

    def _own(self) -> None:
        fd = self._held()
        if not self._env.try_lock(fd):
            if self._env.try_share(fd):
                raise StoreLockedError(
                    f"{self._path} is open for reading in another process; try again when that is closed"
                )
            raise self._locked(fd)
        # The pid is for error messages only. So a store opens even if a full disk does not take the pid.
        with suppress(OSError):
            self._env.ftruncate(fd, 0)
            self._env.pwritev(fd, [memoryview(f"{self._env.getpid()}\n".encode())], 0)

    def _join(self) -> None:
        """Become one of the owners.

        OPENING keeps all other processes from opening or closing the store until `admit_others`. So `sole`
        cannot change until then.
        """
        self._begin()
        fd = self._held()
        self.sole = self._env.try_lock(fd)
        if not self._env.try_share(fd):
            raise StoreLockedError(
                f"{self._path} is in use by a process that does not share it; close it there first"
            )

    def _begin(self, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        """Lock OPENING: exclusively for an owner, shared for a read-only opener.

        Raises StoreLockedError after `_OPENING_SECONDS`.
        """
        self._opening_fd = self._env.open(self._at("OPENING"), flags)
        take = self._env.try_share if self._read_only else self._env.try_lock
        deadline = self._env.monotonic() + _OPENING_SECONDS
        while not take(self._opening_fd):
            if self._env.monotonic() > deadline:
                raise StoreLockedError(
                    f"{self._path} is being opened or closed by another process that makes no progress; end"
                    " that process"
                )
            self._env.sleep(_POLL_SECONDS)

    def _locked(self, fd: int) -> StoreLockedError:
        owner = bytearray(32)
        self._env.preadv(fd, [memoryview(owner)], 0)
        pid = owner.rstrip(b"\0").decode("ascii", "replace").strip() or "unknown"
        who = "this process" if pid == str(self._env.getpid()) else f"process {pid}"
        return StoreLockedError(
            f"{self._path} is in use by {who} (pid {pid}); close that store, or give this one a directory of"
            " its own"
        )

    def _held(self) -> int:
        assert self._lock_fd is not None, "the directory is claimed"
        return self._lock_fd

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            close_quietly(self._env, fd)

    def _at(self, name: str) -> str:
        return os.path.join(self._path, name)
