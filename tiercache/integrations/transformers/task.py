"""One request of the reference worker that runs: its prefill, and then its continuation, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.core import Reason, TokenArray
from tiercache.integrations.transformers.commits import Commits
from tiercache.integrations.transformers.continuation import Continuation
from tiercache.integrations.transformers.generation import Generation
from tiercache.integrations.transformers.prefill import Prefill

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.worker import Worker


class Task:
    """One request that runs; each `step` is one forward pass, or the wait for a restore.

    Without an admission nothing is restored or committed, and the generation's `reason` is the argument
    `reason`. Times count from `started` (`time.perf_counter` seconds). `close` ends a task at any time.

    Thread safety: one owner thread.
    """

    def __init__(
        self,
        worker: Worker,
        admission: Admission | None,
        prompt: TokenArray,
        new_tokens: int,
        stop: frozenset[int],
        *,
        audit: bool,
        started: float,
        reason: Reason = Reason.BUSY,
    ) -> None:
        self._worker = worker
        self._new_tokens = new_tokens
        self._stop = stop
        self._audit = audit
        self._commits = Commits(worker, admission, reason)
        self._prefill = Prefill(worker, self._commits, prompt, audit, started)
        self._continuation: Continuation | None = None

    @property
    def generation(self) -> Generation | None:
        """The result; None until the task is over."""
        return self._continuation.generation if self._continuation else None

    def run(self) -> Generation:
        """Step to the end, and return the result."""
        while self.generation is None:
            self.step()
        return self.generation

    def step(self, *, wait: bool = True) -> bool:
        """Run one forward pass; without `wait`, return False while the restore waits for storage.

        Raises what the forward pass or a commit raises; the task is then to be closed.
        """
        if self._prefill.logits is None:
            return self._prefill.step(wait=wait)
        if self._continuation is None:
            assert self._prefill.cache is not None
            self._continuation = Continuation(
                self._worker, self._prefill, self._commits, self._prefill.cache, self._new_tokens,
                self._stop, audit=self._audit,
            )  # fmt: skip
        self._continuation.step()
        return True

    def close(self) -> None:
        """Release what the task holds; a second call does nothing."""
        self._commits.release()
