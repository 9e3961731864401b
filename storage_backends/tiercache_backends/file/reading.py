"""Reader of a `file` store's objects. A read fills the caller's buffers and verifies each object."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EIO
from mmap import mmap
from threading import Lock

from tiercache.core import BLOCK_ALIGN, ObjectKey, Outcome, PoolName
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.vectors import usable
from tiercache_backends.file.claims import Pin
from tiercache_backends.file.io_engine import IoEngine
from tiercache_backends.file.records import Extent
from tiercache_backends.file.runs import IoRequest, pieces_of
from tiercache_backends.file.slabs import Slabs
from tiercache_backends.file.state import StoreState
from tiercache_backends.file.writing import Remover


class ObjectReader:
    """Reader that verifies every object, and removes damaged ones unless the store is `read_only`.

    Thread safety: any thread may call.
    """

    def __init__(
        self,
        slabs: Slabs,
        io: IoEngine,
        state: StoreState,
        remover: Remover,
        mac_key: MacKey,
        *,
        read_only: bool,
    ) -> None:
        self._slabs = slabs
        self._io = io
        self._state = state
        self._remover = remover
        self._mac_key = mac_key
        self._read_only = read_only
        self._verifying = Lock()
        """Held while one stored object is read again (see `is_sound`)."""

    def read(self, items: Sequence[GetItem], pins: Sequence[Pin | None]) -> list[Outcome]:
        """Read pinned objects and return their outcomes; an item without a pin is a MISS."""
        outcomes = [Outcome.MISS] * len(items)
        reads: list[tuple[int, Pin, IoRequest]] = []
        for index, (item, pin) in enumerate(zip(items, pins, strict=True)):
            if pin is None:
                continue
            length = pin.placement.length
            if length != item.length or not usable(item.buffers, length, writable=True):
                outcomes[index] = Outcome.ERROR
                continue
            verifier = self._mac_key.verifier(item.key, length)
            reads.append(
                (index, pin, IoRequest(pin.placement.extents, item.buffers, length, verifier, pin.reused))
            )
        self._io.read([request for _, _, request in reads])
        corrupt: list[Pin] = []
        unreadable: list[Pin] = []
        for index, pin, request in reads:
            outcomes[index] = self._outcome(items[index].key, pin, request)
            if outcomes[index] is Outcome.CORRUPT:
                corrupt.append(pin)
            elif request.error is not None and request.error.errno == EIO:
                # A bad block stays unreadable until something is written to it. So remove the object. If the
                # object stayed, the next set of the same key would answer HIT and write nothing.
                unreadable.append(pin)
        if self._read_only:
            self._state.count("corrupt", len(corrupt))
        elif corrupt or unreadable:
            self._state.count("corrupt", self._remover.remove_damaged(corrupt))
            self._remover.remove_damaged(unreadable)
        return outcomes

    def is_sound(
        self, key: ObjectKey, length: int, checksums: Checksums, extents: tuple[Extent, ...]
    ) -> bool:
        """Read the bytes in these extents into private memory; return whether they have these checksums.

        Each check takes memory, and a process that writes to shared buffers can cause any number of checks.
        So only one object is checked at a time.
        """
        verifier = self._mac_key.verifier(key, length)
        left = length
        with self._verifying:
            for extent in pieces_of(extents):
                size = min(left, extent.blocks * BLOCK_ALIGN)
                room = memoryview(mmap(-1, extent.blocks * BLOCK_ALIGN))
                request = IoRequest((extent,), [room], size)
                self._io.read([request])
                if request.failed:
                    return False
                verifier.add([room[:size]])
                left -= size
        return verifier.matches(checksums)

    def verify_since(self, number: int) -> None:
        """Verify the objects stored after record `number`; remove those that did not reach the medium."""
        for digest in self._state.digests_since(number):
            [pin] = pins = self._state.pin([digest])
            try:
                if pin is not None:
                    for extent in pin.placement.extents:
                        self._slabs.forget(extent)
                    # Verification uses only the digest, not the pool, so any pool will do here.
                    key = ObjectKey(PoolName.KV, digest)
                    self.read(
                        [GetItem(key, [memoryview(bytearray(pin.placement.length))], pin.placement.length)],
                        pins,
                    )
            finally:
                self._remover.test_blocks(self._state.unpin(pins))

    def _outcome(self, key: ObjectKey, pin: Pin, request: IoRequest) -> Outcome:
        if request.error is not None:
            return self._remover.failed("get", request.error)
        assert request.verifier is not None, "every read has a verifier"
        if not request.short and request.verifier.matches(pin.placement.checksums):
            return Outcome.HIT
        # The mismatch alone proves no damage: another thread or process may have written to the buffers
        # during the read. So verify the stored bytes in private memory before the object is removed.
        return Outcome.ERROR if self.is_sound(key, *pin.placement) else Outcome.CORRUPT
