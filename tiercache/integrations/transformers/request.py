"""One request of the reference worker, from the restore of its prompt to the last commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import Admission, Sources
from tiercache.core import PoolName, Reason, Tier, TokenArray, as_tokens
from tiercache.errors import PoolFullError, TransferError

if TYPE_CHECKING:
    from tiercache.integrations.transformers.worker import Worker

_log = logging.getLogger(__name__)

DECODE_SNAPSHOTS: Final = 2
"""Number of state slots that decoding uses in turn.

With two, the newest complete snapshot survives while the next one is taken.
"""
COPY_SECONDS: Final = 1.0
"""Maximum seconds to wait for free slots.

The slots of the previous request become free when their content has been copied to the host.
"""
CHECKPOINTS: Final = 3
"""Number of state slots for the checkpoints of one prefill.

One is for the place where the prompt leaves a known path, one for the last page boundary before the prompt's
end, and one for the end itself if the end is a page boundary. The checkpoint rules may ask for more states.
"""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request.

    Depths are in tokens. Times are in seconds from the start of the request.
    """

    prompt_tokens: int
    tokens: npt.NDArray[np.int64]
    """The prompt and the answer."""
    first_logits: torch.Tensor
    """Logits `[vocab]` after the prompt, from which the first new token was chosen."""
    restored: int
    """Depth up to which the prompt was restored."""
    sources: Sources
    reason: Reason
    bounds: tuple[int, ...]
    """Depth at the end of every forward pass."""
    states: tuple[int, ...]
    """Depths at which states were committed."""
    restore_seconds: float
    """Time until the cache is filled with the restored pages and state.

    It is computed backwards: `ttft_seconds` minus the time from the filled cache to the first logits. On CUDA
    the device's clock measures the time that is subtracted.
    """
    ttft_seconds: float
    """Time until the first logits are computed. On CUDA, this includes all work that was queued before."""
    cache: DynamicCache = field(repr=False)
    """The cache at the end of the request.

    If the sequence was recomputed (see `anew`), this is the new cache; with `audit` it is still the old
    cache, which holds the restored pages.
    """
    restored_state: Mapping[tuple[int, str], torch.Tensor] = field(repr=False, default_factory=dict)
    """Copy of the restored state by (layer, name), for `Audit`; empty without `audit`."""
    anew: int = 0
    """Number of tokens of the sequence when all of them were recomputed with an empty cache; 0 if never.

    A sequence is recomputed when the answer grows beyond the worker's limit.
    """

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None


class Request:
    """One call of `Worker.serve`, with its live cache and the progress of its commits.

    Without an admission nothing is restored or committed, and the generation's `reason` is the argument
    `reason`. Times count from `started` (`time.perf_counter` seconds).

    Thread safety: one owner thread.
    """

    def __init__(
        self,
        worker: Worker,
        admission: Admission | None,
        prompt: TokenArray,
        audit: bool,
        started: float,
        reason: Reason = Reason.BUSY,
    ) -> None:
        self._worker = worker
        self._runner = worker.runner
        self._admission = admission
        self._reason = reason
        self._limit = worker.limit
        self._anew = 0
        self._restored_cache: DynamicCache | None = None
        self._audit = audit
        self._started = started
        self._tokens: list[int] = prompt.tolist()
        self._prompt = prompt
        self._restored_state: dict[tuple[int, str], torch.Tensor] = {}
        self._bounds: list[int] = []
        self._states: list[int] = []
        self._handed_over: frozenset[int] = frozenset()  # depths at which the prefill hands over a state
        # _exported: the number of tokens whose pages are in the admission's slots
        self._cache, self._exported = self._restore()
        self._restored = self._exported
        self._filled = worker.stream.mark()

    @property
    def admission(self) -> Admission | None:
        """The admission that the controller gave; None if the request runs without the cache."""
        return self._admission

    def run(self, new_tokens: int, stop: frozenset[int]) -> Generation:
        """Compute the prompt and decode up to `new_tokens` tokens; end early after a token in `stop`."""
        chunks = self._worker.chunks(len(self._prompt), self._restored, self._checkpoints())
        self._handed_over = frozenset(chunk.end for chunk in chunks if chunk.checkpoint)
        self._bounds += [chunk.end for chunk in chunks]
        logits = first = self._runner.prefill(
            self._cache, self._prompt, self._restored, tuple(self._bounds), self._hand_over
        )
        computed = self._worker.stream.mark()
        self._worker.stream.synchronize()  # without this, only the queueing of the work would be measured
        ttft = time.perf_counter() - self._started
        prefill_seconds = self._worker.stream.seconds(self._filled, computed)
        self._worker.controller.note_prefill(self._restored, len(self._prompt), prefill_seconds)
        self._decode(logits, new_tokens, stop)
        return Generation(
            prompt_tokens=len(self._prompt),
            tokens=np.array(self._tokens, np.int64),
            first_logits=first,
            restored=self._restored,
            sources=self._admission.sources if self._admission else Sources(),
            reason=self._admission.reason if self._admission else self._reason,
            bounds=tuple(self._bounds),
            states=tuple(self._states),
            restore_seconds=max(0.0, ttft - prefill_seconds),
            ttft_seconds=ttft,
            cache=self._restored_cache or self._cache,
            restored_state=self._restored_state,
            anew=self._anew,
        )

    def _checkpoints(self) -> tuple[int, ...]:
        """Return the depths at which the prefill hands over a state.

        If the rules ask for more states than there are slots, only the deepest depths are returned.
        """
        if self._admission is None:
            return ()
        depths = self._admission.checkpoints
        more = len(depths) - CHECKPOINTS
        if more > 0:
            try:
                self._admission.extend(len(self._prompt), more)
            except PoolFullError:
                return depths[more:]
        return depths

    def _restore(self) -> tuple[DynamicCache, int]:
        """Return the cache from which to continue, and the number of tokens that it holds."""
        while self._admission is not None and (depth := self._settled_depth()):
            pages = self._admission.pages[PoolName.KV][: depth // self._runner.page_size]
            state = self._admission.restored_states.get(PoolName.MAMBA)
            try:
                wait_layer = partial(self._admission.wait_layer, stream=self._worker.stream.handle)
                cache = self._runner.restore(self._worker.tensors, pages, state, wait_layer=wait_layer)
            except TransferError as error:
                _log.warning("a layer could not be loaded: %s", error)
                # The next call of `_settled_depth` waits for the rest of the failed load, and returns the
                # depth that can still be restored.
                self._worker.controller.tick(wait=0.01)
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
        assert self._admission is not None
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            try:
                return self._admission.wait().depth
            except PoolFullError as error:
                if time.monotonic() > deadline or not self._worker.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", len(self._prompt), error)
                    self._admission = None
                    return 0

    def _keep_state(self, cache: DynamicCache) -> None:
        """Copy the restored state for the audit, before the next forward overwrites it.

        The copy takes time. The start of the request is moved by that time, so that the figures of the
        request leave the copy out.
        """
        self._worker.stream.synchronize()
        began = time.perf_counter()
        layout = self._runner.layout
        self._restored_state = {
            (t.layer, t.name): layout.tensor_of(cache, t.layer, t.name)[0].clone()
            for t in layout.state_tensors()
        }
        self._worker.stream.synchronize()
        self._started += time.perf_counter() - began

    def _hand_over(self, depth: int) -> None:
        """Commit the pages up to a checkpoint that the prefill has reached, and the state at the checkpoint.

        Does nothing at the end of another chunk.
        """
        if depth in self._handed_over:
            self._commit(depth, self._snapshot())

    def _decode(self, logits: torch.Tensor, new_tokens: int, stop: frozenset[int]) -> None:
        """Decode greedily, take a snapshot of the state at each page boundary, and commit the newest one.

        Snapshots use two slots of each state pool in turn.
        """
        slots = [self._take() for _ in range(DECODE_SNAPSHOTS)]
        newest: tuple[int, Mapping[PoolName, int]] | None = None
        for count in range(new_tokens):
            token = int(logits.argmax())
            self._tokens.append(token)
            if token in stop or count + 1 == new_tokens:
                break
            if self._limit is not None and len(self._tokens) == self._limit + 1:
                self._commit_end(newest)
                logits = self._compute_anew()
            else:
                logits = self._runner.forward(self._cache, [token], len(self._tokens) - 1)
            self._bounds.append(len(self._tokens))
            # The slots are used in turn. slots[0] is the one for the next snapshot; slots[1] holds the newest
            # one, so that the newest snapshot is never overwritten:
            #
            #     page boundary of the answer     1   2   3   4
            #     slot that takes the snapshot    a   b   a   b
            if len(self._tokens) % self._runner.page_size == 0 and not self._beyond:
                newest = (len(self._tokens), slots[0])
                self._export_state(slots[0])
                slots.reverse()
        if not self._beyond:
            self._commit_end(newest)

    @property
    def _beyond(self) -> bool:
        """Whether the live cache holds more tokens than a stored cache may have."""
        return self._limit is not None and self._runner.layout.length(self._cache) > self._limit

    def _commit_end(self, newest: tuple[int, Mapping[PoolName, int]] | None) -> None:
        """Commit everything that the cache holds, and the newest snapshot if the rules keep it."""
        if self._admission is None:
            return
        # The last token was never fed to the model, so the cache holds one token less than the sequence.
        held = self._runner.layout.length(self._cache)
        if not self._admission.keeps_end:
            newest = None
        self._commit(held, newest[1] if newest else {}, at=newest[0] if newest else 0)

    def _compute_anew(self) -> torch.Tensor:
        """Feed all tokens to an empty cache and return the logits after the last one.

        Beyond the limit, the model may compute other values than those in the cache for the same tokens. With
        an empty cache, the logits are those of a server without a cache.
        """
        self._restored_cache = self._cache if self._audit else None
        self._cache = self._runner.new_cache()
        self._anew = len(self._tokens)
        return self._runner.prefill(self._cache, as_tokens(self._tokens))

    def _snapshot(self) -> Mapping[PoolName, int]:
        slots = self._take()
        self._export_state(slots)
        return slots

    def _take(self) -> Mapping[PoolName, int]:
        """Take one slot of each state pool for a state.

        If too few slots are free, or there is no admission, the result is empty and no state is kept.
        """
        try:
            return self._admission.take_states() if self._admission is not None else {}
        except PoolFullError as error:
            _log.warning("going on without a state: %s", error)
            return {}

    def _export_state(self, slots: Mapping[PoolName, int]) -> None:
        for slot in slots.values():
            self._runner.export_state(self._cache, self._worker.tensors, slot)

    def _commit(self, depth: int, slots: Mapping[PoolName, int], at: int | None = None) -> None:
        """Commit the first `depth` tokens and, if there are `slots`, the state in them.

        The state is at depth `at` (default: `depth`).

        Raises ConfigError if the model or a numeric setting has changed, so that nothing is stored under the
        identity of the model before the change.
        """
        assert self._admission is not None
        self._worker.watch.check()
        # pages   0 .................. first ................ last
        #         |<- already exported ->|<- exported now ->|
        page_size = self._runner.page_size
        first, last = self._exported // page_size, depth // page_size
        if last > first:
            self._runner.export_pages(
                self._cache, self._worker.tensors, first, self._admission.pages[PoolName.KV][first:last]
            )
            self._exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # All work that writes these slots is queued by now. The fence delays the copies to the host until
        # that work is over.
        self._worker.controller.commit(
            self._admission, as_tokens(self._tokens[:depth]), states, fence=self._worker.stream.fence()
        )
        self._states += states
