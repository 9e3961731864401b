"""A group of ranks over TCP: the leader listens, and every other rank keeps one connection to it.

Each message is a frame: 4 bytes with its length (little-endian), then the message. The first frame of a
connection is the key and the number of the rank; a connection without the right key is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
import struct
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiercache.controller.ranks.base import LEADER, MAX_MESSAGE_BYTES, check_rank
from tiercache.errors import InputError, RankError

_log = logging.getLogger(__name__)

KEY_BYTES: Final = 32
"""Length of the key that all ranks of a group share."""
_LENGTH: Final = struct.Struct("<I")
_RANK: Final = struct.Struct("<i")
_MAX_UNSENT: Final = 16 << 20
"""Maximum number of bytes that wait to be sent to one rank. What is beyond it is lost."""
_MAX_STRANGERS: Final = 64
"""Maximum number of connections that have not shown the key. For one beyond it, the oldest is closed."""
_LEAST_QUIET_S: Final = 10.0
"""Least time in seconds between two warnings about connections and messages."""
_GREETING_S: Final = 5.0
"""Seconds in which a connection must show the key."""
_BACKLOG: Final = 128
"""Number of connections that may wait until they are accepted. One beyond it tries again after a second."""
_PAUSE_S: Final = 0.05
"""Seconds between two attempts to connect."""


class SocketRankGroup:
    """Ranks of one model, connected by TCP (a `RankGroup`).

    Rank 0 listens at `address`, a host and a port; with port 0, the system chooses one, and `address` says
    which. The other ranks connect to that address, and connect again whenever the connection ends. `key` are
    32 secret bytes that all ranks share. The messages are not encrypted: use a network that the ranks may
    trust, as their model's own collectives do.

    Thread safety: as `RankGroup`. The methods that are coroutines, and those that they call, run on the
    group's own thread.
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int], key: bytes) -> None:
        """Listen, or prepare to connect; nothing is sent before `open`.

        Raises InputError for a rank, a size or a key that is not possible, and RankError if rank 0 cannot
        listen.
        """
        check_rank(rank, size)
        if len(key) != KEY_BYTES:
            raise InputError(f"the key has {len(key)} bytes; all ranks need the same {KEY_BYTES}")
        self.rank = rank
        self.size = size
        self.address = address
        """Host and port at which rank 0 listens."""
        self._key = key
        self._listener: socket.socket | None = None
        if rank == LEADER:
            try:
                self._listener = socket.create_server(address, backlog=_BACKLOG)
            except OSError as error:
                raise RankError(f"rank 0 cannot listen at {address[0]}:{address[1]}: {error}") from None
            self.address = (address[0], self._listener.getsockname()[1])
        self._deliver: Callable[[bytes], None] = lambda _: None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._writers: dict[int, StreamWriter] = {}
        """Connection to each rank that is there."""
        self._strangers: dict[StreamWriter, None] = {}
        """Connections that have not shown the key, the oldest first."""
        self._next_warning = 0.0

    def open(self, deliver: Callable[[bytes], None]) -> None:  # noqa: D102
        self._deliver = deliver
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tiercache-ranks", daemon=True)
            self._thread.start()

    def send(self, to: int, message: bytes) -> None:  # noqa: D102
        if len(message) > MAX_MESSAGE_BYTES:  # the other end would end the connection
            self._warn(f"a message of {len(message)} bytes for rank {to} is too long, and is lost")
            return
        with suppress(RuntimeError):  # the group is closed
            self._loop.call_soon_threadsafe(self._send, to, message)

    def close(self) -> None:  # noqa: D102
        if self._thread is None:
            self._loop.close()
        else:
            if not self._is_closed:  # a second `stop` would end the loop in the middle of its clean-up
                with suppress(RuntimeError):  # the thread has ended
                    self._loop.call_soon_threadsafe(self._loop.stop)
            self._is_closed = True
            self._thread.join(1.0)
        if self._listener is not None:
            self._listener.close()

    def _run(self) -> None:
        loop = self._loop
        main = loop.create_task(self._connect() if self._listener is None else self._listen())
        loop.run_forever()  # until `close`
        self._next_warning = math.inf
        # Only `main` is cancelled: a connection that was just accepted has no transport yet, and would stay
        # open. Again and again, because `wait_for` drops a cancellation in the moment of a connection.
        while asyncio.all_tasks(loop):
            main.cancel()
            for writer in (*self._strangers, *self._writers.values()):
                writer.transport.abort()
            loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))  # closes the sockets of connections that were aborted
        loop.close()

    def _send(self, to: int, message: bytes) -> None:
        writer = self._writers.get(to)
        if writer is not None and writer.transport.get_write_buffer_size() < _MAX_UNSENT:
            writer.write(_LENGTH.pack(len(message)) + message)

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._greet, sock=self._listener) as server:
            await server.serve_forever()

    async def _connect(self) -> None:
        while True:
            with suppress(OSError, asyncio.TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection(*self.address), 1.0)
                self._writers[LEADER] = writer
                self._send(LEADER, self._key + _RANK.pack(self.rank))
                await self._read(reader, writer, LEADER)
            # Also after a success: rank 0 may end the connection at once, again and again.
            await asyncio.sleep(_PAUSE_S)

    async def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Take a connection as that of the rank that it names, in place of an earlier one."""
        # The ranks show the key at once, so that the oldest stranger is the least likely to be one.
        if len(self._strangers) >= _MAX_STRANGERS:
            next(iter(self._strangers)).transport.abort()
        self._strangers[writer] = None
        frame = b""
        try:
            with suppress(OSError, EOFError, asyncio.TimeoutError):
                frame = await asyncio.wait_for(_read_frame(reader, KEY_BYTES + _RANK.size), _GREETING_S)
        finally:
            del self._strangers[writer]
            if not frame:
                writer.transport.abort()
        key, number = frame[:KEY_BYTES], frame[KEY_BYTES:]
        rank = _RANK.unpack(number)[0] if len(number) == _RANK.size else LEADER
        if rank <= LEADER or not hmac.compare_digest(key, self._key):
            self._warn("a connection to the ranks of this group showed a wrong key, or no rank")
            writer.transport.abort()
            return
        before, self._writers[rank] = self._writers.get(rank), writer
        if before is not None:
            before.transport.abort()
        await self._read(reader, writer, rank)

    async def _read(self, reader: StreamReader, writer: StreamWriter, rank: int) -> None:
        """Deliver the messages of a rank until its connection ends."""
        try:
            while True:
                self._deliver(await _read_frame(reader, MAX_MESSAGE_BYTES))
        except (OSError, EOFError) as error:
            if self._writers.get(rank) is writer:
                self._warn(f"the connection to rank {rank} ended: {error}")
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
            writer.transport.abort()

    def _warn(self, text: str) -> None:
        """Log a warning, but not so often that strangers can fill a log."""
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _LEAST_QUIET_S
            _log.warning("%s", text)


async def _read_frame(reader: StreamReader, most: int) -> bytes:
    """Return the next frame. Raises OSError for one of more than `most` bytes, and EOFError at the end."""
    [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise ConnectionAbortedError(f"the other end announced a message of {length} bytes")
    return await reader.readexactly(length)
