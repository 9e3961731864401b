"""One request of the reference worker that runs: its prefill, and then its answer, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import ParkedStatus
from tiercache.core import PoolName, Reason, as_tokens
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS, Commits
from tiercache.integrations.transformers.requests.prefill import Prefill
from tiercache.integrations.transformers.requests.request import Checked, Chooser, Generation

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.requests.scheduler import Scheduler


class Task:
    """One request that runs; each `step` is one forward pass, or the wait for a restore.

    Without an admission nothing is restored or committed, and the generation's `reason` is the argument
    `reason`. Times count from `started` (`time.perf_counter` seconds). `close` ends a task at any time.
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
        self._runner = scheduler.parts.runner
        self._limit = scheduler.parts.limit
        self._request = request
        self._audit = audit
        self._commits = Commits(scheduler, admission, reason)
        self._prefill = Prefill(scheduler.parts, self._commits, request.prompt, audit, started)
        self._away = False  # parked, or on the way back
        self._tokens: list[int] = request.prompt.tolist()  # the prompt and the answer so far
        self._end = len(request.prompt) + request.new_tokens
        self._choose = Chooser(request.sampling)
        self._cache: DynamicCache | None = None  # the live cache; that of the prefill while this is None
        self._logits = torch.empty(0)  # after the last token
        self._bounds: list[int] = []
        self._anew = 0
        self._restored_cache: DynamicCache | None = None
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
        if self._cache is not None:
            self._decode(self._cache)
            return True
        computed = self._prefill.step(wait=wait)
        if self._prefill.logits is not None:
            self._cache, self._prefill.cache = self._prefill.cache, None
            self._logits = self._prefill.logits
            self._bounds = list(self._prefill.bounds)
            self._slots = [self._commits.take() for _ in range(DECODE_SNAPSHOTS)]
        return computed

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
        first = self._prefill
        assert first.logits is not None
        self.generation = Generation(
            prompt_tokens=len(first.prompt),
            tokens=np.array(self._tokens, np.int64),
            first_logits=first.logits,
            restored=first.restored,
            sources=first.sources,
            reason=first.reason,
            bounds=tuple(self._bounds),
            states=tuple(self._commits.states),
            restore_seconds=first.restore_seconds,
            ttft_seconds=first.ttft_seconds,
            cache=self._restored_cache or cache,
            restored_state=first.restored_state,
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
        if self._commits.admission is None:
            return False
        if self._cache is not None:
            self._commit_end(self._cache)
            self._commits.park(self._cache, self._tokens, self._slots[0], below=below)
            self._cache = self._runner.new_cache()
            self._newest = None
            self._slots.clear()
        elif self._prefill.cache is not None:
            self._prefill.park(below=below)
        else:
            return False
        self._away = True
        return True

    def resume(self) -> None:
        """Begin to bring a parked task back. Raises as `Commits.resume` does, with nothing changed."""
        if self._cache is not None:
            self._commits.resume(len(self._tokens) + 1, DECODE_SNAPSHOTS)
        else:
            self._commits.resume(len(self._tokens), CHECKPOINTS + DECODE_SNAPSHOTS)

    def _arrive(self) -> bool:
        """Return whether a task that was parked can go on."""
        cache = self._commits.arrive()
        if cache is None:
            return False
        if self._cache is not None:
            self._cache = cache
            self._slots = [self._commits.take() for _ in range(DECODE_SNAPSHOTS)]
        else:
            self._prefill.cache = cache
        self._away = False
        return True

    def give_up(self) -> None:
        """Commit the answer so far, and go on without the cache."""
        assert self._cache is not None
        self._commit_end(self._cache)
        self._newest = None
        self._slots = [{}, {}]
        self._commits.give_up()
        self._prefill.reason = Reason.BUSY
        self._commits.release()

    def close(self) -> None:
        """Release what the task holds; a second call does nothing."""
        self._commits.release()
