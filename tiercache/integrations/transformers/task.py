"""One request of the reference worker that runs: its prefill, and then its continuations, step by step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tiercache.core import Reason, TokenArray
from tiercache.integrations.transformers.commits import Commits
from tiercache.integrations.transformers.continuation import Continuation
from tiercache.integrations.transformers.generation import Generation
from tiercache.integrations.transformers.prefill import Prefill
from tiercache.integrations.transformers.sampling import Sampling

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.worker import Worker


class Task:
    """One request that runs; each `step` is one forward pass, or the wait for a restore.

    There is one continuation for each of `samplings`. They share the prompt's pages, and each has a copy of
    the live cache and an admission of its own. Without an admission nothing is restored or committed, and the
    generation's `reason` is the argument `reason`. Times count from `started` (`time.perf_counter` seconds).
    `close` ends a task at any time.

    Thread safety: one owner thread.
    """

    def __init__(
        self,
        worker: Worker,
        admission: Admission | None,
        prompt: TokenArray,
        new_tokens: int,
        stop: frozenset[int],
        samplings: Sequence[Sampling],
        *,
        audit: bool,
        started: float,
        reason: Reason = Reason.BUSY,
    ) -> None:
        self._worker = worker
        self._new_tokens = new_tokens
        self._stop = stop
        self._samplings = samplings
        self._audit = audit
        self._commits = [Commits(worker, admission, reason)]
        self._prefill = Prefill(worker, self._commits[0], prompt, audit, started)
        self._continuations: list[Continuation] = []
        self._turn = 0

    @property
    def generations(self) -> tuple[Generation, ...]:
        """One result for each sampling, in their order; empty until the task is over."""
        found = tuple(one.generation for one in self._continuations if one.generation is not None)
        return found if len(found) == len(self._samplings) else ()

    def run(self) -> tuple[Generation, ...]:
        """Step to the end, and return the results."""
        while not self.generations:
            self.step()
        return self.generations

    def step(self, *, wait: bool = True) -> bool:
        """Run one forward pass; without `wait`, return False while the restore waits for storage.

        The continuations have turns. Raises what the forward pass or a commit raises; the task is then to be
        closed.
        """
        if self._prefill.logits is None:
            return self._prefill.step(wait=wait)
        if not self._continuations:
            self._continue()
        while self._continuations[self._turn].generation is not None:
            self._turn = (self._turn + 1) % len(self._continuations)
        one = self._continuations[self._turn]
        one.step()
        if one.generation is not None:
            self._commits[self._turn].release()
        self._turn = (self._turn + 1) % len(self._continuations)
        return True

    def close(self) -> None:
        """Release what the task holds; a second call does nothing."""
        for one in self._commits:
            one.release()

    def _continue(self) -> None:
        """Begin the continuations. The first one takes over the prefill's admission and live cache."""
        prefill, first = self._prefill, self._commits[0]
        assert prefill.cache is not None
        more = len(self._samplings) - 1
        if more:
            # A fork shares the pages that are committed.
            first.commit(prefill.cache, prefill.tokens, len(prefill.prompt), {})
        tokens = len(prefill.prompt) + self._new_tokens
        self._commits += [first.fork(tokens) for _ in range(more)]
        with torch.inference_mode():
            caches = [prefill.cache, *(copy.deepcopy(prefill.cache) for _ in range(more))]
        for commits, cache, sampling in zip(self._commits, caches, self._samplings, strict=True):
            self._continuations.append(
                Continuation(
                    self._worker, prefill, commits, cache, self._new_tokens, self._stop, sampling,
                    audit=self._audit,
                )
            )  # fmt: skip
        prefill.cache = None
