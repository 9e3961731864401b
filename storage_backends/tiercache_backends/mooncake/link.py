"""The connection to a master: opened and kept by guarded calls, and how long a call waits for it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import SharedMemory
from tiercache.storage.guard import GiveUp, Guard, PendingCall
from tiercache_backends.mooncake.header import HEADER_BYTES, prefix_of
from tiercache_backends.mooncake.library import (
    FULL,
    ClientSpec,
    MooncakeClient,
    idle_client,
    outcome_of,
    release_client,
)
from tiercache_backends.mooncake.memory import AttachedMappings, Region, StagingMemory
from tiercache_backends.mooncake.settings import MooncakeSettings


class Patience:
    """Time that one call of the store has left.

    It makes calls of Mooncake one after the other, and waits for memory, threads and claims in between. As
    long as Mooncake answers, each answer gives it another deadline. In an outage it ends one deadline after
    the last answer, however many calls it would have made.

    Thread safety: one thread.
    """

    def __init__(self, deadline: float) -> None:
        """Begin with `deadline` seconds."""
        self._deadline: Final = deadline
        self._until = time.monotonic() + deadline

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    def answered(self, codes: Sequence[int]) -> None:
        """Begin anew if these codes of a call say that all of Mooncake could be reached."""
        if all(code >= 0 or outcome_of(code) is not Outcome.UNAVAILABLE for code in codes):
            self._until = time.monotonic() + self._deadline

    def end(self) -> None:
        """Note that Mooncake is out of reach: nothing is left."""
        self._until = 0.0


_log = logging.getLogger(__name__)
_LOCAL_BUFFER: Final = 16 << 20
"""Memory of the client's own for the calls that move `bytes`."""
_CANARY_BYTES: Final = 64
_MAX_PIECES: Final = 1024
"""Pieces of all calls under way. From some 1,400 for one host on, Mooncake fails calls (code -800)."""
T = TypeVar("T")


class Link:
    """One client of the master, which may be out of reach.

    Thread safety: any thread. No lock is held while a call is under way.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connect, and wait for that as long as a call may take."""
        self._settings: Final = settings
        self.staging: Final = StagingMemory(settings.staging)
        self.attached: Final = AttachedMappings()
        self.pieces: Final = _MAX_PIECES // settings.threads
        """Pieces that one call may move."""
        self.guard: Final = Guard(
            str(settings),
            settings.threads,
            settings.deadline,
            on_hang=self._on_hang,
            failures=settings.breaker_failures,
            pause=settings.breaker_pause,
            max_hung=2 * settings.threads,
        )
        self._changed: Final = threading.Condition()  # guards registrations, and the fields below
        self._users = 0
        self._client: MooncakeClient | None = None
        self._spec: ClientSpec
        self._closed = False
        try:
            self.guard.begin("connecting", self._connect).result()
        except UnavailableError as error:
            self.guard.leave_out(str(error))

    def ready(self) -> MooncakeClient:
        """Return the client if calls may be made now; raise UnavailableError otherwise."""
        may_call = self.guard.may_call(self._examine)
        client = self._client
        if not may_call or client is None:
            raise UnavailableError(f"{self._settings}: {self.guard.why}")
        return client

    def patience(self) -> Patience:
        """Return the time for one call of the store."""
        return Patience(self._settings.deadline)

    def begin(
        self,
        patience: Patience,
        what: str,
        work: Callable[[MooncakeClient], T],
        give_up: GiveUp | None = None,
    ) -> PendingCall[T]:
        """Begin calls of the client; raises UnavailableError if none may be made now.

        `give_up` is called if the calls take too long; what it returns is called when they have returned.
        """
        client = self.ready()
        seconds = patience.left
        if not seconds:
            raise UnavailableError(f"{self._settings}: {self.guard.why}")
        return self.guard.begin(what, lambda: self._use(client, work), give_up=give_up, seconds=seconds)

    def end(self, patience: Patience, pending: PendingCall[T]) -> T:
        """Return what the calls returned; raises UnavailableError if they take too long."""
        try:
            return pending.result()
        except UnavailableError as error:
            self.guard.failed(str(error))
            patience.end()
            raise

    def ask(self, patience: Patience, what: str, work: Callable[[MooncakeClient], T]) -> T:
        """Make calls of the client; raises UnavailableError if they cannot be made or take too long."""
        return self.end(patience, self.begin(patience, what, work))

    def ask_with(
        self, patience: Patience, what: str, nbytes: int, work: Callable[[MooncakeClient, Region], T]
    ) -> T:
        """Make calls of the client that need staging memory; raises UnavailableError like `ask`."""
        region = self.staging.take(nbytes, patience.left)
        if region is None:
            raise UnavailableError(f"{self._settings}: calls that do not return have all staging memory")
        try:
            give = partial(self.staging.give, region)
            pending = self.begin(patience, what, lambda client: work(client, region), lambda: give)
        except BaseException:  # whatever it is, the call has not begun
            self.staging.give(region)
            raise
        try:
            return self.end(patience, pending)
        finally:
            if not pending.hangs:
                self.staging.give(region)

    def heads(self, patience: Patience, what: str, names: Sequence[str]) -> list[bytes | int]:
        """Return the header of each object, or the code for which it could not be read."""

        def work(client: MooncakeClient, region: Region) -> list[bytes | int]:
            codes = client.heads(names, region.address, HEADER_BYTES)
            return [
                code if code < 0 else bytes(region.view[n * HEADER_BYTES : (n + 1) * HEADER_BYTES])
                for n, code in enumerate(codes)
            ]

        found = self.ask_with(patience, what, len(names) * HEADER_BYTES, work)
        patience.answered([head for head in found if isinstance(head, int)])
        return found

    def attach(self, memory: SharedMemory) -> None:
        """Map a caller's memory, and register the mapping now, or when Mooncake answers again.

        A memory that is not registered is not used: payloads in it are copied.
        """
        with self._changed:
            self.attached.add(memory)
        if self._client is not None:
            with suppress(UnavailableError):
                self.ask(self.patience(), "attach", self._register)

    def close(self) -> None:
        """Disconnect. While calls hang, the client stays, and the last of them disconnects it."""
        with self._changed:
            self._closed = True
            idle: bool = self._changed.wait_for(lambda: self._users == 0, self._settings.deadline)
            if not idle and (client := self._client) is not None:
                client.keep()
        if idle:
            # It may take a second (`idle`). The interpreter waits for this thread at exit, although a tier of
            # a chain is closed on a daemon thread: one that is inside Mooncake then would crash the process.
            threading.Thread(target=self._disconnect, name="tiercache-mooncake-close", daemon=False).start()
        self.guard.close()

    def _is_over(self) -> bool:
        return self._closed and self._users == 0

    # --- on the threads of the calls
    # --------------------------------------------------------------------------------------------------------

    def _use(self, client: MooncakeClient, work: Callable[[MooncakeClient], T]) -> T:
        """Call the client, which stays connected meanwhile."""
        with self._changed:
            if self._closed:
                raise UnavailableError(f"{self._settings} is being closed")
            self._users += 1
        try:
            return work(client)
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()
            if self._is_over():
                self._disconnect()

    def _connect(self) -> None:
        settings = self._settings
        address = (settings.address.host, settings.address.port)
        try:
            with socket.create_connection(address, settings.deadline) as probe:
                hostname = settings.hostname or probe.getsockname()[0]
        except OSError as error:
            raise UnavailableError(
                f"no master answers at {settings.address} ({error.strerror or error}); start mooncake_master,"
                " or name its -rpc_address and -rpc_port"
            ) from error
        self._spec = ClientSpec(
            hostname,
            settings.metadata,
            settings.segment,
            _LOCAL_BUFFER,
            settings.protocol,
            settings.devices,
            str(settings.address),
            settings.tenant,
        )
        client = idle_client(self._spec)
        if client is None:
            client = MooncakeClient()
            if code := client.setup(self._spec):
                client.keep()
                raise UnavailableError(
                    f"the master at {settings.address} was reached, but Mooncake could not be set up with"
                    f" metadata={settings.metadata} and protocol={settings.protocol} (code {code}); use the"
                    " settings of the pool's other clients"
                )
        if client.register(self.staging.mapping.address, self.staging.nbytes):
            client.keep()
            raise UnavailableError(f"{self.staging.nbytes} bytes of memory cannot be registered")
        with self._changed:
            if self._closed:
                client.keep()
            else:
                self._client = client

    def _register(self, client: MooncakeClient) -> None:
        """Register the attached memories that wait for it. One that Mooncake refuses is not used."""
        while True:
            with self._changed:
                found = self.attached.next_waiting()
            if found is None:
                return
            memory, mapping = found
            code = client.register(mapping.address, mapping.nbytes)
            if code:
                _log.warning("%s: attached memory could not be registered (code %d)", self._settings, code)
                continue
            with self._changed:
                self.attached.registered(memory)

    def _examine(self) -> None:
        """Connect if need be, and store, read and delete a canary; report to the breaker."""
        try:
            if self._client is None:
                self._connect()
            client = self._client
            if client is None:
                raise UnavailableError("it is being closed")
            self._use(client, self._try_canary)
        except UnavailableError as error:
            self.guard.why = str(error)
            return
        self.guard.probed(True)
        # In this order: an `attach` that still met the open breaker has left its memory to this call.
        with suppress(UnavailableError):
            self._use(client, self._register)

    def _try_canary(self, client: MooncakeClient) -> None:
        region = self.staging.take(2 * _CANARY_BYTES, 0)
        if region is None:
            raise UnavailableError("calls that do not return have all staging memory")
        name, payload = (
            f"{prefix_of(self._settings.prefix)}canary/{os.urandom(16).hex()}",
            os.urandom(_CANARY_BYTES),
        )
        try:
            region.view[:_CANARY_BYTES] = payload
            code = client.put([name], [[region.address]], [[_CANARY_BYTES]], 1)[0]
            if not code:
                there = client.get([name], [[region.address + _CANARY_BYTES]], [[_CANARY_BYTES]])[0]
                client.remove([name])
                code = 0 if there == _CANARY_BYTES else min(there, -1)
        finally:
            found = bytes(region.view[_CANARY_BYTES : 2 * _CANARY_BYTES])
            self.staging.give(region)
        if code == FULL:
            return
        if code:
            raise UnavailableError(
                f"the master answers, but an object cannot be stored and read (code {code})"
            )
        if found != payload:
            raise UnavailableError("it does not return what it has just stored")

    def _disconnect(self) -> None:
        with self._changed:
            client, self._client = self._client, None
        if client is not None:
            for mapping in (self.staging.mapping, *self.attached.mappings):
                client.unregister(mapping.address)
            release_client(self._spec, client)

    def _on_hang(self, why: str) -> None:
        _log.warning("%s: %s; its memory is withheld until it does", self._settings, why)
