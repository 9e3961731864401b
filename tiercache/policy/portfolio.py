"""Portfolio of policies: the member that lately saved most computation ranks the units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Reuse, Units

WINDOW = 100
"""Number of requests between two comparisons of the members."""
_KEPT = 0.7
"""Share of a member's earlier score that each comparison keeps. About the last three windows count."""


class Portfolio(Policy):
    """Policy that ranks as one of its `members` does, while all of them learn.

    The owner of the policy keeps a shadow (a simulated cache without bytes, see `index.Shadow`) for each
    member, and passes to `served` how many FLOPs each shadow has saved. When the kind of traffic changes,
    another member takes over. The cost is one shadow per member.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "portfolio"

    def __init__(self, members: Mapping[str, Policy], name: str = "portfolio") -> None:
        if not members:
            raise ConfigError("a portfolio needs at least one policy")
        self.members = dict(members)
        self.label = name
        # An attribute of the instance, because it depends on the members.
        self.needs_states = any(member.needs_states for member in members.values())  # type: ignore[misc]
        self.current = next(iter(self.members))
        self.scores = dict.fromkeys(self.members, 0.0)
        """FLOPs that each member's shadow saved, with less weight for older windows."""
        self.settled = False
        """Whether the current member stays, so that shadows are not needed any more."""
        self._window: list[Sequence[float]] = []

    def rank(self, units: Units) -> Ranks:
        """Return the ranks of the current member."""
        return self.members[self.current].rank(units)

    def value(self, units: Units) -> Ranks:
        """Return the values of the current member."""
        return self.members[self.current].value(units)

    def chance(self, units: Units, ticks: float) -> Ranks:
        """Return the probabilities of the current member."""
        return self.members[self.current].chance(units, ticks)

    def evicted(self, rank: float) -> None:
        """Report an eviction to the current member only, because that member gave the rank."""
        self.members[self.current].evicted(rank)

    def left(self, queue: int, digest: int, nbytes: int) -> None:
        """Report to the current member only, as `evicted` does."""
        self.members[self.current].left(queue, digest, nbytes)

    def reused(self, reuse: Reuse) -> None:
        """Report a hit or a miss to all members."""
        for member in self.members.values():
            member.reused(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Let all members learn."""
        for member in self.members.values():
            member.learn(live, gone)

    def served(self, flops: Sequence[float]) -> None:
        """Count a request, of which each member's shadow saved this many FLOPs, in the order of `members`.

        Every `WINDOW` requests, the sums are passed to `saved`.
        """
        self._window.append(flops)
        if len(self._window) == WINDOW:
            self.saved([sum(column) for column in zip(*self._window, strict=True)])
            self._window.clear()

    def saved(self, flops: Sequence[float]) -> None:
        """Choose the current member by the FLOPs that each member's shadow saved in the last window.

        `flops` are in the order of `members`. The member with the highest score becomes the current one;
        among equal scores, the first.
        """
        for name, value in zip(self.members, flops, strict=True):
            self.scores[name] = _KEPT * self.scores[name] + value
        self.current = max(self.scores, key=lambda name: self.scores[name])
