"""The ranks of a `torch.distributed` process group as a group of the controller."""

from __future__ import annotations

import secrets
from typing import Any, Final

from tiercache.controller.ranks.base import LEADER
from tiercache.controller.ranks.sockets import KEY_BYTES, SocketRankGroup
from tiercache.errors import InputError, MissingExtraError, RankError

_PORT_BYTES: Final = 2
_MAX_HOST: Final = 255


def ranks_of(process_group: Any = None, host: str = "127.0.0.1") -> SocketRankGroup:
    """Return this rank's part of a group with the ranks of a process group of gloo.

    `process_group` defaults to the default group; its collectives must take tensors in CPU memory. Rank 0
    listens at `host`, an address of its own machine by which the others reach it, and broadcasts address and
    key over the process group, once. All ranks make this call. The process group is not used afterwards: its
    collectives would wait for each other, and would be unusable after the first that times out.

    Raises InputError without a process group, RankError if rank 0 cannot listen, and MissingExtraError
    without torch.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError("a group of torch.distributed", "torch", error) from None
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("torch.distributed has no process group; call init_process_group first")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise InputError("this process is outside the process group; call ranks_of on its ranks only")
    if len(host.encode()) > _MAX_HOST:
        raise InputError(
            f"the host has {len(host.encode())} bytes; use a name or address of up to {_MAX_HOST}"
        )
    # | key, 32 bytes | port, 2 bytes | length of the host, 1 byte | host, padded |
    note = torch.zeros(KEY_BYTES + _PORT_BYTES + 1 + _MAX_HOST, dtype=torch.uint8)
    group, trouble = None, RankError(f"rank 0 cannot listen at {host}; see its own error")
    if rank == LEADER:
        key, name = secrets.token_bytes(KEY_BYTES), host.encode()
        try:
            group = SocketRankGroup(rank, size, (host, 0), key)
        except RankError as error:
            trouble = error  # raised below, when the others know of it
        port = 0 if group is None else group.address[1]
        data = key + port.to_bytes(_PORT_BYTES, "little") + bytes([len(name)]) + name
        note[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        dist.broadcast(note, group=process_group, group_src=LEADER)
    except BaseException:  # whatever it is, rank 0 does not go on listening, and it is raised again
        if group is not None:
            group.close()
        raise
    data = bytes(note.tolist())
    port = int.from_bytes(data[KEY_BYTES:][:_PORT_BYTES], "little")
    if not port:
        raise trouble
    if group is None:
        length, rest = data[KEY_BYTES + _PORT_BYTES], data[KEY_BYTES + _PORT_BYTES + 1 :]
        group = SocketRankGroup(rank, size, (rest[:length].decode(), port), data[:KEY_BYTES])
    return group
