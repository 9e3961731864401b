"""The part of the map for which the disk has room: a disk may be smaller than the capacity, or be filled by other programs."""

from __future__ import annotations

import logging
from threading import Lock
from typing import Final

from tiercache.storage.env import Env
from tiercache_backends.lmdb.budget import Budget
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.local.failures import is_full

_log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds until the store tries again to let the file grow, unless the file system reports more room earlier; doubled each time in vain."""
_RESERVE_PAGES: Final = 64
_RESERVE_SHARE: Final = 64
"""LMDB pages allocated on the disk behind the file's last one: one in so many of the map, and at least `_RESERVE_PAGES`."""
_ROOM_BYTES: Final = 1 << 20
"""Bytes of new room on the disk for which the store tries at once."""


class Disk:
    """The room that the disk gives to LMDB's file: the whole map, or, after a write found the disk full, what the file has on it.

    Thread safety: any thread may call.
    """

    def __init__(self, env: Env, environment: Environment, whole: Budget) -> None:
        self._env = env
        self._environment = environment
        self.whole: Final = whole
        self._mutex = Lock()
        self._short: Budget | None = None
        self._free_then = 0
        self._pages_then = 0
        self._pause = 0.0
        self._again = 0.0

    def budget(self) -> Budget:
        """Return what may be used now: after the disk was full what the file has on it, until it is time to try for more."""
        with self._mutex:
            if self._short is not None and self._is_due():
                self._short = None
            return self._short or self.whole

    def refused(self) -> Budget:
        """Note that the disk was full, and return what may be used from now on. Raises OSError."""
        pages = self._environment.pages_on_disk()
        with self._mutex:
            if self._short is None:
                _log.warning("the disk of %s is full; the store goes on with the %d pages that it has there", self._environment.path, pages)
            # At first, and whenever the file has grown, the shortage may have passed when the next call comes.
            self._pause = 0.0 if pages > self._pages_then else min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
            self._pages_then = pages
            self._free_then = self._free()
            self._again = self._env.monotonic() + self._pause
            self._short = Budget(min(pages, self.whole.map_pages), self.whole.page_bytes)
            return self._short

    def keep_reserve(self) -> None:
        """Keep room for deletions and evictions on a disk that other programs fill; where none is left, go on with what the file has."""
        if self._short is None:
            try:
                pages = max(_RESERVE_PAGES, self.whole.map_pages // _RESERVE_SHARE)
                self._environment.reserve(pages // 4, pages)
            except OSError as error:
                if is_full(error):
                    self.refused()

    def lift(self) -> Budget:
        """Return the whole map's budget, so that the next write tries for more: nothing could be stored in what the file has."""
        with self._mutex:
            self._short = None
            return self.whole

    def is_short(self) -> bool:
        """Return whether the store goes on with less than its map."""
        return self._short is not None

    def _is_due(self) -> bool:
        return self._env.monotonic() >= self._again or self._free() >= self._free_then + _ROOM_BYTES

    def _free(self) -> int:
        try:
            found = self._env.statvfs(self._environment.path)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize
