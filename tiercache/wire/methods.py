"""The calls of the daemon's gRPC service: one table for both ends, so that each message type is named in one place only."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tiercache.core import Verb
from tiercache.wire.v1 import storage_pb2 as pb

SERVICE: Final = "tiercache.wire.v1.Storage"
SESSION_METADATA: Final = "tiercache-session-bin"
"""Metadata key under which a call on the unix socket carries its session's token."""
UNTOUCHED_METADATA: Final = "tiercache-untouched"
"""Key in the trailing metadata of a refusal by the daemon itself: nothing of the call touches, or will touch, attached memory.

A status alone does not say so, for gRPC makes the same ones on either side while the call may still be under way."""

GRPC_SOCKET: Final = "grpc.sock"
ATTACH_SOCKET: Final = "attach.sock"
"""Names of the two sockets in a daemon's socket directory."""


class Method(NamedTuple):
    """One call of the service. A side that is a stream carries payload frames (`wire.frames`), which pass through gRPC as plain bytes."""

    name: str
    request: type[Any]
    reply: type[Any]
    verb: Verb | None
    """Verb that the caller must be allowed; None: any principal may call."""
    streams: str = ""
    """Side that is a stream, `request` or `reply`; empty: neither."""

    @property
    def path(self) -> str:
        """HTTP/2 path of the call."""
        return f"/{SERVICE}/{self.name}"


METHODS: Final = {
    method.name: method
    for method in (
        Method("Hello", pb.HelloRequest, pb.HelloReply, None),
        Method("Exists", pb.ExistsRequest, pb.BitmapReply, Verb.READ),
        Method("Get", pb.GetRequest, pb.GetReply, Verb.READ, "reply"),
        Method("Set", pb.SetRequest, pb.OutcomesReply, Verb.WRITE, "request"),
        Method("GetInto", pb.GetIntoRequest, pb.OutcomesReply, Verb.READ),
        Method("SetFrom", pb.SetFromRequest, pb.OutcomesReply, Verb.WRITE),
        Method("Delete", pb.DeleteRequest, pb.BitmapReply, Verb.ADMIN),
        Method("Describe", pb.DescribeRequest, pb.DescribeReply, Verb.READ),
        Method("Scan", pb.ScanRequest, pb.ScanReply, Verb.READ),
        Method("Register", pb.RegisterRequest, pb.RegisterReply, Verb.WRITE),
        Method("Namespaces", pb.NamespacesRequest, pb.NamespacesReply, Verb.READ),
        Method("Usage", pb.UsageRequest, pb.UsageReply, Verb.READ),
        Method("Flush", pb.FlushRequest, pb.FlushReply, Verb.WRITE),
    )
}
