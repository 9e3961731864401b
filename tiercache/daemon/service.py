"""The gRPC service: it admits each call, bounds its time, serves it, and turns errors into status codes.

Each method is served as a pair of byte streams, whether or not clients stream it. This way no request is read before its caller is known,
and no message is waited for longer than a stream may stand still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, TypeVarTuple

import grpc
from grpc import StatusCode

import tiercache
from tiercache.core import ObjectKey
from tiercache.daemon.access import Access, Caller, Refusal
from tiercache.daemon.call import Call, Threads, request_bytes, untangled
from tiercache.daemon.gate import Gate
from tiercache.daemon.meters import Meters
from tiercache.daemon.objects import Objects, read_keys
from tiercache.daemon.sessions import Attachments
from tiercache.daemon.views import Fenced
from tiercache.errors import ClosedError, StorageError, WireError
from tiercache.storage.base import NAMESPACE_BYTES, NamespaceRecord, ScanEntry, StorageBackend
from tiercache.wire import messages
from tiercache.wire.methods import METHODS, SERVICE, UNTOUCHED_METADATA, Method
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_UNTOUCHED = ((UNTOUCHED_METADATA, "1"),)
"""Trailing metadata of a refusal: nothing of the call touches attached memory."""


_RECORD_BYTES: Final = 4096
"""Most bytes of a namespace's record as a message."""
_MOST_NAMESPACES: Final = 512
"""Most namespaces of one tenant."""

T = TypeVar("T")
A = TypeVarTuple("A")
Handler = Callable[[Call], Awaitable[None]]


class Service:
    """Handlers of all calls of the daemon's gRPC service.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        access: Access,
        attachments: Attachments,
        threads: Threads,
        objects: Objects,
        *,
        instance: bytes,
        store: str,
        limits: pb.Limits,
        idle: float,
        meters: Meters | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Serve calls with these parts; `gate`: the gate through which connections reach gRPC, None if clients connect directly."""
        self._access = access
        self._gate = gate
        self._attachments = attachments
        self._threads = threads
        self._limits = limits
        self._idle = idle
        self._meters = meters or Meters()
        self._instance = instance
        self._store = store
        self._handlers: dict[str, Handler] = {
            "Get": objects.get,
            "Set": objects.set,
            "GetInto": objects.get_into,
            "SetFrom": objects.set_from,
            "Hello": self._hello,
            "Exists": self._exists,
            "Delete": self._delete,
            "Describe": self._describe,
            "Scan": self._scan,
            "Register": self._register,
            "Namespaces": self._namespaces,
            "Usage": self._usage,
            "Flush": self._flush,
        }
        assert self._handlers.keys() == METHODS.keys(), "every method has its handler"

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to gRPC's server."""
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: grpc.stream_stream_rpc_method_handler(self._entrance(METHODS[name])) for name in METHODS}
        )

    async def admit(self, context: Any) -> None:
        """Abort a call of any service if its caller is not known."""
        try:
            self._caller(context)
        except Refusal as refusal:
            self._meters.refused_for(refusal)
            await context.abort(refusal.code, refusal.message)

    def _entrance(self, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        async def serve(_: Any, context: Any) -> None:
            with (
                untangled(),
                self._meters.call(method.name, context),
                suppress(grpc.aio.InternalError),
            ):  # InternalError: the client has gone, and cannot be answered
                await answer(context)

        async def answer(context: Any) -> None:
            # Not inside the `except` block: the error that `abort` raises would keep the handled one alive, with all that its frames hold.
            refusal = await self._outcome(method, context)
            if refusal is not None:
                await context.abort(*refusal)

        return serve

    async def _outcome(self, method: Method, context: Any) -> tuple[Any, ...] | None:
        """Serve a call and return None, or the arguments of `abort`: status code, one sentence and, where it applies, trailing metadata."""
        try:
            await self._serve(method, context)
        except Refusal as refusal:
            self._meters.refused_for(refusal)
            return refusal.code, refusal.message, _UNTOUCHED
        except WireError as error:
            self._meters.refused_for(error)
            return StatusCode.INVALID_ARGUMENT, str(error), _UNTOUCHED
        except TimeoutError as error:
            self._meters.refused_for(error)
            return StatusCode.DEADLINE_EXCEEDED, f"the call took too long; none may take {self._limits.call_seconds:g} s"
        except ClosedError:
            return StatusCode.UNAVAILABLE, "the daemon is going down"
        except StorageError as error:
            return StatusCode.INTERNAL, str(error)
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError, grpc.RpcError):
            raise
        except Exception:  # noqa: BLE001  a bug in the daemon fails this call, and is logged; it never ends the daemon
            _log.exception("a call of %s failed", method.name)
            return StatusCode.INTERNAL, f"{method.name} failed inside the daemon; its log has the details"
        return None

    def _caller(self, context: Any) -> Caller:
        peer = context.peer()
        passed = self._gate.passed(peer) if self._gate is not None else None
        local = peer.startswith("unix") if passed is None else passed
        metadata = context.invocation_metadata() or ()
        caller = self._access.caller(metadata, peer, context.auth_context(), self._attachments, local=local)
        if self._gate is not None:
            self._gate.recognised(peer)
        return caller

    async def _serve(self, method: Method, context: Any) -> None:
        caller = self._caller(context)
        self._meters.called(caller.grants.name)
        caller.grants.check(method.verb)
        remaining = context.time_remaining()
        if remaining is None:
            raise Refusal(StatusCode.INVALID_ARGUMENT, "the call has no deadline; give it one", "deadline")
        if not caller.bounds.streams.try_take(1):
            raise Refusal(StatusCode.RESOURCE_EXHAUSTED, f"{caller.grants.name} has as many calls under way as it may; try again later")
        call = Call(caller, context, self._idle, self._limits.message_bytes, request_bytes(self._limits.keys))
        try:
            async with asyncio.timeout(min(remaining, self._limits.call_seconds)):
                await self._handlers[method.name](call)
        finally:
            call.close()
            caller.bounds.streams.give(1)

    async def _hello(self, call: Call) -> None:
        await call.request(pb.HelloRequest)
        grants = call.caller.grants
        able = grants.store.capabilities
        await _answer(
            call,
            pb.HelloReply(
                version=tiercache.__version__, instance=self._instance, principal=grants.name, tenant=grants.tenant,
                verbs=sorted(grants.verbs), store=self._store, persistent=able.persistent, bounded=able.bounded,
                limits=self._limits_of(call.caller),
            ),
        )  # fmt: skip

    def _limits_of(self, caller: Caller) -> pb.Limits:
        """Return the limits, lowered to what this caller's share has room for."""
        limits = pb.Limits()
        limits.CopyFrom(self._limits)
        limits.client_bytes = min(limits.client_bytes, caller.bounds.payload.largest)
        limits.object_bytes = min(limits.object_bytes, caller.bounds.payload.largest)
        return limits

    async def _exists(self, call: Call) -> None:
        keys = await self._keys(call, pb.ExistsRequest)
        answers = await self._ask(call, call.caller.grants.store.exists, keys)
        self._meters.existed(keys, answers)
        await _answer(call, pb.BitmapReply(bits=messages.bits(answers)))

    async def _delete(self, call: Call) -> None:
        keys = await self._keys(call, pb.DeleteRequest)
        await _answer(call, pb.BitmapReply(bits=messages.bits(await self._ask(call, call.caller.grants.store.delete, keys))))

    async def _describe(self, call: Call) -> None:
        entries = await self._ask(call, call.caller.grants.store.describe, await self._keys(call, pb.DescribeRequest))
        there = [entry for entry in entries if entry is not None]
        metas, times = _described(there)
        keys = messages.keys([entry.key for entry in there])
        present = messages.bits([entry is not None for entry in entries])
        await _answer(call, pb.DescribeReply(present=present, metas=metas, stored_at=times, keys=keys))

    async def _scan(self, call: Call) -> None:
        request = await call.request(pb.ScanRequest)
        namespace = request.namespace if request.HasField("namespace") else None
        page = await self._ask(call, call.caller.grants.store.scan, namespace, request.cursor)
        metas, times = _described(page.entries)
        keys = messages.keys([entry.key for entry in page.entries])
        await _answer(call, pb.ScanReply(keys=keys, metas=metas, stored_at=times, cursor=page.cursor))

    async def _register(self, call: Call) -> None:
        request = (await call.request(pb.RegisterRequest)).namespace
        if not 0 < len(request.namespace) <= NAMESPACE_BYTES:
            raise WireError(f"a namespace of {len(request.namespace)} bytes is not possible; it has 1 to {NAMESPACE_BYTES}")
        store = call.caller.grants.store
        if isinstance(store, Fenced) and not store.allows(request.namespace):
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{call.caller.grants.name} may not use namespace {request.namespace.hex()}; the operator can add it to its namespaces",
            )
        if request.ByteSize() > _RECORD_BYTES:
            raise WireError(
                f"a namespace's record of {request.ByteSize()} bytes is beyond the limit of {_RECORD_BYTES}; that is no identity"
            )
        record = NamespaceRecord(request.namespace, messages.read_mapping(request.texts, request.numbers), request.states)
        await self._ask(call, _register, store, record)
        await _answer(call, pb.RegisterReply())

    async def _namespaces(self, call: Call) -> None:
        await call.request(pb.NamespacesRequest)
        records = await self._ask(call, call.caller.grants.store.namespaces)
        found = [messages.namespace(r.namespace, r.identity, states=r.states) for r in records]
        await _answer(call, pb.NamespacesReply(namespaces=found))

    async def _usage(self, call: Call) -> None:
        await call.request(pb.UsageRequest)
        grants = call.caller.grants
        if not grants.sees_all:
            raise Refusal(StatusCode.PERMISSION_DENIED, f"the store's totals are not {grants.name}'s alone; that takes the verb admin")
        usage = await self._ask(call, grants.store.usage)
        await _answer(
            call,
            pb.UsageReply(
                objects=usage.objects, payload_bytes=usage.payload_bytes, used_bytes=usage.used_bytes, capacity_bytes=usage.capacity_bytes,
                texts=messages.texts(usage.details), numbers=messages.numbers(usage.details),
            ),
        )  # fmt: skip

    async def _flush(self, call: Call) -> None:
        await call.request(pb.FlushRequest)
        await self._ask(call, call.caller.grants.store.flush)
        await _answer(call, pb.FlushReply())

    async def _ask(self, call: Call, work: Callable[[*A], T], *arguments: *A) -> T:
        """Run `work` in a store thread and return its result."""
        return await self._threads.run(call.caller.bounds.workers, work, *arguments)

    async def _keys(self, call: Call, kind: type[Any]) -> list[ObjectKey]:
        request = await call.request(kind)
        return read_keys(request.keys, self._limits.keys)


def _register(store: StorageBackend, record: NamespaceRecord) -> None:
    """Register a namespace; runs in a store thread. Raises Refusal for a new one beyond _MOST_NAMESPACES.

    Their number is limited because stores keep namespaces for ever, and show all of them at once.
    """
    known = {held.namespace for held in store.namespaces()}
    if record.namespace not in known and len(known) >= _MOST_NAMESPACES:
        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, f"there are {len(known)} namespaces already; no more are remembered", "limit")
    store.register_namespace(record)


def _described(entries: Sequence[ScanEntry]) -> tuple[list[pb.ObjectMeta], list[float]]:
    return [messages.meta(entry.meta) for entry in entries], [entry.stored_at or 0.0 for entry in entries]


async def _answer(call: Call, reply: Any) -> None:
    await call.send(reply.SerializeToString())
