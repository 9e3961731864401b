"""A server of gRPC that keeps to the protocol as far as a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from tiercache.wire.methods import METHODS, SERVICE
from tiercache.wire.v1 import storage_pb2 as pb

LIMITS = pb.Limits(
    keys=16, message_bytes=4 << 20, object_bytes=64 << 20, client_bytes=64 << 20, streams=8, call_seconds=60
)


@contextmanager
def server(**handlers: Callable[[Iterator[bytes], Any], Iterator[bytes]]) -> Iterator[str]:
    """The address of a server of these handlers of messages; Hello and Exists have answers."""

    def hello(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        yield pb.HelloReply(version="0", instance=b"i", principal="p", limits=LIMITS).SerializeToString()

    def exists(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        count = len(pb.ExistsRequest.FromString(next(requests)).keys.pool_of)
        yield pb.BitmapReply(bits=bytes(-(-count // 8))).SerializeToString()

    methods = {"Hello": hello, "Exists": exists, **handlers}
    assert methods.keys() <= METHODS.keys()
    made = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
    table = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in methods.items()}
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, table),))
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}"
    made.stop(0).wait(30)
