"""Calls end with a status, and what a thread uses is given back once, whenever its call is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import key
from tests.storage.late import Late
from tiercache.config.loading import load
from tiercache.daemon import StorageServer
from tiercache.daemon.access import Budgets, Caller, Refusal
from tiercache.daemon.budget import Budget
from tiercache.daemon.call import Call
from tiercache.daemon.store_threads import Threads
from tiercache.wire import messages
from tiercache.wire.methods import METHODS
from tiercache.wire.v1 import storage_pb2 as pb

Start = Callable[..., asyncio.Future[Any]]


def run(scenario: Callable[[Threads, Budget, Start, list[str]], Awaitable[None]]) -> list[str]:
    """Return what a scenario says of work that it starts by `start`: whether it landed or was undone, too."""
    said: list[str] = []

    async def main() -> None:
        threads, workers = Threads(1), Budget(1)
        landed, undo = (lambda: said.append("landed")), (lambda: said.append("undone"))
        start = partial(threads.start, workers, landed=landed, undo=undo)
        await scenario(threads, workers, start, said)
        assert await threads.close(10)
        await asyncio.sleep(0)
        assert workers.held == 0

    asyncio.run(main())
    return said


def test_work_that_is_done_lands_once_and_a_failure_that_nobody_fetches_is_not_complained_about() -> None:
    async def scenario(_: Threads, __: Budget, start: Start, said: list[str]) -> None:
        assert await start(lambda a, b: a + b, 2, 3) == 5
        assert said == ["landed"]
        await asyncio.wait([start(lambda: 1 // 0)])

    assert run(scenario) == ["landed", "landed", "undone"]


@pytest.mark.parametrize("has_got_one", [False, True])
def test_work_that_is_cancelled_before_it_begins(has_got_one: bool) -> None:
    """The work waits for a thread, or has just got one and nobody knows."""

    async def scenario(_: Threads, workers: Budget, start: Start, said: list[str]) -> None:
        await workers.take(1)
        future = start(lambda: said.append("worked"))
        await asyncio.sleep(0)
        if has_got_one:
            workers.give(1)
            await asyncio.sleep(0)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        if not has_got_one:
            workers.give(1)

    assert run(scenario) == ["landed", "undone"]


def test_work_of_many_callers_in_few_threads() -> None:
    async def main() -> None:
        threads, workers = Threads(3), Budget(2)
        futures = [threads.start(workers, lambda n: n * n, n) for n in range(300)]
        assert await asyncio.gather(*futures) == [n * n for n in range(300)]
        assert await threads.close(30)
        assert workers.held == 0

    asyncio.run(main())


def test_work_that_is_under_way_lands_when_it_has_ended() -> None:
    async def scenario(_: Threads, workers: Budget, start: Start, said: list[str]) -> None:
        began, end = Event(), Event()

        def work() -> None:
            began.set()
            end.wait(30)
            said.append("worked")

        future = start(work)
        await asyncio.to_thread(began.wait, 30)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert said == []
        assert workers.held == 1, "its thread is busy"
        end.set()

    assert run(scenario) == ["worked", "landed", "undone"]


def status_of(serve: Callable[[Call], Awaitable[None]], *, pause: float = 0.0) -> str:
    """Return the details that a client gets which reads nothing for `pause` seconds from a call.

    `serve` handles the call; a Refusal that it raises ends the call with a status.
    """
    budgets = Budgets(Budget(1), Budget(1), Budget(1), Budget(1), Budget(1))
    caller = Caller(Any, None, budgets)  # type: ignore[arg-type]

    async def handle(_: Any, context: Any) -> None:
        call = Call(caller, context, idle=0.5, message_bytes=1 << 24, request_bytes=1 << 10)
        try:
            await serve(call)
        except Refusal as refusal:
            await call.end()
            await context.abort(refusal.code, refusal.message)

    def read(port: int) -> str:
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            replies = channel.stream_stream("/service/call")(iter([b""]), timeout=60)
            time.sleep(pause)
            with pytest.raises(grpc.RpcError) as info:
                list(replies)
            return str(info.value.details())

    async def main() -> str:
        server = grpc.aio.server()
        handlers = {"call": grpc.stream_stream_rpc_method_handler(handle)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.to_thread(read, port)
        finally:
            await server.stop(0)

    return asyncio.run(main())


def test_a_call_whose_first_messages_nobody_reads_ends_with_a_status() -> None:
    """The status comes as soon as the client reads, for `Call.send` sends the initial metadata first."""

    async def serve(call: Call) -> None:
        for _ in range(5):
            await call.send(bytes(8 << 20))

    assert "limits.idle" in status_of(serve, pause=2)  # four times `idle`


def test_a_call_that_is_cancelled_while_it_begins_ends_with_a_status() -> None:
    async def serve(call: Call) -> None:
        beginning = asyncio.create_task(call.begin())
        for _ in range(2):  # two tasks begin; gRPC has the metadata then, and has not said that it is sent
            await asyncio.sleep(0)
        beginning.cancel()
        raise Refusal(grpc.StatusCode.ABORTED, "over")

    assert status_of(serve) == "over"


def test_a_get_sends_the_initial_metadata_while_the_store_reads(tmp_path: Path) -> None:
    go_on = Event()
    held = Late(MemoryBackend(), {"get"}, lambda: go_on.wait(60))
    settings = load(None, {"directory": str(tmp_path), "listen": ["127.0.0.1:0"]})
    with StorageServer(settings, held) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        request = pb.GetRequest(keys=messages.keys([key(0)]), lengths=[4096]).SerializeToString()
        replies = channel.stream_stream(METHODS["Get"].path)(iter([request]), timeout=60)
        try:
            assert replies.initial_metadata() is not None
        finally:
            go_on.set()
        assert len(list(replies)) == 1
