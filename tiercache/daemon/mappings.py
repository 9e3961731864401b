"""Memory of clients that is mapped here, kept a little longer than its session.

Memory that was sealed when it was mapped cannot be mapped a second time (`wire.memory`). A client whose session ended, because a call took
too long, say, comes back soon; its memory is found here then. When its process ends, the memory goes at once.
"""

from __future__ import annotations

import os
from asyncio import TimerHandle, get_running_loop
from dataclasses import dataclass
from typing import Final, NamedTuple

from tiercache.wire.memory import Region

KEEP_SECONDS: Final = 60.0
"""For a process that lives; longer than the longest pause between two attempts of a client to connect."""
KEEP_UNSEEN_SECONDS: Final = 5.0
"""For one in another PID namespace, of which we do not hear."""
_MOST_KEPT: Final = 64  # of one user


class Inode(NamedTuple):
    """What tells one user's memfd from all others."""

    uid: int
    device: int
    number: int

    @classmethod
    def of(cls, uid: int, fd: int) -> Inode:
        """Of an open memfd that a user passed."""
        found = os.fstat(fd)
        return cls(uid, found.st_dev, found.st_ino)


@dataclass(slots=True)
class Mapping:
    """A region, and how many sessions have it."""

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
        """The mapping of this memory, for one more session."""
        found = self._mappings.get(inode)
        if found is not None:
            found.sessions += 1
            self._stop_waiting(found)
        return found

    def add(self, inode: Inode, region: Region) -> Mapping:
        """A region that was mapped just now, for its first session; or the one of a session that was faster."""
        found = self.find(inode)
        if found is not None:
            region.close()
            return found
        self._mappings[inode] = made = Mapping(inode, region)
        return made

    def release(self, mapping: Mapping, pid: int) -> None:
        """A session of this process (0: one that we do not see) has it no more. Without any it stays for a while."""
        mapping.sessions -= 1
        if mapping.sessions:
            return
        kept = sum(not other.sessions and inode.uid == mapping.inode.uid for inode, other in self._mappings.items())
        try:
            mapping.process = os.pidfd_open(pid) if pid else None
        except OSError:
            kept = _MOST_KEPT + 1  # it has ended
        if kept > _MOST_KEPT:
            self._forget(mapping)
            return
        loop = get_running_loop()
        mapping.timer = loop.call_later(KEEP_SECONDS if mapping.process is not None else KEEP_UNSEEN_SECONDS, self._forget, mapping)
        if mapping.process is not None:
            loop.add_reader(mapping.process, self._forget, mapping)

    def clear(self) -> None:
        """Let go of all."""
        for mapping in list(self._mappings.values()):
            self._forget(mapping)

    def _forget(self, mapping: Mapping) -> None:
        """Unmapped when the last view of it is gone."""
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
