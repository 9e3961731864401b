"""Form in which the bytes of one object lie in a pack.

This is the only place where the bytes of an object are encoded and decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tiercache.storage.base import SetItem
from tiercache.storage.vectors import take, total

RAW: Final = 0
"""Codec of bytes that are stored as they came."""
CODECS: Final = frozenset({RAW})
"""Codecs that this version reads; an entry with another codec is passed over."""


class Encoded(NamedTuple):
    """Bytes of one object as they are stored."""

    codec: int
    pieces: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return total(self.pieces)


def encode(item: SetItem) -> Encoded:
    """Return the stored form of a well-formed item."""
    return Encoded(RAW, take(item.buffers, 0, item.meta.length))


def decode(codec: int, stored: memoryview, length: int) -> memoryview | None:
    """Return the `length` bytes of an object from its stored form; None if they cannot be had from it."""
    if codec == RAW and stored.nbytes == length:
        return stored
    return None
