"""A switch in user space that delays and drops frames: `python -m tests.hosts.wire DELAY LOSS PORT...`.

`DELAY` is in seconds, each way, and `LOSS` is the probability that a frame is lost. It says `ready` on its
standard output when it switches.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from random import Random

ALL = 3
"""ETH_P_ALL of linux/if_ether.h."""
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Constants of linux/if_packet.h."""
SO_RCVBUFFORCE = 33
"""Constant of asm-generic/socket.h."""
HEADER = 10
"""Bytes of `struct virtio_net_hdr` before each frame: what is left to do of its checksum and segmentation."""
LONGEST = HEADER + 14 + (1 << 16)
QUEUE = 64 << 20
"""Bytes that may be under way; what comes beyond is dropped, as by a switch."""
BURST = 32
"""Frames that are taken of one port before it is the next one's turn."""


def switch(delay: float, loss: float, names: list[str]) -> None:
    """Carry frames between the ports for ever."""
    ports = [_open(name) for name in names]
    homes: dict[bytes, socket.socket] = {}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    held, random = 0, Random(0)
    print("ready", flush=True)
    while True:
        pause = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for port in select.select(ports, [], [], pause)[0]:
            for _ in range(BURST):
                try:
                    frame = port.recv(LONGEST, socket.MSG_DONTWAIT)
                except OSError:  # nothing more, or the cable is pulled
                    break
                homes[frame[HEADER + 6 : HEADER + 12]] = port
                home = homes.get(frame[HEADER : HEADER + 6])
                for other in (home,) if home else ports:
                    if other is not port and held + len(frame) <= QUEUE and random.random() >= loss:
                        under_way.append((time.monotonic() + delay, other, frame))
                        held += len(frame)
        while under_way and under_way[0][0] <= time.monotonic():
            _, port, frame = under_way.popleft()
            held -= len(frame)
            with suppress(OSError):  # the cable is pulled
                port.send(frame)


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    with suppress(OSError):  # without it, the limit of the machine holds
        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE)
    port.bind((name, ALL))
    return port


if __name__ == "__main__":
    switch(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
