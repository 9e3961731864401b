"""Frames of data connections, on which payload travels beside gRPC (`proto/tiercache/wire/v1/data.proto`).

A frame is 16 bytes, a header (a protobuf message) and a payload:

    bytes    0      1    4                  8                   16
             kind | 0  | length of header | length of payload | header | payload

Both ends compare the lengths with their limits before they make room for anything. A payload is sent from the
buffers where it lies, and received into the buffers where it belongs.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from tiercache.errors import WireError

FRAME_BYTES: Final = 16
"""Bytes of a frame before its header."""
VECTOR: Final = 64
"""Maximum number of buffers of one call of the kernel."""
METHODS: Final = frozenset({"Exists", "Get", "Set"})
"""Names of the calls that data connections carry."""
_FRAME: Final = struct.Struct("<B3xIQ")


class FrameKind(enum.IntEnum):
    """Kinds of frames, by their numbers on the wire."""

    OPEN = 1
    OPENED = 2
    CALL = 3
    OBJECTS = 4
    REPLY = 5
    FAILED = 6


class Frame(NamedTuple):
    """First 16 bytes of a frame."""

    kind: FrameKind
    header: int
    """Bytes of the header."""
    payload: int
    """Bytes of the payload."""


def pack(kind: FrameKind, header: bytes, payload: int = 0) -> bytes:
    """Return the first bytes of a frame, up to its payload of `payload` bytes."""
    return _FRAME.pack(kind, len(header), payload) + header


def unpack(data: bytes | bytearray, max_header: int, max_payload: int = 0) -> Frame:
    """Return the first 16 bytes of a frame, decoded.

    Raises WireError for an unknown kind, and for lengths beyond these maxima.
    """
    kind, header, payload = _FRAME.unpack(data)
    try:
        found = Frame(FrameKind(kind), header, payload)
    except ValueError:
        raise WireError(f"a frame is of kind {kind}, which this version does not know") from None
    if header > max_header or payload > max_payload:
        raise WireError(
            f"a frame has a header of {header} and a payload of {payload} bytes; {max_header} and"
            f" {max_payload} are the most"
        )
    return found


def skip(views: list[memoryview], nbytes: int) -> None:
    """Remove the first `nbytes` bytes, and empty views before the next byte, from a list of views."""
    done = 0
    for view in views:
        if nbytes < view.nbytes:
            break
        nbytes -= view.nbytes
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]


def place(data: memoryview, views: list[memoryview]) -> memoryview:
    """Copy bytes into views, remove those that are full from the list, and return the bytes that are left."""
    while views and data:
        part = data[: views[0].nbytes]
        views[0][: part.nbytes] = part
        skip(views, part.nbytes)
        data = data[part.nbytes :]
    return data
