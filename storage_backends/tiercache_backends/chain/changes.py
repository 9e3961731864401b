"""Changes of a chain while it serves: it is given the list of tiers that it should have, and gets there.

A list is checked first, and its new tiers are opened. Then the tiers are exchanged in one step, and what has
left is closed at last. Until that step a change that fails leaves the chain as it was. Tiers that are not in
the list leave afterwards, in the background:

    1. `leaving` is set                         no operation begins to write to the tier
    2. the tiers are swapped                    operations that might still write to it have ended
    3. `Leaving.copy` scans the tier            what no other tier has is copied; again until that succeeds
    4. the tiers without it are swapped in      operations that read it have ended
    5. it is closed

Another list may come at any time. A tier that is leaving takes objects again if it is in that list.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Final

from tiercache.config.urls import section_of
from tiercache.errors import ClosedError, ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.storage.base import Capabilities
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import capabilities_of, open_backend
from tiercache.storage.shares import Shares
from tiercache.storage.tiers import LEAVING, PREFIX, STUCK, TierChange, free_name
from tiercache_backends.chain.leaving import Leaving
from tiercache_backends.chain.lineup import CHAIN, Lineups
from tiercache_backends.chain.movement import Deletions
from tiercache_backends.chain.settings import TierSettings, check_together, is_live_change, parse_tiers
from tiercache_backends.chain.shares import ChainShares
from tiercache_backends.chain.tier import Tier, check_stores

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 10.0
"""Seconds after which a tier that could not leave tries again."""


def tier_of(settings: TierSettings, env: Env) -> Tier:
    """Return the tier that settings describe; it is not open yet."""
    section = settings.section
    return Tier(settings, partial(open_backend, section, env=env), capabilities_of(section), env)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Difference between the tiers of a chain and the list that it was given."""

    wanted: Sequence[tuple[TierSettings, Tier | None]]
    """Settings of each tier, in order, and the tier of the chain that they mean; None for a new one."""
    leaving: Sequence[Tier]
    dropped: Sequence[Tier]

    @property
    def set_anew(self) -> list[tuple[Tier, TierSettings]]:
        """Tiers of the chain that take other settings."""
        return [(tier, to) for to, tier in self.wanted if tier is not None and to != tier.settings]

    def in_words(self, tiers: Sequence[Tier]) -> list[str]:
        """Return the difference to a chain of these tiers."""
        kept = [tier for _, tier in self.wanted if tier is not None]
        found = [f"tier {to.name} joins" for to, tier in self.wanted if tier is None]
        found += [f"tier {tier.name} stays" for tier in kept if tier.leaving]
        found += [f"tier {tier.name} leaves" for tier in self.leaving if not tier.leaving]
        found += [f"tier {tier.name} is dropped" for tier in self.dropped]
        found += [f"tier {to.name} has other settings" for _, to in self.set_anew]
        in_order = kept == [tier for tier in tiers if tier in kept]
        return found if in_order else [*found, "the order of the tiers"]

    def in_order(self, tiers: Mapping[str, Tier], before: Sequence[Tier]) -> list[Tier]:
        """Return the tiers with these names, in order, and those that leave where they were `before`.

        So the objects of a tier that leaves go to the one that takes its place.
        """
        found = [tiers[settings.name] for settings, _ in self.wanted]
        for at, tier in enumerate(before):
            if tier in self.leaving:
                found.insert(at, tier)
        return found


class Changes:
    """Changes of a chain's tiers, one at a time; the next one waits.

    `promised`: capabilities that the chain had when it was opened.

    Thread safety: any thread.
    """

    def __init__(
        self, lineups: Lineups, deletions: Deletions, promised: Capabilities, shares: ChainShares, env: Env
    ) -> None:
        self._lineups: Final = lineups
        self._deletions: Final = deletions
        self._promised: Final = promised
        self._shares: Final = shares
        self._env: Final = env
        self._gate: Final = CallGate(CHAIN, env.getpid)
        self._lock: Final = Lock()  # held during a change
        self._step: Final = Lock()  # held while a tier that is empty is taken out, or shares change
        self._leavers = Thread()
        """Thread on which tiers leave."""
        self._stop = Event()
        """Set to end that thread."""
        self._gone: Future[None] = Future()
        """Future that is done when no tier of the last list leaves any more."""
        self._gone.set_result(None)

    def close(self) -> bool:
        """Refuse changes, wait for the one under way, and stop tiers that leave; True to the first caller."""
        if not self._gate.close():
            return False
        self._pause()
        self._disappoint("was closed")
        return True

    def share(self, shares: Shares) -> None:
        """Keep these shares; see `TierChain.share`."""
        with self._gate, self._lock, self._step:
            self._shares.share(shares, self._lineups.current.tiers)

    def retier(self, specs: Any, drop: Collection[str], shares: Shares | None) -> TierChange:
        """Change to another list of tiers; see `StorageBackend.retier`."""
        with self._gate, self._lock:
            self._pause()
            try:
                plan = self._plan(specs, drop)
                if what := plan.in_words(self._lineups.current.tiers):
                    self._change(plan, shares or self._shares.current)
                    self._disappoint("was given another list")
                    self._gone = Future()
                    self._gone.set_running_or_notify_cancel()
                elif shares is not None:
                    self._shares.share(shares, self._lineups.current.tiers)
            finally:
                self._go_on()
            return TierChange(what, self._gone)

    def _disappoint(self, why: str) -> None:
        """End the wait for tiers that were to leave."""
        if not self._gone.done():
            self._gone.set_exception(RefusedError(f"the chain {why} before all tiers that leave were empty"))

    # --- the difference
    # --------------------------------------------------------------------------------------------------------

    def _plan(self, specs: Any, drop: Collection[str]) -> _Plan:
        """Check a list, as far as nothing has to be opened for it; raises ConfigError or StorageError."""
        tiers = self._lineups.current.tiers
        listed = check_stores(parse_tiers(specs), self._env)
        wanted: list[tuple[TierSettings, Tier | None]] = []
        for spec, settings in zip(specs, listed, strict=True):
            tier = _same(settings, tiers)
            if f"{PREFIX}name" not in (section_of(spec) if isinstance(spec, str) else spec):
                taken = [*(other.name for other in tiers), *(one.name for one, _ in wanted)]
                name = free_name(str(settings.section["type"]), taken) if tier is None else tier.name
                settings = replace(settings, name=name)
            wanted.append((settings, tier))
        check_together([settings for settings, _ in wanted])
        kept = [tier for _, tier in wanted if tier is not None]
        out = [tier for tier in tiers if tier not in kept]
        for name in drop:
            if name not in [tier.name for tier in out]:
                why = "is in the list" if name in [tier.name for tier in kept] else "is not there"
                raise ConfigError(f"tier {name!r} cannot be dropped, because it {why}")
        plan = _Plan(
            wanted,
            [tier for tier in out if tier.name not in drop],
            [tier for tier in out if tier.name in drop],
        )
        self._check(plan)
        return plan

    def _check(self, plan: _Plan) -> None:
        for settings, tier in plan.wanted:
            for other in self._lineups.current.tiers:
                if other.name == settings.name and other is not tier and other not in plan.dropped:
                    raise ConfigError(
                        f"the name {other.name!r} is taken until that tier, which is elsewhere, has left;"
                        " give the new tier another tier_name"
                    )
        for tier, to in plan.set_anew:
            if not is_live_change(tier.settings, to):
                raise ConfigError(
                    f"tier {tier.name!r} would have to be opened again with these settings; restart, or add a"
                    " new tier with another tier_name at another place, which is filled from this one"
                )
        for tier in plan.leaving:
            if not tier.leaving and not (tier.is_readable and tier.capabilities.listed):
                why = f"is left out ({tier.why})" if tier.capabilities.listed else "cannot list its objects"
                raise UnavailableError(
                    f"tier {tier.name!r} {why}, so what only it has cannot be copied; keep it in the list, or"
                    " drop it with what only it has"
                )

    # --- the change
    # --------------------------------------------------------------------------------------------------------

    def _change(self, plan: _Plan, shares: Shares | None) -> None:
        before = self._lineups.current.tiers
        made = self._open([settings for settings, tier in plan.wanted if tier is None])
        kept = {to.name: tier for to, tier in plan.wanted if tier is not None}
        tiers = plan.in_order({**kept, **{tier.name: tier for tier in made}}, before)
        configured = [(tier, tier.settings) for tier, _ in plan.set_anew]
        try:
            for tier, to in plan.set_anew:
                tier.configure(to)
            self._shares.check(shares, [tier for tier in tiers if tier not in plan.leaving])
            if shares is not None:
                self._shares.share(shares, tiers)
        except BaseException:  # whatever it is, it is raised again
            for tier, was in configured:
                tier.configure(was)
            for tier in made:
                tier.close()
            self._shares.follow(before)
            self._lineups.follow()
            raise
        for _, known in plan.wanted:
            if known is not None:
                known.leaving = ""
        for tier in plan.leaving:
            tier.leaving = tier.leaving or LEAVING
        self._exchange(tiers, plan.dropped)
        for tier in made:
            _introduce(tier, before)
        self._lineups.follow()

    def _open(self, listed: Sequence[TierSettings]) -> list[Tier]:
        """Open new tiers at the same time; if one cannot be used, none stays open, and it is raised why."""
        made = [tier_of(settings, self._env) for settings in listed]
        try:
            for opened in [tier.begin_open() for tier in made]:
                opened()
            for tier in made:
                if not tier.is_readable:
                    raise StorageError(
                        f"tier {tier.name!r} cannot be opened, so the chain is as before: {tier.why}"
                    )
                self._check_promises(tier)
        except BaseException:  # whatever it is, it is raised again
            for tier in made:
                tier.close()
            raise
        return made

    def _check_promises(self, tier: Tier) -> None:
        """Raise ConfigError if a tier, which is open, lacks what the chain has promised."""
        for promised in ("persistent", "shared"):
            if getattr(self._promised, promised) and not getattr(tier.capabilities, promised):
                raise ConfigError(
                    f"tier {tier.name!r} is not {promised}, as the chain has been since its opening;"
                    " open the chain again with this tier"
                )

    def _exchange(self, tiers: Sequence[Tier], gone: Sequence[Tier]) -> None:
        """Exchange the tiers for these, of which the tiers that are `gone` are none, and close those."""
        for tier in tiers if gone else ():
            tier.learn_namespaces(gone)
        self._lineups.swap(tiers)
        for tier in gone:
            tier.close()

    # --- tiers that leave
    # --------------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Let tiers no longer leave, so that the chain can change; they stay as they are."""
        self._stop.set()
        if self._leavers.ident is not None:
            self._leavers.join()

    def _go_on(self) -> None:
        """Let tiers leave that are not in the list."""
        self._stop = Event()
        leaving = [tier for tier in self._lineups.current.tiers if tier.leaving]
        self._leavers = Thread(
            target=self._let_go, args=(leaving, self._stop), name="tiercache-leaving", daemon=True
        )
        if leaving:
            self._leavers.start()
        elif not self._gone.done():
            self._gone.set_result(None)

    def _let_go(self, leaving: list[Tier], stop: Event) -> None:
        while leaving and not stop.is_set():
            for tier in list(leaving):
                try:
                    self._empty(tier, stop)
                    leaving.remove(tier)
                except ClosedError:
                    pass  # another list has come, or the end of the chain
                except StorageError as error:
                    if not tier.leaving.startswith(STUCK):
                        _log.warning("tier %s: %s: %s", tier.name, STUCK, error)
                    tier.leaving = f"{STUCK}: {error}"
            stop.wait(_AGAIN_S if leaving else 0)
        if not leaving:
            self._gone.set_result(None)

    def _empty(self, tier: Tier, stop: Event) -> None:
        """Copy what only a leaving tier has to the others, and take it out; raises StorageError."""
        lineup = self._lineups.current
        nearest = [
            other for other in (*lineup.below(tier), *reversed(lineup.above(tier))) if not other.leaving
        ]
        with self._deletions.watch() as deleted:
            Leaving(tier, nearest, lineup.movers, deleted, stop.is_set).copy()
        with self._step:
            others = [other for other in self._lineups.current.tiers if other is not tier]
            self._exchange(others, [tier])
            self._shares.follow(others)
            self._lineups.follow()


def _same(settings: TierSettings, tiers: Sequence[Tier]) -> Tier | None:
    """Return the tier that settings mean: the one at their place or, if they have no place, of their name."""
    kind = str(settings.section["type"])
    for tier in tiers:
        has_name = (tier.name, tier.kind) == (settings.name, kind)
        if tier.settings.place == settings.place and (settings.place or has_name):
            return tier
    return None


def _introduce(tier: Tier, others: Sequence[Tier]) -> None:
    """Tell a new tier of the memory that other tiers know, and all of each other's namespaces."""
    for other in others:
        for memory in other.memories:
            tier.attach(memory)
        other.learn_namespaces([tier])
    tier.learn_namespaces(others)
