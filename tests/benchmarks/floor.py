"""The least that a call costs: plain sockets before a `file` store, without the code of a daemon.

`python -m tests.benchmarks.floor DIRECTORY` serves the frames of `tiercache_lab.bench.raw` and prints its
port. By the sizes of a call it asks the store whether objects are there, reads them, or stores new ones; a
thread serves each connection. `clients.py` runs it as the way `floor`.
"""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
from dataclasses import replace

from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, to_set
from tiercache.wire.data import VECTOR, skip

OBJECTS = 8
SIZE = 64 << 10
_CALL = struct.Struct("<QQ")
_NUMBERS = itertools.count()


def serve(sock: socket.socket, store: StorageBackend) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    arena = HostArena(OBJECTS * SIZE, SIZE, huge_pages=False)
    views = [arena.view(n) for n in range(OBJECTS)]
    keys = [key(("floor", n)) for n in range(OBJECTS)]
    gets = [GetItem(k, [view], SIZE) for k, view in zip(keys, views, strict=True)]
    meta = replace(to_set(keys[0], payload(0, SIZE)).meta, checksum=b"")
    while len(head := sock.recv(_CALL.size, socket.MSG_WAITALL)) == _CALL.size:
        up, down = _CALL.unpack(head)
        if up < SIZE:
            sock.recv(up, socket.MSG_WAITALL)
            out = views
            if down < SIZE:
                store.exists(keys)
                out = [views[0][:down]]
            else:
                store.get(gets)
        else:
            left = list(views)
            while left:
                skip(left, sock.recvmsg_into(left[:VECTOR], 0, socket.MSG_WAITALL)[0])
            name = next(_NUMBERS)
            store.set([SetItem(key((name, n)), [view], meta) for n, view in enumerate(views)])
            out = [views[0][:down]]
        left = list(out)
        while left:
            skip(left, sock.sendmsg(left))


def main(directory: str) -> None:
    store = open_backend(f"file://{directory}/floor?capacity=512MiB")
    store.set([to_set(key(("floor", n)), payload(n, SIZE)) for n in range(OBJECTS)])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock, store), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
