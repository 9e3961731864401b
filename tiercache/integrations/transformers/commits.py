"""Admission of one sequence of the reference worker, and its commits to the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from transformers.cache_utils import DynamicCache

from tiercache.controller import Admission, Sources
from tiercache.core import PoolName, Reason, as_tokens
from tiercache.errors import PoolFullError

if TYPE_CHECKING:
    from tiercache.integrations.transformers.worker import Worker

_log = logging.getLogger(__name__)

DECODE_SNAPSHOTS: Final = 2
"""Number of state slots that decoding uses in turn.

With two, the newest complete snapshot survives while the next one is taken.
"""
CHECKPOINTS: Final = 3
"""Number of state slots for the checkpoints of one prefill.

One is for the place where the prompt leaves a known path, one for the last page boundary before the prompt's
end, and one for the end itself if the end is a page boundary. The checkpoint rules may ask for more states.
"""


class Commits:
    """Admission of one sequence, and how much of the sequence is committed.

    Without an admission nothing is kept, and every method does nothing.

    Thread safety: one owner thread.
    """

    def __init__(
        self, worker: Worker, admission: Admission | None, reason: Reason = Reason.BUSY, exported: int = 0
    ) -> None:
        """Begin with `exported` tokens whose pages are in the admission's slots.

        `reason` is the reason why there is no admission.
        """
        self._worker = worker
        self._held = admission
        self._reason = reason
        self.admission = admission
        """The admission that the controller gave; None if the sequence runs without the cache."""
        self.exported = exported
        """Number of tokens whose pages are in the admission's slots."""
        self.states: list[int] = []
        """Depths at which states were committed, in tokens."""

    @property
    def reason(self) -> Reason:
        """The reason of the admission, or why there is none."""
        return self.admission.reason if self.admission else self._reason

    @property
    def sources(self) -> Sources:
        """The tiers from which the sequence was restored."""
        return self.admission.sources if self.admission else Sources()

    def give_up(self) -> None:
        """Go on without the cache. The slots are given back at the end, with `release`."""
        self.admission = None

    def take(self) -> Mapping[PoolName, int]:
        """Take one slot of each state pool for a state.

        If too few slots are free, or there is no admission, the result is empty and no state is kept.
        """
        try:
            return self.admission.take_states() if self.admission is not None else {}
        except PoolFullError as error:
            _log.warning("going on without a state: %s", error)
            return {}

    def export_state(self, cache: DynamicCache, slots: Mapping[PoolName, int]) -> None:
        """Copy the state of `cache` into `slots`, which `take` gave."""
        if slots:
            self._worker.runner.export_state(cache, self._worker.tensors, slots)

    def commit(
        self,
        cache: DynamicCache,
        tokens: list[int],
        depth: int,
        slots: Mapping[PoolName, int],
        at: int | None = None,
    ) -> None:
        """Commit the first `depth` of `tokens` and, if there are `slots`, the state in them.

        The state is at depth `at` (default: `depth`).

        Raises ConfigError if the model or a numeric setting has changed, so that nothing is stored under the
        identity of the model before the change.
        """
        if self.admission is None:
            return
        self._worker.watch.check()
        # pages   0 .................. first ................ last
        #         |<- already exported ->|<- exported now ->|
        page_size = self._worker.runner.page_size
        first, last = self.exported // page_size, depth // page_size
        if last > first and self._worker.runner.layout.has_pages:
            self._worker.runner.export_pages(
                cache, self._worker.tensors, first, self.admission.pages[PoolName.KV][first:last]
            )
            self.exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # All work that writes these slots is queued by now. The fence delays the copies to the host until
        # that work is over.
        self._worker.controller.commit(
            self.admission, as_tokens(tokens[:depth]), states, fence=self._worker.stream.fence()
        )
        self.states += states

    def fork(self, tokens: int) -> Commits:
        """Return what another continuation of the same sequence keeps, with slots for `tokens` tokens.

        It shares the committed pages. If there is no room for it, it keeps nothing.
        """
        admission = self.admission
        if admission is None:
            return Commits(self._worker, None, self._reason)
        tokens = self._worker.kept(tokens)
        states = DECODE_SNAPSHOTS if self._worker.runner.layout.state_geometries else 0
        fork = self._worker.scheduler.await_room(
            lambda: self._worker.controller.fork(admission, tokens=tokens, states=states), tokens
        )
        forked = Commits(self._worker, fork, exported=fork.depth if fork is not None else 0)
        forked.states += self.states
        return forked

    def release(self) -> None:
        """Give the slots back once the device has finished with them; a second call does nothing."""
        if self._held is not None:
            held, self._held, self.admission = self._held, None, None
            self._worker.scheduler.release(held)
