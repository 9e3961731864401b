"""Refreshes of the directory, on a thread of their own: no lookup waits for a listing.

    ask    a lookup has missed: the bucket is listed behind it, `refresh` seconds after the last time
    sync   a call that is no lookup waits until what was in the bucket when it began is known

A refresh lists the names of the last minutes, which is one request, and goes on with the sweep that is under
way (`listing`). The first sweep begins when the store is opened, another one after each twelfth refresh.
No refresh begins a request after its deadline: the rest is left to the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from threading import Condition, Thread
from typing import Final

from tiercache_backends.s3.directory.listing import BucketListing, Portion
from tiercache_backends.s3.failures import FailureKind, RequestError
from tiercache_backends.s3.service import BucketClient
from tiercache_backends.s3.settings import S3Settings

_log = logging.getLogger(__name__)

_SWEEP: Final = 12
"""Number of refreshes from the end of a sweep to the next one."""
_PAUSE: Final = 1.0
"""Most seconds from a refresh that failed to the next one."""


class Refresher:
    """Refresher of a directory.

    Thread safety: any thread may call; a thread of its own does the work.
    """

    def __init__(
        self, settings: S3Settings, client: BucketClient, listing: BucketListing, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._client = client
        self._listing = listing
        self._clock = clock
        self._thread = Thread(target=self._work, name="tiercache-s3-refresh", daemon=True)
        self._changed = Condition()  # guards the fields from here on
        self._closing = False
        # Refreshes and sweeps are numbered from 1.
        self._begun = self._ended = self._sweeps_begun = self._sweeps_ended = 0
        self._awaited = self._sweep_awaited = 0
        """The refresh and the sweep for whose ends calls wait."""
        self._since_sweep = 0
        self._more = False
        """Whether the last refresh left new names to the next."""
        self._asked = False
        self._due = -inf
        self._failure: tuple[int, RequestError] | None = None
        """Number of the last refresh, and why it failed; None if it did not fail."""
        self.early = 0
        """Number of objects that were missed before everything in the bucket was listed once."""

    @property
    def is_complete(self) -> bool:
        """Whether everything in the bucket was listed once."""
        return self._sweeps_ended > 0

    def start(self) -> None:
        """Begin the first sweep, and wait for its end, but not beyond a deadline.

        Raises RequestError if the service cannot be asked.
        """
        self._thread.start()
        if not self._await(1, 1):
            _log.warning(
                "%s is still being listed; until that is over, objects in it may be misses", self._settings
            )

    def ask(self, missed: int = 0, *, sweep: bool = False) -> RequestError | None:
        """Cause a refresh behind a call that has missed so many objects; with `sweep`, a sweep as well.

        Returns why the last refresh has failed, if it did.
        """
        with self._changed:
            if not self.is_complete:
                self.early += missed
            if sweep:
                self._since_sweep = _SWEEP
            self._asked = True
            self._changed.notify_all()
            return None if self._failure is None else self._failure[1]

    def sync(self, *, sweep: bool = False) -> None:
        """Wait until what was written before this call is known; with `sweep`, also what was removed.

        Raises RequestError if the service cannot be asked, or the answer takes longer than a deadline.
        """
        self._client.check()
        with self._changed:
            numbers = self._begun + 1, self._sweeps_begun + 1 if sweep else 1
        if not self._await(*numbers):
            raise RequestError(
                FailureKind.UNREACHABLE,
                f"{self._client.where} is still being listed; wait, or raise deadline",
            )

    def close(self) -> None:
        """End the thread, unless it waits for an answer for longer than a deadline."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(self._settings.deadline)

    def _await(self, refresh: int, sweep: int) -> bool:
        """Wait for the ends of a refresh and a sweep; return False if they take longer than a deadline."""

        def ended() -> bool:
            failed = self._failure is not None and self._failure[0] >= refresh
            return failed or (self._ended >= refresh and self._sweeps_ended >= sweep)

        with self._changed:
            self._awaited = max(self._awaited, refresh)
            self._sweep_awaited = max(self._sweep_awaited, sweep)
            self._changed.notify_all()
            if not self._changed.wait_for(ended, self._settings.deadline):
                return False
            if self._failure is not None and self._failure[0] >= refresh:
                raise RequestError(self._failure[1].kind, self._failure[1].text)
            return True

    def _pause(self) -> float:
        """Return the seconds until the next refresh, as it looks now."""
        behind = self._more or self._sweeps_ended < max(1, self._sweep_awaited)
        if self._begun < self._awaited or (behind and self._failure is None):
            return 0.0
        return max(0.0, self._due - self._clock()) if behind or self._asked else inf

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (pause := self._pause()) > 0:
                    self._changed.wait(None if pause == inf else pause)
                if self._closing:
                    return
                self._begun += 1
                self._asked = False
                sweep = self._sweeps_begun > self._sweeps_ended
                if not sweep and (
                    self._since_sweep >= _SWEEP or self._sweeps_ended < max(1, self._sweep_awaited)
                ):
                    self._sweeps_begun += 1
                    sweep = True
            failure = None
            swept = more = False
            try:
                self._client.check()
                portion = Portion(self._client.deadline())
                more = self.is_complete and not self._listing.recent(portion)
                swept = sweep and not portion.is_spent and self._listing.sweep(portion)
            except RequestError as error:
                failure = error
            with self._changed:
                self._ended = self._begun
                self._more = more
                self._since_sweep = 0 if swept else self._since_sweep + 1
                self._sweeps_ended += swept
                self._failure = None if failure is None else (self._begun, failure)
                pause = self._settings.refresh if failure is None else min(_PAUSE, self._settings.refresh)
                self._due = self._clock() + pause
                self._changed.notify_all()
