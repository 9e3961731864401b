"""TTL: units are kept for a time that follows from the pauses of sessions and from the cost of a miss."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tiercache.policy.base import (
    LEARN_EVERY,
    CheckpointKind,
    Column,
    Ending,
    Policy,
    Ranks,
    Reuse,
    Units,
    columns_of,
    last_use,
)
from tiercache.policy.costs import Costs

_TIMES: Final = 2.0 ** (np.arange(48) / 2)
"""Times to live that are considered, in ticks: powers of the square root of 2, up to 12 million."""
_ALIVE: Final = float(2**44)
"""Increase of the rank of a unit whose time has not run out. All ticks are below it."""
_TURNS: Final = 16
"""Number of turns that are told apart; the last stands for all later ones."""
_ROLES: Final = len(CheckpointKind) * 3 * len(Ending)
"""Number of roles: the reasons for a state, each with no, one or more continuations and each `Ending`."""
_ENOUGH: Final = 8.0
"""Weight of pauses from which a class is described by its own pauses."""
_KEPT: Final = 0.95
"""Factor by which earlier observations lose weight every `LEARN_EVERY` requests."""
_OF_SESSIONS: Final = np.isin(
    np.arange(_ROLES) // (3 * len(Ending)), [CheckpointKind.END, CheckpointKind.PROMPT]
)
"""Roles of states of which each request leaves one."""

Table = npt.NDArray[np.float64]


class Ttl(Policy):
    """Policy that first evicts units whose time to live has run out, the least recently used first.

    The time to live of a unit is the time t for which

        chance of a hit within t x cost of a miss / bytes  -  price x expected time until the hit or t

    is highest. The price is what a byte of the cache earns in a tick: the cost that all hits have saved
    lately, divided by bytes and ticks. After the units whose time has run out come the others, the least
    recently used first. Before there are observations, no time runs out.

    Chances are those of the pauses that were seen of units of the same class, misses of evicted units
    included. A class is the reason why the state was taken, the number of continuations, how the request
    ended (see `Ending`), and the turn of the session. A class with fewer than 8 pauses uses those of all
    turns, and these those of all units. A chance also has a factor for whether there will be a hit at all:
    for ends of prompts and requests it is the share of such states of that turn that were hit, for other
    states it is 1.

    Source: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
    Time-to-Live" (arXiv 2511.02230), which keeps the KV of an agent during a tool call for a time that weighs
    the cost of a reload or of computing again against the memory that is held, by the tool's earlier times.
    What differs:

    - It is known at most that a tool was called, not which, so classes stand for the tools.
    - Ticks are the only clock: pauses are counted in the hits and inserts of all sessions, not in seconds.
    - The delay in a queue, which the paper adds to the cost of a miss, is not known. The price of memory is
      ours, because the paper's is a delay of other requests.
    - Nothing is pinned: if all times to live are running, units are evicted all the same. The paper then lets
      the program go that came last. The arrival of a session is not known here.

    Thread safety: as `Policy`.
    """

    name: ClassVar[str] = "ttl"

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._reused: list[Reuse] = []
        self._pauses = np.zeros((_ROLES, _TURNS, len(_TIMES)))
        """Pauses, by role, turn and the shortest of `_TIMES` that is not shorter."""
        self._made = np.zeros(_TURNS)
        """Requests, by turn."""
        self._saved = self._elapsed = 0.0
        """FLOPs that hits saved, and ticks."""
        self._opened = 0
        self._derive()

    def rank(self, units: Units) -> Ranks:
        """Return the tick of the last use, and more for units whose time to live has not run out."""
        age = units.now - last_use(units)
        return np.asarray(_ALIVE * (age <= self.times(units)) + last_use(units), np.float64)

    def times(self, units: Units) -> Ranks:
        """Return the time to live of each unit, in ticks; infinite before there are observations."""
        if self._saved <= 0:
            return np.full(len(units), np.inf)
        nbytes = units.nbytes.sum(dtype=np.float64) * (units.population / len(units))
        price = self._saved / max(self._elapsed, 1.0) / nbytes
        at = _classes(units.checkpoint, units.children, units.ending, units.lineage)
        worth = self._costs.density(units)[:, None] * self._chance[at] - price * self._held[at]
        best = worth.argmax(axis=1)
        return np.where(worth.max(axis=1) > 0, _TIMES[best], 0.0)

    def reused(self, reuse: Reuse) -> None:
        """Record a pause that has ended, for the next `learn`."""
        self._reused.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        """Learn the pauses that have ended since the last call."""
        told = columns_of(self._reused)
        self._reused.clear()
        for sum_ in (self._pauses, self._made):
            sum_ *= _KEPT
        role, turn = _classes(told["checkpoint"], told["children"], told["ending"], told["lineage"])
        place = np.minimum(np.searchsorted(_TIMES, told["age"]), len(_TIMES) - 1)
        np.add.at(self._pauses, (role, turn, place), 1.0)
        # A request that continues another has the next turn. All others begin a session.
        later = np.minimum(turn + 1, _TURNS - 1)[_OF_SESSIONS[role]]
        np.add.at(self._made, later, 1.0)
        self._made[0] += max(0, LEARN_EVERY - len(later))
        end = told["depth"] * live.page_tokens
        saved = self._costs.profile.flops(end - np.minimum(told["replay"] * live.page_tokens, end), end)
        self._saved = _KEPT * self._saved + float(np.sum(np.where(told["evicted"], 0.0, saved)))
        self._elapsed = _KEPT * self._elapsed + max(0, live.now - self._opened)
        self._opened = live.now
        self._derive()

    def _derive(self) -> None:
        """Compute the chance of a hit within each time, and the expected time until the hit or then."""
        own, roles = self._pauses, self._pauses.sum(axis=1, keepdims=True)
        pauses = np.where(_sum(roles) >= _ENOUGH, roles, self._pauses.sum(axis=(0, 1), keepdims=True))
        pauses = np.where(_sum(own) >= _ENOUGH, own, pauses)
        share = np.minimum(own.sum(axis=2) / np.maximum(self._made, 1.0), 1.0)
        # Few observations say little about the share, so one hit is added to what was seen of each turn.
        share = np.where(_OF_SESSIONS[:, None], (share * self._made + 1.0) / (self._made + 1.0), 1.0)
        within = np.cumsum(pauses, axis=2) / np.maximum(_sum(pauses), 1e-9)
        self._chance: Table = share[..., None] * within
        # A unit is held until the hit. Between two times, the chance is that at the earlier one.
        waiting = 1.0 - np.concatenate([np.zeros((_ROLES, _TURNS, 1)), self._chance[..., :-1]], axis=2)
        self._held: Table = np.cumsum(waiting * np.diff(_TIMES, prepend=0.0), axis=2)


def _sum(pauses: Table) -> Table:
    total: Table = pauses.sum(axis=2, keepdims=True)
    return total


def _classes(checkpoint: Column, children: Column, ending: Column, lineage: Column) -> tuple[Column, Column]:
    """Return the role and the turn of each unit."""
    return (checkpoint * 3 + np.minimum(children, 2)) * len(Ending) + ending, np.minimum(lineage, _TURNS - 1)
