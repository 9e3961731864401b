"""The end of a session's connection is a promise: nothing touches the memory any more."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.daemon.access import Access, Budgets
from tiercache.daemon.budget import Budget
from tiercache.daemon.sessions import Attachments
from tiercache.wire import attachment
from tiercache.wire.v1 import attach_pb2 as pb


def test_the_end_is_not_told_before_everything_has_landed_not_even_when_the_daemon_ends(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        bounds = Budgets(*(Budget(1 << 30) for _ in range(5)))
        attachments = Attachments(
            Access(daemon_settings("unix"), MemoryBackend(), bounds), max_clients=4, max_bytes=1 << 30
        )
        attachments.listen(str(tmp_path / "attach.sock"), 0o600)
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
