"""Portfolio of several policies, of which the one that lately saved most ranks the units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Reuse, Units

WINDOW = 100
"""Number of requests after which the members are compared again."""
_KEPT = 0.7
"""Share of a member's earlier score that is kept at each comparison, so that some three windows count."""


class Portfolio(Policy):
    """Policy that ranks as one of its `members` does, while all of them learn.

    The owner of the policy keeps a shadow cache for each member (see `index.Shadow`) and reports by `saved` how much each would have saved.
    The portfolio insures against traffic whose nature changes, at the cost of one shadow per member.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "portfolio"

    def __init__(self, members: Mapping[str, Policy], name: str = "portfolio") -> None:
        if not members:
            raise ConfigError("a portfolio needs at least one policy")
        self.members = dict(members)
        self.label = name
        self.needs_states = any(member.needs_states for member in members.values())  # type: ignore[misc]  # of this portfolio
        self.current = next(iter(self.members))
        self.scores = dict.fromkeys(self.members, 0.0)
        """FLOPs that each member's shadow lately saved; older windows count less."""

    def rank(self, units: Units) -> Ranks:
        """Return the ranks of the current member."""
        return self.members[self.current].rank(units)

    def evicted(self, rank: float) -> None:
        """Report an eviction to the current member only: the rank has a meaning only for the member that gave it."""
        self.members[self.current].evicted(rank)

    def reused(self, reuse: Reuse) -> None:
        """Report a hit or a miss to all members."""
        for member in self.members.values():
            member.reused(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Let all members learn."""
        for member in self.members.values():
            member.learn(live, gone)

    def saved(self, flops: Sequence[float]) -> None:
        """Note the FLOPs that each member's shadow saved in the last window, in the order of `members`, and choose the current member.

        The one with the highest score is chosen; among equal ones, the first.
        """
        for name, value in zip(self.members, flops, strict=True):
            self.scores[name] = _KEPT * self.scores[name] + value
        self.current = max(self.scores, key=lambda name: self.scores[name])
