"""Schedule of the worker: admission of requests, their turns of one forward pass each, and their end."""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiercache.controller import Admission, Lookup
from tiercache.core import Reason
from tiercache.errors import AdmissionError, ClosedError, PoolFullError
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS
from tiercache.integrations.transformers.requests.request import Checked, Generation
from tiercache.integrations.transformers.requests.task import COPY_SECONDS, Task
from tiercache.transfer import Fence

if TYPE_CHECKING:
    from tiercache.controller import HybridCacheController
    from tiercache.integrations.transformers.device import PoolTensors
    from tiercache.integrations.transformers.runner import ModelRunner
    from tiercache.integrations.transformers.stream import TorchStream
    from tiercache.integrations.transformers.watch import Watch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Model, pools, stream and controller of one worker."""

    controller: HybridCacheController
    runner: ModelRunner
    tensors: PoolTensors
    stream: TorchStream
    watch: Watch
    limit: int | None
    """Tokens of the longest sequence that is restored and kept; None for no limit."""
    chunk_limit: int | None
    """Maximum number of tokens of one forward pass of a prefill; None for no limit."""

    def exceeds_limit(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens is longer than the cache may keep (see `limit`)."""
        return self.kept(tokens) < tokens

    def kept(self, tokens: int) -> int:
        """Return how many of a sequence's tokens the cache may keep (see `limit`)."""
        return tokens if self.limit is None else min(tokens, self.limit)


class Scheduler:
    """Scheduler of one worker's requests, which knows when the device has finished with their slots."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._released: Fence | None = None  # passed when the device work of ended requests is over

    def begin(
        self,
        request: Checked,
        *,
        audit: bool,
        started: float,
        lookup: Lookup | None = None,
        wait: bool = True,
        grows: bool = False,
    ) -> Task:
        """Admit a request and return its task, which is to be closed.

        With `grows`, slots are reserved for the prompt alone; the task takes more as its answer grows.

        If the device pools have no room for it, the task runs without the cache; without `wait`, the method
        raises PoolFullError instead. `lookup` is an earlier lookup of this prompt.

        Raises ConfigError if the model or a numeric setting has changed.
        """
        parts = self.parts
        parts.watch.check()
        admission, reason = None, Reason.BUSY
        if parts.exceeds_limit(len(request.prompt)):
            reason = Reason.DISABLED
        else:
            lookup = lookup or parts.controller.lookup(request.prompt, request.extra)
            states = CHECKPOINTS + DECODE_SNAPSHOTS if parts.runner.layout.state_geometries else 0
            tokens = parts.kept(len(request.prompt) + request.new_tokens)
            if not grows:
                admission = self._admit(lookup, tokens, states, wait=wait)
            elif self._fits(tokens):
                admission = self._admit(lookup, len(request.prompt), states, wait=wait)
        return Task(self, admission, request, audit=audit, started=started, reason=reason)

    def _admit(self, lookup: Lookup, tokens: int, states: int, *, wait: bool) -> Admission | None:
        """Admit a request; return None if the device pools have no room for it.

        Without `wait`, raises PoolFullError at once instead. The slots of the last request stay taken for
        milliseconds, until their content is copied to the host. Therefore a failed attempt is repeated for up
        to `COPY_SECONDS`.
        """
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            try:
                return self.parts.controller.admit(lookup, tokens=tokens, states=states)
            except PoolFullError as error:
                if not wait:
                    raise
                if self._released is not None:
                    self.synchronize()  # the copies to the host begin when the last request's work is over
                    deadline = time.monotonic() + COPY_SECONDS
                    continue
                is_late = not self._fits(tokens) or time.monotonic() > deadline
                if is_late or not self.parts.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", tokens, error)
                    return None

    def _fits(self, tokens: int) -> bool:
        """Return whether the device has page slots for `tokens` tokens at all."""
        pages = -(-tokens // self.parts.controller.page_size) if self.parts.tensors.kv else 0
        return pages <= self.parts.tensors.page_slots

    def release(self, admission: Admission) -> None:
        """End an admission, once the device has finished what is queued now."""
        self._released = self.parts.stream.fence()
        with suppress(ClosedError):  # a controller that closes releases its admissions itself
            self.parts.controller.release(admission, fence=self._released)

    def synchronize(self) -> None:
        """Wait until the device has finished the requests that are over, and free their slots."""
        if self._released is not None:
            self._released.synchronize()
            self._released = None
        self.parts.controller.tick()


class Turns:
    """Requests that are served together; a request is named by its number, and lower numbers are older.

        waiting --> running --> over
                      | ^
                      v |
                     parked

    A running request reserves slots for its prompt, and for one page after the other of its answer. If there
    is none left, the youngest running request is parked. It goes on when another one has ended. If it cannot
    be parked, or does not come back, it begins anew.
    """

    def __init__(
        self, scheduler: Scheduler, requests: Sequence[Checked], in_flight: int, *, audit: bool, below: bool
    ) -> None:
        """Prepare to serve `requests`, at most `in_flight` at a time; park in storage if `below`."""
        self._scheduler, self._parts = scheduler, scheduler.parts
        self._requests = requests
        self._in_flight = in_flight
        self._audit = audit
        self._below = below
        self._started = time.perf_counter()
        self._waiting = list(range(len(requests)))  # ascending
        self._running: dict[int, Task] = {}
        self._parked: dict[int, Task] = {}
        self._results: dict[int, Generation | Exception] = {}
        self._lookup: Lookup | None = None  # of the first request that waits
        self._has_room = True  # whether a request has ended since a slot was missing
        self._short_since: float | None = None  # when the only request that runs found no slot

    def run(self) -> list[Generation | Exception]:
        """Serve all requests; return what each of them gave. Raises ClosedError if the worker is closed."""
        self._parts.controller.tick()
        try:
            while self._waiting or self._running or self._parked:
                self._resume()
                self._begin()
                computed, short = self._step()
                if short:
                    self._make_room()
                elif not computed:
                    self._parts.controller.tick(wait=0.01)
        finally:
            for task in (*self._running.values(), *self._parked.values()):
                task.close()
        return [self._results[number] for number in range(len(self._requests))]

    @property
    def _takes_more(self) -> bool:
        return not self._running or (self._has_room and len(self._running) < self._in_flight)

    def _step(self) -> tuple[bool, bool]:
        """Step every running task once; return whether one computed, and whether one found no slot."""
        computed = short = False
        for number, task in list(self._running.items()):
            try:
                computed |= task.step(wait=False)
            except PoolFullError:
                short = True
            except Exception as error:  # noqa: BLE001  whatever ends a request, the others go on
                self._end(number, error)
            else:
                if task.lost:
                    self._begin_anew(number)
                elif (result := task.generation) is not None:
                    # Live caches of all requests would stay in memory until the last request is over.
                    empty = None if self._audit else self._parts.runner.new_cache()
                    self._end(number, result if empty is None else replace(result, cache=empty))
        if computed:
            self._short_since = None
        return computed, short

    def _begin(self) -> None:
        """Begin requests in their order, as long as there is room; none overtakes a parked one."""
        while self._waiting and not self._parked and self._takes_more:
            number = self._waiting[0]
            request = self._requests[number]
            try:
                if self._lookup is None and not self._parts.exceeds_limit(len(request.prompt)):
                    self._lookup = self._parts.controller.lookup(request.prompt, request.extra)
                self._running[number] = self._scheduler.begin(
                    request, audit=self._audit, started=self._started, lookup=self._lookup,
                    wait=not self._running, grows=True,
                )  # fmt: skip
            except PoolFullError:
                return
            except Exception as error:  # noqa: BLE001  whatever ends a request, the others go on
                self._results[number] = error
            del self._waiting[0]
            self._lookup = None

    def _resume(self) -> None:
        """Let parked requests go on, the oldest first, if there is room."""
        for number in sorted(self._parked):
            if not self._takes_more:
                return
            task = self._parked[number]
            try:
                task.resume()
            except PoolFullError:
                if self._running or not self._is_over():
                    return
                self._begin_anew(number)
            except AdmissionError:  # it has expired
                self._begin_anew(number)
            else:
                self._running[number] = self._parked.pop(number)
                self._running = dict(sorted(self._running.items()))

    def _make_room(self) -> None:
        """Park the youngest running request, unless slots are on their way already."""
        self._scheduler.synchronize()
        if any(task.copies for task in self._parked.values()):
            self._parts.controller.tick(wait=0.01)
            return
        holders = [number for number, task in self._running.items() if task.has_slots]
        if len(holders) > 1:
            self._retract(max(holders))
        elif self._is_over() and not any(task.returns for task in self._running.values()):
            try:
                self._running[holders[0]].give_up()
            except Exception as error:  # noqa: BLE001  whatever ends a request, the others go on
                self._end(holders[0], error)

    def _retract(self, number: int) -> None:
        """Park a running request; if that is not possible, let it begin anew."""
        task, self._has_room = self._running[number], False
        try:
            if task.park(below=self._below):
                self._parked[number] = self._running.pop(number)
            else:
                self._begin_anew(number)
        except (PoolFullError, AdmissionError):  # the host has no room for it
            self._begin_anew(number)
        except Exception as error:  # noqa: BLE001  whatever ends a request, the others go on
            self._end(number, error)

    def _is_over(self) -> bool:
        """Wait a little for slots that others give back; return whether none will come."""
        now = time.monotonic()
        self._short_since = self._short_since or now
        return not self._parts.controller.tick(wait=0.01) or now - self._short_since > COPY_SECONDS

    def _begin_anew(self, number: int) -> None:
        """Let a request wait again, and serve it from its beginning."""
        self._take(number).close()
        insort(self._waiting, number)
        self._lookup = None

    def _end(self, number: int, result: Generation | Exception) -> None:
        self._results[number] = result
        self._take(number).close()
        self._has_room = True

    def _take(self, number: int) -> Task:
        return (self._running if number in self._running else self._parked).pop(number)
