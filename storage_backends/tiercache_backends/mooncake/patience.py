"""How long one call of the store waits for Mooncake: a deadline since all it had asked for was answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tiercache.core import Outcome
from tiercache_backends.mooncake.library import outcome_of


class Patience:
    """Time that one call of the store has left.

    It makes calls of Mooncake one after the other, and waits for memory, threads and claims in between. As
    long as Mooncake answers, each answer gives it another deadline. In an outage it ends one deadline after
    the last answer, however many calls it would have made.

    Thread safety: one thread.
    """

    def __init__(self, deadline: float) -> None:
        """Begin with `deadline` seconds."""
        self._deadline: Final = deadline
        self._until = time.monotonic() + deadline

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    def answered(self, codes: Sequence[int]) -> None:
        """Begin anew if these codes of a call say that all of Mooncake could be reached."""
        if all(code >= 0 or outcome_of(code) is not Outcome.UNAVAILABLE for code in codes):
            self._until = time.monotonic() + self._deadline

    def end(self) -> None:
        """Note that Mooncake is out of reach: nothing is left."""
        self._until = 0.0
