"""The gRPC service: it admits each call, bounds its time, serves it, and turns errors into status codes.

Each method is served as a pair of byte streams, even if its request and reply are single messages. This way
no request is read before its caller is known, and each read and write has a time limit (`limits.idle`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

import grpc
from grpc import StatusCode

import tiercache
from tiercache.core import ObjectKey
from tiercache.daemon.access import Access, Caller, Refusal, Sessions
from tiercache.daemon.call import Call, read_keys, request_bytes, without_abort_traceback
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.gate import Gate
from tiercache.daemon.inquiries import Inquiries
from tiercache.daemon.node_metrics import NodeMetrics
from tiercache.daemon.payload.calls import DataCall, DataCalls
from tiercache.daemon.payload.channel import DisconnectedError
from tiercache.daemon.payload.sessions import DataSessions
from tiercache.daemon.shared import SharedCalls
from tiercache.daemon.status.board import StatusBoard
from tiercache.daemon.store_threads import Threads
from tiercache.daemon.streams import StreamCalls
from tiercache.daemon.tiers import TierCalls
from tiercache.errors import ClosedError, RefusedError, StorageError, UnlistedError, WireError
from tiercache.steps import Deadline
from tiercache.storage.base import NAMESPACE_BYTES, NamespaceRecord, ScanEntry, StorageBackend
from tiercache.wire import messages
from tiercache.wire.methods import METHODS, SERVICE, UNTOUCHED_METADATA, Method
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_UNTOUCHED = ((UNTOUCHED_METADATA, "1"),)
"""Trailing metadata of a refusal. It promises that the call does not touch attached memory, now or later."""
_RECORD_BYTES: Final = 4096
"""Maximum bytes of a namespace's record as a message."""

T = TypeVar("T")
CallT = TypeVar("CallT", bound=Call)
A = TypeVarTuple("A")
Handler = Callable[[Call], Awaitable[None]]


class Service:
    """Handlers of all calls of the daemon's gRPC service.

    Thread safety: the event loop's thread; calls of data connections also take steps in threads of their own.
    """

    def __init__(
        self,
        access: Access,
        attachments: Sessions,
        threads: Threads,
        streams: StreamCalls,
        shared: SharedCalls,
        tiers: TierCalls,
        board: StatusBoard,
        inquiries: Inquiries,
        *,
        instance: bytes,
        store: str,
        limits: pb.Limits,
        idle: float,
        metrics: NodeMetrics | None = None,
        calls: CallLog | None = None,
        gate: Gate | None = None,
        data: DataCalls | None = None,
        sessions: DataSessions | None = None,
    ) -> None:
        """Serve calls with these parts; `gate` is None if clients connect to gRPC directly.

        `data` and `sessions` are None if there are no data connections.
        """
        self._access = access
        self._gate = gate
        self._attachments = attachments
        self._threads = threads
        self._limits = limits
        self._idle = idle
        self._metrics = metrics or NodeMetrics()
        self._calls = calls or CallLog(self._metrics.count_refusal)
        self._instance = instance
        self._store = store
        self._tiers = tiers
        self._board = board
        self._handlers: dict[str, Handler] = {
            "Get": streams.get,
            "Set": streams.set,
            "GetInto": shared.get_into,
            "SetFrom": shared.set_from,
            "Hello": self._hello,
            "Exists": self._exists,
            "Delete": self._delete,
            "Describe": self._describe,
            "Scan": self._scan,
            "Advise": self._advise,
            "Register": self._register,
            "Namespaces": self._namespaces,
            "Usage": self._usage,
            "Flush": self._flush,
            "Status": self._status,
            "History": inquiries.history,
            "Report": inquiries.report,
            "ChangeTiers": tiers.change,
            "FollowTierChange": tiers.follow,
        }
        self._sessions = sessions
        self._data_handlers: dict[str, Callable[[DataCall], Awaitable[None]]] = (
            {} if data is None else {"Get": data.get_data, "Set": data.set_data, "Exists": self._exists}
        )
        assert self._handlers.keys() == METHODS.keys(), "every method must have a handler"

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to gRPC's server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {name: grpc.stream_stream_rpc_method_handler(self._entrance(METHODS[name])) for name in METHODS},
        )

    async def admit(self, context: Any) -> None:
        """Abort a call of any service if its caller is not known."""
        try:
            self._identify(context)
        except Refusal as refusal:
            self._calls.refused(refusal)
            await context.abort(refusal.code, refusal.message)

    def _entrance(self, method: Method) -> Callable[[Any, Any], Awaitable[None]]:
        async def serve(_: Any, context: Any) -> None:
            # gRPC raises InternalError if the client has disconnected; then no answer can be sent.
            with (
                without_abort_traceback(),
                self._metrics.measure_call(method.name, context),
                self._calls.follow(method.name, self._client(context.peer())),
                suppress(grpc.aio.InternalError),
            ):
                await answer(context)

        async def answer(context: Any) -> None:
            # Do not call `abort` inside an `except` block. The error that it raises would keep the handled
            # error alive, and everything to which the frames of the handled error refer.
            refusal = await self._outcome(method, self._serve(method, context))
            if refusal is not None:
                await context.abort(*refusal)

        return serve

    async def _outcome(self, method: Method, serving: Awaitable[None]) -> tuple[Any, ...] | None:
        """Await a call; return None, or the arguments of gRPC's `abort` if the call failed.

        The arguments are a status code, one sentence and, if the call was refused, trailing metadata.
        """
        try:
            await serving
        except Refusal as refusal:
            self._calls.refused(refusal)
            return refusal.code, refusal.message, _UNTOUCHED
        except WireError as error:
            self._calls.refused(error)
            return StatusCode.INVALID_ARGUMENT, str(error), _UNTOUCHED
        except TimeoutError as error:
            self._calls.refused(error)
            return (
                StatusCode.DEADLINE_EXCEEDED,
                f"the call took longer than its deadline or the limit of {self._limits.call_seconds:g} s",
            )
        except ClosedError:
            return StatusCode.UNAVAILABLE, "the daemon is shutting down"
        except UnlistedError as error:
            return StatusCode.FAILED_PRECONDITION, str(error)
        except StorageError as error:
            return StatusCode.INTERNAL, str(error)
        except (
            asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.InternalError, grpc.RpcError,
            DisconnectedError,
        ):  # fmt: skip
            raise
        except Exception:  # noqa: BLE001
            # A bug in the daemon fails this call and is logged. It never ends the daemon.
            _log.exception("a call of %s failed", method.name)
            return StatusCode.INTERNAL, f"{method.name} failed inside the daemon; its log has the details"
        return None

    def _client(self, peer: str) -> str:
        return peer if self._gate is None else self._gate.client_of(peer)

    def _identify(self, context: Any) -> Caller:
        peer = context.peer()
        # The gate does not know connections that workers made to gRPC directly.
        is_local = self._gate.is_local(peer) if self._gate is not None else None
        local = peer.startswith("unix") if is_local is None else is_local
        metadata = context.invocation_metadata() or ()
        caller = self._access.identify(metadata, peer, context.auth_context(), self._attachments, local=local)
        if self._gate is not None:
            self._gate.mark_known(peer)
        return caller

    async def _serve(self, method: Method, context: Any) -> None:
        caller = self._identify(context)

        def make() -> Call:
            return Call(
                caller, context, self._idle, self._limits.message_bytes, request_bytes(self._limits.keys)
            )

        if caller.session is not None:
            self._calls.name_peer(caller.peer)
        await self._perform(method, caller, context.time_remaining(), make, self._handlers[method.name])

    async def answer(self, call: DataCall) -> None:
        """Serve a call that came on a data connection, and answer it.

        Raises DisconnectedError if the connection cannot be used any more.
        """
        method = METHODS[call.name]
        peer = self._client(call.caller.peer)
        with self._metrics.measure(method.name) as measured, self._calls.follow(method.name, peer):
            handler = self._data_handlers[method.name]
            serving = self._perform(method, call.caller, call.seconds, lambda: call, handler)
            failure = await self._outcome(method, serving)
            measured.code = failure[0] if failure else StatusCode.OK
            if failure is not None:
                await call.fail(failure[0], failure[1])

    async def _perform(
        self,
        method: Method,
        caller: Caller,
        remaining: float | None,
        make: Callable[[], CallT],
        handler: Callable[[CallT], Awaitable[None]],
    ) -> None:
        """Admit a call of a known caller and let `handler` serve it, within its deadline and the limits."""
        self._metrics.count_call(caller.permissions.name)
        self._calls.name_caller(caller.permissions.name)
        caller.permissions.check(method.verb)
        if remaining is None:
            raise Refusal(StatusCode.INVALID_ARGUMENT, "the call has no deadline; give it one", "deadline")
        if not caller.budgets.streams.try_take(1):
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{caller.permissions.name} has as many calls under way as it may; try again later",
            )
        call, started, failed = make(), time.monotonic(), True
        try:
            async with Deadline(min(remaining, self._limits.call_seconds)):
                await handler(call)
            failed = False
        finally:
            caller.budgets.streams.give(1)
            seconds = time.monotonic() - started
            self._metrics.slowest.note(method.name, caller.permissions.name, seconds, failed=failed)
            await call.end()

    async def _hello(self, call: Call) -> None:
        await call.request(pb.HelloRequest)
        permissions = call.caller.permissions
        able = permissions.store.capabilities
        data = None
        if self._sessions is not None:
            data = self._sessions.offer(call.caller, call.context.peer())
        await _answer(
            call,
            pb.HelloReply(
                version=tiercache.__version__, instance=self._instance, principal=permissions.name,
                tenant=permissions.tenant,
                verbs=sorted(permissions.verbs), store=self._store, persistent=able.persistent,
                bounded=able.bounded, unordered=not able.ordered, unlisted=not able.listed,
                limits=self._limits_of(call.caller), data=data,
            ),
        )  # fmt: skip

    def _limits_of(self, caller: Caller) -> pb.Limits:
        """Return the limits; those for payload are at most the payload budget of this caller."""
        limits = pb.Limits()
        limits.CopyFrom(self._limits)
        limits.client_bytes = min(limits.client_bytes, caller.budgets.payload.largest)
        limits.object_bytes = min(limits.object_bytes, caller.budgets.payload.largest)
        return limits

    async def _exists(self, call: Call) -> None:
        keys = await self._keys(call, pb.ExistsRequest)
        answers = await self._ask(call, call.caller.permissions.store.exists, keys)
        self._metrics.count_exists(keys, answers)
        await _answer(call, pb.BitmapReply(bits=messages.bits(answers)))

    async def _delete(self, call: Call) -> None:
        keys = await self._keys(call, pb.DeleteRequest)
        caller = call.caller
        deleted = await self._calls.change(
            "delete",
            partial(self._threads.start, caller.budgets.workers),
            partial(caller.permissions.store.delete, keys),
            lambda deleted: {"deleted": sum(deleted)},
            objects=len(keys),
        )
        await _answer(call, pb.BitmapReply(bits=messages.bits(deleted)))

    async def _describe(self, call: Call) -> None:
        entries = await self._ask(
            call, call.caller.permissions.store.describe, await self._keys(call, pb.DescribeRequest)
        )
        there = [entry for entry in entries if entry is not None]
        present = messages.bits([entry is not None for entry in entries])
        await _answer(call, pb.DescribeReply(present=present, **_described(call, there)))

    async def _scan(self, call: Call) -> None:
        request = await call.request(pb.ScanRequest)
        namespace = request.namespace if request.HasField("namespace") else None
        page = await self._ask(call, call.caller.permissions.store.scan, namespace, request.cursor)
        await _answer(call, pb.ScanReply(cursor=page.cursor, **_described(call, page.entries)))

    async def _advise(self, call: Call) -> None:
        request = await call.request(pb.AdviseRequest)
        keys = read_keys(request.keys, self._limits.keys)
        if len(request.values) != len(keys):
            raise WireError(f"{len(keys)} keys came with {len(request.values)} values; give each its value")
        with suppress(StorageError):  # a hint may be lost
            await self._ask(
                call, call.caller.permissions.store.advise, keys, list(request.values), request.worker
            )
        await _answer(call, pb.AdviseReply())

    async def _register(self, call: Call) -> None:
        request = (await call.request(pb.RegisterRequest)).namespace
        if not 0 < len(request.namespace) <= NAMESPACE_BYTES:
            raise WireError(
                f"a namespace of {len(request.namespace)} bytes is not allowed; it must have 1 to"
                f" {NAMESPACE_BYTES} bytes"
            )
        store = call.caller.permissions.store
        if not store.may_register(request.namespace):
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{call.caller.permissions.name} may not use namespace {request.namespace.hex()}; the"
                " operator can add it to its namespaces",
            )
        if request.ByteSize() > _RECORD_BYTES:
            raise WireError(
                f"a namespace's record of {request.ByteSize()} bytes is beyond the limit of {_RECORD_BYTES};"
                " shorten the identity"
            )
        record = NamespaceRecord(
            request.namespace, messages.read_mapping(request.texts, request.numbers), request.states
        )
        await self._ask(call, _register, store, record)
        await _answer(call, pb.RegisterReply())

    async def _namespaces(self, call: Call) -> None:
        await call.request(pb.NamespacesRequest)
        records = await self._ask(call, call.caller.permissions.store.namespaces)
        found = [messages.namespace(r.namespace, r.identity, states=r.states) for r in records]
        await _answer(call, pb.NamespacesReply(namespaces=found))

    async def _usage(self, call: Call) -> None:
        await call.request(pb.UsageRequest)
        permissions = call.caller.permissions
        if not permissions.sees_all:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"the store holds objects that {permissions.name} cannot see; its totals need the verb admin",
            )
        usage = await self._ask(call, permissions.store.usage)
        secret = {} if permissions.operates else {"url": ""}
        await _answer(
            call,
            pb.UsageReply(
                objects=usage.objects, payload_bytes=usage.payload_bytes, used_bytes=usage.used_bytes,
                capacity_bytes=usage.capacity_bytes,
                texts=messages.texts(usage.details), numbers=messages.numbers(usage.details),
                tiers=[messages.tier(asdict(tier) | secret) for tier in usage.tiers],
            ),
        )  # fmt: skip

    async def _flush(self, call: Call) -> None:
        await call.request(pb.FlushRequest)
        await self._ask(call, call.caller.permissions.store.flush)
        await _answer(call, pb.FlushReply())

    async def _status(self, call: Call) -> None:
        await call.request(pb.StatusRequest)
        document = await self._ask(call, self._board.encoded, call.caller.permissions)
        await _answer(call, pb.StatusReply(document=document))

    async def _ask(self, call: Call, work: Callable[[*A], T], *arguments: *A) -> T:
        """Run `work` in a store thread and return its result."""
        return await self._threads.start(call.caller.budgets.workers, work, *arguments)

    async def _keys(self, call: Call, kind: type[Any]) -> list[ObjectKey]:
        request = await call.request(kind)
        keys = read_keys(request.keys, self._limits.keys)
        self._tiers.notice(keys)
        return keys


def _register(store: StorageBackend, record: NamespaceRecord) -> None:
    """Register a namespace; runs in a store thread. Raises Refusal beyond the bounds of its tenant."""
    try:
        store.register_namespace(record)
    except RefusedError as error:
        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, str(error), "limit") from error


def _described(call: Call, entries: Sequence[ScanEntry]) -> dict[str, Any]:
    """Return the fields of a reply that describe these objects."""
    # The tier of an object depends on what other callers store and read. So the tiers are told only to
    # callers who may know the totals of the store.
    told = call.caller.permissions.sees_all
    return {
        "keys": messages.keys([entry.key for entry in entries]),
        # Present values say what other callers expect of the objects, so they are not told.
        "metas": [messages.meta(replace(entry.meta, value=None, worker=0)) for entry in entries],
        "stored_at": [entry.stored_at or 0.0 for entry in entries],
        "tiers": messages.tiers([entry.tier for entry in entries]) if told else None,
    }


async def _answer(call: Call, reply: Any) -> None:
    await call.send(reply.SerializeToString())
