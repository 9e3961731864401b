"""Limits on the beginning of a connection, up to the client's acknowledgement of gRPC's SETTINGS.

Before the acknowledgement gRPC holds a client to the defaults of the protocol and not to the SETTINGS: a header block may take 16 MiB, and
several times that in memory, in any number of streams. After it gRPC bounds by itself what it keeps. Therefore bytes and calls are counted
here until then. In TLS only bytes can be counted.
"""

from __future__ import annotations

from typing import Final

HEAD_BYTES: Final = 16 << 10
"""Most bytes of TLS handshake, preface, settings and headers; some four times what a client with a token and certificate chain sends."""
DATA_BYTES: Final = 64 << 10
"""Most bytes of DATA frames: the initial flow-control window of a connection (RFC 9113, 6.9.2)."""
_PREFACE_BYTES: Final = 24
_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_ACK: Final = 1


class Opening:
    """Counter of the bytes and calls that a client sends before its acknowledgement.

    Thread safety: one thread.
    """

    def __init__(self, *, tls: bool, most_streams: int) -> None:
        """Count nothing so far; `tls`: whether the bytes are encrypted; `most_streams`: calls that may begin."""
        self.acknowledged = False
        """Whether the acknowledgement has passed; always False in TLS."""
        self.excessive = False
        """Whether the client sent more bytes or began more calls than it may before the acknowledgement."""
        self.calls = 0
        """Number of calls (HEADERS frames) that began so far; 0 in TLS, where they cannot be seen."""
        self._tls = tls
        self._most_streams: Final = most_streams
        self._room = {False: HEAD_BYTES, True: DATA_BYTES}  # bytes left; the key says whether they are of DATA frames
        self._in_data = False
        self._left = _PREFACE_BYTES  # bytes left of the preface or of a frame's payload
        self._header = bytearray()

    @property
    def room(self) -> int:
        """Most bytes that `take` may be given now."""
        return self._room[False] if self._tls else sum(self._room.values())

    def take(self, data: bytes) -> int:
        """Look at the next bytes, at most `room` of them, and return how many there are up to the end of the acknowledgement's header."""
        if self._tls:
            self._spend(len(data))
            return len(data)
        at = 0
        while at < len(data) and not self.acknowledged:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
            else:
                step = min(_FRAME_HEADER_BYTES - len(self._header), len(data) - at)
                self._header += data[at : at + step]
            self._spend(step)
            at += step
            if len(self._header) == _FRAME_HEADER_BYTES:
                self._begin_frame()
        return at

    def _spend(self, nbytes: int) -> None:
        self._room[self._in_data] -= nbytes
        self.excessive |= self._room[self._in_data] < 0

    def _begin_frame(self) -> None:
        self._left = int.from_bytes(self._header[:3])
        kind, flags = self._header[3], self._header[4]
        self._header.clear()
        self._in_data = kind == _DATA
        self.calls += kind == _HEADERS
        self.excessive |= self.calls > self._most_streams
        self.acknowledged = kind == _SETTINGS and bool(flags & _ACK)
