"""Changes of a chain while it serves: tiers that join, leave, are replaced or reordered, and settings.

A change is checked first. Then a new tier is opened and examined, the tiers are exchanged in one step, and
what is out is closed at last. A change that fails leaves the chain as it was.

A tier that leaves is read on, but takes no new objects, until the others have what only it had:

    1. `is_leaving` is set                      no operation begins to write to the tier
    2. the same tiers are swapped in            operations that might still write to it have ended
    3. `Leaving.copy` scans the tier            what no other tier has is copied
    4. the tiers without it are swapped in      operations that read it have ended
    5. it is closed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final

from tiercache.config.urls import section_of
from tiercache.errors import ConfigError, RefusedError, StorageError
from tiercache.storage.base import Capabilities
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.registry import capabilities_of, open_backend
from tiercache.storage.shares import Shares
from tiercache.storage.tiers import PREFIX, Report, ignore_progress
from tiercache_backends.chain.leaving import Leaving, check_readable
from tiercache_backends.chain.lineup import CHAIN, Lineup, Lineups
from tiercache_backends.chain.movement import Deletions
from tiercache_backends.chain.settings import (
    LIVE_SETTINGS,
    TierSettings,
    change_tier,
    check_chain,
    parse_tier,
)
from tiercache_backends.chain.shares import ChainShares
from tiercache_backends.chain.tier import Tier, check_stores


def tier_of(settings: TierSettings, env: Env) -> Tier:
    """Return the tier that settings describe; it is not open yet."""
    section = settings.section
    return Tier(settings, partial(open_backend, section, env=env), capabilities_of(section), env)


class Changes:
    """Changes of a chain's tiers, one at a time.

    `promised`: capabilities that the chain had when it was opened.

    Thread safety: any thread; a change during another one is refused.
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
        self._under_way = ""
        self._closing = False

    def close(self) -> bool:
        """Refuse further changes and give up the one under way; return True to the first caller."""
        self._closing = True
        return self._gate.close()

    def add(self, spec: Any, position: int | None) -> None:
        """Add a tier; see `TierChain.add_tier`."""
        with self._change("a tier is being added") as lineup:
            at = len(lineup.tiers) if position is None else position
            if not 0 <= at <= len(lineup.tiers):
                raise ConfigError(
                    f"position {at} is not possible; use 0 (first) to {len(lineup.tiers)} (last)"
                )
            [settings] = check_stores([parse_tier(spec, [tier.name for tier in lineup.tiers])], self._env)
            planned = _settings(lineup.tiers)
            planned.insert(at, settings)
            check_chain(planned)
            self._add(settings, at)

    def remove(self, name: str, report: Report, *, keep_contents: bool) -> None:
        """Remove a tier; see `TierChain.remove_tier`."""
        with self._change(f"tier {name!r} is being removed") as lineup:
            tier = _named(lineup, name)
            others = [other for other in lineup.tiers if other is not tier]
            if not others:
                raise ConfigError(f"tier {name!r} is the last of the chain; add another tier first")
            check_chain(_settings(others))
            self._shares.check(others)
            self._remove(tier, report, keep_contents=keep_contents)

    def replace(self, name: str, spec: Any, report: Report, *, keep_contents: bool) -> None:
        """Replace a tier; see `TierChain.replace_tier`."""
        with self._change(f"tier {name!r} is being replaced") as lineup:
            old = _named(lineup, name)
            at = lineup.tiers.index(old)
            [settings] = check_stores([parse_tier(spec, [tier.name for tier in lineup.tiers])], self._env)
            in_place = bool(settings.place) and settings.place == old.settings.place
            if in_place and not _has_name(spec):
                settings = replace(settings, name=name)
            planned = _settings(lineup.tiers)
            planned[at] = settings
            check_chain(planned)
            if in_place:
                self._reopen(old, settings)
            else:
                self._exchange(old, settings, report, keep_contents=keep_contents)

    def share(self, shares: Shares) -> None:
        """Keep these shares; see `TierChain.share`."""
        with self._change("shares are being changed") as lineup:
            self._shares.share(shares, lineup.tiers)

    def reorder(self, names: Sequence[str]) -> None:
        """Bring the tiers into another order; see `TierChain.reorder`."""
        with self._change("the tiers are being reordered") as lineup:
            if sorted(names) != sorted(tier.name for tier in lineup.tiers):
                raise ConfigError(
                    f"{', '.join(names) or 'nothing'} is no order of the tiers; name each once:"
                    f" {_names(lineup)}"
                )
            tiers = [_named(lineup, name) for name in names]
            check_chain(_settings(tiers))
            self._lineups.swap(tiers)
            self._lineups.follow()

    def configure(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change settings of a tier; see `TierChain.change_tier`."""
        with self._change(f"tier {name!r} is being changed") as lineup:
            tier = _named(lineup, name)
            settings = change_tier(tier.settings, changes)
            if not (is_live := changes.keys() <= LIVE_SETTINGS):
                [settings] = check_stores([settings], self._env)
            planned = _settings(lineup.tiers)
            planned[lineup.tiers.index(tier)] = settings
            check_chain(planned)
            if is_live:
                tier.configure(settings)
                self._lineups.swap(lineup.tiers)
                self._lineups.follow()
            else:
                self._reopen(tier, settings)

    @contextmanager
    def _change(self, what: str) -> Iterator[Lineup]:
        with self._gate:
            if not self._lock.acquire(blocking=False):
                raise RefusedError(f"{self._under_way}; change the chain again when that is over")
            try:
                self._under_way = what
                yield self._lineups.current
            finally:
                self._lock.release()

    # --- steps
    # --------------------------------------------------------------------------------------------------------

    def _add(self, settings: TierSettings, at: int) -> Tier:
        tier = tier_of(settings, self._env)
        tier.open()
        try:
            if not tier.is_readable:
                raise StorageError(
                    f"tier {tier.name!r} cannot be opened, so the chain is as before: {tier.why}"
                )
            self._check_promises(tier)
            others = self._lineups.current.tiers
            self._shares.check([*others, tier])
        except (StorageError, ConfigError):
            tier.close()
            raise
        self._shares.follow([*others, tier])
        self._lineups.swap([*others[:at], tier, *others[at:]])
        _introduce(tier, others)
        self._lineups.follow()
        return tier

    def _check_promises(self, tier: Tier) -> None:
        """Raise ConfigError if a tier, which is open, lacks what the chain has promised."""
        for promised in ("persistent", "shared"):
            if getattr(self._promised, promised) and not getattr(tier.capabilities, promised):
                raise ConfigError(
                    f"tier {tier.name!r} is not {promised}, as the chain has been since its opening;"
                    " open the chain again with this tier"
                )

    def _remove(self, tier: Tier, report: Report, *, keep_contents: bool) -> None:
        others = [other for other in self._lineups.current.tiers if other is not tier]
        if keep_contents:
            self._copy_out(tier, report)
        for other in others:
            other.learn_namespaces([tier])
        self._lineups.swap(others)
        tier.close()
        self._shares.follow(others)
        self._lineups.follow()

    def _copy_out(self, tier: Tier, report: Report) -> None:
        check_readable(tier)
        tier.is_leaving = True
        try:
            self._lineups.swap(self._lineups.current.tiers)
            lineup = self._lineups.current
            nearest = [*lineup.below(tier), *reversed(lineup.above(tier))]
            Leaving(tier, nearest, lineup.movers, self._deletions, lambda: self._closing).copy(report)
        except BaseException:  # also an exception of `report`: the tier takes objects again
            tier.is_leaving = False
            self._lineups.follow()
            raise

    def _exchange(self, old: Tier, settings: TierSettings, report: Report, *, keep_contents: bool) -> None:
        """Add a tier below the old one, and remove that."""
        lineup = self._lineups.current
        if settings.name in [tier.name for tier in lineup.tiers]:
            raise ConfigError(
                f"the name {settings.name!r} is taken until the objects of that tier are copied; give the new"
                " tier another tier_name"
            )
        new = self._add(settings, lineup.tiers.index(old) + 1)
        try:
            self._remove(old, report, keep_contents=keep_contents)
        except BaseException:  # whatever it is, it is raised again
            # Objects that were stored meanwhile may be in the new tier only. If the others do not take them,
            # it stays, and the error says so.
            self._remove(new, ignore_progress, keep_contents=True)
            raise

    def _reopen(self, old: Tier, settings: TierSettings) -> None:
        """Close a tier's store and open it with other settings; the tier is out meanwhile.

        The new tier is swapped in before it is open, so that deletions which come meanwhile are noted in it.
        """
        tiers = self._lineups.current.tiers
        if old.has_hung_calls:
            raise RefusedError(f"a call of tier {old.name!r} does not return; try again when it has")
        new = tier_of(settings, self._env)
        self._shares.check([new if tier is old else tier for tier in tiers])
        self._shares.follow([new if tier is old else tier for tier in tiers])
        self._lineups.swap([new if tier is old else tier for tier in tiers])
        try:
            if not old.suspend():
                raise RefusedError(f"a call of tier {old.name!r} does not return; try again when it has")
            new.take_over(old)
            new.open()
            if not new.is_open:
                raise StorageError(
                    f"tier {new.name!r} cannot be opened, so the chain is as before: {new.why}"
                )
        except BaseException:  # whatever it is, it is raised again
            # The old tier is out, with the deletions that came meanwhile, before it is in the chain again.
            old.take_over(new)
            if old.is_open:  # a call began to hang just now
                old.leave_out("a call hangs")
            self._lineups.swap(tiers)
            new.close()
            old.take_over(new)
            self._shares.follow(tiers)
            try:
                old.open()
            finally:
                self._lineups.follow()
            raise
        _introduce(new, (old,))
        old.close()
        self._lineups.follow()


def _introduce(tier: Tier, others: Sequence[Tier]) -> None:
    """Tell a new tier of the memory that other tiers know, and all of each other's namespaces."""
    for other in others:
        for memory in other.memories:
            tier.attach(memory)
        other.learn_namespaces([tier])
    tier.learn_namespaces(others)


def _settings(tiers: Sequence[Tier]) -> list[TierSettings]:
    return [tier.settings for tier in tiers]


def _named(lineup: Lineup, name: str) -> Tier:
    for tier in lineup.tiers:
        if tier.name == name:
            return tier
    raise ConfigError(f"no tier is named {name!r}; the chain has {_names(lineup)}")


def _names(lineup: Lineup) -> str:
    return ", ".join(tier.name for tier in lineup.tiers)


def _has_name(spec: str | Mapping[str, Any]) -> bool:
    return f"{PREFIX}name" in (section_of(spec) if isinstance(spec, str) else spec)
