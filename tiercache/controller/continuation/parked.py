"""Parked requests: their life from `park` to `resume`, and the share of the host that they may take."""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np
from blake3 import blake3

from tiercache.controller.admission import Admission
from tiercache.controller.context import ControllerContext
from tiercache.controller.continuation.holds import HostHold, HostHolds, all_objects, counts
from tiercache.controller.continuation.moves import ParkCopy, ParkDeletion, ParkWrite
from tiercache.controller.retention import MAX_TTL, checked_seconds
from tiercache.controller.values import Values
from tiercache.core import ABSENT, CacheTransferUnits, Mask, PoolName, Tier, TokenArray
from tiercache.errors import AdmissionError, InputError
from tiercache.index import Node
from tiercache.keys import KEY_BYTES, parked_keys
from tiercache.storage.values import HALF_LIFE
from tiercache.transfer import Fence

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


MAX_PARKED: Final = 1024
"""Maximum number of parked requests."""
_MAX_DELETIONS: Final = 256
"""Maximum number of deletions from storage that may wait for it."""
_MAX_HALVINGS: Final = 64.0
"""Maximum number of half-lives by which the value of a parked object is raised."""


class ParkedStatus(enum.StrEnum):
    """Place and fate of a parked request."""

    COPYING = "copying"
    """On its way from the device to the host."""
    ON_HOST = "on_host"
    """On the host, and with `below` perhaps on its way to storage."""
    STORED = "stored"
    """In storage, and not on the host any more."""
    LOST = "lost"
    """A copy failed. To resume it is a miss."""
    RESUMED = "resumed"
    RELEASED = "released"
    EXPIRED = "expired"


_OVER: Final = (ParkedStatus.RESUMED, ParkedStatus.RELEASED, ParkedStatus.EXPIRED)


class Parked:
    """One parked request, which `HybridCacheController.park` returns and `resume` takes."""

    def __init__(
        self, parking: Parking, context: ControllerContext, ticket: ParkingTicket, left: float
    ) -> None:
        """`left`: seconds after which the request is given up."""
        pages = -(-len(ticket.tokens) // context.page_size)
        self.status = ParkedStatus.COPYING
        self.expires = context.clock() + left
        """Clock time in seconds at which the request is given up."""
        self.keys = parked_keys(context.namespace, ticket.id, ticket.tokens, ticket.extra, pages)
        """Keys of its pages in storage."""
        self.ticket = ticket
        self.hold: HostHold | None = None
        """Its objects on the host, while the host has them."""
        self.write: ParkWrite | None = None
        self.was_offered = False
        """Whether some of its objects may be in storage."""
        self._parking = parking

    @property
    def tokens(self) -> TokenArray:
        """Tokens of the request. Do not change them."""
        return self.ticket.tokens

    def to_bytes(self) -> bytes:
        """Return the ticket as bytes, with which another process can resume the request.

        Whoever has them can resume it. Raises AdmissionError unless the request is in storage.
        """
        if self.status is not ParkedStatus.STORED:
            raise AdmissionError(
                f"this request is not in storage (it is {self.status}); park it with below=True, and call"
                " flush or wait until its status is `stored`"
            )
        return self.ticket.to_bytes()

    def release(self) -> None:
        """Give the request up: free its host memory, and delete it from storage in the background.

        Raises AdmissionError if it was resumed or released before, or has expired.
        """
        self._parking.release(self)

    def leave_host(self) -> None:
        """Let go of the objects on the host, if they are there."""
        if self.hold is not None:
            self.hold.close()
            self.hold = None


class Parking:
    """All parked requests of one controller."""

    def __init__(self, context: ControllerContext, values: Values) -> None:
        self._context, self._values = context, values
        self._active: dict[bytes, Parked] = {}
        """Parked requests that can be resumed, by their id."""
        self._next = math.inf
        """Earliest clock time in seconds at which one expires."""
        self.holds = HostHolds(context)
        self._most = int(context.arena.blocks * context.options.park_share)

    def park(
        self,
        admission: Admission,
        tokens: TokenArray,
        states: Mapping[PoolName, int] | None,
        *,
        ttl: float,
        below: bool,
        fence: Fence | None,
    ) -> Parked:
        """Park a request; `HybridCacheController.park` explains it."""
        context = self._context
        ttl = checked_seconds("ttl", ttl, MAX_TTL)
        self._check(admission, tokens, states, below)
        pages = -(-len(tokens) // context.page_size)
        node = admission.shared_node(len(tokens) // context.page_size)
        wanted = all_objects(context, pages)
        blocks = sum(context.allocator.blocks_of(pool, n) for pool, n in counts(wanted).items())
        kept, unit = self.holds.blocks + blocks, context.arena.block_bytes
        if kept > self._most or len(self._active) >= MAX_PARKED:
            self._count("refused")
            raise AdmissionError(
                f"with this request, parked requests would keep {kept * unit} bytes of the host,"
                f" and may keep {self._most * unit}, and {MAX_PARKED} at a time; resume or release"
                " others, or raise park_share"
            )
        hold, copied = self._take_host(node, wanted, pages, blocks)
        device = {pool: table[:pages].copy() for pool, table in admission.pages.items()}
        device |= {pool: np.full(pages, slot, np.int64) for pool, slot in (states or {}).items()}
        name, extra = secrets.token_bytes(ID_BYTES), admission.lookup.extra
        ticket = ParkingTicket(context.namespace, name, tokens.copy(), extra, time.time() + ttl)
        parked = Parked(self, context, ticket, ttl)
        parked.hold = hold
        self._active[name] = parked
        self._next = min(self._next, parked.expires)
        value = self._value(node, ttl) if below else None
        units = [
            CacheTransferUnits(pool, device[pool][mask], hold.places[pool][mask])
            for pool, mask in copied.items()
            if mask.any()
        ]
        over = partial(self._copied, parked, value)
        if not units:  # cannot happen with states; without, every page may be shared
            admission.close(fence)
            over(True)
        else:
            ParkCopy(context, hold, units, fence, over).take_over(*admission.hand_over(), fence)
        self._count("parked")
        return parked

    def find(self, parked: Any) -> Parked:
        """Return the request to resume. Raises AdmissionError or InputError if it cannot be resumed."""
        context = self._context
        if isinstance(parked, Parked):
            self._require_active(parked)
            return parked
        ticket = ParkingTicket.from_bytes(parked, context.namespace)
        if (mine := self._active.get(ticket.id)) is not None:
            if mine.ticket.to_bytes() != ticket.to_bytes():
                raise InputError(
                    "this ticket was changed after to_bytes returned it; pass the bytes as they were"
                )
            return mine
        left = ticket.expires - time.time()
        if left <= 0:
            raise AdmissionError("this parked request has expired; compute its tokens again")
        if context.storage is None:
            raise InputError("this ticket is of a request in storage, and this controller has no storage")
        found = Parked(self, context, ticket, left)
        found.status, found.was_offered = ParkedStatus.STORED, True
        return found

    def take(self, parked: Parked) -> None:
        """Record that a request is being resumed, so that it cannot be resumed again."""
        self._active.pop(parked.ticket.id, None)
        if parked.write is not None:
            parked.write.stop()

    def finish(self, parked: Parked, *, whole: bool) -> None:
        """Let go of the objects of a request that was resumed, or that turned out to be lost."""
        self._count("resumed" if whole else "missed")
        self._end(parked, ParkedStatus.RESUMED)

    def release(self, parked: Parked) -> None:
        """Give a parked request up. Raises AdmissionError if it was ended before."""
        self._require_active(parked)
        self._count("released")
        self._end(parked, ParkedStatus.RELEASED)

    def expire(self) -> None:
        """Give up the requests whose time is over."""
        if self._next == math.inf or (now := self._context.clock()) < self._next:
            return
        for parked in [one for one in self._active.values() if one.expires <= now]:
            self._count("expired")
            self._end(parked, ParkedStatus.EXPIRED)
        self._next = min((one.expires for one in self._active.values()), default=math.inf)

    def close(self) -> None:
        """Free the host memory of all parked requests. What is in storage stays there."""
        for parked in list(self._active.values()):
            if parked.status is not ParkedStatus.STORED:
                self._end(parked, ParkedStatus.RELEASED)
        self._active.clear()

    def _check(
        self, admission: Admission, tokens: TokenArray, states: Mapping[PoolName, int] | None, below: bool
    ) -> None:
        context = self._context
        admission.require_started()
        admission.check_sequence(tokens)
        most = min(admission.slots.pages * context.page_size, MAX_TOKENS)
        if not 0 < (count := len(tokens)) <= most:
            raise InputError(f"{count} tokens cannot be parked; this admission has slots for 1 to {most}")
        if context.index.state_pools or states:
            admission.slots.check_states([states or {}])
        if below and context.storage is None:
            raise InputError("there is no storage to park a request in; leave out below=True")

    def _take_host(
        self, node: Node, wanted: Mapping[PoolName, Mask], pages: int, blocks: int
    ) -> tuple[HostHold, dict[PoolName, Mask]]:
        """Take room on the host; return it, and which objects to copy there.

        Pages that the index has on the host stay where they are, and are pinned.
        """
        index = self._context.index
        located = index.locations(node, node.end).pages
        copied = {pool: mask.copy() for pool, mask in wanted.items()}
        for pool, at in located.items():
            copied[pool][: node.end] = at.host < 0
        with index.pinned(node, Tier.HOST):
            hold = self.holds.take(counts(copied), blocks)
            if any((at.host >= 0).any() for at in located.values()):
                hold.pins = [index.pin(node, Tier.HOST)]
        hold.places = {pool: np.full(pages, ABSENT) for pool in copied}
        for pool, at in located.items():
            hold.places[pool][: node.end] = at.host
        for pool, mask in copied.items():
            hold.places[pool][mask] = hold.own[pool]
        return hold, copied

    def _value(self, node: Node, ttl: float) -> float:
        """Return the value with which storage keeps the objects until `ttl` has passed, and hardly longer.

        Values lose half of their weight in an hour, so that a higher value is worth as many hours as it has
        doublings more than what the request shares with others.
        """
        found = [one for values in self._values.of(node.path()).values() for one in values.values()]
        return float(max([1.0, *found]) * 2.0 ** min(ttl / HALF_LIFE, _MAX_HALVINGS))

    def _copied(self, parked: Parked, value: float | None, whole: bool) -> None:
        """Go on when everything is on the host, or a copy has failed."""
        if parked.status is not ParkedStatus.COPYING or parked.hold is None:
            return
        if not whole:
            self._count("lost")
            parked.status = ParkedStatus.LOST
            parked.leave_host()
            return
        parked.status = ParkedStatus.ON_HOST
        if value is None or parked.ticket.id not in self._active:
            return
        write = ParkWrite(self._context, parked.hold, parked.keys, value, partial(self._written, parked))
        parked.write = None if write.done else write

    def _written(self, parked: Parked, whole: bool, offered: bool) -> None:
        """Let go of the host once storage has everything. Otherwise the host keeps the request."""
        parked.write = None
        parked.was_offered |= offered
        if parked.status in _OVER:
            self._forget(parked)
        elif whole and parked.ticket.id in self._active and parked.hold is not None:
            self._count("stored")
            parked.status = ParkedStatus.STORED
            parked.leave_host()

    def _end(self, parked: Parked, status: ParkedStatus) -> None:
        self._active.pop(parked.ticket.id, None)
        parked.status = status
        parked.leave_host()
        if parked.write is not None:
            parked.write.stop()  # its end deletes what it has written
        else:
            self._forget(parked)

    def _forget(self, parked: Parked) -> None:
        """Delete in the background what storage may have of a request. If that fails, its value fades."""
        context = self._context
        if not parked.was_offered or context.storage is None:
            return
        if context.in_flight.count("park") < _MAX_DELETIONS:
            pages = dict.fromkeys(context.index.page_pools, parked.keys)
            ParkDeletion(context, pages | dict.fromkeys(context.index.state_pools, parked.keys[-1:]))

    def _require_active(self, parked: Parked) -> None:
        if self._active.get(parked.ticket.id) is parked:
            return
        if parked.status is ParkedStatus.EXPIRED:
            raise AdmissionError("this parked request has expired; compute its tokens again")
        if parked.status in _OVER:
            raise AdmissionError(
                f"this parked request was {parked.status} already; a request is parked, and resumed, once"
            )
        raise AdmissionError(
            "this request was parked by another controller, or is being resumed; use the one that parked it,"
            " or carry it over with to_bytes"
        )

    def _count(self, outcome: str) -> None:
        self._context.metrics.increment("parked_requests_total", outcome)
