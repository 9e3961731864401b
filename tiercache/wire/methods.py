"""Table of the calls of the daemon's gRPC service, for both ends."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tiercache.core import Verb
from tiercache.wire.v1 import storage_pb2 as pb

SERVICE: Final = "tiercache.wire.v1.Storage"
SESSION_METADATA: Final = "tiercache-session-bin"
"""Metadata key of the session's token in a call on the unix socket."""
UNTOUCHED_METADATA: Final = "tiercache-untouched"
"""Key in the trailing metadata of a refusal by the daemon.

The key says that the call does not touch attached memory, now or later. A status code alone does not say so:
gRPC itself produces the same codes on either side while the call may still be under way."""

GRPC_SOCKET: Final = "grpc.sock"
"""Name of the gRPC socket in a daemon's socket directory."""
ATTACH_SOCKET: Final = "attach.sock"
"""Name of the attach socket in a daemon's socket directory."""
DATA_SOCKET: Final = "data.sock"
"""Name of the socket for data connections in a daemon's socket directory."""


class Method(NamedTuple):
    """Call of the service."""

    name: str
    request: type[Any]
    reply: type[Any]
    verb: Verb | None
    """Verb that the caller must have; None if any principal may make the call."""
    streams: str = ""
    """Name of the part that is a stream: `request`, `reply`, or empty if neither is."""

    @property
    def path(self) -> str:
        """HTTP/2 path of the call."""
        return f"/{SERVICE}/{self.name}"


CHANGES: Final = frozenset({"Delete", "Flush", "Reload"})
"""Calls that change a store or a daemon, also if their client does not wait for the answer."""
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
        Method("Advise", pb.AdviseRequest, pb.AdviseReply, Verb.WRITE),
        Method("Register", pb.RegisterRequest, pb.RegisterReply, Verb.WRITE),
        Method("Namespaces", pb.NamespacesRequest, pb.NamespacesReply, Verb.READ),
        Method("Usage", pb.UsageRequest, pb.UsageReply, Verb.READ),
        Method("Flush", pb.FlushRequest, pb.FlushReply, Verb.WRITE),
        Method("Status", pb.StatusRequest, pb.StatusReply, None),
        Method("History", pb.HistoryRequest, pb.HistoryReply, Verb.READ),
        Method("Report", pb.ReportRequest, pb.ReportReply, None),
        Method("Reload", pb.ReloadRequest, pb.ReloadReply, Verb.ADMIN),
    )
}
