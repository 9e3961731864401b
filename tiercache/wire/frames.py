"""Messages that carry payload: `{Header header = 1; bytes payload = 2;}`, encoded and decoded by hand.

Protobuf's Python code copies a payload three times on its way: into the message, into its serial form, and out of it again. Here it is
copied once, into the bytes that gRPC sends, and on receipt it is read in place, from the bytes that gRPC received. The bytes on the wire
are the same that the generated code writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tiercache.errors import WireError

CHUNK_BYTES: Final = 2 << 20
"""Payload bytes of one message: enough that the cost of a message counts little, few enough that many streams share one budget."""

_FEW_BYTES: Final = 64 << 10
"""Bytes up to which a message is parsed without counting its fields first."""
_MOST_FIELDS: Final = 8192
"""Most fields of a message, more than any batch has objects. A field of two bytes takes a hundred in memory, and each costs time."""

_HEADER: Final = 1
_PAYLOAD: Final = 2
_LEN: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of a field's content, by wire type of fixed width."""

H = TypeVar("H", bound=Message)


class Piece(NamedTuple):
    """Bytes [start, stop) of item number `item`."""

    item: int
    start: int
    stop: int


def cut(lengths: Sequence[int], chunk: int = CHUNK_BYTES, most: int = 1024) -> Iterator[list[Piece]]:
    """Yield for each message the pieces of items in it: at most `chunk` bytes and `most` pieces.

    An item of 0 bytes becomes one piece of 0 bytes.
    """
    message: list[Piece] = []
    room = chunk
    for item, length in enumerate(lengths):
        start = 0
        while True:
            if message and (not room or len(message) == most):
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
    """Return the message with this header, and with the bytes of the views, one after the other, as its payload."""
    packed = header.SerializeToString()
    size = sum(view.nbytes for view in views)
    return b"".join([_tag(_HEADER), _varint(len(packed)), packed, _tag(_PAYLOAD), _varint(size), *views])


def decode(message: bytes, header: type[H], most: int = 1 << 20) -> tuple[H, memoryview]:
    """Return the header of a message, of at most `most` bytes, and its payload, as a view of `message`.

    Raises WireError for a malformed message or a longer header.
    """
    view = memoryview(message)
    packed, payload = b"", view[:0]
    for number, kind, start, stop in _fields(view):
        if number == _HEADER and kind == _LEN:
            if len(packed) + stop - start > most:
                raise WireError(f"a message's header has more than {most} bytes; send fewer objects in one message")
            packed += view[start:stop]
        elif number == _PAYLOAD and kind == _LEN:
            payload = view[start:stop]
    return read_message(packed, header, most), payload


def read_message(data: bytes, kind: type[H], most: int) -> H:
    """Parse a message of at most `most` bytes. Raises WireError if it is longer, malformed, or has too many fields.

    The limit on fields (`_MOST_FIELDS`, checked above 64 KiB) keeps the memory for the message in proportion to its bytes.
    """
    if len(data) > most:
        raise WireError(f"a message of {len(data)} bytes is beyond the {most} of its kind; send it in parts")
    if len(data) > _FEW_BYTES:
        for _ in _fields(memoryview(data)):
            pass
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"a message cannot be read ({error})") from error


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number and wire type of each field, and the offsets at which its content begins and ends.

    Raises WireError for a malformed field or more than `_MOST_FIELDS` of them.
    """
    at = 0
    for _ in range(_MOST_FIELDS):
        if at >= len(view):
            return
        tag, at = _read_varint(view, at)
        if not tag >> 3:
            raise WireError("a message has a field without a number")
        start, at = _field(view, at, tag & 7)
        yield tag >> 3, tag & 7, start, at
    if at < len(view):
        raise WireError(f"a message has more than {_MOST_FIELDS} fields; send it in parts")


def _field(view: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return the offsets at which the content of a field of wire type `kind` begins and ends. `at`: the offset just behind its tag."""
    if kind == _LEN:
        size, at = _read_varint(view, at)
    elif kind in _FIXED:
        size = _FIXED[kind]
    elif kind == 0:
        start = at
        _, at = _read_varint(view, at)
        return start, at
    else:
        raise WireError(f"a message has a field of wire type {kind}, which does not exist any more")
    if size > len(view) - at:
        raise WireError(f"a message promises {size} bytes and ends after {len(view) - at}")
    return at, at + size


def _tag(number: int) -> bytes:
    return bytes([number << 3 | _LEN])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
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
