"""One request of the reference worker that runs: its prefill, and then its continuations, step by step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tiercache.controller import ParkedStatus
from tiercache.core import Reason, TokenArray
from tiercache.integrations.transformers.draft import Drafting
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS, Commits
from tiercache.integrations.transformers.requests.continuation import Continuation
from tiercache.integrations.transformers.requests.prefill import Prefill
from tiercache.integrations.transformers.requests.request import Generation, Sampling

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.requests.scheduler import Scheduler


class Task:
    """One request that runs; each `step` is one forward pass, or the wait for a restore.

    There is one continuation for each of `samplings`. They share the prompt's pages, and each has a copy of
    the live cache and an admission of its own. Without an admission nothing is restored or committed, and the
    generation's `reason` is the argument `reason`. Times count from `started` (`time.perf_counter` seconds).
    `close` ends a task at any time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
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
        parts = self._parts = scheduler.parts
        self._new_tokens = new_tokens
        self._stop = stop
        self._samplings = samplings
        self._audit = audit
        drafting = Drafting(parts.draft) if parts.draft is not None else None
        self._commits = [Commits(scheduler, admission, reason, drafting=drafting)]
        self._prefill = Prefill(parts, self._commits[0], prompt, audit, started)
        self._continuations: list[Continuation] = []
        self._turn = 0
        self._away = False  # parked, or on the way back

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
        if self._away and not self._arrive():
            return False
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

    @property
    def lost(self) -> bool:
        """Whether the task was parked and cannot be brought back; it is then to be closed."""
        return self._commits[0].lost

    @property
    def parks(self) -> int:
        """Number of times that the task was parked."""
        return self._commits[0].parks

    @property
    def has_slots(self) -> bool:
        """Whether the task has device slots that it could give to others."""
        return self._commits[0].admission is not None

    @property
    def returns(self) -> bool:
        """Whether the task was parked and is being brought back."""
        return self._away

    @property
    def copies(self) -> bool:
        """Whether the task is parked and its slots are still being copied to the host."""
        parked = self._commits[0].parked
        return self._away and parked is not None and parked.status is ParkedStatus.COPYING

    def park(self, *, below: bool) -> bool:
        """Give the slots of a task with one sampling to others; return False if there is nothing to park.

        With `below`, it is kept in storage, and on the host otherwise. Raises PoolFullError or AdmissionError
        if there is no room for it. After an exception, or if the result is False, the task is to be closed.
        """
        assert len(self._samplings) == 1
        if self._commits[0].admission is None:
            return False
        if self._prefill.logits is not None:
            if not self._continuations:
                self._continue()
            self._continuations[0].park(below=below)
        elif self._prefill.cache is not None:
            self._prefill.park(below=below)
        else:
            return False
        self._away = True
        return True

    def resume(self) -> None:
        """Begin to bring a parked task back. Raises as `Commits.resume` does, with nothing changed."""
        if self._continuations:
            self._commits[0].resume(self._continuations[0].length + 1, DECODE_SNAPSHOTS)
        else:
            self._commits[0].resume(len(self._prefill.prompt), CHECKPOINTS + DECODE_SNAPSHOTS)

    def give_up(self) -> None:
        """Commit the answer so far, and go on without the cache."""
        self._continuations[0].give_up()
        self._commits[0].release()

    def _arrive(self) -> bool:
        """Return whether a task that was parked can go on."""
        cache = self._commits[0].arrive()
        if cache is None:
            return False
        if self._continuations:
            self._continuations[0].go_on(cache)
        else:
            self._prefill.cache = cache
        self._away = False
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
                    self._parts, prefill, commits, cache, self._new_tokens, self._stop, sampling,
                    audit=self._audit,
                )
            )  # fmt: skip
        prefill.cache = None
