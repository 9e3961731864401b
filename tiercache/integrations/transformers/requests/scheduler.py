"""Admission of the worker's requests, and the end of their device work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.controller import Admission, Lookup
from tiercache.core import Reason, TokenArray
from tiercache.errors import ClosedError, PoolFullError
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS
from tiercache.integrations.transformers.requests.prefill import COPY_SECONDS
from tiercache.integrations.transformers.requests.sampling import Sampling
from tiercache.integrations.transformers.requests.task import Task
from tiercache.transfer import Fence

if TYPE_CHECKING:
    from tiercache.integrations.transformers.worker import Worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """A request whose values are checked and in the worker's form."""

    prompt: TokenArray
    new_tokens: int
    stop: frozenset[int]
    extra: bytes
    samplings: Sequence[Sampling]
    """Samplings of the continuations."""


class Scheduler:
    """Scheduler of one worker's requests, which knows when the device has finished with their slots.

    Thread safety: one owner thread.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
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
        worker = self._worker
        worker.check_models()
        admission, reason = None, Reason.BUSY
        if worker.exceeds_limit(len(request.prompt)):
            reason = Reason.DISABLED
        else:
            lookup = lookup or worker.controller.lookup(request.prompt, request.extra)
            states = CHECKPOINTS + DECODE_SNAPSHOTS if worker.runner.layout.state_geometries else 0
            tokens = worker.kept(len(request.prompt) + request.new_tokens)
            if not grows:
                admission = self.admit(lookup, tokens, states, wait=wait)
            elif self._fits(tokens):
                admission = self.admit(lookup, len(request.prompt), states, wait=wait)
        return Task(
            worker, admission, request.prompt, request.new_tokens, request.stop, request.samplings,
            audit=audit, started=started, reason=reason,
        )  # fmt: skip

    def admit(self, lookup: Lookup, tokens: int, states: int, *, wait: bool = True) -> Admission | None:
        """Admit a request; return None if the device pools have no room for it.

        Without `wait`, raises PoolFullError at once instead.
        """

        def attempt() -> Admission:
            return self._worker.controller.admit(lookup, tokens=tokens, states=states)

        return self.await_room(attempt, tokens) if wait else attempt()

    def await_room(self, attempt: Callable[[], Admission], tokens: int) -> Admission | None:
        """Return what `attempt` gives for `tokens` tokens; None if it finds no room.

        The slots of the last request stay taken for milliseconds, until their content is copied to the host.
        Therefore a failed attempt is repeated for up to `COPY_SECONDS`.
        """
        worker, deadline = self._worker, time.monotonic() + COPY_SECONDS
        while True:
            try:
                return attempt()
            except PoolFullError as error:
                if self._released is not None:
                    self.synchronize()  # the copies to the host begin when the last request's work is over
                    deadline = time.monotonic() + COPY_SECONDS
                    continue
                if (
                    not self._fits(tokens)
                    or time.monotonic() > deadline
                    or not worker.controller.tick(wait=0.01)
                ):
                    _log.warning("computing %d tokens without the cache: %s", tokens, error)
                    return None

    def _fits(self, tokens: int) -> bool:
        """Return whether the device has page slots for `tokens` tokens at all."""
        pages = -(-tokens // self._worker.controller.page_size) if self._worker.tensors.kv else 0
        return pages <= self._worker.tensors.page_slots

    def release(self, admission: Admission) -> None:
        """End an admission, once the device has finished what is queued now."""
        self._released = self._worker.stream.fence()
        with suppress(ClosedError):  # a controller that closes releases its admissions itself
            self._worker.controller.release(admission, fence=self._released)

    def synchronize(self) -> None:
        """Wait until the device has finished the requests that are over, and free their slots."""
        if self._released is not None:
            self._released.synchronize()
            self._released = None
        self._worker.controller.tick()
