"""Rules that say how long a request waits for storage: the prefetch policies and their settings."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tiercache.errors import ConfigError


class PrefetchPolicy(enum.StrEnum):
    """Name of the way in which a request waits while storage is at work."""

    BEST_EFFORT = "best_effort"
    """The first poll after `admit` ends the wait."""
    WAIT_COMPLETE = "wait_complete"
    """The request waits until all fetches have landed."""
    TIMEOUT = "timeout"
    """The request waits for a time that depends on the length of its prompt (see `PrefetchRules`)."""


@dataclass(frozen=True, slots=True)
class PrefetchRules:
    """A prefetch policy, and the settings of the policy `timeout`. Times are in seconds.

    The time that a request may wait is `base` + `per_1024_tokens` for every 1,024 tokens that device and host
    lack, and at most `most`. It counts from the first poll that finds storage at work, which is usually that
    of `admit`. Under every policy, the deadline of the admission ends the wait as well.

    `policy` may be given by its name. Raises ConfigError for an unknown name, and for a time that is negative
    or not finite.
    """

    policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    base: float = 1.0
    per_1024_tokens: float = 0.25
    most: float = 10.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "policy", PrefetchPolicy(self.policy))
        except ValueError:
            raise ConfigError(
                f"there is no prefetch policy {self.policy!r}; use {', '.join(PrefetchPolicy)}"
            ) from None
        for name in ("base", "per_1024_tokens", "most"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not possible; use a finite number of seconds from 0"
                )

    def patience(self, tokens: int) -> float:
        """Return for how many seconds a request may wait that lacks `tokens` tokens of its prompt."""
        match self.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return 0.0
            case PrefetchPolicy.WAIT_COMPLETE:
                return math.inf
            case PrefetchPolicy.TIMEOUT:
                return min(self.base + self.per_1024_tokens * tokens / 1024, self.most)
