"""Targets whose bytes come from a socket or from another process."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3
from tiercache_backends.grpc.backend import read_history, read_report

from tests.fuzz.base import MIB, Target, promised
from tiercache.config.models import EventsSettings, ScoreSettings
from tiercache.controller.continuation.parked import ParkingTicket
from tiercache.controller.ranks.base import Message, MessageKind, RankFacts, pack_depths
from tiercache.controller.ranks.session import RankSession
from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.daemon.admission import OpeningCounter
from tiercache.daemon.fleet import Fleet
from tiercache.daemon.http.routes import read_prompt
from tiercache.errors import InputError, UnavailableError, WireError
from tiercache.events import EventKind, KVEvent, Medium, Place
from tiercache.events.base import ObjectGroup
from tiercache.events.encoding import decode_batch, encode_batch, namespace_label
from tiercache.events.publisher import EventPublisher
from tiercache.events.settings import EventSettings
from tiercache.keys import Shard, page_keys
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import StoreEvents
from tiercache.wire import attachment, data, messages
from tiercache.wire.v1 import attach_pb2, data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

KEYS = [ObjectKey(pool, bytes([n]) * 64) for n, pool in enumerate([PoolName.KV, PoolName.MAMBA, PoolName.KV])]
META = ObjectMeta(b"n" * 32, 4096, b"c" * 16, b"p" * 32, 3, 0.5, 7)

# -- gRPC's messages, which carry payload or not


def _set(data: bytes) -> None:
    found = messages.read_message(data, pb.UnreadHeader, MIB)
    header = messages.read_message(found.header, pb.SetHeader, MIB)
    promised(len(found.payload) <= len(data) and header.ByteSize() <= 2 * len(data), "more than was given")
    messages.read_keys(header.keys, 100)


def _sets() -> list[bytes]:
    header = pb.SetHeader(keys=messages.keys(KEYS[:2]), metas=[messages.meta(META)] * 2)
    return [
        pb.SetRequest(header=header, payload=b"abc").SerializeToString(),
        pb.SetRequest().SerializeToString(),
    ]


READERS: Sequence[tuple[type[Any], Callable[[Any], object]]] = (
    (pb.ExistsRequest, lambda found: messages.read_keys(found.keys, 100)),
    (pb.SetFromRequest, lambda found: [messages.read_meta(each) for each in found.metas]),
    (pb.BitmapReply, lambda found: messages.read_bits(found.bits, 3)),
    (pb.OutcomesReply, lambda found: messages.read_outcomes(found.outcomes, 3)),
    (pb.UsageReply, lambda found: [messages.read_tier(each) for each in found.tiers]),
    (pb.Tiers, lambda found: messages.read_tiers(found, 3)),
    (pb.HistoryReply, lambda found: read_history(found, 3, 2)),
    (pb.ReportReply, read_report),
    (pb.Namespace, lambda found: messages.read_mapping(found.texts, found.numbers)),
)
"""Messages and their readers; the first byte of an input chooses one."""


def _message(found: bytes) -> None:
    kind, read = READERS[found[0] % len(READERS)] if found else READERS[0]
    read(messages.read_message(found[1:], kind, MIB))


def _messages() -> list[bytes]:
    report = pb.TierReport(name="ssd", last_read=1.0, texts={"a": "b"}, numbers={"c": 1})
    sound = [
        pb.ExistsRequest(keys=messages.keys(KEYS)),
        pb.SetFromRequest(keys=messages.keys(KEYS), metas=[messages.meta(META)] * 3),
        pb.BitmapReply(bits=messages.bits([True, False, True])),
        messages.outcomes([Outcome.HIT, Outcome.MISS, Outcome.ERROR]),
        pb.UsageReply(objects=3, tiers=[report]),
        pb.Tiers(names=["a", "b"], tier_of=b"\0\1\0"),
        pb.HistoryReply(
            tiers=[pb.TierHistory(name="ssd", present=b"\x05")], pages=[1], layouts=[b"l" * 32],
            layout_of=[0], tier_of=[1], causes=[pb.REMOVAL_CAUSE_EVICTED], times=[1.5],
        ),
        pb.ReportReply(rows=[pb.AccountRow(hour=1, tenant="t")], begun=1.0),
        messages.namespace(b"n" * 32, {"model": "m", "page_size": 16}, states=True),
    ]  # fmt: skip
    return [bytes([n]) + message.SerializeToString() for n, message in enumerate(sound)]


# -- data connections, the attach socket, and what comes before a caller is known

HEADERS = {
    data.FrameKind.OPEN: data_pb2.DataOpen, data.FrameKind.REPLY: pb.OutcomesReply,
    data.FrameKind.CALL: data_pb2.DataCall, data.FrameKind.FAILED: data_pb2.DataFailure,
}  # fmt: skip


def _stream(found: bytes) -> None:
    """Read frames of a data connection as both ends do, until the bytes end."""
    at = 0
    while at + data.FRAME_BYTES <= len(found):
        frame = data.unpack(found[at : at + data.FRAME_BYTES], 1 << 16, MIB)
        at += data.FRAME_BYTES
        header = found[at : at + frame.header]
        messages.read_message(header, HEADERS.get(frame.kind, pb.SetHeader), 1 << 16)
        at += frame.header + frame.payload


def _streams() -> list[bytes]:
    def made(kind: data.FrameKind, message: Any, payload: bytes = b"") -> bytes:
        return data.pack(kind, message.SerializeToString(), len(payload)) + payload

    header = pb.SetHeader(keys=messages.keys(KEYS[:1]), metas=[messages.meta(META)])
    return [
        made(data.FrameKind.OPEN, data_pb2.DataOpen()) + made(data.FrameKind.OPENED, pb.HelloReply()),
        made(data.FrameKind.CALL, data_pb2.DataCall()) + made(data.FrameKind.OBJECTS, header, b"12345"),
        made(data.FrameKind.FAILED, data_pb2.DataFailure()),
    ]


@cache
def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _packet(found: bytes) -> None:
    """Receive a packet with as many descriptors as its first byte says; the untold are closed."""
    left, right = _pair()
    before = len(os.listdir("/proc/self/fd"))
    count = found[0] % 4 if found else 0
    socket.send_fds(left, [found[1:] or b"\0"], [left.fileno()] * count)
    for kind in (attach_pb2.Request,):
        try:
            _, given = attachment.receive(right, kind, max_fds=1)
            for descriptor in given:
                os.close(descriptor)
        finally:
            promised(len(os.listdir("/proc/self/fd")) == before, "a descriptor stayed open")


def _packets() -> list[bytes]:
    made = [
        attach_pb2.Request(attach=attach_pb2.Attach(bytes=4096)), attach_pb2.Session(token=b"t" * 32),
        attach_pb2.Answer(region=1),
    ]  # fmt: skip
    return [bytes([n % 2]) + message.SerializeToString() for n, message in enumerate(made)]


def _opening(found: bytes) -> None:
    """Count what a connection sends before its caller is known, in pieces of any size."""
    for tls in (False, True):
        counter = OpeningCounter(tls=tls, max_streams=32)
        at, step = 0, 1 + (found[0] if found else 0)
        while at < len(found) and not counter.acknowledged and not counter.excessive:
            piece = found[at : at + min(step, max(1, counter.room))]
            taken = counter.take(piece)
            promised(0 < taken <= len(piece), "it takes nothing, or more than there is")
            at += taken


def _openings() -> list[bytes]:
    def framed(kind: int, flags: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3) + bytes([kind, flags]) + b"\0\0\0\1" + payload

    call = framed(1, 4, b"x" * 40) + framed(0, 1, b"y" * 90)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + framed(4, 0)
    return [preface + framed(4, 1), preface + call + framed(4, 1)]


# -- events


def _batch(found: bytes) -> None:
    time, events = decode_batch(found)
    encode_batch(time, [event for event in events if event.group is None])


def _batches() -> list[bytes]:
    place = Place(Medium.STORAGE, "ssd")
    group = ObjectGroup(PoolName.KV, b"n" * 8, b"l" * 32, 16)
    return [
        encode_batch(1.5, [
            KVEvent(EventKind.STORED, place, group, [b"k" * 32], b"p" * 32, 3, [1, 2, 3]),
            KVEvent(EventKind.REMOVED, place, group, [b"k" * 32], None, None, []),
            KVEvent(EventKind.CLEARED, place), KVEvent(EventKind.CLEARED, None),
        ]),
        encode_batch(0.0, []),
    ]  # fmt: skip


class _Asked:
    """A publisher, and the socket of a client that asks for replays."""

    def __init__(self) -> None:
        import zmq

        address = "tcp://127.0.0.1:0"
        self.publisher = EventPublisher(
            EventSettings(endpoint=address, replay=address), [StoreEvents(open_backend("memory://"), "m")]
        )
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(self.publisher.replay_endpoint)

    def ask(self, parts: Sequence[bytes]) -> None:
        """Send any request, then a sound one; its answer must come."""
        self.socket.send_multipart([*parts])
        self.socket.send_multipart([b"", (2**64 - 1).to_bytes(8)])
        while True:
            promised(self.socket.poll(10_000), "no answer to a request for a replay")
            if self.socket.recv_multipart()[-2] == b"\xff" * 8:
                return


@cache
def _asked() -> _Asked:
    return _Asked()


def _replay(found: bytes) -> None:
    _asked().ask(found.split(b"|")[:64])


def _replays() -> list[bytes]:
    return [b"|12345678", b"|" + bytes(8), b"||"]


# -- parked requests and ranks

NAMESPACE = b"n" * 32


def _ticket(found: bytes) -> None:
    """Read a ticket as it is, and with the checksum that it should have."""
    for sealed in (found, found[:-16] + blake3(found[:-16]).digest(length=16)):
        try:
            ticket = ParkingTicket.from_bytes(sealed, NAMESPACE)
            promised(ticket.tokens.size and ticket.namespace == NAMESPACE, "a ticket of nothing")
        except InputError:
            continue


def _tickets() -> list[bytes]:
    tokens = np.arange(9, dtype=np.uint64)
    return [
        ParkingTicket(NAMESPACE, secrets.token_bytes(16), tokens, b"", 1e9).to_bytes(),
        ParkingTicket(b"o" * 32, bytes(16), tokens, b"extra", 0.0).to_bytes(),
    ]


class _Silent:
    """Group of ranks whose messages go nowhere."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open(self, deliver: Callable[[bytes], None]) -> None:
        """Deliver nothing."""

    def send(self, to: int, message: bytes) -> None:
        """Lose the message."""

    def close(self) -> None:
        """End nothing."""


FACTS = RankFacts(3, 16, NAMESPACE, {"kv": (Shard(0, 3), b"g" * 16)})
SESSION = b"SESSION!"


def _rank(found: bytes) -> None:
    """Read messages of other ranks, as the leader and as a follower in the middle of two requests."""
    for number in (0, 1):
        session = RankSession(_Silent(number), FACTS)
        agreements = [session.begin(), session.begin()]
        # The session's name is random; a rank that means harm knows it.
        own = session._handshake.session  # private: the only place where a session's name can be read
        for part in found.split(b"||"):
            session.deliver(part.replace(SESSION, own))
        for agreement in agreements:
            agreement.close()


def _ranks() -> list[bytes]:
    def said(kind: MessageKind, sender: int, *fields: Any) -> bytes:
        return Message(kind, SESSION, sender, fields).pack()

    votes = [said(MessageKind.VOTE, n, 0, 0, 0, pack_depths(0b1101), 3, False) for n in (1, 2)]
    return [
        b"||".join([said(MessageKind.HELLO, 1, b"nonce-01", *FACTS.fields()), *votes,
                    said(MessageKind.LOADED, 1, 0, 0)]),
        b"||".join([said(MessageKind.TARGET, 0, 0, 0, 1, pack_depths(0b101)),
                    said(MessageKind.DECIDED, 0, 0, 0, 3, "none", False), said(MessageKind.AGAIN, 0, 0, 1)]),
        said(MessageKind.WELCOME, 0, b"nonce-01", ["kv"]),
        said(MessageKind.REFUSED, 0, b"nonce-01", "sizes differ"),
    ]  # fmt: skip


def _cursor(found: bytes) -> None:
    """Hand a store any cursor: the store makes nothing of those that it did not give out."""
    for store in _stores():
        promised(not store.scan(None, found).entries, "a cursor of nobody's gives entries")


@cache
def _stores() -> Sequence[Any]:
    return [open_backend("memory://"), open_backend(["memory://?tier_name=a", "memory://?tier_name=b"])]


def _cursors() -> list[bytes]:
    return [msgpack.packb([0, 1, "a", b"", []]), msgpack.packb([1, 2**62, "b", b"12345678", ["a"]]),
            struct.pack("<Q", 3), b"\0" * 64]  # fmt: skip


# --- the HTTP port
# ------------------------------------------------------------------------------------------------------------


def _prompt(found: bytes) -> None:
    what, _, rest = found.partition(b"&")
    namespace, prompt = read_prompt("ab" * 32, what.decode("latin-1"), rest)
    scores = _fleet().score(namespace, prompt)
    promised(set(scores) == {"a"} and max(scores["a"].values()) <= 16 * len(prompt), "more than was asked")


@cache
def _fleet() -> Fleet:
    fleet = Fleet(ScoreSettings(workers={"a": (EventsSettings(),)}))
    group = ObjectGroup(PoolName.KV, bytes.fromhex(namespace_label(b"\xab" * 32)), b"l" * 32, 16)
    keys = page_keys(b"\xab" * 32, np.zeros(64, np.uint64), 16)
    fleet.apply("a/0", [KVEvent(EventKind.STORED, Place(Medium.GPU), group, keys)])
    return fleet


def _prompts() -> list[bytes]:
    return [b"tokens&" + bytes(4 * 100), b"keys&" + bytes(32 * 3), b"text&abc"]


RECEIVED = (
    Target("payload message", _set, _sets, (WireError,)),
    Target("message", _message, _messages, (WireError,)),
    Target("data frames", _stream, _streams, (WireError,)),
    Target("attach packet", _packet, _packets, (WireError,), max_bytes=5000, costs=2),
    Target("opening connection", _opening, _openings, max_bytes=2048, costs=2),
    Target("event batch", _batch, _batches, (WireError,)),
    Target("scored prompt", _prompt, _prompts, (InputError,)),
    Target("replay request", _replay, _replays, max_bytes=512, costs=20),
    Target("ticket", _ticket, _tickets),
    Target("rank message", _rank, _ranks, costs=5),
    Target("scan cursor", _cursor, _cursors, (UnavailableError,), costs=2),
)
