"""Clients whose stores are closed, kept connected for the next store of this process.

To disconnect a client takes Mooncake a second, for which it stops all Python threads of the process.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from tiercache_backends.mooncake.library import MooncakeClient

_MAX_IDLE: Final = 4
"""Clients of one kind that are kept."""


class ClientSpec(NamedTuple):
    """Arguments of `MooncakeClient.setup`; clients that have the same serve any store of theirs."""

    hostname: str
    metadata: str
    segment: int
    buffer: int
    protocol: str
    devices: str
    master: str
    tenant: str


_idle: Final[dict[ClientSpec, deque[MooncakeClient]]] = {}
"""Idle clients; each step of theirs is one call of a deque, so that they need no lock."""


def take(spec: ClientSpec) -> MooncakeClient | None:
    """Return an idle client that the master answers; None if there is none. May block as a call may."""
    clients = _idle.get(spec, deque())
    while True:
        try:
            client = clients.pop()
        except IndexError:
            return None
        # If the master was started anew meanwhile, the first call finds the old connection broken.
        if any(client.exist(["tc1"])[0] >= 0 for _ in range(2)):
            return client
        client.close()


def release(spec: ClientSpec, client: MooncakeClient) -> None:
    """Keep a client that nothing uses and that has no registered memory, or disconnect it.

    A client that lends memory is disconnected: its owner wants the memory back.
    """
    clients = _idle.setdefault(spec, deque())
    if spec.segment or len(clients) >= _MAX_IDLE:
        client.close()
    else:
        clients.append(client)
