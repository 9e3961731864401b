"""Standard services that gRPC tools expect: health, and reflection for known callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from tiercache.daemon.call import without_abort_traceback

_HEALTH: Final = "grpc.health.v1.Health"
_REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_CHECK_SECONDS: Final = 5.0
"""Seconds that sending the answer to a `Check` may take."""

Admit = Callable[[Any], Awaitable[None]]
"""Coroutine function that takes gRPC's context of a call, and aborts the call if its caller is unknown."""


class Standard:
    """Health and reflection services of one server.

    `Check` answers every client, because a load balancer has no credentials. It reports the health of the
    whole daemon and does not read the request, so that an unknown client cannot make the daemon hold memory
    or wait. `Watch` and reflection are for known callers.

    Thread safety: the event loop's thread.
    """

    def __init__(self, admit: Admit, service: str) -> None:
        self._admit = admit
        self._service = service
        self._health = HealthServicer()
        self._reflection = ReflectionServicer([service, _HEALTH, _REFLECTION])

    async def report_serving(self) -> None:
        """Report that the service is healthy."""
        for name in ("", self._service):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def report_shutdown(self) -> None:
        """Report that the service is not healthy; it cannot be reported as healthy again."""
        await self._health.enter_graceful_shutdown()

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers to add to gRPC's server."""
        health = {"Check": self._check, "Watch": self._watch}
        request, reply = (
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        asked, told = (
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return (
            grpc.method_handlers_generic_handler(
                _HEALTH,
                {
                    name: grpc.stream_stream_rpc_method_handler(call, request, reply)
                    for name, call in health.items()
                },
            ),
            grpc.method_handlers_generic_handler(
                _REFLECTION,
                {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect, asked, told)},
            ),
        )

    async def _check(self, _: Any, context: Any) -> None:
        async with asyncio.timeout(_CHECK_SECONDS):
            await context.write(await self._health.Check(health_pb2.HealthCheckRequest(), context))

    async def _watch(self, _: Any, context: Any) -> None:
        with without_abort_traceback():
            await self._admit(context)
            await self._health.Watch(await context.read(), context)

    async def _reflect(self, requests: Any, context: Any) -> None:
        with without_abort_traceback():
            await self._admit(context)
            async for reply in self._reflection.ServerReflectionInfo(requests, context):
                await context.write(reply)
