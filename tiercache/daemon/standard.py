"""The standard services that gRPC tools expect: health, and reflection for known callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from tiercache.daemon.call import untangled

_HEALTH: Final = "grpc.health.v1.Health"
_REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_CHECK_SECONDS: Final = 5.0
"""Seconds that sending the answer of a `Check` may take."""

Admit = Callable[[Any], Awaitable[None]]
"""Coroutine function that aborts the call of a context if its caller is not known."""


class Standard:
    """Health and reflection services of one server.

    `Check` answers every client, because a load balancer has no credentials. It answers for the daemon as a whole and does not read the
    request, so that an unknown client cannot make it hold or wait for anything. `Watch` and reflection are for known callers.

    Thread safety: the event loop's thread.
    """

    def __init__(self, admit: Admit, service: str) -> None:
        self._admit = admit
        self._service = service
        self._health = HealthServicer()
        self._reflection = ReflectionServicer([service, _HEALTH, _REFLECTION])

    async def serving(self) -> None:
        """Report from now on that the service is healthy."""
        for name in ("", self._service):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leaving(self) -> None:
        """Report from now on, and for good, that the service is not healthy."""
        await self._health.enter_graceful_shutdown()

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers to add to gRPC's server."""
        health = {"Check": self._check, "Watch": self._watch}
        request, reply = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        asked, told = reflection_pb2.ServerReflectionRequest.FromString, reflection_pb2.ServerReflectionResponse.SerializeToString
        return (
            grpc.method_handlers_generic_handler(
                _HEALTH, {name: grpc.stream_stream_rpc_method_handler(call, request, reply) for name, call in health.items()}
            ),
            grpc.method_handlers_generic_handler(
                _REFLECTION, {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect, asked, told)}
            ),
        )

    async def _check(self, _: Any, context: Any) -> None:
        async with asyncio.timeout(_CHECK_SECONDS):
            await context.write(await self._health.Check(health_pb2.HealthCheckRequest(), context))

    async def _watch(self, _: Any, context: Any) -> None:
        with untangled():
            await self._admit(context)
            await self._health.Watch(await context.read(), context)

    async def _reflect(self, requests: Any, context: Any) -> None:
        with untangled():
            await self._admit(context)
            async for reply in self._reflection.ServerReflectionInfo(requests, context):
                await context.write(reply)
