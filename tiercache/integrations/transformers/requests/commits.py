"""Admission of one sequence of the reference worker, and its commits to the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from transformers.cache_utils import DynamicCache

from tiercache.controller import Admission, Parked, ResumedAdmission, Sources, Status
from tiercache.core import PoolName, Reason, as_tokens
from tiercache.errors import AdmissionError, ClosedError, PoolFullError
from tiercache.integrations.transformers.device import export_last_page

if TYPE_CHECKING:
    from tiercache.integrations.transformers.requests.scheduler import Scheduler

_log = logging.getLogger(__name__)

DECODE_SNAPSHOTS: Final = 2
"""Number of state slots that decoding uses in turn.

With two, the newest complete snapshot survives while the next one is taken.
"""
PARK_SECONDS: Final = 3600.0
"""Maximum seconds for which a request is parked. After that, it is served from its beginning."""
CHECKPOINTS: Final = 3
"""Number of state slots for the checkpoints of one prefill.

One is for the place where the prompt leaves a known path, one for the last page boundary before the prompt's
end, and one for the end itself if the end is a page boundary. The checkpoint rules may ask for more states.
"""


class Commits:
    """Admission of one sequence, and how much of the sequence is committed.

    Without an admission nothing is kept, and every method does nothing.
    """

    def __init__(
        self, scheduler: Scheduler, admission: Admission | None, reason: Reason = Reason.BUSY
    ) -> None:
        """Begin with nothing committed; `reason` is the reason why there is no admission."""
        self._scheduler, self._parts = scheduler, scheduler.parts
        self._held = admission
        self._reason = reason
        self.admission = admission
        """The admission that the controller gave; None if the sequence runs without the cache."""
        self.exported = 0
        """Number of tokens whose pages are in the admission's slots."""
        self.states: list[int] = []
        """Depths at which states were committed, in tokens."""
        self.parked: Parked | None = None
        """The parked sequence, until it has arrived again."""
        self.parks = 0
        """Number of times that the sequence was parked."""
        self.lost = False
        """Whether a parked sequence could not be brought back."""
        self._arriving: ResumedAdmission | None = None
        self._spare: list[Mapping[PoolName, int]] = []  # state slots that `take` gives out first

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
        if self._spare:
            return self._spare.pop()
        try:
            return self.admission.take_states() if self.admission is not None else {}
        except PoolFullError as error:
            _log.warning("going on without a state: %s", error)
            return {}

    def export_state(self, cache: DynamicCache, slots: Mapping[PoolName, int]) -> None:
        """Copy the state of `cache` into `slots`, which `take` gave."""
        if slots:
            self._parts.runner.export_state(cache, self._parts.tensors, slots)

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
        self._parts.watch.check()
        # pages   0 .................. first ................ last
        #         |<- already exported ->|<- exported now ->|
        page_size = self._parts.runner.page_size
        first, last = self.exported // page_size, depth // page_size
        if last > first and self._parts.runner.layout.has_pages:
            pages = self.admission.pages[PoolName.KV][first:last]
            self._parts.runner.export_pages(cache, self._parts.tensors, first, pages)
            self.exported = last * page_size
        states = {depth if at is None else at: slots} if slots else {}
        # All work that writes these slots is queued by now. The fence delays the copies to the host until
        # that work is over.
        fence = self._parts.stream.fence()
        self._parts.controller.commit(self.admission, as_tokens(tokens[:depth]), states, fence=fence)
        self.states += states

    def reserve(self, tokens: int) -> None:
        """Make sure of page slots for `tokens` tokens. Raises PoolFullError if there are too few."""
        tokens = self._parts.kept(tokens)
        if self.admission is not None and self.admission.slots.pages * self._parts.runner.page_size < tokens:
            self.admission.extend(tokens)

    def park(
        self, cache: DynamicCache, tokens: list[int], slots: Mapping[PoolName, int], *, below: bool
    ) -> None:
        """Give the slots to others; keep pages and state on the host, or with `below` in storage.

        `cache` holds exactly `tokens`, of which all whole pages are committed. `slots` are to take its state;
        without them, slots are taken. Raises PoolFullError or AdmissionError if there is no room; the
        admission is then to be released.
        """
        assert self.admission is not None
        parts, page_size = self._parts, self._parts.runner.page_size
        slots = slots or self.take()
        if parts.runner.layout.state_geometries and not slots:
            raise PoolFullError("there is no slot for the live state of a request that is to be parked")
        if len(tokens) % page_size and parts.runner.layout.has_pages:
            last = int(self.admission.pages[PoolName.KV][len(tokens) // page_size])
            export_last_page(cache, parts.tensors, last)
        self.export_state(cache, slots)
        self.parked = parts.controller.park(
            self.admission, as_tokens(tokens), slots or None,
            ttl=PARK_SECONDS, below=below, fence=parts.stream.fence(),
        )  # fmt: skip
        self.parks += 1
        self._held = self.admission = None
        self._spare.clear()

    def resume(self, tokens: int, states: int) -> None:
        """Begin to bring the parked sequence back, with slots for `tokens` tokens and `states` states.

        Raises PoolFullError, with nothing changed, if there are too few; AdmissionError if it has expired.
        """
        assert self.parked is not None
        states = states if self._parts.runner.layout.state_geometries else 0
        self._held = self._arriving = self._parts.controller.resume(
            self.parked, tokens=self._parts.kept(tokens), states=states
        )

    def arrive(self) -> DynamicCache | None:
        """Return the live cache once the sequence has arrived; None before.

        None and `lost` if it does not come back; it is then to be released.
        """
        admission, parked, parts = self._arriving, self.parked, self._parts
        assert admission is not None
        assert parked is not None
        try:
            if admission.poll().status is Status.PENDING:
                return None
            self.lost = not admission.resumed
        except PoolFullError:
            self.lost = True
        if self.lost:
            return None
        tokens, page_size = len(parked.tokens), parts.runner.page_size
        cache = parts.runner.restore(
            parts.tensors,
            admission.pages.get(PoolName.KV, ())[: -(-tokens // page_size)],
            admission.live_states or None,
            wait_layer=partial(admission.wait_layer, stream=parts.stream.handle),
            tokens=tokens,
        )
        parts.runner.layout.cut(cache, tokens)
        self.exported = tokens // page_size * page_size
        self.admission, self._arriving, self.parked = admission, None, None
        if admission.live_states:
            self._spare.append(admission.live_states)  # the live state is in the cache now
        return cache

    def release(self) -> None:
        """Give the slots back once the device has finished with them, and what is parked.

        A second call does nothing.
        """
        if self.parked is not None and self._arriving is None:
            with suppress(AdmissionError, ClosedError):  # it may have expired
                self.parked.release()
        self.parked = self._arriving = None
        if self._held is not None:
            held, self._held, self.admission = self._held, None, None
            self._scheduler.release(held)
