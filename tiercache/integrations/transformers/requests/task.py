"""One request of the reference worker that runs: its prefill, and then its answer, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import ParkedStatus, Sources, Status
from tiercache.core import PoolName, Reason, as_tokens
from tiercache.errors import PoolFullError, TransferError
from tiercache.index import plan_prefill
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS, Commits
from tiercache.integrations.transformers.requests.request import Checked, Chooser, Generation

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.index import Chunk
    from tiercache.integrations.transformers.requests.scheduler import Scheduler
    from tiercache.integrations.transformers.stream import Mark

_log = logging.getLogger(__name__)

COPY_SECONDS: Final = 1.0
"""Maximum seconds to wait for free slots.

The slots of the previous request become free when their content has been copied to the host.
"""


class Task:
    """One request that runs; each `step` is one forward pass, or the wait for a restore.

    Without an admission nothing is restored or committed, and the generation's `reason` is the argument
    `reason`. Times count from `started` (`time.perf_counter` seconds). With `audit`, copies of the restored
    state and cache are kept. `close` ends a task at any time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission | None,
        request: Checked,
        *,
        audit: bool,
        started: float,
        reason: Reason = Reason.BUSY,
    ) -> None:
        self._parts = scheduler.parts
        self._runner = scheduler.parts.runner
        self._limit = scheduler.parts.limit
        self._request = request
        self._prompt = request.prompt
        self._audit = audit
        self._started = started
        self._commits = Commits(scheduler, admission, reason)
        self._away = False  # parked, or on the way back
        self._tokens: list[int] = request.prompt.tolist()  # the prompt and the answer so far
        self._end = len(request.prompt) + request.new_tokens
        self._choose = Chooser(request.sampling)
        self._cache: DynamicCache | None = None  # None before the first forward pass, and while parked
        self._chunks: list[Chunk] = []  # those of the prefill that are not yet computed, the next one last
        self._marks: list[tuple[Mark, Mark]] = []  # begin and end of each forward pass of the prefill
        self._first_logits: torch.Tensor | None = None  # after the prompt; None until the prefill is over
        self._logits = torch.empty(0)  # after the last token
        self._restored = 0
        self._sources, self._reason = Sources(), Reason.NONE
        self._restored_state: dict[tuple[int, str], torch.Tensor] = {}
        self._restored_cache: DynamicCache | None = None
        self._restore_seconds = self._ttft_seconds = 0.0
        self._bounds: list[int] = []
        self._anew = 0
        # The slots are used in turn. _slots[0] is the one for the next snapshot; _slots[1] holds the newest
        # one, so that the newest snapshot is never overwritten:
        #
        #     page boundary of the answer     1   2   3   4
        #     slot that takes the snapshot    a   b   a   b
        self._slots: list[Mapping[PoolName, int]] = []
        self._newest: tuple[int, Mapping[PoolName, int]] | None = None
        self.generation: Generation | None = None
        """The result; None until the answer is complete."""

    def run(self) -> Generation:
        """Step to the end, and return the result."""
        while self.generation is None:
            self.step()
        return self.generation

    def step(self, *, wait: bool = True) -> bool:
        """Run one forward pass; without `wait`, return False while the restore waits for storage.

        Raises what the forward pass or a commit raises; the task is then to be closed. Raises PoolFullError,
        with nothing changed, if there is no slot for the page of the next token.
        """
        if self._away and not self._arrive():
            return False
        if self._cache is None:
            if not wait and self._is_pending():
                return False
            self._cache = self._begin()
        if self._first_logits is None:
            self._compute_chunk(self._cache)
        else:
            self._decode(self._cache)
        return True

    # -- the prefill

    def _is_pending(self) -> bool:
        """Return whether the restore waits for storage."""
        admission = self._commits.admission
        try:
            return admission is not None and admission.poll().status is Status.PENDING
        except PoolFullError:
            return False  # `_settled_depth` deals with it

    def _begin(self) -> DynamicCache:
        """Return a cache filled with what is restored, and plan the chunks behind it."""
        cache, self._restored = self._restore()
        self._commits.exported = self._restored
        tokens, limit = len(self._prompt), self._parts.chunk_limit
        # A prompt beyond the limit is one chunk, because the model might compute something else with cuts.
        most = tokens if limit is None or self._parts.exceeds_limit(tokens) else limit
        chunks = plan_prefill(tokens, self._restored, most, self._runner.page_size, self._checkpoints())
        self._bounds = [chunk.end for chunk in chunks]
        self._chunks = list(reversed(chunks))
        return cache

    def _compute_chunk(self, cache: DynamicCache) -> None:
        chunk = self._chunks.pop()
        began = self._parts.stream.mark()
        logits = self._runner.forward(cache, self._prompt[chunk.start : chunk.end], chunk.start)
        if chunk.checkpoint:
            slots = self._commits.take()
            self._commits.export_state(cache, slots)
            self._commits.commit(cache, self._tokens, chunk.end, slots)
        self._marks.append((began, self._parts.stream.mark()))
        if not self._chunks:
            self._end_prefill(logits)

    def _end_prefill(self, logits: torch.Tensor) -> None:
        stream = self._parts.stream
        stream.synchronize()  # without this, only the queueing of the work would be measured
        self._ttft_seconds = time.perf_counter() - self._started
        computed = stream.seconds(self._marks[0][0], self._marks[-1][1])
        self._restore_seconds = max(0.0, self._ttft_seconds - computed)
        # Between two chunks, other requests may have been computed.
        seconds = sum(stream.seconds(began, ended) for began, ended in self._marks)
        self._parts.controller.note_prefill(self._restored, len(self._prompt), seconds)
        self._marks.clear()
        self._sources, self._reason = self._commits.sources, self._commits.reason
        self._first_logits = self._logits = logits
        self._slots = [self._commits.take() for _ in range(DECODE_SNAPSHOTS)]

    def _checkpoints(self) -> tuple[int, ...]:
        """Return the depths at which the prefill hands over a state.

        If the rules ask for more states than there are slots, only the deepest depths are returned.
        """
        admission = self._commits.admission
        if admission is None:
            return ()
        depths = admission.checkpoints
        more = len(depths) - CHECKPOINTS
        if more > 0:
            try:
                admission.extend(len(self._prompt), more)
            except PoolFullError:
                return depths[more:]
        return depths

    def _restore(self) -> tuple[DynamicCache, int]:
        """Return the cache from which to continue, and the number of tokens that it holds."""
        while self._commits.admission is not None and (depth := self._settled_depth()):
            admission = self._commits.admission
            pages = admission.pages.get(PoolName.KV, ())[: depth // self._runner.page_size]
            state = admission.restored_states or None
            try:
                wait = partial(admission.wait_layer, stream=self._parts.stream.handle)
                tensors = self._parts.tensors
                cache = self._runner.restore(tensors, pages, state, wait_layer=wait, tokens=depth)
            except TransferError as error:
                _log.warning("a layer could not be loaded: %s", error)
                # The next call of `_settled_depth` waits for the rest of the failed load, and returns the
                # depth that can still be restored.
                self._parts.controller.tick(wait=0.01)
                continue
            if self._audit:
                self._keep_state(cache)
            return cache, depth
        return self._runner.new_cache(), 0

    def _settled_depth(self) -> int:
        """Wait until the admission is ready, and return the depth to restore, in tokens.

        After a failed load, the request may have too few slots for the tokens that it now has to compute. In
        that case it runs without the cache, and the result is 0.
        """
        assert self._commits.admission is not None
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            try:
                return self._commits.admission.wait().depth
            except PoolFullError as error:
                if time.monotonic() > deadline or not self._parts.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", len(self._prompt), error)
                    self._commits.give_up()
                    return 0

    def _keep_state(self, cache: DynamicCache) -> None:
        """Copy the restored state for the audit, before the next forward overwrites it.

        The copy takes time. The start of the request is moved by that time, so that the figures of the
        request leave the copy out.
        """
        self._parts.stream.synchronize()
        began = time.perf_counter()
        layout = self._runner.layout
        for t in layout.state_tensors():
            kept = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            layout.read_state(cache, t, kept)
            self._restored_state[t.layer, t.name] = kept
        self._parts.stream.synchronize()
        self._started += time.perf_counter() - began

    # -- the answer

    def _decode(self, cache: DynamicCache) -> None:
        """Choose the next token, and feed it to the model unless it is the last one.

        At each page boundary of the answer, a snapshot of the state is taken.
        """
        self._commits.reserve(min(len(self._tokens) + 1, self._end - 1))
        token = self._choose(self._logits)
        self._tokens.append(token)
        if token in self._request.stop or len(self._tokens) == self._end:
            self._finish(cache)
            return
        if self._limit is not None and len(self._tokens) == self._limit + 1:
            self._commit_end(cache)
            self._commits.release()
            cache = self._compute_anew(cache)
        else:
            self._logits = self._runner.forward(cache, [token], len(self._tokens) - 1)
        self._bounds.append(len(self._tokens))
        if len(self._tokens) % self._runner.page_size == 0 and not self._beyond(cache):
            self._newest = (len(self._tokens), self._slots[0])
            self._commits.export_state(cache, self._slots[0])
            self._slots.reverse()

    def _compute_anew(self, cache: DynamicCache) -> DynamicCache:
        """Feed all tokens to an empty cache, and return it.

        Beyond the limit, the model may compute other values than those in the cache for the same tokens. With
        an empty cache, the logits are those of a server without a cache.
        """
        self._restored_cache = cache if self._audit else None
        self._cache = empty = self._runner.new_cache()
        self._anew = len(self._tokens)
        self._logits = self._runner.prefill(empty, as_tokens(self._tokens))
        return empty

    def _beyond(self, cache: DynamicCache) -> bool:
        """Return whether the live cache holds more tokens than a stored cache may have."""
        return self._limit is not None and self._runner.layout.length(cache) > self._limit

    def _commit_end(self, cache: DynamicCache) -> None:
        """Commit everything that the cache holds, and the newest snapshot if the rules keep it."""
        if self._commits.admission is None:
            return
        # The last token was never fed to the model, so the cache holds one token less than the sequence.
        held = self._runner.layout.length(cache)
        at, slots = self._newest or (0, {})
        if not self._commits.admission.keeps_end:
            slots = {}
        self._commits.commit(cache, self._tokens, held, slots, at=at)

    def _finish(self, cache: DynamicCache) -> None:
        if not self._beyond(cache):
            self._commit_end(cache)
        assert self._first_logits is not None
        self.generation = Generation(
            prompt_tokens=len(self._prompt),
            tokens=np.array(self._tokens, np.int64),
            first_logits=self._first_logits,
            restored=self._restored,
            sources=self._sources,
            reason=self._reason,
            bounds=tuple(self._bounds),
            states=tuple(self._commits.states),
            restore_seconds=self._restore_seconds,
            ttft_seconds=self._ttft_seconds,
            cache=self._restored_cache or cache,
            restored_state=self._restored_state,
            anew=self._anew,
            sampling=self._request.sampling,
            parks=self._commits.parks,
        )
        self._commits.release()

    @property
    def lost(self) -> bool:
        """Whether the task was parked and cannot be brought back; it is then to be closed."""
        return self._commits.lost

    @property
    def has_slots(self) -> bool:
        """Whether the task has device slots that it could give to others."""
        return self._commits.admission is not None

    @property
    def returns(self) -> bool:
        """Whether the task was parked and is being brought back."""
        return self._away

    @property
    def copies(self) -> bool:
        """Whether the task is parked and its slots are still being copied to the host."""
        parked = self._commits.parked
        return self._away and parked is not None and parked.status is ParkedStatus.COPYING

    def park(self, *, below: bool) -> bool:
        """Give the slots to others; return False if there is nothing to park.

        With `below`, the task is kept in storage, and on the host otherwise; its live cache is dropped.
        Raises PoolFullError or AdmissionError if there is no room for it. After an exception, or if the
        result is False, the task is to be closed.
        """
        if self._commits.admission is None or self._cache is None:
            return False
        if self._first_logits is None:
            held = self._chunks[-1].start
            self._commits.commit(self._cache, self._tokens, held, {})
            self._commits.park(self._cache, self._tokens[:held], {}, below=below)
        else:
            self._commit_end(self._cache)
            self._commits.park(self._cache, self._tokens, self._slots[0], below=below)
            self._newest = None
            self._slots.clear()
        self._cache, self._away = None, True
        return True

    def resume(self) -> None:
        """Begin to bring a parked task back. Raises as `Commits.resume` does, with nothing changed."""
        if self._first_logits is None:
            self._commits.resume(len(self._tokens), CHECKPOINTS + DECODE_SNAPSHOTS)
        else:
            self._commits.resume(len(self._tokens) + 1, DECODE_SNAPSHOTS)

    def _arrive(self) -> bool:
        """Return whether a task that was parked can go on."""
        self._cache = self._commits.arrive()
        if self._cache is None:
            return False
        if self._first_logits is not None:
            self._slots = [self._commits.take() for _ in range(DECODE_SNAPSHOTS)]
        self._away = False
        return True

    def give_up(self) -> None:
        """Commit the answer so far, and go on without the cache."""
        assert self._first_logits is not None, "only an answer that grows finds no slot"
        assert self._cache is not None
        self._commit_end(self._cache)
        self._newest = None
        self._slots = [{}, {}]
        self._commits.give_up()
        self._reason = Reason.BUSY
        self._commits.release()

    def close(self) -> None:
        """Release what the task holds; a second call does nothing."""
        self._commits.release()
