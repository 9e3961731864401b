"""Checks of the tiers' stores before they are opened: what is a mistake, and what is sickness.

A mistake of the configuration refuses the chain. A disk that fails or does not answer is sick: its tier is
left out until it is well, and the other tiers serve.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tiercache.errors import InputError, StorageError, UnavailableError
from tiercache.storage.env import Env
from tiercache.storage.guard import Guard, PendingCall
from tiercache.storage.registry import check_backend
from tiercache_backends.chain.settings import TierSettings, check_together

_log = logging.getLogger(__name__)


def check_stores(tiers: Sequence[TierSettings], env: Env) -> list[TierSettings]:
    """Return the settings of the tiers with the places at which their stores are when links are followed.

    All stores are checked at the same time, each for at most the deadline of its tier. One that is sick keeps
    its settings as they are. Raises ConfigError for a setting that a store refuses and for two tiers at one
    place, and StorageError for a directory that a store refuses.
    """
    guard = Guard("tiers", len(tiers), max((tier.deadline for tier in tiers), default=0.0))
    try:
        checks = [
            guard.begin(f"a check of {tier.name!r}", partial(_check, tier, env), seconds=tier.deadline)
            for tier in tiers
        ]
        # The mistakes are raised when all checks are over, so that none of their threads is left behind.
        answers = [_answer(tier, check) for tier, check in zip(tiers, checks, strict=True)]
    finally:
        guard.close()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    found = [answer for answer in answers if isinstance(answer, TierSettings)]
    check_together(found)
    return found


def _check(tier: TierSettings, env: Env) -> TierSettings:
    check_backend(tier.section, env=env)
    return replace(tier, place=env.realpath(tier.place)) if tier.place.startswith("/") else tier


def _answer(tier: TierSettings, check: PendingCall[TierSettings]) -> TierSettings | Exception:
    """Return what a check has found: settings, or the mistake to be raised."""
    try:
        return check.result()
    except OSError as error:
        # A StorageError is an OSError too: what a store says of its directory is no failure of the disk.
        if isinstance(error, StorageError) and not isinstance(error, UnavailableError):
            return _named(tier, error)
        _log.warning("tier %s cannot be checked: %s", tier.name, error)
        return tier
    except InputError as error:
        return _named(tier, error)


def _named(tier: TierSettings, error: Exception) -> Exception:
    error.args = (f"tier {tier.name!r}: {error}",)
    return error
