"""Regions of memory that a client and a daemon on one host share, and the packets in which they are handed over.

The client makes a memfd with all of its pages present, sealed against resizing. The daemon maps it, then seals it against any *new* way of
writing (F_SEAL_FUTURE_WRITE, Linux 5.1). From then on no process can punch a hole into it, so neither side can make memory grow or vanish
under the other, while both go on writing through the mappings that they have. Neither /dev/shm nor a shared IPC namespace is needed.

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
"""Length in bytes of the longest packet on the attach socket."""

_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE; the fcntl module of Python 3.11 does not name it
_MADV_POPULATE_WRITE: Final = 23
_ABSENT: Final = "not all of the memfd's pages are present; touch every page before it is attached, and punch no holes"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

M = TypeVar("M", bound=Message)


class Region:
    """A mapped memfd. `view` has its bytes; it stays mapped until the last view is gone. `close` drops the region's own view.

    Thread safety: any thread may use `view`; one thread calls `close`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` bytes of the memfd `fd`, which the caller goes on owning; raises OSError."""
        self.nbytes: Final = nbytes
        mapped = mmap.mmap(fd, nbytes)
        self.view = memoryview(mapped)
        self.address: Final = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def populate(self) -> None:
        """Fault every page into this mapping; raises OSError where memory is short. Releases the GIL."""
        if _libc.madvise(self.address, self.nbytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Drop the region's own view. A second call does nothing."""
        self.view = memoryview(b"")


def create(nbytes: int, name: str) -> int:
    """Create a memfd of `nbytes` bytes, sealed against resizing. Raises OSError.

    None of its pages are present yet: map it as a `Region` and call `populate`.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def adopt(fd: int, declared: int, most: int) -> Region:
    """Map another process's memfd, and seal it so that it can do this process no harm. Raises WireError, with the reason.

    `declared`: the size in bytes that the other process announced; `most`: the largest size that is accepted. A large memfd takes a while,
    so do not call this in an event loop.

    The order of the steps matters: a seal must fix the size before the size is read, and a seal must rule out new holes before the check
    that there are none.
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
        raise WireError(_ABSENT)  # checked before it is sealed too, so that its owner can repair it
    try:
        region = Region(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError) as error:
        raise WireError(
            f"the memfd cannot be mapped for writing and sealed against holes ({error}): it was sealed before, perhaps by a daemon that has"
            " ended since, or this kernel is older than Linux 5.1"
        ) from None
    # Not by counting blocks, of which some may lie beyond the end.
    if os.lseek(fd, 0, os.SEEK_HOLE) < nbytes:
        raise WireError(_ABSENT)
    try:
        region.populate()
    except OSError as error:
        raise WireError(f"the memfd cannot be mapped ({error}); Linux 5.14 is needed") from None
    return region


def send(sock: socket.socket, message: Message, *fds: int) -> None:
    """Send one packet with file descriptors; raises OSError."""
    socket.send_fds(sock, [message.SerializeToString()], list(fds), socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, kind: type[M], most_fds: int = 0) -> tuple[M | None, list[int]]:
    """Receive a packet and the file descriptors that came with it, which the caller then owns; None at the end of the connection.

    Raises OSError, and WireError for a packet that is not of this kind or has more than `most_fds` descriptors; they are closed then.
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
