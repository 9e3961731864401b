"""Tickets of parked requests, as bytes that another process can use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from blake3 import blake3

from tiercache.core import TokenArray
from tiercache.errors import InputError
from tiercache.keys import KEY_BYTES

ID_BYTES: Final = 16
"""Random bytes that name a parked request."""
MAX_TOKENS: Final = 1 << 22
"""Maximum number of tokens of a parked request."""
_MAX_EXTRA: Final = 1 << 20
"""Maximum number of bytes of the sequence's `extra`."""
_MAGIC: Final = b"tiercache parked 1\n"
_SUM_BYTES: Final = 16
_FIELDS: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class ParkingTicket:
    """Everything that another process needs to resume a request whose objects are in storage.

    As bytes: a line that names the format, a msgpack array of these fields, and 16 bytes of BLAKE3 over both.
    """

    namespace: bytes
    """Namespace under which the request was computed: model, numerics and tenant."""
    id: bytes
    tokens: TokenArray
    extra: bytes
    expires: float
    """Time at which the request is given up, in seconds since 1970."""

    def to_bytes(self) -> bytes:
        """Return the ticket as bytes; there is nothing secret in them beyond the id and the tokens."""
        tokens = self.tokens.astype("<u8").tobytes()
        body: bytes = _MAGIC + msgpack.packb([self.namespace, self.id, tokens, self.extra, self.expires])
        return body + blake3(body).digest(length=_SUM_BYTES)

    @classmethod
    def from_bytes(cls, data: Any, namespace: bytes) -> ParkingTicket:
        """Return the ticket in `data`; InputError if it is damaged, or of another namespace."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InputError(f"a parked request is a Parked or its bytes, not {type(data).__name__}")
        data = bytes(data)
        fields = _fields(data) if len(data) <= 8 * MAX_TOKENS + _MAX_EXTRA + 1024 else None
        if fields is None:
            raise InputError(
                "these bytes are no ticket of a parked request, or are damaged; pass what Parked.to_bytes"
                " returned"
            )
        if fields.namespace != namespace:
            raise InputError(
                "this ticket is of another model, numerics or tenant; resume it with a controller of the same"
                " identity"
            )
        return fields


def _fields(data: bytes) -> ParkingTicket | None:
    """Return the fields of a ticket of any namespace, or None if the bytes are damaged."""
    body, checksum = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if not body.startswith(_MAGIC) or blake3(body).digest(length=_SUM_BYTES) != checksum:
        return None
    try:
        # The checksum is no secret. Without limits, a forged ticket announces nested arrays of gigabytes.
        found = msgpack.unpackb(body[len(_MAGIC) :], max_ext_len=0, max_array_len=_FIELDS, max_map_len=0)
        namespace, name, tokens, extra, expires = found
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    well = (
        all(isinstance(part, bytes) for part in (namespace, name, tokens, extra))
        and isinstance(expires, float)
        and math.isfinite(expires)
        and (len(namespace), len(name)) == (KEY_BYTES, ID_BYTES)
        and 0 < len(tokens) <= 8 * MAX_TOKENS
        and len(tokens) % 8 == 0
        and len(extra) <= _MAX_EXTRA
    )
    if not well:
        return None
    return ParkingTicket(namespace, name, np.frombuffer(tokens, "<u8").astype(np.uint64), extra, expires)
