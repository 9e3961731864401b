"""The hit rate and the saved time, as every document, table and page of a daemon gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self


@dataclass(slots=True)
class Hits:
    """Prompt tokens that clients asked a store for, and those that they got from it.

    A store sees objects. A page of KV stands for as many tokens as the record of its namespace says, once for
    all ranks. To look up is to ask, and only what is read is a hit.
    """

    asked_tokens: int = 0
    """Tokens of pages that clients looked up."""
    restored_tokens: int = 0
    """Tokens of pages that clients read."""
    unsized_objects: int = 0
    """Objects that were looked up, and of which it is not known for how many tokens they stand."""
    timed_tokens: int = 0
    """Restored tokens of which it is known how long their prefill takes."""
    prefill_seconds: float = 0.0
    """Time that the prefill of these would have taken."""
    read_seconds: float = 0.0
    """Time that the store took to read these."""

    def __sub__(self, before: Hits) -> Self:
        """Return what was counted since `before`."""
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, name) - getattr(before, name) for name in names))

    @classmethod
    def total(cls, several: Iterable[Hits]) -> Self:
        """Return the sum of several."""
        found = list(several)
        return cls(*(sum(getattr(one, field.name) for one in found) for field in fields(cls)))

    @classmethod
    def rated(cls, tenants: Iterable[Hits]) -> Self:
        """Return the sum of the tenants whose rate can be known; of all if it is that of none.

        Otherwise one lookup of a key that nobody can know would leave all of them without a rate.
        """
        several = list(tenants)
        return cls.total([one for one in several if not one.unsized_objects] or several)

    @property
    def token_hit_rate(self) -> float | None:
        """Restored prompt tokens / prompt tokens asked for, at most 1; None if that is not known.

        At the begin of an interval, tokens are read that were looked up before it.
        """
        return None if self.why_no_rate else min(1.0, self.restored_tokens / self.asked_tokens)

    @property
    def why_no_rate(self) -> str:
        """Reason why there is no hit rate; empty if there is one."""
        if self.unsized_objects:
            return (
                f"{self.unsized_objects:,} objects were looked up whose tokens are not known: no record says"
                " their page size, or they are states of a model without pages"
            )
        if self.restored_tokens > 2 * self.asked_tokens:
            return "clients read pages that they had not looked up"
        return "" if self.asked_tokens else "no prompt was looked up"

    @property
    def saved_seconds(self) -> float | None:
        """Time that the prefill of the restored tokens would have taken, less that of their reads.

        Of tokens whose prefill has no known speed, nothing is counted. None if there are no others.
        """
        return self.prefill_seconds - self.read_seconds if self.timed_tokens else None

    @property
    def why_not_saved(self) -> str:
        """Reason why not all restored tokens count in `saved_seconds`; empty if they do."""
        left = round(self.restored_tokens - self.timed_tokens)
        if not self.restored_tokens:
            return "nothing was restored"
        if not left:
            return ""
        return f"no worker has registered how long the prefill of {left:,} of the tokens takes"
