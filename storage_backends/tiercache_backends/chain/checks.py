"""Checks of the tiers' stores before they are opened: what is a mistake, and what is sickness.

A mistake of the configuration refuses the chain. A disk that fails or does not answer is sick: its tier is
left out until it is well, and the other tiers serve.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tiercache.errors import InputError, StorageError, UnavailableError
from tiercache.storage.calls import PendingCall
from tiercache.storage.env import Env
from tiercache.storage.registry import check_backend
from tiercache_backends.chain.settings import TierSettings, check_together

_log = logging.getLogger(__name__)


def check_stores(tiers: Sequence[TierSettings], env: Env) -> list[TierSettings]:
    """Return the settings of the tiers with the places at which their stores are when links are followed.

    All stores are checked at the same time, each for at most the deadline of its tier. One that is sick keeps
    its settings as they are. Raises ConfigError for a setting that a store refuses and for two tiers at one
    place, and StorageError for a directory that a store refuses.
    """
    checks = [_begin(tier, env) for tier in tiers]
    # The mistakes are raised when all checks are over, so that none of their threads is left behind.
    answers = [_answer(tier, *check) for tier, check in zip(tiers, checks, strict=True)]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    found = [answer for answer in answers if isinstance(answer, TierSettings)]
    check_together(found)
    return found


_Check = tuple[PendingCall[TierSettings], threading.Thread]


def _begin(tier: TierSettings, env: Env) -> _Check:
    # A check that hangs keeps its thread until it returns, and then does nothing more.
    call = PendingCall("a check of its settings", partial(_check, tier, env), tier.deadline, lambda: _nothing)
    thread = threading.Thread(target=call.run, name=f"tiercache-check-{tier.name}", daemon=True)
    thread.start()
    return call, thread


def _check(tier: TierSettings, env: Env) -> TierSettings:
    check_backend(tier.section, env=env)
    return replace(tier, place=env.realpath(tier.place)) if tier.place.startswith("/") else tier


def _answer(
    tier: TierSettings, call: PendingCall[TierSettings], thread: threading.Thread
) -> TierSettings | Exception:
    """Return what a check has found: settings, or the mistake to be raised."""
    found: TierSettings | Exception = tier
    try:
        found = call.result()
    except OSError as error:
        # A StorageError is an OSError too: what a store says of its directory is no failure of the disk.
        if isinstance(error, StorageError) and not isinstance(error, UnavailableError):
            found = _named(tier, error)
        else:
            _log.warning("tier %s cannot be checked: %s", tier.name, error)
    except InputError as error:
        found = _named(tier, error)
    if not call.given_up:
        thread.join()
    return found


def _named(tier: TierSettings, error: Exception) -> Exception:
    error.args = (f"tier {tier.name!r}: {error}",)
    return error


def _nothing() -> None:
    """Do nothing."""
