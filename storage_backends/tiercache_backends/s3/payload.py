"""Form in which the bytes of one object lie in a pack.

This is the only place where the bytes of an object are encoded and decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from tiercache.storage.base import SetItem
from tiercache.storage.vectors import take, total
from tiercache_backends.s3 import compression
from tiercache_backends.s3.choices import CodecChoices
from tiercache_backends.s3.compression import Codec

CODECS: Final = frozenset(Codec)
"""Codecs that this version reads; an object with another codec, of a later version, is a miss."""


class Encoded(NamedTuple):
    """Bytes of one object as they are stored."""

    codec: int
    pieces: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return total(self.pieces)


def encode(item: SetItem, choices: CodecChoices) -> Encoded:
    """Return the stored form of a well-formed item, by the codec of its pool."""
    codec, pieces = choices.encode(item.key, item.buffers, item.meta.length)
    if pieces is None:
        return Encoded(Codec.RAW, take(item.buffers, 0, item.meta.length))
    return Encoded(codec, [memoryview(piece) for piece in pieces])


def decode(codec: int, stored: memoryview, length: int) -> memoryview | None:
    """Return the `length` bytes of an object from its stored form; None if they cannot be had from it.

    The caller's buffers have room for `length` bytes; more is never allocated.
    """
    if codec == Codec.RAW:
        return stored if stored.nbytes == length else None
    payload = np.empty(length, np.uint8).data
    return payload if compression.decode(codec, stored, [payload], length) else None
