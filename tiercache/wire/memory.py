"""Regions of memory that a client and a daemon on one host share, and the packets in which they are handed over.

The client makes a memfd, all of its pages present, sealed against resizing. The daemon maps it, then seals it against any *new* way of
writing (F_SEAL_FUTURE_WRITE, Linux 5.1): from then on nobody can punch a hole into it, so that neither side's memory can grow or vanish
behind the other's back, while both go on writing through the mappings that they have. Neither /dev/shm nor a shared IPC
namespace is needed.

The price: memory that a daemon has sealed can never be mapped for writing again, by that daemon or another (design/0013).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import WireError

PACKET_BYTES: Final = 4096
"""The longest packet of the attach socket."""

_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE; the fcntl module of Python 3.11 does not name it
_MADV_POPULATE_WRITE: Final = 23
_ABSENT: Final = "not all of the memfd's pages are present; touch every page before it is attached, and punch no holes"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

M = TypeVar("M", bound=Message)


class Region:
    """A mapped memfd: `view` is its bytes. It stays mapped until the last view of it is gone; `close` lets go of ours.

    Thread safety: any thread may use `view`; one closes.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the memfd `fd`, which stays the caller's; raises OSError."""
        self.nbytes: Final = nbytes
        mapped = mmap.mmap(fd, nbytes)
        self.view = memoryview(mapped)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def populate(self) -> None:
        """Fault every page into this mapping; raises OSError where there is not the memory. The GIL is released."""
        if _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Twice is harmless."""
        self.view = memoryview(b"")


def create(nbytes: int, name: str) -> int:
    """A new memfd of `nbytes` bytes, sealed against resizing, none of its pages present yet: map it, and `populate`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def adopt(fd: int, declared: int, most: int) -> Region:
    """Map another process's memfd, sealed so that it can do this process no harm. Raises WireError, with the reason.

    Takes a while for a large one: not for an event loop. In this order: the size is fixed by a seal before it is read, and holes are ruled
    out by a seal before it is checked that there are none.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise WireError("what was passed is no memfd; pass one made with MFD_ALLOW_SEALING") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise WireError("the memfd can be shrunk under its readers; add F_SEAL_SHRINK before it is attached")
    nbytes = os.fstat(fd).st_size
    if nbytes != declared or not nbytes or nbytes % BLOCK_ALIGN:
        raise WireError(f"the memfd has {nbytes} bytes, {declared} were declared, and a whole number of {BLOCK_ALIGN} is needed")
    if nbytes > most:
        raise WireError(f"{nbytes} bytes are beyond the {most} that may be attached; raise limits.attached_bytes, or attach less")
    if os.fstat(fd).st_blksize != mmap.PAGESIZE:
        raise WireError("the memfd is on reserved huge pages, whose holes cannot be told; use ordinary or transparent huge pages")
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise WireError(_ABSENT)  # before it is sealed, so that its owner can mend that
    try:
        region = Region(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError) as error:
        raise WireError(
            f"the memfd cannot be mapped for writing and sealed against holes ({error}): it was sealed before, perhaps by a daemon that has"
            " ended since, or this kernel is older than Linux 5.1"
        ) from None
    # Not by counting blocks: there may be some beyond the end.
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise WireError(_ABSENT)
    try:
        region.populate()
    except OSError as error:
        raise WireError(f"the memfd cannot be mapped ({error}); Linux 5.14 is needed") from None
    return region


def send(sock: socket.socket, message: Message, *fds: int) -> None:
    """Send one packet, with descriptors; raises OSError."""
    socket.send_fds(sock, [message.SerializeToString()], list(fds), socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, kind: type[M], most_fds: int = 0) -> tuple[M | None, list[int]]:
    """The next packet and the descriptors that came with it, which are the caller's now; None at the end of the connection.

    Raises OSError, and WireError for a packet that is not of this kind: its descriptors are closed then.
    """
    data, fds, flags, _ = socket.recv_fds(sock, PACKET_BYTES, max(1, most_fds), socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > most_fds:
            raise WireError("a packet is too long, or carries more descriptors than its kind does")
        return (kind.FromString(data) if data else None), fds
    except (DecodeError, WireError) as error:
        for fd in fds:
            os.close(fd)
        raise WireError(f"a packet of the attach socket cannot be read ({error})") from error
