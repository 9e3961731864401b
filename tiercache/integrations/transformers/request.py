"""Serves one request of the reference worker, from the restore of its prompt to the last commit of its answer."""

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
"""State slots between which decoding alternates, so that the newest complete snapshot survives while the next is taken."""
COPY_SECONDS: Final = 1.0
"""Seconds that a request waits at most for slots that copies of the previous request to the host still hold."""
CHECKPOINTS: Final = 3
"""State slots for one prefill: branch point, prompt end, and a prompt that ends on a page boundary. Rules may ask for more."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request.

    `tokens` are prompt and answer; `bounds` is the depth after every forward pass; `states` are the depths at which states were committed.
    Depths and `restored` are in tokens. Times are in seconds: `restore_seconds` until the cache was filled, `ttft_seconds` until the first
    logits `[vocab]` were there (on a device: by its own clock, and after waiting for it). `anew` is the bound whose forward pass began with
    an empty cache, because the answer grew beyond the worker's limit; 0 if there was none.
    """

    prompt_tokens: int
    tokens: npt.NDArray[np.int64]
    first_logits: torch.Tensor
    restored: int
    sources: Sources
    reason: Reason
    bounds: tuple[int, ...]
    states: tuple[int, ...]
    restore_seconds: float
    ttft_seconds: float
    cache: DynamicCache = field(repr=False)
    restored_state: Mapping[tuple[int, str], torch.Tensor] = field(repr=False, default_factory=dict)
    anew: int = 0

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None


class Request:
    """One call of `Worker.serve`: the live cache and what has been committed of it.

    Without an admission nothing is restored or committed; `reason` says why. Times count from `started` (`time.perf_counter` seconds).

    Thread safety: one owner thread.
    """

    def __init__(
        self, worker: Worker, admission: Admission | None, prompt: TokenArray, audit: bool, started: float, reason: Reason = Reason.BUSY
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
        self._cache, self._exported = self._restore()
        self._restored = self._exported
        self._filled = worker.stream.mark()

    @property
    def admission(self) -> Admission | None:
        """The admission that the controller gave; None once the request continues without the cache."""
        return self._admission

    def run(self, new_tokens: int, stop: frozenset[int]) -> Generation:
        """Compute the prompt and decode up to `new_tokens` tokens; end early after a token of `stop`."""
        cuts = self._cuts()
        logits = first = self._runner.prefill(self._cache, self._prompt, self._restored, cuts, self._hand_over)
        self._bounds += [*(c for c in cuts if c < len(self._prompt)), len(self._prompt)]
        computed = self._worker.stream.mark()
        self._worker.stream.synchronize()  # without this, the time would be that of queueing the work
        ttft = time.perf_counter() - self._started
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
            restore_seconds=max(0.0, ttft - self._worker.stream.seconds(self._filled, computed)),
            ttft_seconds=ttft,
            cache=self._restored_cache or self._cache,
            restored_state=self._restored_state,
            anew=self._anew,
        )

    def _cuts(self) -> tuple[int, ...]:
        """Return the depths at which to cut the prefill; only the deepest ones if rules ask for more states than there are slots."""
        if self._admission is None:
            return ()
        cuts = self._admission.checkpoints
        more = len(cuts) - CHECKPOINTS
        if more > 0:
            try:
                self._admission.extend(len(self._prompt), more)
            except PoolFullError:
                return cuts[more:]
        return cuts

    def _restore(self) -> tuple[DynamicCache, int]:
        """Return the cache to continue from, and how many tokens it holds."""
        while self._admission is not None and (depth := self._settled_depth()):
            pages = self._admission.pages[PoolName.KV][: depth // self._runner.page_size]
            state = self._admission.restored_states.get(PoolName.MAMBA)
            try:
                wait_layer = partial(self._admission.wait_layer, stream=self._worker.stream.handle)
                cache = self._runner.restore(self._worker.tensors, pages, state, wait_layer=wait_layer)
            except TransferError as error:
                _log.warning("a layer could not be loaded: %s", error)
                self._worker.controller.tick(wait=0.01)  # once the load has ended, the next poll tells what can still be restored
                continue
            if self._audit:
                self._keep_state(cache)
            return cache, depth
        return self._runner.new_cache(), 0

    def _settled_depth(self) -> int:
        """Wait for the admission and return the depth to restore, in tokens.

        After a failed load there may be too few slots to compute in; then the request continues without the cache, and 0 is returned.
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
        """Copy the restored state for the audit from the tensors that the next forward reads, before that forward writes to them.

        The time of the copy is taken off the measured time.
        """
        self._worker.stream.synchronize()
        began = time.perf_counter()
        layout = self._runner.layout
        self._restored_state = {(t.layer, t.name): layout.tensor_of(cache, t.layer, t.name)[0].clone() for t in layout.state_tensors()}
        self._worker.stream.synchronize()
        self._started += time.perf_counter() - began

    def _hand_over(self, depth: int) -> None:
        """Commit pages and a state of the prefill, which has reached a checkpoint; nothing if `depth` is not on a page boundary."""
        if self._admission is not None and depth % self._runner.page_size == 0:
            self._commit(depth, self._snapshot())

    def _decode(self, logits: torch.Tensor, new_tokens: int, stop: frozenset[int]) -> None:
        """Decode greedily; save the state at each page boundary to one of two slots in turn, and commit the newest at the end."""
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
            if len(self._tokens) % self._runner.page_size == 0 and not self._beyond:
                newest = (len(self._tokens), slots[0])
                self._export_state(slots[0])
                slots.reverse()
        if not self._beyond:
            self._commit_end(newest)

    @property
    def _beyond(self) -> bool:
        """Whether the live cache holds more tokens than may be kept."""
        return self._limit is not None and self._runner.layout.length(self._cache) > self._limit

    def _commit_end(self, newest: tuple[int, Mapping[PoolName, int]] | None) -> None:
        """Commit everything that the cache holds, with the newest snapshot, if there is one and the rules keep it."""
        if self._admission is None:
            return
        # The last token was never fed, so the cache holds one token less than the sequence.
        held = self._runner.layout.length(self._cache)
        if not self._admission.keeps_end:
            newest = None
        self._commit(held, newest[1] if newest else {}, at=newest[0] if newest else 0)

    def _compute_anew(self) -> torch.Tensor:
        """Feed all tokens to an empty cache and return the logits after the last one.

        Beyond the limit the model may compute cached values differently, so this gives what a server without a cache would compute.
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
        """Take a slot per state pool for one state; return none if slots are short, so that there is no state at that depth."""
        try:
            return self._admission.take_states() if self._admission is not None else {}
        except PoolFullError as error:
            _log.warning("going on without a state: %s", error)
            return {}

    def _export_state(self, slots: Mapping[PoolName, int]) -> None:
        for slot in slots.values():
            self._runner.export_state(self._cache, self._worker.tensors, slot)

    def _commit(self, depth: int, slots: Mapping[PoolName, int], at: int | None = None) -> None:
        """Commit the first `depth` tokens and, if there are `slots`, the state in them at depth `at` (default: `depth`).

        Raises ConfigError if the model is no longer the one under whose identity this would be stored.
        """
        assert self._admission is not None
        self._worker.watch.check()
        page_size = self._runner.page_size
        first, last = self._exported // page_size, depth // page_size
        if last > first:
            self._runner.export_pages(self._cache, self._worker.tensors, first, self._admission.pages[PoolName.KV][first:last])
            self._exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # All work that writes these slots is queued by now; the fence makes copies to the host begin after it.
        self._worker.controller.commit(self._admission, as_tokens(self._tokens[:depth]), states, fence=self._worker.stream.fence())
        self._states += states
