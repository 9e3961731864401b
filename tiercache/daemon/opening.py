"""The beginning of a connection, up to the client's acknowledgement of gRPC's SETTINGS: how much of it gRPC is given.

Before the acknowledgement gRPC holds a client to the defaults of the protocol and not to what it announced: a header block may take 16 MiB,
and several times that in memory, in any number of streams. From then on gRPC bounds by itself what it keeps. So until then we count. In TLS
nothing but bytes can be counted.
"""

from __future__ import annotations

from typing import Final

HEAD_BYTES: Final = 16 << 10
"""Of TLS handshake, preface, settings and headers; some four times what a client with a token and a chain of certificates sends."""
DATA_BYTES: Final = 64 << 10
"""Of DATA frames: the window of a connection that has not been enlarged (RFC 9113, 6.9.2)."""
_PREFACE_BYTES: Final = 24
_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_ACK: Final = 1


class Opening:
    """Looks at what a client sends first.

    Thread safety: one thread.
    """

    def __init__(self, *, tls: bool, most_streams: int) -> None:
        self.acknowledged = False
        """Has the acknowledgement passed? Never so in TLS."""
        self.excessive = False
        """Did it send more than a client has to say before it?"""
        self.calls = 0
        """How many began so far; in TLS nobody knows."""
        self._tls = tls
        self._most_streams: Final = most_streams
        self._room = {False: HEAD_BYTES, True: DATA_BYTES}  # by: is it of a DATA frame?
        self._in_data = False
        self._left = _PREFACE_BYTES  # of the preface or of a frame's payload
        self._header = bytearray()

    @property
    def room(self) -> int:
        """So many bytes may be taken at once."""
        return self._room[False] if self._tls else sum(self._room.values())

    def take(self, data: bytes) -> int:
        """The next bytes, of which there are at most `room`: how many of them there are up to the acknowledgement."""
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
