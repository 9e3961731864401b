"""The gRPC service: it admits each call, bounds its time, serves it, and turns errors into status codes.

Each method is served as a pair of byte streams, even if its request and reply are single messages. This way
no request is read before its caller is known, and each read and write has a time limit (`limits.idle`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from tiercache.daemon.access import Access, Caller, Refusal
from tiercache.daemon.call import Call, request_bytes, without_abort_traceback
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.gate import Gate
from tiercache.daemon.payload.attachments import Attachments
from tiercache.daemon.payload.data import DataCall
from tiercache.errors import ClosedError, StorageError, UnlistedError, WireError
from tiercache.wire.methods import METHODS, SERVICE, UNTOUCHED_METADATA, Method
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_UNTOUCHED = ((UNTOUCHED_METADATA, "1"),)
"""Trailing metadata of a refusal. It promises that the call does not touch attached memory, now or later."""
_HEALTH: Final = "grpc.health.v1.Health"
_CHECK_SECONDS: Final = 5.0
"""Seconds that sending the answer to a `Check` may take."""

Handler = Callable[[Call], Awaitable[None]]


class Service:
    """Entrance of all calls, those of gRPC and those of data connections.

    Thread safety: the event loop's thread, but `answer` any thread.
    """

    def __init__(
        self,
        access: Access,
        attachments: Attachments,
        calls: CallLog,
        gate: Gate,
        handlers: Mapping[str, Handler],
        data_handlers: Mapping[str, Callable[[DataCall], None]],
        *,
        limits: pb.Limits,
        idle: float,
    ) -> None:
        """Serve each method by its handler; those of data connections have handlers of their own.

        A client that makes no progress for `idle` seconds is refused.
        """
        assert handlers.keys() == METHODS.keys(), "every method must have a handler"
        self._access: Final = access
        self._attachments: Final = attachments
        self._calls: Final = calls
        self._gate: Final = gate
        self._handlers: Final = handlers
        self._data_handlers: Final = data_handlers
        self._limits: Final = limits
        self._idle: Final = idle

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to gRPC's server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: grpc.stream_stream_rpc_method_handler(self._entrance(METHODS[name])) for name in METHODS},
        )

    def _entrance(self, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        async def serve(_: Any, context: Any) -> None:
            # gRPC raises InternalError if the client has disconnected; then no answer can be sent.
            with (
                without_abort_traceback(),
                self._calls.call(method.name, self._shown(context.peer())) as record,
                suppress(grpc.aio.InternalError),
            ):
                # Do not call `abort` inside an `except` block. The error that it raises would keep the
                # handled error alive, and everything to which the frames of the handled error refer.
                failure = None
                try:
                    await self._serve(method, context)
                    record.code = StatusCode.OK
                except BaseException as error:  # noqa: BLE001  `_judge` raises what it does not know
                    failure = self._judge(method, error)
                    record.code = failure[0]
                if failure is not None:
                    await context.abort(*failure)

        return serve

    def _judge(self, method: Method, error: BaseException) -> tuple[Any, ...]:
        """Return the arguments of gRPC's `abort` for a call that has failed.

        They are a status code, one sentence and, if the call was refused, trailing metadata. Raises the error
        if the client has gone.
        """
        self._calls.refused(error)
        match error:
            case Refusal():
                return error.code, error.message, _UNTOUCHED
            case WireError():
                return StatusCode.INVALID_ARGUMENT, str(error), _UNTOUCHED
            case TimeoutError():
                return (
                    StatusCode.DEADLINE_EXCEEDED,
                    f"the call took longer than its deadline or the limit of {self._limits.call_seconds:g} s",
                )
            case ClosedError():
                return StatusCode.UNAVAILABLE, "the daemon is shutting down"
            case UnlistedError():
                return StatusCode.FAILED_PRECONDITION, str(error)
            case StorageError():
                return StatusCode.INTERNAL, str(error)
            case grpc.aio.AbortError() | grpc.aio.InternalError() | grpc.RpcError() | ConnectionError():
                raise error
            case Exception():
                # A bug in the daemon fails this call and is logged. It never ends the daemon.
                _log.error("a call of %s failed", method.name, exc_info=error)
                return StatusCode.INTERNAL, f"{method.name} failed inside the daemon; its log has the details"
        raise error

    def _shown(self, peer: str) -> str:
        found = self._gate.find(peer)
        return peer if found is None else found.shown

    def _identify(self, context: Any) -> Caller:
        peer = context.peer()
        # The gate does not know connections that workers made to gRPC directly.
        found = self._gate.find(peer)
        local = peer.startswith("unix") if found is None else found.local
        metadata = context.invocation_metadata() or ()
        caller = self._access.identify(metadata, peer, context.auth_context(), self._attachments, local=local)
        self._gate.mark_known(peer)
        return caller

    async def _serve(self, method: Method, context: Any) -> None:
        caller = self._identify(context)
        with self._admitted(method, caller, context.time_remaining()) as seconds:
            call = Call(
                caller, context, self._idle, self._limits.message_bytes, request_bytes(self._limits.keys)
            )
            try:
                async with asyncio.timeout(seconds):
                    await self._handlers[method.name](call)
            finally:
                await call.end()

    def answer(self, call: DataCall) -> None:
        """Serve a call that came on a data connection, and answer it, in the thread of the connection.

        Raises OSError if the connection cannot be used any more.
        """
        method, handler = METHODS[call.name], self._data_handlers[call.name]
        with self._calls.call(method.name, self._shown(call.caller.peer)) as record:
            try:
                with self._admitted(method, call.caller, call.seconds) as seconds:
                    if not seconds:
                        raise TimeoutError
                    call.until = time.monotonic() + seconds
                    handler(call)
                record.code = StatusCode.OK
            except Exception as error:  # noqa: BLE001  `_judge` raises what it does not know
                record.code, text, *_ = self._judge(method, error)
                call.fail(record.code, text)

    @contextmanager
    def _admitted(self, method: Method, caller: Caller, remaining: float | None) -> Iterator[float]:
        """Admit a call of a known caller, and yield how many seconds it may take."""
        self._calls.know(caller.permissions.name, caller.peer if caller.session is not None else "")
        caller.permissions.check(method.verb)
        if remaining is None:
            raise Refusal(StatusCode.INVALID_ARGUMENT, "the call has no deadline; give it one", "deadline")
        if not caller.budgets.streams.try_take(1):
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{caller.permissions.name} has as many calls under way as it may; try again later",
            )
        try:
            yield min(remaining, self._limits.call_seconds)
        finally:
            caller.budgets.streams.give(1)


class HealthService:
    """Health service of one server, whose one call, `Check`, answers every client.

    A load balancer has no credentials. `Check` reports the health of the whole daemon and does not read the
    request, so that an unknown client cannot make the daemon hold memory or wait.

    Thread safety: the event loop's thread.
    """

    def __init__(self) -> None:
        self.is_serving = False
        """Whether the service is reported as healthy."""

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to gRPC's server."""
        calls: dict[str, Any] = {"Check": grpc.stream_stream_rpc_method_handler(self._check)}
        return grpc.method_handlers_generic_handler(_HEALTH, calls)

    async def _check(self, _: Any, context: Any) -> None:
        reply = health_pb2.HealthCheckResponse
        status = reply.SERVING if self.is_serving else reply.NOT_SERVING
        async with asyncio.timeout(_CHECK_SECONDS):
            await context.write(reply(status=status).SerializeToString())
