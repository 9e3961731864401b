"""Attachment of a client's memory to a daemon on the same host, and the packets of the attach socket.

The client makes a memfd with all of its pages present, sealed against resizing. The daemon maps it, and then
seals it against new writable mappings (F_SEAL_FUTURE_WRITE, Linux 5.1). From then on no process can punch a
hole into the memfd. So neither process can remove pages that the other has mapped, or make the other allocate
new pages. Both can still write through their existing mappings. This needs no /dev/shm and no shared IPC
namespace.

    client                                     daemon
    1. memfd_create, fallocate, touch pages
    2. seal: SHRINK, GROW
    3. pass the memfd over the attach socket
                                               4. check the seals, the size, and that there are no holes
                                               5. map; seal: FUTURE_WRITE, SEAL
                                               6. check again that there are no holes

The disadvantage is that no process can make a new writable mapping after a daemon has sealed the memory
(docs/design/payload.md).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import WireError
from tiercache.memory import Region

PACKET_BYTES: Final = 4096
"""Maximum size in bytes of a packet on the attach socket."""

_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE; Python's fcntl module has no name for it
_ABSENT: Final = (
    "not all of the memfd's pages are present; touch every page before it is attached, and punch no holes"
)

M = TypeVar("M", bound=Message)


def adopt(fd: int, declared: int, max_bytes: int) -> Region:
    """Map another process's memfd, and seal the memfd so that the other process cannot harm this one.

    `declared`: the size in bytes that the other process announced. `max_bytes`: the largest accepted size.
    Raises WireError with the reason for a refusal. A large memfd takes a while, so do not call this in an
    event loop.

    The order of the steps matters. The size must be sealed before it is read. Otherwise the other process
    could shrink the memfd after the check, and an access beyond its end would raise SIGBUS in this process.
    The memfd must be sealed against holes before the last check for holes. Otherwise the other process could
    punch a hole after the check, and each access to the hole would allocate a page of this process's memory.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError(
            "the passed descriptor is not a memfd; pass a memfd made with MFD_ALLOW_SEALING"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WireError("the memfd can be shrunk while it is used; add F_SEAL_SHRINK before it is attached")
    nbytes = os.fstat(fd).st_size
    if nbytes != declared or not nbytes or nbytes % BLOCK_ALIGN:
        raise WireError(
            f"the memfd has {nbytes} bytes and {declared} were declared; both must be the same multiple of"
            f" {BLOCK_ALIGN}"
        )
    if nbytes > max_bytes:
        raise WireError(
            f"{nbytes} bytes are beyond the {max_bytes} that may be attached; raise limits.attached_bytes, or"
            " attach less"
        )
    if os.fstat(fd).st_blksize != mmap.PAGESIZE:
        raise WireError(
            "the memfd is on reserved huge pages, whose holes cannot be detected; use ordinary or transparent"
            " huge pages"
        )
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise WireError(_ABSENT)  # before the sealing, so that the other process can still fill the hole
    try:
        region = Region(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError) as error:
        raise WireError(
            f"the memfd cannot be mapped for writing and sealed against holes ({error}): either a daemon,"
            " perhaps one that has ended, has sealed it already, or this kernel is older than Linux 5.1"
        ) from None
    # Check again, because a hole may have been made before the sealing. It would not be enough to compare the
    # number of allocated blocks (st_blocks) with the size: if the file has blocks beyond its end, the number
    # can be right in spite of a hole.
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise WireError(_ABSENT)
    try:
        region.populate()
    except OSError as error:
        raise WireError(
            f"the memfd's pages cannot be faulted in ({error}); this needs Linux 5.14 and enough free memory"
        ) from None
    return region


def send(sock: socket.socket, message: Message, *fds: int) -> None:
    """Send one packet with file descriptors; raise OSError if that fails."""
    socket.send_fds(sock, [message.SerializeToString()], list(fds), socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, kind: type[M], max_fds: int = 0) -> tuple[M | None, list[int]]:
    """Return the next packet, or None at the end of the connection, and its file descriptors.

    The caller must close the descriptors. Raises OSError. Raises WireError for a packet that is not of this
    kind or has more than `max_fds` descriptors, after closing the descriptors.
    """
    data, fds, flags, _ = socket.recv_fds(sock, PACKET_BYTES, max(1, max_fds), socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > max_fds:
            raise WireError("a packet is too long, or carries too many descriptors")
        return (kind.FromString(data) if data else None), fds
    except (DecodeError, WireError) as error:
        for fd in fds:
            os.close(fd)
        raise WireError(f"a packet of the attach socket cannot be read ({error})") from error
