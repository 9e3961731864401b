"""A gRPC server that only streams messages. `bench rpc` compares a daemon with this server.

The server runs as a separate process and prints its port.

`/bare/Get` sends the same message as many times as requested. `/bare/Set` reads messages to the end of the
stream. Both use protobuf messages and the generated code, like any gRPC program in Python.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tiercache.wire.v1 import storage_pb2 as pb

OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))
"""Options of the server and of its clients' channels: messages of at most 64 MiB."""


def reply(size: int) -> pb.GetReply:
    """Return a message that has the form of a daemon's answer with one object of `size` bytes."""
    pieces = pb.GetPieces(items=[1], outcomes=[1], sizes=[size], checksums=bytes(16))  # type: ignore[list-item]
    return pb.GetReply(pieces=pieces, payload=bytes(size))


async def _get(request: bytes, _: Any) -> AsyncIterator[pb.GetReply]:
    count, size = map(int, request.split())
    message = reply(size)
    for _ in range(count):
        yield message


async def _set(messages: AsyncIterator[pb.SetRequest], _: Any) -> bytes:
    return str(sum([len(message.payload) async for message in messages])).encode()


async def _serve() -> None:
    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, Any] = {
        "Get": grpc.unary_stream_rpc_method_handler(_get, None, pb.GetReply.SerializeToString),
        "Set": grpc.stream_unary_rpc_method_handler(_set, pb.SetRequest.FromString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
