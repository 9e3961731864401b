"""The end of a session's connection is a promise: nothing touches the memory any more."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.daemon.access import Access, Budgets
from tiercache.daemon.budget import Budget
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.payload.attachments import Attachments
from tiercache.wire import attachment
from tiercache.wire.v1 import attach_pb2 as pb


def opened(path: Path) -> Attachments:
    bounds = Budgets(*(Budget(1 << 30) for _ in range(5)))
    access = Access(daemon_settings("unix"), MemoryBackend(), bounds)
    attachments = Attachments(access, 1 << 30, 4, CallLog())
    attachments.listen(str(path), 0o600)
    return attachments


def test_a_client_that_arrives_while_the_daemon_ends_is_let_go(tmp_path: Path) -> None:
    """The connection is accepted, and the daemon ends before it has served a step of it."""

    async def scenario(turns: int) -> None:
        attachments = opened(tmp_path / f"{turns}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(tmp_path / f"{turns}.sock"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.wait_for(attachments.close(), 30)
            client.settimeout(10)
            try:
                while client.recv(1 << 10):
                    pass
            except ConnectionResetError:
                pass  # the connection was never accepted

    for turns in range(6):
        asyncio.run(scenario(turns))


def test_the_end_is_not_told_before_everything_has_landed_not_even_when_the_daemon_ends(tmp_path):
    async def scenario() -> None:
        attachments = opened(tmp_path / "attach.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            await asyncio.to_thread(client.connect, str(tmp_path / "attach.sock"))
            greeting, _ = await asyncio.to_thread(attachment.receive, client, pb.Session)
            assert greeting is not None
            session = attachments.find(greeting.token)
            assert session is not None
            session.begin()
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.05)
            assert session.ended
            closing = asyncio.create_task(attachments.close())
            client.setblocking(False)
            for _ in range(5):
                await asyncio.sleep(0.02)
                try:
                    raise AssertionError(f"the end came too early: {client.recv(1)!r}")
                except BlockingIOError:
                    pass
            assert not closing.done()
            session.finish()
            await asyncio.wait_for(closing, 30)
            assert client.recv(1) == b""

    asyncio.run(scenario())
