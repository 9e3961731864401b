"""Reader of a `file` store's objects. A read fills the caller's buffers and verifies each object."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EIO
from mmap import mmap
from threading import Lock

from tiercache.core import BLOCK_ALIGN, ObjectKey, Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import Checksums, MacKey
from tiercache.storage.vectors import usable
from tiercache_backends.file.claims import Pins
from tiercache_backends.file.io_engine import IoEngine
from tiercache_backends.file.records import Extent, Places
from tiercache_backends.file.runs import IoBatch, pieces_of
from tiercache_backends.file.state import StoreState
from tiercache_backends.file.writing import Remover


class ObjectReader:
    """Reader that verifies every object, and removes damaged ones unless the store is `read_only`.

    Thread safety: any thread may call.
    """

    def __init__(
        self, io: IoEngine, state: StoreState, remover: Remover, mac_key: MacKey, *, read_only: bool
    ) -> None:
        self._io = io
        self._state = state
        self._remover = remover
        self._mac_key = mac_key
        self._read_only = read_only
        self._verifying = Lock()
        """Held while one stored object is read again (see `is_sound`)."""

    def read(self, items: Sequence[GetItem], pins: Pins) -> list[Outcome]:
        """Read pinned objects and return their outcomes; an item without a pin is a MISS."""
        outcomes = [Outcome.MISS] * len(items)
        fitting = [
            position
            for position, (index, length) in enumerate(zip(pins.items, pins.lengths, strict=True))
            if length == items[index].length and usable(items[index].buffers, length, writable=True)
        ]
        if len(fitting) < len(pins.items):
            for index in pins.items:
                outcomes[index] = Outcome.ERROR
            pins = pins.only(fitting)
        batch = IoBatch(
            [items[index].key for index in pins.items],
            [items[index].buffers for index in pins.items],
            pins.lengths,
            pins.places,
            self._mac_key,
            reused=pins.reused,
        )
        self._io.read(batch)
        if (
            batch.checksums == pins.checksums
            and batch.macs == pins.macs
            and not (batch.errors or batch.short)
        ):
            hit = Outcome.HIT
            for index in pins.items:
                outcomes[index] = hit
            return outcomes
        corrupt: list[int] = []
        unreadable: list[int] = []
        for position, index in enumerate(pins.items):
            outcomes[index] = outcome = self._outcome(batch, position, pins)
            if outcome is Outcome.CORRUPT:
                corrupt.append(position)
            elif position in batch.errors and batch.errors[position].errno == EIO:
                # If the object stayed, the next set of the same key would answer HIT and write nothing.
                unreadable.append(position)
        if self._read_only:
            self._state.count("corrupt", len(corrupt))
        elif corrupt or unreadable:
            self._state.count("corrupt", self._remover.remove_damaged(pins, corrupt))
            self._remover.remove_damaged(pins, unreadable, keep_blocks=True)
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
                piece = IoBatch([key], [[room]], [size], Places.of([(extent,)]), self._mac_key)
                self._io.read(piece)
                if piece.failed(0):
                    return False
                verifier.add([room[:size]])
                left -= size
        return verifier.matches(checksums)

    def _outcome(self, batch: IoBatch, position: int, pins: Pins) -> Outcome:
        """Return the outcome of one object of a batch that was read."""
        if position in batch.errors:
            return self._remover.failed("get", batch.errors[position])
        checksums = Checksums(pins.checksums[position], pins.macs[position])
        if (
            position not in batch.short
            and batch.checksums[position] == checksums.checksum
            and batch.macs[position] == checksums.mac
        ):
            return Outcome.HIT
        # The mismatch alone proves no damage: another thread or process may have written to the buffers
        # during the read. So verify the stored bytes in private memory before the object is removed.
        sound = self.is_sound(
            batch.keys[position], batch.lengths[position], checksums, pins.places.extents(position)
        )
        return Outcome.ERROR if sound else Outcome.CORRUPT
