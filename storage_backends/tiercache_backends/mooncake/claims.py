"""Claims on names: one thread of this process at a time stores or removes an object.

Mooncake does not say which of two puts at once was the first, and a removal takes whatever is there. Between
processes that stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Final


class NameClaims:
    """Names that threads of this process are changing.

    Thread safety: any thread. A thread that has claims asks for no others, so none waits for itself.
    """

    def __init__(self) -> None:
        self._changed: Final = Condition()
        self._held: Final[set[str]] = set()

    @contextmanager
    def some(self, names: Sequence[str], seconds: float) -> Iterator[set[str]]:
        """Claim those of these names that are free, for the `with` block; none if none is for so long."""
        with self._changed:
            self._changed.wait_for(lambda: any(name not in self._held for name in names), seconds)
            mine = {name for name in names if name not in self._held}
            self._held.update(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._held.difference_update(mine)
                self._changed.notify_all()
