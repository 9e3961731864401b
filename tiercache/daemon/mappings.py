"""Memory of clients that the daemon has mapped; it stays mapped for a while after its last session.

Memory that was sealed when it was mapped cannot be mapped a second time (`wire.memory`). A client whose session ended, for example because
a call took too long, comes back soon and finds its memory still mapped here. When the client's process ends, its memory goes at once.
"""

from __future__ import annotations

import os
from asyncio import TimerHandle, get_running_loop
from dataclasses import dataclass
from typing import Final, NamedTuple

from tiercache.wire.memory import Region

KEEP_SECONDS: Final = 60.0
"""Seconds to keep the memory of a living process; longer than the longest pause between two attempts of a client to connect."""
KEEP_UNSEEN_SECONDS: Final = 5.0
"""Seconds to keep the memory of a process in another PID namespace, whose end the daemon does not learn."""
_MOST_KEPT: Final = 64
"""Most mappings of one user that are kept without a session."""


class Inode(NamedTuple):
    """Identity of a memfd: the user who passed it, and its device and inode number."""

    uid: int
    device: int
    number: int

    @classmethod
    def of(cls, uid: int, fd: int) -> Inode:
        """Return the identity of the open memfd `fd` that user `uid` passed."""
        found = os.fstat(fd)
        return cls(uid, found.st_dev, found.st_ino)


@dataclass(slots=True)
class Mapping:
    """A mapped region, and the number of sessions that have it."""

    inode: Inode
    region: Region
    sessions: int = 1
    timer: TimerHandle | None = None
    process: int | None = None
    """A pidfd of the last process that had it in a session, while none has."""


class Mappings:
    """All mapped regions.

    Thread safety: the event loop's thread.
    """

    def __init__(self) -> None:
        self._mappings: dict[Inode, Mapping] = {}

    def find(self, inode: Inode) -> Mapping | None:
        """Return the mapping of this memory and count one more session of it; None if there is none."""
        found = self._mappings.get(inode)
        if found is not None:
            found.sessions += 1
            self._stop_waiting(found)
        return found

    def add(self, inode: Inode, region: Region) -> Mapping:
        """Add a region that was mapped just now, for its first session, and return its mapping.

        If another session was faster to map the same memory, close `region` and return that session's mapping.
        """
        found = self.find(inode)
        if found is not None:
            region.close()
            return found
        self._mappings[inode] = made = Mapping(inode, region)
        return made

    def release(self, mapping: Mapping, pid: int) -> None:
        """Count one session of process `pid` less (0: a process in another PID namespace); the last one leaves the mapping for a while."""
        mapping.sessions -= 1
        if mapping.sessions:
            return
        kept = sum(not other.sessions and inode.uid == mapping.inode.uid for inode, other in self._mappings.items())
        try:
            mapping.process = os.pidfd_open(pid) if pid else None
        except OSError:
            kept = _MOST_KEPT + 1  # the process has ended, so that nothing is kept
        if kept > _MOST_KEPT:
            self._forget(mapping)
            return
        loop = get_running_loop()
        mapping.timer = loop.call_later(KEEP_SECONDS if mapping.process is not None else KEEP_UNSEEN_SECONDS, self._forget, mapping)
        if mapping.process is not None:
            loop.add_reader(mapping.process, self._forget, mapping)

    def clear(self) -> None:
        """Forget all mappings."""
        for mapping in list(self._mappings.values()):
            self._forget(mapping)

    def _forget(self, mapping: Mapping) -> None:
        """Forget a mapping; its memory is unmapped when the last view of it is gone."""
        self._stop_waiting(mapping)
        mapping.region.close()
        del self._mappings[mapping.inode]

    def _stop_waiting(self, mapping: Mapping) -> None:
        if mapping.timer is not None:
            mapping.timer.cancel()
            mapping.timer = None
        if mapping.process is not None:
            get_running_loop().remove_reader(mapping.process)
            os.close(mapping.process)
            mapping.process = None
