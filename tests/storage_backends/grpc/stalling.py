"""A server that keeps to the protocol as far as a test wants it to, and a proxy that stops passing bytes
on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import grpc

from tiercache.wire.methods import METHODS, SERVICE
from tiercache.wire.v1 import storage_pb2 as pb

LIMITS = pb.Limits(
    keys=16, message_bytes=4 << 20, object_bytes=64 << 20, client_bytes=64 << 20, streams=8, call_seconds=60
)


@contextmanager
def server(**handlers: Callable[[Iterator[bytes], Any], Iterator[bytes]]) -> Iterator[str]:
    """The address of a server whose methods are `handlers`, from messages to messages; Hello and Exists have
    answers.
    """

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


class Proxy:
    """Between a client and a server on TCP.

    From `hole` on no byte passes, and neither side hears of it, until `pass_on`.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._open = Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def hole(self) -> None:
        self._open.clear()

    def pass_on(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.wait()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
