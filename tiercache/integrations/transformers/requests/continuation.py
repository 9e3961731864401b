"""Continuation of one prompt: decoding, snapshots of the state and commits, one forward pass at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from transformers.cache_utils import DynamicCache

from tiercache.core import PoolName, Reason, as_tokens
from tiercache.integrations.transformers.requests.commits import DECODE_SNAPSHOTS, Commits
from tiercache.integrations.transformers.requests.prefill import Prefill
from tiercache.integrations.transformers.requests.request import Chooser, Generation, Sampling

if TYPE_CHECKING:
    from tiercache.integrations.transformers.parts import Parts


class Continuation:
    """One answer to a prompt, of up to `new_tokens` tokens; it ends early after a token in `stop`.

    It begins when `prefill` is over, and takes over `cache`, the live cache after the prompt.
    """

    def __init__(
        self,
        parts: Parts,
        prefill: Prefill,
        commits: Commits,
        cache: DynamicCache,
        new_tokens: int,
        stop: frozenset[int],
        sampling: Sampling,
        *,
        audit: bool,
    ) -> None:
        assert prefill.logits is not None
        self._runner = parts.runner
        self._prefill = prefill
        self._commits = commits
        self._cache = cache
        self._logits = self._first_logits = prefill.logits
        self._end = len(prefill.prompt) + new_tokens
        self._stop = stop
        self._sampling = sampling
        self._choose = Chooser(sampling)
        self._audit = audit
        # A continuation for which there was no room keeps nothing, although the prompt was restored.
        shares = commits.admission is not None or prefill.commits.admission is None
        self._reason = prefill.reason if shares else commits.reason
        self._limit = parts.limit
        self._anew = 0
        self._restored_cache: DynamicCache | None = None
        self._tokens = list(prefill.tokens)
        self._bounds = list(prefill.bounds)
        self._drafting = commits.drafting
        self._rejected: list[tuple[int, ...]] = [() for _ in self._bounds]
        self._proposed = self._accepted = 0
        # The slots are used in turn. _slots[0] is the one for the next snapshot; _slots[1] holds the newest
        # one, so that the newest snapshot is never overwritten:
        #
        #     page boundary of the answer     1   2   3   4
        #     slot that takes the snapshot    a   b   a   b
        self._slots = [commits.take() for _ in range(DECODE_SNAPSHOTS)]
        self._newest: tuple[int, Mapping[PoolName, int]] | None = None
        self.generation: Generation | None = None
        """The result; None until the answer is complete."""

    def step(self) -> None:
        """Choose the next token, and feed it to the model unless it is the last one.

        With a draft, what it proposes is fed in the same forward pass, and the beginning with which the model
        agrees is taken over. At each page boundary of the answer, a snapshot of the state is taken. Raises
        PoolFullError, with nothing changed, if there is no slot for the page of the next token.
        """
        self._commits.reserve(min(len(self._tokens) + 1, self._end - 1))
        token = self._choose(self._logits)
        self._tokens.append(token)
        if token in self._stop or len(self._tokens) == self._end:
            self._finish()
            return
        if self._limit is not None and len(self._tokens) == self._limit + 1:
            self._commit_end()
            self._commits.release()
            self._compute_anew()
            self._rejected.append(())
        else:
            self._feed()
        self._bounds.append(len(self._tokens))
        if len(self._tokens) % self._runner.page_size == 0 and not self._beyond:
            self._newest = (len(self._tokens), self._slots[0])
            self._commits.export_state(self._cache, self._slots[0])
            self._slots.reverse()

    def _feed(self) -> None:
        """Feed the last token and what the draft proposes behind it; keep what the model would choose, too.

            fed         token   proposed 0   proposed 1   proposed 2
            logits of   row 0   row 1        row 2        row 3

        Proposal n is accepted if the model chooses it by row n, and all before it are accepted. The others
        are cut off both caches. The next token is chosen by the row behind the last accepted one.
        """
        proposed: list[int] = []
        if self._drafting is not None:
            # The last token of an answer is never fed, and a stored cache has no token beyond the limit.
            end = self._end - 1 if self._limit is None else min(self._end - 1, self._limit)
            proposed = self._drafting.propose(self._tokens, end - len(self._tokens), self._stop)
        start, fed = len(self._tokens) - 1, [self._tokens[-1], *proposed]
        rows = self._runner.logits(self._cache, fed, start, keep=len(fed))
        accepted = 0
        while accepted < len(proposed) and self._choose(rows[accepted]) == proposed[accepted]:
            accepted += 1
        self._tokens += proposed[:accepted]
        self._logits = rows[accepted]
        self._proposed += len(proposed)
        self._accepted += accepted
        self._rejected.append(tuple(proposed[accepted:]))
        if accepted < len(proposed):
            self._runner.layout.cut(self._cache, len(self._tokens))
        if self._drafting is not None:
            self._drafting.keep(len(self._tokens))

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the answer so far; the live cache holds all of them."""
        return len(self._tokens)

    def park(self, *, below: bool) -> None:
        """Commit the answer so far, and park it; see `Commits.park`. The live cache is dropped."""
        self._commit_end()
        self._commits.park(self._cache, self._tokens, self._slots[0], below=below)
        self._cache = self._runner.new_cache()
        self._newest = None
        self._slots.clear()

    def go_on(self, cache: DynamicCache) -> None:
        """Go on with the cache of a continuation that was parked."""
        self._cache = cache
        self._slots = [self._commits.take() for _ in range(DECODE_SNAPSHOTS)]

    def give_up(self) -> None:
        """Commit the answer so far, and go on without the cache."""
        self._commit_end()
        self._newest = None
        self._slots = [{}, {}]
        self._commits.give_up()
        self._reason = Reason.BUSY

    @property
    def _beyond(self) -> bool:
        """Whether the live cache holds more tokens than a stored cache may have."""
        return self._limit is not None and self._runner.layout.length(self._cache) > self._limit

    def _finish(self) -> None:
        if not self._beyond:
            self._commit_end()
        first = self._prefill
        self.generation = Generation(
            prompt_tokens=len(first.prompt),
            tokens=np.array(self._tokens, np.int64),
            first_logits=self._first_logits,
            restored=first.restored,
            sources=first.sources,
            reason=self._reason,
            bounds=tuple(self._bounds),
            states=tuple(self._commits.states),
            restore_seconds=first.restore_seconds,
            ttft_seconds=first.ttft_seconds,
            cache=self._restored_cache or self._cache,
            restored_state=first.restored_state,
            anew=self._anew,
            sampling=self._sampling,
            parks=self._commits.parks,
            proposed=self._proposed,
            accepted=self._accepted,
            rejected=tuple(self._rejected) if any(self._rejected) else (),
        )

    def _commit_end(self) -> None:
        """Commit everything that the cache holds, and the newest snapshot if the rules keep it."""
        if self._commits.admission is None:
            return
        # The last token was never fed to the model, so the cache holds one token less than the sequence.
        held = self._runner.layout.length(self._cache)
        at, slots = self._newest or (0, {})
        if not self._commits.admission.keeps_end:
            slots = {}
        self._commits.commit(self._cache, self._tokens, held, slots, at=at)

    def _compute_anew(self) -> None:
        """Feed all tokens to an empty cache.

        Beyond the limit, the model may compute other values than those in the cache for the same tokens. With
        an empty cache, the logits are those of a server without a cache.
        """
        self._restored_cache = self._cache if self._audit else None
        self._cache = self._runner.new_cache()
        self._anew = len(self._tokens)
        self._logits = self._runner.prefill(self._cache, as_tokens(self._tokens))
