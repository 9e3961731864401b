"""Prefill of one prompt: its restore, and the computation of the rest, one chunk at a time."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import Sources, Status
from tiercache.core import PoolName, Reason, TokenArray
from tiercache.errors import PoolFullError, TransferError
from tiercache.index import plan_prefill
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, Commits

if TYPE_CHECKING:
    from tiercache.index import Chunk
    from tiercache.integrations.transformers.requests.scheduler import Parts
    from tiercache.integrations.transformers.stream import Mark

_log = logging.getLogger(__name__)

COPY_SECONDS: Final = 1.0
"""Maximum seconds to wait for free slots.

The slots of the previous request become free when their content has been copied to the host.
"""


class Prefill:
    """Restore of one prompt, and the forward passes up to the prompt's end; `step` runs one of them.

    Times count from `started` (`time.perf_counter` seconds). With `audit`, a copy of the restored state is
    kept.
    """

    def __init__(
        self, parts: Parts, commits: Commits, prompt: TokenArray, audit: bool, started: float
    ) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._audit = audit
        self._started = started
        self._chunks: list[Chunk] = []  # those not yet computed, the next one last
        self._marks: list[tuple[Mark, Mark]] = []  # begin and end of each forward pass
        self.commits = commits
        self.prompt = prompt
        self.tokens: list[int] = prompt.tolist()
        self.cache: DynamicCache | None = None
        """The live cache; None before the first step that computes."""
        self.logits: torch.Tensor | None = None
        """Logits `[vocab]` after the prompt; None until the prefill is over."""
        self.restored = 0
        """Depth up to which the prompt was restored, in tokens."""
        self.sources = Sources()
        self.reason = Reason.NONE
        """The reason of the restore; valid once the prefill is over, as `sources` is."""
        self.restored_state: dict[tuple[int, str], torch.Tensor] = {}
        """Copy of the restored state by (layer, name), for the audit."""
        self.bounds: tuple[int, ...] = ()
        """Depth at the end of each forward pass, in tokens."""
        self.restore_seconds = self.ttft_seconds = 0.0
        """Times as in `Generation`; valid once the prefill is over."""

    def step(self, *, wait: bool = True) -> bool:
        """Compute the next chunk, after the restore if it is the first; return whether a chunk was computed.

        Without `wait`, the result is False while the restore still waits for storage.
        """
        if self.cache is None:
            if not wait and self._is_pending():
                return False
            self._begin()
        assert self.cache is not None
        chunk = self._chunks.pop()
        began = self._parts.stream.mark()
        logits = self._runner.forward(self.cache, self.prompt[chunk.start : chunk.end], chunk.start)
        if chunk.checkpoint:
            slots = self.commits.take()
            self.commits.export_state(self.cache, slots)
            self.commits.commit(self.cache, self.tokens, chunk.end, slots)
        self._marks.append((began, self._parts.stream.mark()))
        if not self._chunks:
            self._finish(logits)
        return True

    def park(self, *, below: bool) -> None:
        """Park what is computed so far; see `Commits.park`. The next step needs a new `cache`."""
        assert self.cache is not None
        held = self._chunks[-1].start
        self.commits.commit(self.cache, self.tokens, held, {})
        self.commits.park(self.cache, self.tokens[:held], {}, below=below)
        self.cache = None

    def _begin(self) -> None:
        """Fill the cache with what is restored, and plan the chunks behind it."""
        self.cache, self.restored = self._restore()
        self.commits.exported = self.restored
        tokens, limit = len(self.prompt), self._parts.chunk_limit
        # A prompt beyond the limit is one chunk, because the model might compute something else with cuts.
        most = tokens if limit is None or self._parts.exceeds_limit(tokens) else limit
        chunks = plan_prefill(tokens, self.restored, most, self._runner.page_size, self._checkpoints())
        self.bounds = tuple(chunk.end for chunk in chunks)
        self._chunks = list(reversed(chunks))

    def _finish(self, logits: torch.Tensor) -> None:
        stream = self._parts.stream
        stream.synchronize()  # without this, only the queueing of the work would be measured
        self.ttft_seconds = time.perf_counter() - self._started
        self.restore_seconds = max(
            0.0, self.ttft_seconds - stream.seconds(self._marks[0][0], self._marks[-1][1])
        )
        # Between two chunks, other requests may have been computed.
        seconds = sum(stream.seconds(began, ended) for began, ended in self._marks)
        self._parts.controller.note_prefill(self.restored, len(self.prompt), seconds)
        self._marks.clear()
        self.sources, self.reason = self.commits.sources, self.commits.reason
        self.logits = logits

    def _checkpoints(self) -> tuple[int, ...]:
        """Return the depths at which the prefill hands over a state.

        If the rules ask for more states than there are slots, only the deepest depths are returned.
        """
        if self.commits.admission is None:
            return ()
        depths = self.commits.admission.checkpoints
        more = len(depths) - CHECKPOINTS
        if more > 0:
            try:
                self.commits.admission.extend(len(self.prompt), more)
            except PoolFullError:
                return depths[more:]
        return depths

    def _is_pending(self) -> bool:
        """Return whether the restore waits for storage."""
        try:
            return (
                self.commits.admission is not None and self.commits.admission.poll().status is Status.PENDING
            )
        except PoolFullError:
            return False  # `_settled_depth` deals with it

    def _restore(self) -> tuple[DynamicCache, int]:
        """Return the cache from which to continue, and the number of tokens that it holds."""
        while self.commits.admission is not None and (depth := self._settled_depth()):
            admission = self.commits.admission
            pages = admission.pages.get(PoolName.KV, ())[: depth // self._runner.page_size]
            state = admission.restored_states or None
            try:
                wait_layer = partial(admission.wait_layer, stream=self._parts.stream.handle)
                cache = self._runner.restore(
                    self._parts.tensors, pages, state, wait_layer=wait_layer, tokens=depth
                )
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
        assert self.commits.admission is not None
        deadline = time.monotonic() + COPY_SECONDS
        while True:
            try:
                return self.commits.admission.wait().depth
            except PoolFullError as error:
                if time.monotonic() > deadline or not self._parts.controller.tick(wait=0.01):
                    _log.warning("computing %d tokens without the cache: %s", len(self.prompt), error)
                    self.commits.give_up()
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
            self.restored_state[t.layer, t.name] = kept
        self._parts.stream.synchronize()
        self._started += time.perf_counter() - began
