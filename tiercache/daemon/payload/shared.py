"""Memory that clients on this host share with the daemon: its mappings, its sessions, GetInto and SetFrom.

A client passes a memfd over the attach socket (`attachments`). The daemon maps the memfd, and the client's
session holds the mapping as a numbered region. GetInto and SetFrom name extents (region, offset, size). The
store reads into these extents, or writes from them, without a copy in between:

    memfd ── Mapping ── Region ── AttachSession ── extents of a call ── views ── store

Memory is sealed when it is mapped, and cannot be mapped a second time (`wire.attachment`). Therefore the
daemon keeps a mapping for a while after its last session has ended. A client whose session has ended, for
example because a call took too long, soon connects again, and finds its memory still mapped. When the
client's process ends, the daemon unmaps the memory at once.
"""

from __future__ import annotations

import os
import secrets
from asyncio import Event, TimerHandle, get_running_loop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from grpc import StatusCode

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.daemon.access import Caller, LimitError, Refusal
from tiercache.daemon.call import Call, check_length, read_keys, read_wanted
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.store_threads import Threads
from tiercache.errors import WireError
from tiercache.memory import Region
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.vectors import batches, total
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

KEEP_SECONDS: Final = 60.0
"""Seconds for which the memory of a living process stays mapped without a session.

A client does not pause for that long between two attempts to connect."""
KEEP_UNSEEN_SECONDS: Final = 5.0
"""Seconds for which the memory of a process in another PID namespace stays mapped without a session.

The time is short, because the daemon cannot notice the end of such a process."""
_MAX_KEPT: Final = 64
"""Maximum number of mappings of one user that are kept without a session."""
_TOKEN_BYTES: Final = 32
_MAX_REGIONS: Final = 16
"""Maximum number of regions of one session."""
_EXTENTS_BYTES: Final = 128 << 20
"""Maximum bytes of attached memory that one call may name, in addition to the size of the largest object."""
_STORE_CALL_BYTES: Final = 128 << 20
"""Maximum bytes that one store call moves. The limit is low because a store call cannot be cancelled."""
_STORE_CALL_ITEMS: Final = 1024
"""Maximum number of objects of one store call."""
_EXTENT_OBJECT_BYTES: Final = 256
"""Estimated bytes of the Python objects for one extent of attached memory."""

Item = TypeVar("Item", GetItem, SetItem)


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
    """Mapped region, and the number of sessions that have it."""

    inode: Inode
    region: Region
    sessions: int = 1
    timer: TimerHandle | None = None
    """Timer that forgets the mapping; None while a session has it."""
    process: int | None = None
    """Pidfd of the process whose session had the mapping last.

    None while a session has the mapping, and for a process in another PID namespace."""


class Mappings:
    """All mapped regions.

    Thread safety: the event loop's thread.
    """

    def __init__(self) -> None:
        self._mappings: dict[Inode, Mapping] = {}

    def find(self, inode: Inode) -> Mapping | None:
        """Return the mapping of this memory for one more session; None if the memory is not mapped."""
        found = self._mappings.get(inode)
        if found is not None:
            found.sessions += 1
            self._stop_waiting(found)
        return found

    def add(self, inode: Inode, region: Region) -> Mapping:
        """Add a region that was just mapped for one session, and return its mapping.

        Two sessions A and B may map the same memory at once, each in a thread:

            1. A finds no mapping, and begins to map.     2. B finds no mapping, and begins to map.
            3. A adds its region.                         4. B finds A's mapping here, and closes its own.
        """
        found = self.find(inode)
        if found is not None:
            region.close()
            return found
        self._mappings[inode] = made = Mapping(inode, region)
        return made

    def release(self, mapping: Mapping, pid: int) -> None:
        """Count one session less for a mapping; keep the mapping for a while after its last session.

        `pid` is the session's process, or 0 for a process in another PID namespace.
        """
        mapping.sessions -= 1
        if mapping.sessions:
            return
        kept = sum(
            not other.sessions and inode.uid == mapping.inode.uid for inode, other in self._mappings.items()
        )
        try:
            mapping.process = os.pidfd_open(pid) if pid else None
        except OSError:
            kept = _MAX_KEPT + 1  # the process has ended: keep nothing
        if kept > _MAX_KEPT:
            self._forget(mapping)
            return
        loop = get_running_loop()
        mapping.timer = loop.call_later(
            KEEP_SECONDS if mapping.process is not None else KEEP_UNSEEN_SECONDS, self._forget, mapping
        )
        if mapping.process is not None:  # a pidfd becomes readable when the process ends
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


class AttachSession:
    """Session of one client on this host, with the regions that it attached.

    A session that ends must not unmap memory that a store thread uses. The client may reuse its memory as
    soon as the daemon has closed the connection:

        1. GetInto calls `begin`, and a store thread writes into the client's memory.
        2. The client gives up on the call, and closes its end of the connection; `ended` is set.
        3. No other call can `begin` now. The daemon calls `wait_unused`.
        4. The store thread is done and `finish` is called. `wait_unused` returns; `end` drops the regions.
        5. The daemon closes its end. Now the client knows that nothing touches its memory any more.

    Thread safety: the event loop's thread. Views of regions may be used from any thread between `begin` and
    `finish`.
    """

    def __init__(self, uid: int, pid: int, mappings: Mappings) -> None:
        self.uid: Final = uid
        self.pid: Final = pid
        self._mappings = mappings
        self.token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self.caller: Caller
        """The client; `attachments` sets this before the session can be found."""
        self.ended = False
        """Whether no call may begin any more."""
        self.when_ended: Callable[[], None] = lambda: None
        """Function to call when that has become so."""
        self._regions: dict[int, Mapping] = {}
        self._under_way = 0
        self._unused = Event()
        self._unused.set()

    @property
    def attached(self) -> int:
        """Total bytes of this session's regions; any thread may read this."""
        return sum(mapping.region.nbytes for mapping in list(self._regions.values()))

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """Return a view of `size` bytes of a region, from `offset` on.

        Raises WireError unless the bytes are attached, and are whole pages of 4 KiB (BLOCK_ALIGN).
        """
        found = self._regions.get(region)
        if found is None or size == 0 or offset + size > found.region.nbytes or (offset | size) % BLOCK_ALIGN:
            raise WireError(
                f"bytes [{offset}, {offset + size}) of region {region} are not attached, or not whole pages"
                f" of {BLOCK_ALIGN}"
            )
        return found.region.view[offset : offset + size]

    def add(self, mapping: Mapping) -> int:
        """Add a region and return its number; raises LimitError for more than _MAX_REGIONS."""
        if len(self._regions) >= _MAX_REGIONS:
            raise LimitError(f"a session has at most {_MAX_REGIONS} regions; attach fewer, larger ones")
        self._regions[len(self._regions) + 1] = mapping
        return len(self._regions)

    def begin(self) -> None:
        """Count one more call that uses the regions; raises Refusal if the session has ended."""
        if self.ended:
            raise Refusal(
                StatusCode.UNAUTHENTICATED, "the session has ended; connect to the attach socket again"
            )
        self._under_way += 1
        self._unused.clear()

    def finish(self) -> None:
        """Count one call less that uses the regions; each `begin` needs one `finish`."""
        self._under_way -= 1
        if not self._under_way:
            self._unused.set()

    async def wait_unused(self) -> None:
        """Wait until no call uses the regions."""
        while self._under_way:  # another call may begin after the event is set, before this coroutine runs
            await self._unused.wait()

    def end(self) -> None:
        """Release all regions. Call this when no call uses them any more.

        The memory stays mapped for a while after its last session (`Mappings`), and while there are views of
        it.
        """
        while self._regions:
            self._mappings.release(self._regions.popitem()[1], self.pid)


class SharedCalls:
    """Handlers of GetInto and SetFrom, which let the store move bytes straight to and from attached memory.

    Thread safety: the event loop's thread.
    """

    def __init__(self, threads: Threads, limits: pb.Limits, metrics: NodeMetrics) -> None:
        self._threads: Final = threads
        self._limits: Final = limits
        self._max_extents: Final = limits.object_bytes + _EXTENTS_BYTES
        self._metrics: Final = metrics

    async def get_into(self, call: Call) -> None:
        """Serve GetInto: let the store fill memory that the client attached."""
        request = await call.request(pb.GetIntoRequest, _weigh)
        wanted = read_wanted(request.keys, request.lengths, self._limits)
        session = _session(call.caller)
        buffers = _extents(session, request.places, len(wanted.keys), self._max_extents)
        items = [
            GetItem(key, views, length)
            for key, views, length in zip(wanted.keys, buffers, wanted.lengths, strict=True)
        ]
        store = call.caller.permissions.store
        read = store.peek if request.peek else store.get
        outcomes = await self._move(call.caller, session, read, items)
        self._metrics.count_reads(call.caller.permissions.name, "shared", items, outcomes)
        await call.send(messages.outcomes(outcomes).SerializeToString())

    async def set_from(self, call: Call) -> None:
        """Serve SetFrom: let the store take objects from memory that the client attached."""
        request = await call.request(pb.SetFromRequest, _weigh)
        keys = read_keys(request.keys, self._limits.keys)
        metas = [messages.read_meta(meta) for meta in request.metas]
        if len(metas) != len(keys):
            raise WireError(f"{len(keys)} keys came with {len(metas)} descriptions")
        # The store may read the payload after the client has given the call up and written something else
        # there. Only a checksum that the client computed before the call shows that.
        if not all(meta.checksum for meta in metas):
            raise WireError("an object came without its checksum; compute it before SetFrom, and send it")
        session = _session(call.caller)
        buffers = _extents(session, request.places, len(keys), self._max_extents)
        for meta in metas:
            check_length(meta.length, self._limits.object_bytes)
        items = [SetItem(key, views, meta) for key, views, meta in zip(keys, buffers, metas, strict=True)]
        outcomes = await self._move(call.caller, session, call.caller.permissions.store.set, items)
        stored = sum(
            meta.length for meta, outcome in zip(metas, outcomes, strict=True) if outcome is Outcome.STORED
        )
        self._metrics.count_payload(call.caller.permissions.name, "shared", "in", stored)
        await call.send(messages.outcomes(outcomes).SerializeToString())

    async def _move(
        self,
        caller: Caller,
        session: AttachSession,
        work: Callable[[Sequence[Item]], list[Outcome]],
        items: Sequence[Item],
    ) -> list[Outcome]:
        """Run `work` on attached memory, on one portion of `items` after the other, each a store call.

        If the call is cancelled, no further portion begins.
        """
        outcomes: list[Outcome] = []
        # Each portion needs a `begin` of its own besides that of the call: when the call is cancelled, the
        # thread that works on a portion goes on.
        session.begin()
        try:
            for part in batches(
                items, lambda item: total(item.buffers), _STORE_CALL_ITEMS, _STORE_CALL_BYTES
            ):
                session.begin()
                outcomes += await self._threads.start(
                    caller.budgets.workers, work, part, landed=session.finish
                )
        finally:
            session.finish()
        return outcomes


def _weigh(request: pb.GetIntoRequest | pb.SetFromRequest) -> int:
    """Return the estimated bytes of the Python objects for the extents of a request."""
    return _EXTENT_OBJECT_BYTES * len(request.places.regions)


def _session(caller: Caller) -> AttachSession:
    """Return the caller's session; raises Refusal for a caller over TCP."""
    if not isinstance(caller.session, AttachSession):
        raise Refusal(
            StatusCode.FAILED_PRECONDITION,
            "memory is shared over the unix sockets only; use Get and Set here",
        )
    return caller.session


def _extents(
    session: AttachSession, places: pb.Places, expected: int, max_bytes: int
) -> list[list[memoryview]]:
    """Return the views of each item's extents, one list for each of `expected` items.

    Raises WireError if the columns do not fit together or an extent is not attached, and LimitError for more
    than `max_bytes` bytes.
    """
    # counts     2           1        extents of each item
    # regions    7     7     8        one entry for each extent; likewise offsets and sizes
    columns = (places.regions, places.offsets, places.sizes)
    extents_in_all = sum(places.counts)
    if len(places.counts) != expected or any(len(column) != extents_in_all for column in columns):
        raise WireError(
            f"{expected} items came with places for {len(places.counts)} items, or with incomplete places"
        )
    if sum(places.sizes) > max_bytes:
        raise LimitError(
            f"the places of one call have {sum(places.sizes)} bytes and may have {max_bytes}; send the items"
            " in parts"
        )
    extents = iter(zip(*columns, strict=True))
    return [[session.view(*next(extents)) for _ in range(count)] for count in places.counts]
