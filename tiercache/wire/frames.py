"""Messages that carry payload, `{Header header = 1; bytes payload = 2;}`, encoded and decoded by hand.

Protobuf's Python code copies a payload three times: into the message, into the serialised bytes, and out of
the received bytes. This module copies a payload once, into the bytes that gRPC sends. A received payload is
used where it lies in gRPC's bytes. The generated code would produce the same bytes on the wire:

    tag 0x0A | length of the header | header | tag 0x12 | length of the payload | payload
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tiercache.errors import WireError

CHUNK_BYTES: Final = 2 << 20
"""Maximum payload bytes of one message.

With larger messages, fewer streams could share one budget. With smaller messages, the fixed cost of each
message would count more."""

_FEW_BYTES: Final = 64 << 10
"""Maximum bytes of a message that is parsed without counting its fields first."""
_MAX_FIELDS: Final = 8192
"""Maximum number of fields of a message, more than any batch needs.

The limit is needed because a field of two bytes may take 100 bytes of memory, and each field takes time."""

_HEADER: Final = 1
"""Field number of the header."""
_PAYLOAD: Final = 2
"""Field number of the payload."""
_LEN: Final = 2
"""Wire type of a field whose length comes before its content."""
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of a field's content, for the two wire types with a fixed width."""

H = TypeVar("H", bound=Message)


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


def encode(header: Message, views: Sequence[memoryview]) -> bytes:
    """Return the message with this header, and with the bytes of the views, joined, as its payload."""
    packed = header.SerializeToString()
    size = sum(view.nbytes for view in views)
    return b"".join([_tag(_HEADER), _varint(len(packed)), packed, _tag(_PAYLOAD), _varint(size), *views])


def decode(message: bytes, header: type[H], max_bytes: int = 1 << 20) -> tuple[H, memoryview]:
    """Return the header of a message, and its payload as a view of `message`.

    Raises WireError for a malformed message, or a header of more than `max_bytes` bytes.
    """
    # As in protobuf, a message may repeat a field: repeated headers are joined, and the last payload counts.
    view = memoryview(message)
    packed, payload = b"", view[:0]
    for number, kind, start, stop in _fields(view):
        if number == _HEADER and kind == _LEN:
            if len(packed) + stop - start > max_bytes:
                raise WireError(
                    f"a message's header has more than {max_bytes} bytes; send fewer objects in one message"
                )
            packed += view[start:stop]
        elif number == _PAYLOAD and kind == _LEN:
            payload = view[start:stop]
    return read_message(packed, header, max_bytes), payload


def read_message(data: bytes, kind: type[H], max_bytes: int) -> H:
    """Return the parsed message.

    Raises WireError if the message has more than `max_bytes` bytes, is malformed, or has too many fields. The
    limit on fields (`_MAX_FIELDS`, checked above 64 KiB) bounds the memory for the parsed message.
    """
    if len(data) > max_bytes:
        raise WireError(
            f"a message of {len(data)} bytes is beyond the limit of {max_bytes}; send it in parts"
        )
    if len(data) > _FEW_BYTES:
        for _ in _fields(memoryview(data)):
            pass
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"a message cannot be read ({error})") from error


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, stop) of each field; its content is view[start:stop].

    Raises WireError for a malformed field, or for more than `_MAX_FIELDS` fields.
    """
    at = 0
    for _ in range(_MAX_FIELDS):
        if at >= len(view):
            return
        tag, at = _read_varint(view, at)
        if not tag >> 3:
            raise WireError("a message has a field without a number")
        start, at = _field(view, at, tag & 7)
        yield tag >> 3, tag & 7, start, at
    if at < len(view):
        raise WireError(f"a message has more than {_MAX_FIELDS} fields; send it in parts")


def _field(view: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return the offsets (start, stop) of the content of a field of wire type `kind`.

    `at`: the offset after the field's tag.
    """
    if kind == _LEN:
        size, at = _read_varint(view, at)
    elif kind in _FIXED:
        size = _FIXED[kind]
    elif kind == 0:
        start = at
        _, at = _read_varint(view, at)
        return start, at
    else:
        raise WireError(f"a message has a field of wire type {kind}, which this format does not use")
    if size > len(view) - at:
        raise WireError(f"a field of {size} bytes has only {len(view) - at} left in its message")
    return at, at + size


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _LEN])


def _varint(value: int) -> bytes:
    """Encode a number as protobuf does: 7 bits per byte, lowest first; bit 7 means that a byte follows."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at offset `at`, and the offset after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(view):
            raise WireError("a message ends in the middle of a number")
        byte: Any = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise WireError("a message has a number of more than ten bytes")
