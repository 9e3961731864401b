"""The tiers of a chain at one time, and their exchange for others while calls go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from tiercache.core import ObjectKey
from tiercache.errors import ClosedError
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache_backends.chain.movement import Deletions, Mover
from tiercache_backends.chain.tier import Tier

CHAIN: Final = "the chain of tiers"


class Lineup:
    """Tiers of a chain at one time, the fastest first, with the mover of each.

    Each operation of the chain is inside the `gate` of the lineup that it began with.

    Thread safety: plain immutable data, and a gate.
    """

    def __init__(self, tiers: Sequence[Tier], movers: Mapping[Tier, Mover], gate: CallGate) -> None:
        self.tiers: Final = tuple(tiers)
        self.movers: Final = movers
        self.gate: Final = gate

    def above(self, tier: Tier) -> Sequence[Tier]:
        """Return the tiers above a tier, the first first; none if it is not in the lineup."""
        return self.tiers[: self.tiers.index(tier)] if tier in self.tiers else ()

    def below(self, tier: Tier) -> Sequence[Tier]:
        """Return the tiers below a tier, the first first; none if it is not in the lineup."""
        return self.tiers[self.tiers.index(tier) + 1 :] if tier in self.tiers else ()

    def readable(self) -> list[Tier]:
        """Return the tiers that are asked."""
        return [tier for tier in self.tiers if tier.is_readable]

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Pass the values of objects on to all tiers that are asked."""
        for tier in self.readable():
            tier.advise(keys, values, worker)


class Lineups:
    """The present lineup of a chain, which `swap` exchanges for another.

    Thread safety: any thread; `swap` and `close` one at a time.
    """

    def __init__(self, tiers: Sequence[Tier], deletions: Deletions, env: Env) -> None:
        self._deletions: Final = deletions
        self._env: Final = env
        self.current = self._lineup(tiers, {})
        """Lineup with which the next operation begins."""
        self.follow()

    @contextmanager
    def bound(self) -> Iterator[Lineup]:
        """Bind an operation to the present lineup during a `with` block."""
        while True:
            lineup = self.current
            try:
                lineup.gate.__enter__()
                break
            except ClosedError:
                # `swap` sets `current` before it closes the gate, so a gate that is closed while its lineup
                # is the present one means that the chain is closed, or that this process was forked.
                if lineup is self.current:
                    raise
        try:
            yield lineup
        finally:
            lineup.gate.__exit__()

    def swap(self, tiers: Sequence[Tier]) -> None:
        """Exchange the tiers; return when no operation is bound to an earlier lineup any more.

        The movers of tiers that left have ended then. Those of new tiers have not begun; see `follow`.
        """
        was = self.current
        self.current = self._lineup(tiers, was.movers)
        was.gate.close()
        for tier in was.tiers:
            if tier not in self.current.tiers:
                was.movers[tier].close()

    def follow(self) -> None:
        """Let movers begin, and look for what the present lineup needs to be copied."""
        for mover in self.current.movers.values():
            mover.follow(self.current.tiers)

    def _lineup(self, tiers: Sequence[Tier], movers: Mapping[Tier, Mover]) -> Lineup:
        own = {tier: movers.get(tier) or self._mover(tier) for tier in tiers}
        return Lineup(tiers, own, CallGate(CHAIN, self._env.getpid))

    def _mover(self, tier: Tier) -> Mover:
        return Mover(tier, partial(self._above, tier), partial(self._below, tier), self._deletions)

    def _above(self, tier: Tier) -> Sequence[Tier]:
        return self.current.above(tier)

    def _below(self, tier: Tier) -> Sequence[Mover]:
        lineup = self.current
        return [lineup.movers[other] for other in lineup.below(tier)]
