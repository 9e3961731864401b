"""Pieces of objects, as they travel in messages that carry payload (`SetRequest`, `GetReply`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

CHUNK_BYTES: Final = 2 << 20
"""Maximum payload bytes of one message.

With larger messages, fewer streams could share one budget. With smaller messages, the fixed cost of each
message would count more."""


class Piece(NamedTuple):
    """Bytes [start, stop) of item number `item`."""

    item: int
    start: int
    stop: int


def cut(lengths: Sequence[int], chunk: int = CHUNK_BYTES, max_pieces: int = 1024) -> Iterator[list[Piece]]:
    """Divide items among messages, and yield the pieces of each message.

    A message has at most `chunk` bytes and `max_pieces` pieces. An item of 0 bytes becomes one piece of 0
    bytes. With `chunk` = 4 and lengths 3, 0 and 6:

        message 1    item 0 [0, 3)   item 1 [0, 0)   item 2 [0, 1)
        message 2    item 2 [1, 5)
        message 3    item 2 [5, 6)
    """
    message: list[Piece] = []
    room = chunk
    for item, length in enumerate(lengths):
        start = 0
        while True:
            if message and (not room or len(message) == max_pieces):
                yield message
                message, room = [], chunk
            stop = min(length, start + room)
            message.append(Piece(item, start, stop))
            room -= stop - start
            start = stop
            if start >= length:
                break
    if message:
        yield message
