"""One request of the reference worker, from the restore of its prompt to the last commit of its answer."""

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
"""State slots that decoding alternates between, so that the newest complete snapshot survives while the next is taken."""
COPY_SECONDS: Final = 1.0
"""How long a request waits at most for slots that the previous one's copies to the host still hold."""
CHECKPOINTS: Final = 3
"""State slots for one prefill: branch point, prompt end, and a prompt that ends with its page. More are taken where rules ask for more."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of one request.

    `tokens`: prompt and answer; `bounds`: the depth after every forward pass; `states`: depths at which states were committed. `restored`
    is in tokens, times in seconds: `restore_seconds` until the cache was filled, `ttft_seconds` until the first logits `[vocab]` were there
    (on a device: by its own clock, and after waiting for it). `anew` is the bound whose forward pass began with an empty cache, because
    the answer grew beyond what the model's cache is good for; 0 for none.
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
        """The tokens that were generated."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None


class Request:
    """One `serve`: the live cache and what is committed of it. Without an admission nothing is restored or committed, for `reason`."""

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
        """What the controller gave; None once the request goes on without."""
        return self._admission

    def run(self, new_tokens: int, stop: frozenset[int]) -> Generation:
        """Compute the prompt and decode."""
        cuts = self._cuts()
        logits = first = self._runner.prefill(self._cache, self._prompt, self._restored, cuts, self._hand_over)
        self._bounds += [*(c for c in cuts if c < len(self._prompt)), len(self._prompt)]
        computed = self._worker.stream.mark()
        self._worker.stream.synchronize()  # or the time would be that of queueing the work
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
        """Where to cut the prefill; where rules ask for more states than there are slots for, the deepest."""
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
        """The cache to continue from, and how many tokens it holds."""
        while self._admission is not None and (depth := self._settled_depth()):
            pages = self._admission.pages[PoolName.KV][: depth // self._runner.page_size]
            state = self._admission.restored_states.get(PoolName.MAMBA)
            try:
                wait_layer = partial(self._admission.wait_layer, stream=self._worker.stream.handle)
                cache = self._runner.restore(self._worker.tensors, pages, state, wait_layer=wait_layer)
            except TransferError as error:
                _log.warning("a layer could not be loaded: %s", error)
                self._worker.controller.tick(wait=0.01)  # once the load has landed, the next poll names what is still restorable
                continue
            if self._audit:
                self._keep_state(cache)
            return cache, depth
        return self._runner.new_cache(), 0

    def _settled_depth(self) -> int:
        """The depth to restore. After a load that failed there may be too few slots to compute in: without the cache then."""
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
        """Copy the restored state for the audit, out of what the forward will read, and before it writes there; off the clock."""
        self._worker.stream.synchronize()
        began = time.perf_counter()
        layout = self._runner.layout
        self._restored_state = {(t.layer, t.name): layout.tensor_of(cache, t.layer, t.name)[0].clone() for t in layout.state_tensors()}
        self._worker.stream.synchronize()
        self._started += time.perf_counter() - began

    def _hand_over(self, depth: int) -> None:
        """The prefill stands at a checkpoint: commit its pages and its state."""
        if self._admission is not None and depth % self._runner.page_size == 0:
            self._commit(depth, self._snapshot())

    def _decode(self, logits: torch.Tensor, new_tokens: int, stop: frozenset[int]) -> None:
        """Greedy decoding. The state at each page boundary goes to one of two slots in turn; the newest is committed at the end."""
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
        """Does the live cache hold more than what may be kept?"""
        return self._limit is not None and self._runner.layout.length(self._cache) > self._limit

    def _commit_end(self, newest: tuple[int, Mapping[PoolName, int]] | None) -> None:
        """Commit all that the cache holds, with the newest snapshot."""
        if self._admission is None:
            return
        # The last token was never fed, so the cache holds one token less than the sequence.
        held = self._runner.layout.length(self._cache)
        if not self._admission.keeps_end:
            newest = None
        self._commit(held, newest[1] if newest else {}, at=newest[0] if newest else 0)

    def _compute_anew(self) -> torch.Tensor:
        """From here on the model computes otherwise, so all tokens go into an empty cache, as a server without a cache would have it."""
        self._restored_cache = self._cache if self._audit else None
        self._cache = self._runner.new_cache()
        self._anew = len(self._tokens)
        return self._runner.prefill(self._cache, as_tokens(self._tokens))

    def _snapshot(self) -> Mapping[PoolName, int]:
        slots = self._take()
        self._export_state(slots)
        return slots

    def _take(self) -> Mapping[PoolName, int]:
        """A slot for a state; none where they are short, and then there is no state at that depth."""
        try:
            return self._admission.take_states() if self._admission is not None else {}
        except PoolFullError as error:
            _log.warning("going on without a state: %s", error)
            return {}

    def _export_state(self, slots: Mapping[PoolName, int]) -> None:
        for slot in slots.values():
            self._runner.export_state(self._cache, self._worker.tensors, slot)

    def _commit(self, depth: int, slots: Mapping[PoolName, int], at: int | None = None) -> None:
        """Commit the first `depth` tokens, with a state at `at` (default: at `depth`) where there is one.

        ConfigError if the model is no longer the one whose identity this would be stored under.
        """
        assert self._admission is not None
        self._worker.watch.check()
        page_size = self._runner.page_size
        first, last = self._exported // page_size, depth // page_size
        if last > first:
            self._runner.export_pages(self._cache, self._worker.tensors, first, self._admission.pages[PoolName.KV][first:last])
            self._exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # Everything that writes these slots is queued by now; copies to the host begin behind it.
        self._worker.controller.commit(self._admission, as_tokens(self._tokens[:depth]), states, fence=self._worker.stream.fence())
        self._states += states
