"""Admission of connections whose caller is not known yet: their states, and which of them is served next.

    state      what is read from the client
    waiting    nothing
    opening    bytes and calls, which are counted
    settled    a little at a time, at a rate that all settled connections share
    known      everything, uncounted

A connection is settled once the client has acknowledged gRPC's SETTINGS (the frame with which an HTTP/2
server announces its limits). In TLS the gate cannot see the acknowledgement. There, a connection is settled
once it is older than gRPC's timeouts for handshake and acknowledgement together, or once it is known. A
connection is known once gRPC's service has recognised a caller on it.

A bounded number of connections is opening at once, and only a few of them may be wide: send more than a
usual client sends before it acknowledges. Waiting connections open, and opening ones become wide, in this
order: first those whose origin (user id or IP address) has not failed lately, then those whose origin has the
fewest such connections, then those whose origin was served the fewest bytes recently, then the oldest. An
origin fails when one of its connections ends without a known caller. So a client from a new
address goes before any number of addresses that only open connections.

When the limit on connections is reached, a new connection displaces a connection that is not known. For
this, the gate chooses the origin that has most connections that are not known, with a handicap for one that
failed lately, and displaces the oldest of these connections.

Calls of unknown callers are refused, but each refusal takes a turn of the event loop, and delays the calls of
known callers. Therefore all settled connections share one rate of forwarding (`SharedRate`); the origin that
was served the fewest bytes goes first. A connection that waits for this rate is throttled. The rate does not
apply to trusted connections: those through a unix socket, and those for which gRPC requires a client
certificate. Nobody can make a call on them without a permitted user id or a certificate.

This module does no I/O and reads no clock; `gate` does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

HEAD_BYTES: Final = 16 << 10
"""Maximum bytes of TLS handshake, preface, SETTINGS and headers together; a usual client sends a quarter."""
DATA_BYTES: Final = 64 << 10
"""Maximum bytes of DATA frames: the initial flow-control window of a connection (RFC 9113, 6.9.2)."""
GREETING_BYTES: Final = {False: 1 << 10, True: 4 << 10}
"""Bytes that each opening connection may forward, in clear and in TLS; with more it must become wide.

gRPC's own client sends 150 bytes before it acknowledges the SETTINGS, and in TLS 700 to 2,500.
"""
_PREFACE_BYTES: Final = 24
_RECORD_HEADER_BYTES: Final = 5
_HANDSHAKE: Final = b"\x16"
"""Type of a TLS record (RFC 8446, 5.1)."""
_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
"""Frame types (RFC 9113, 6)."""
_ACK: Final = 1
"""The flag ACK of a SETTINGS frame."""
_MAX_ORIGINS: Final = 4096
"""Maximum number of origins whose usage is recorded; when it is exceeded, all records are dropped."""
_FORGIVING_SECONDS: Final = 5.0
"""Seconds after which the weight of all failures sinks by one."""
_FAILED: Final = 2
"""Weight of an origin that fails. It does not grow, because a client may share an address with strangers."""
_PRESSED_SECONDS: Final = 1.0
"""Seconds that a connection may take to open while others wait for their turn."""
_RATE_BURST_BYTES: Final = 64 << 10
"""Maximum bytes that the shared rate saves up.

These bytes are enough for the first calls of 256 clients, or of about 100 clients with TLS.
"""
_RATE_BYTES_PER_SECOND: Final = 16 << 10
"""Bytes per second of the shared rate: enough for a thousand calls of the smallest size, 16 bytes.

The event loop can refuse that many calls a second in addition to its other work. At twice this rate, calls of
known callers were delayed by seconds (measured with "short calls without end" of tests/daemon/attacks.py)."""
_CALL_BYTES: Final = 256
"""Bytes that each call of an opening connection takes from the shared rate."""
_TURN_BYTES: Final = 1 << 10
"""Maximum bytes that a settled connection without a known caller forwards at a time."""


class OpeningCounter:
    """Counter of the bytes and calls that a client sends before it acknowledges gRPC's SETTINGS.

    Before the acknowledgement gRPC enforces only the defaults of the protocol, not its own SETTINGS. The
    defaults let a client begin any number of streams, each with a header block of 16 MiB. In memory a header
    block takes several times its size. After the acknowledgement gRPC itself bounds the memory that a client
    makes it use. In TLS only bytes can be counted.

    Thread safety: one thread.
    """

    def __init__(self, *, tls: bool, max_streams: int) -> None:
        """Start with all counts at 0; `max_streams` calls may begin.

        `tls` says whether the bytes are encrypted.
        """
        self.acknowledged = False
        """Whether the acknowledgement has passed; always False in TLS."""
        self.excessive = False
        """Whether the client sent more bytes or began more calls than it may before the acknowledgement."""
        self.calls = 0
        """Number of calls (HEADERS frames) that have begun; 0 in TLS, where they cannot be seen."""
        self.is_wide = False
        """Whether the connection may send more than GREETING_BYTES."""
        self._tls = tls
        self._greeting = GREETING_BYTES[tls]
        self._max_streams: Final = max_streams
        # Bytes that may still come: in DATA frames (True), and in everything else (False).
        self._room = {False: HEAD_BYTES, True: DATA_BYTES}
        self._in_data = False
        self._left = _PREFACE_BYTES  # bytes left of the preface or of a frame's payload
        self._header = bytearray()

    @property
    def room(self) -> int:
        """Maximum number of bytes that `take` may be given now."""
        room = self._room[False] if self._tls else sum(self._room.values())
        return room if self.is_wide else min(room, self._greeting)

    @property
    def must_widen(self) -> bool:
        """Whether more may come only when the connection is wide."""
        return not self.is_wide and not self._greeting

    @property
    def cost(self) -> int:
        """Bytes that the connection has taken from the shared rate: an estimate of what its calls cost.

        In TLS calls cannot be counted, so all bytes count but those of the first record of the handshake.
        """
        if not self._tls:
            return _CALL_BYTES * self.calls
        # type (1 byte) | version (2 bytes) | length (2 bytes)
        hello = int.from_bytes(self._header[3:]) if self._header[:1] == _HANDSHAKE else 0
        return max(0, HEAD_BYTES - self._room[False] - _RECORD_HEADER_BYTES - hello)

    def take(self, data: bytes) -> int:
        """Count the next bytes, at most `room`, and return how many of them belong to the opening.

        If `data` contains the acknowledgement, the opening ends with the header of its frame. Otherwise all
        of `data` belongs to the opening.
        """
        if self._tls:
            self._header += data[: _RECORD_HEADER_BYTES - len(self._header)]
            self._spend(len(data))
            return len(data)
        at = 0
        # preface (24 bytes) | header (9 bytes) | payload | header | payload | ...
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
        self._greeting -= nbytes
        self._room[self._in_data] -= nbytes
        self.excessive |= self._room[self._in_data] < 0

    def _begin_frame(self) -> None:
        # length (3 bytes) | type | flags | stream (4 bytes)
        self._left = int.from_bytes(self._header[:3])
        kind, flags = self._header[3], self._header[4]
        self._header.clear()
        self._in_data = kind == _DATA
        self.calls += kind == _HEADERS
        self.excessive |= self.calls > self._max_streams
        self.acknowledged = kind == _SETTINGS and bool(flags & _ACK)


class SharedRate:
    """Token bucket in bytes, with the usage of each origin since the bucket was last full.

    The bucket may be overdrawn, by at most the bytes of one second, because the bytes of an opening
    connection are taken even if fewer are left. `left` is 0 until the bucket is above 0 again.

        -per_second ......... 0 ......... burst
           overdrawn, left: 0 | left: 1 to burst

    Thread safety: one thread.
    """

    def __init__(self, burst: int, per_second: int, now: float) -> None:
        """Start with `burst` bytes, a full bucket.

        `now` is in seconds on a monotonic clock, which later calls must use as well.
        """
        self._burst: Final = burst
        self._per_second: Final = per_second
        self._left: float = burst
        self._at = now
        self._used: Counter[bytes] = Counter()

    def left(self, now: float) -> int:
        """Return the number of bytes that may be taken now; 0 if the bucket is overdrawn."""
        self._left = min(self._left + (now - self._at) * self._per_second, self._burst)
        self._at = now
        if self._left == self._burst:
            self._used.clear()
        return max(0, int(self._left))

    def take(self, origin: bytes, nbytes: int) -> None:
        """Take `nbytes` bytes for `origin`, even if fewer are left."""
        self._left = max(self._left - nbytes, -self._per_second)
        if len(self._used) > _MAX_ORIGINS:
            self._used.clear()
        self._used[origin] += nbytes

    def used(self, origin: bytes) -> int:
        """Return the number of bytes that `origin` has taken since the bucket was last full."""
        return self._used[origin]


class ConnectionState:
    """State of one connection.

    Thread safety: the gate's thread; any thread may set `known`.
    """

    def __init__(self, number: int, origin: bytes, now: float, *, tls: bool, trusted: bool) -> None:
        self.number: Final = number
        """Number in the order in which connections were accepted."""
        self.origin: Final = origin
        """Key under which connections are counted together."""
        self.tls: Final = tls
        """Whether the client's bytes are encrypted."""
        self.trusted: Final = trusted
        """Whether the client is authenticated before it can make a call, by its user id or a certificate."""
        self.since = now
        """Monotonic seconds at which the connection began to open or, while it waits, was accepted."""
        self.opening: OpeningCounter | None = None
        """Counter of the client's bytes and calls while the connection is opening, else None."""
        self.forwarded = 0
        """Bytes forwarded to gRPC before a caller was recognised."""
        self.known = False
        """Whether a caller was recognised on this connection."""


C = TypeVar("C", bound=ConnectionState)


class Overdue(NamedTuple, Generic[C]):
    """Opening connections whose time is over."""

    settled: list[C]
    """Connections in TLS that must be settled, because they are old enough."""
    late: list[C]
    """Connections that must be cut, because they took too long."""


class Admission(Generic[C]):
    """All connections, and the order in which they open and are served.

    At most `max_opening` connections are opening at once, and at most `max_wide` of them are wide. gRPC
    itself cuts a connection whose handshake and acknowledgement take longer than `settling` seconds.

    Thread safety: one thread.
    """

    def __init__(
        self, *, max_connections: int, max_opening: int, settling: float, now: float, max_wide: int = 0
    ) -> None:
        self._max_connections: Final = max_connections
        self._max_opening: Final = max_opening
        self._max_wide: Final = max_wide
        self._settling: Final = settling
        self._rate = SharedRate(_RATE_BURST_BYTES, _RATE_BYTES_PER_SECOND, now)
        self._unsettled: dict[int, C] = {}
        """Connections that wait or are opening, by number; the oldest comes first."""
        self._throttled: dict[int, C] = {}
        """Settled connections that wait for the shared rate, by number."""
        self._failures: Counter[bytes] = Counter()
        """Weight of each origin of which a connection ended lately without a known caller."""
        self._forgave_at = now
        self.connections: Final[dict[int, C]] = {}
        """All connections by number; the oldest comes first."""

    def add(self, connection: C) -> None:
        """Add a connection, which waits for its turn to open."""
        self.connections[connection.number] = self._unsettled[connection.number] = connection

    def remove(self, connection: C) -> bool:
        """Remove a connection in any state; return False if it was removed before."""
        self._unsettled.pop(connection.number, None)
        self._throttled.pop(connection.number, None)
        if self.connections.pop(connection.number, None) is None:
            return False
        if not connection.known:
            self._failures[connection.origin] = _FAILED
        return True

    def settle(self, connection: C) -> None:
        """Settle an opening connection; its bytes and calls are no longer counted one by one."""
        connection.opening = None
        del self._unsettled[connection.number]

    def throttle(self, connection: C) -> None:
        """Let a settled connection wait until the shared rate has bytes left."""
        self._throttled[connection.number] = connection

    def release(self, connection: C) -> None:
        """Stop making a connection wait for the shared rate."""
        self._throttled.pop(connection.number, None)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of connections is reached."""
        return len(self.connections) >= self._max_connections

    @property
    def has_unsettled(self) -> bool:
        """Whether a connection waits or is opening."""
        return bool(self._unsettled)

    @property
    def has_throttled(self) -> bool:
        """Whether a connection waits for the shared rate."""
        return bool(self._throttled)

    def is_throttled(self, connection: C) -> bool:
        """Return whether this connection waits for the shared rate."""
        return connection.number in self._throttled

    def unread(self) -> list[C]:
        """Return the connections that are not read now: those that wait, and those that are throttled."""
        return [*self._waiting(), *self._throttled.values()]

    def to_displace(self) -> C | None:
        """Return the connection to close in favour of a new one; None if all have a known caller."""
        unknown = [connection for connection in self.connections.values() if not connection.known]
        if not unknown:
            return None
        held = Counter(connection.origin for connection in unknown)
        # `max` returns the first of equals, which is the one with the oldest connection.
        origin = max(held, key=lambda origin: held[origin] + self._failures[origin])
        return next(connection for connection in unknown if connection.origin == origin)

    def to_open(self, clock: Callable[[], float]) -> Iterator[C]:
        """Yield waiting connections until `max_opening` are opening, or the shared rate is used up.

        The caller opens or removes each connection before it asks for the next. A connection that fails to
        open counts as opening in this round, so that the round ends even if no connection can be opened.
        """
        opening = Counter(
            connection.origin for connection in self._unsettled.values() if connection.opening is not None
        )
        while opening.total() < self._max_opening and self._rate.left(clock()):
            chosen = self._first(self._waiting(), opening)
            if chosen is None:
                return
            yield chosen
            opening[chosen.origin] += 1

    def to_widen(self) -> Iterator[C]:
        """Yield opening connections that wait to become wide, until `max_wide` are wide; now these are."""
        found = [(connection, connection.opening) for connection in self._unsettled.values()]
        wide = Counter(connection.origin for connection, opening in found if opening and opening.is_wide)
        waiting = {connection: opening for connection, opening in found if opening and opening.must_widen}
        while wide.total() < self._max_wide and (chosen := self._first(waiting, wide)) is not None:
            waiting.pop(chosen).is_wide = True
            yield chosen
            wide[chosen.origin] += 1

    def _first(self, waiting: Iterable[C], held: Mapping[bytes, int]) -> C | None:
        """Return which of the `waiting` goes first, if each origin has `held` so many already."""

        def urgency(connection: C) -> tuple[int, int, int]:
            origin = connection.origin
            return self._failures[origin], held[origin], self._rate.used(origin)

        # `min` returns the first of equals, which is the oldest.
        return min(waiting, key=urgency, default=None)

    def to_serve(self, clock: Callable[[], float]) -> Iterator[C]:
        """Yield throttled connections, each once, while the shared rate has bytes left.

        Connections of the origin that was served the fewest bytes come first. The caller forwards what
        `may_forward` allows before it asks for the next connection.
        """
        for connection in sorted(
            self._throttled.values(), key=lambda waiting: (self._rate.used(waiting.origin), waiting.forwarded)
        ):
            if not self._rate.left(clock()):
                return
            del self._throttled[connection.number]
            yield connection

    def may_forward(self, connection: C, now: float) -> int:
        """Return how many bytes of a settled connection that is not known may be forwarded in one turn."""
        return _TURN_BYTES if connection.trusted else min(self._rate.left(now), _TURN_BYTES)

    def record_forwarded(self, connection: C, nbytes: int, cost: int) -> None:
        """Record `nbytes` forwarded bytes, and take `cost` bytes from the shared rate.

        A trusted connection takes nothing from the shared rate.
        """
        connection.forwarded += nbytes
        if not connection.trusted:
            self._rate.take(connection.origin, cost)

    def overdue(self, now: float) -> Overdue[C]:
        """Return the opening connections whose time is over."""
        if now - self._forgave_at > _FORGIVING_SECONDS or len(self._failures) > _MAX_ORIGINS:
            self._forgave_at = now
            self._failures = Counter({origin: n - 1 for origin, n in self._failures.items() if n > 1})
        overdue: Overdue[C] = Overdue([], [])
        max_age = _PRESSED_SECONDS if next(self._waiting(), None) is not None else self._settling
        for connection in self._unsettled.values():
            age = now - connection.since
            if connection.opening is None:
                continue
            if connection.tls and age > self._settling:
                overdue.settled.append(connection)
            elif age > max_age:
                overdue.late.append(connection)
        return overdue

    def stalled(self, now: float) -> list[C]:
        """Return the throttled connections on which no caller was recognised within `settling` seconds."""
        return [
            connection
            for connection in self._throttled.values()
            if not connection.known and now - connection.since > self._settling
        ]

    def _waiting(self) -> Iterator[C]:
        return (connection for connection in self._unsettled.values() if connection.opening is None)
