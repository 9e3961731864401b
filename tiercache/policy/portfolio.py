"""Several policies, of which the one that lately saved most ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Ranks, Reuse, Units

WINDOW = 100
"""Requests after which the members are compared again."""
_KEPT = 0.7
"""Of what a member saved before, at each comparison: some three windows count."""


class Portfolio(Policy):
    """Ranks as one of `members` does; all of them learn. Who owns the policy keeps a shadow cache for each member (see `index.Shadow`) and
    tells by `saved` what each would have saved.

    Insurance for traffic whose nature changes, at the price of as many shadows. Thread safety: as `Policy`.
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
        """What each member's shadow lately saved, in FLOPs; older windows count less."""

    def rank(self, units: Units) -> Ranks:
        """What the current member says."""
        return self.members[self.current].rank(units)

    def evicted(self, rank: float) -> None:
        """Only the member that ranked it can make something of it."""
        self.members[self.current].evicted(rank)

    def reused(self, reuse: Reuse) -> None:
        """For all members."""
        for member in self.members.values():
            member.reused(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """For all members."""
        for member in self.members.values():
            member.learn(live, gone)

    def saved(self, flops: Sequence[float]) -> None:
        """What each member's shadow saved in the last window, in the order of `members`; equal ones go to the first."""
        for name, value in zip(self.members, flops, strict=True):
            self.scores[name] = _KEPT * self.scores[name] + value
        self.current = max(self.scores, key=lambda name: self.scores[name])
