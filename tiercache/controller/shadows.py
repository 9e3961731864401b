"""Shadow caches, which find the policy of a portfolio that would have saved the most computation.

A portfolio is a policy that follows the best of several member policies. A shadow cache simulates one member
with an index but no bytes. All shadow caches run on one background thread.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from tiercache.controller.context import ControllerContext
from tiercache.core import TokenArray
from tiercache.index import Shadow, checkpoints_named
from tiercache.policy import Ending, Portfolio, policy_named
from tiercache.policy.costs import Costs

_log = logging.getLogger(__name__)
_MAX_WAITING: Final = 64
"""Maximum number of requests that wait for the shadow thread. Further requests are not simulated."""


class Shadows:
    """Set of shadow caches, one for each member of a portfolio.

    Each shadow cache has the capacity of the host arena, and a policy object of its own.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). Only `_run` runs on
    the shadow thread.
    """

    def __init__(self, context: ControllerContext, portfolio: Portfolio) -> None:
        self._context = context
        self._portfolio = portfolio
        self._waiting = 0
        """Number of requests that wait for the shadow thread."""
        cost = {
            name: pool.blocks_per_object * context.arena.block_bytes for name, pool in context.host.items()
        }
        self._shadows = [
            Shadow(
                policy_named(name, Costs(context.profile)), page_size=context.page_size,
                page_pools=context.index.page_pools,
                state_pools=context.index.state_pools, cost=cost, capacity=context.arena.nbytes,
                checkpoints=checkpoints_named(context.options.checkpoints, Costs(context.profile)),
                seed=context.options.seed,
            )
            for name in portfolio.members
        ]  # fmt: skip
        self._thread = context.threads("shadow", 1)

    def served(self, prompt: TokenArray, sequence: TokenArray, extra: bytes, ending: Ending) -> None:
        """Let the shadow caches simulate a request that began as `prompt` and ended as `sequence`."""
        if self._portfolio.settled:
            self._shadows = []  # requests that still wait find none, and their answers are dropped
        elif self._waiting < _MAX_WAITING:
            self._waiting += 1
            self._thread.submit(partial(self._run, prompt, sequence, extra, ending))

    def close(self, timeout: float) -> bool:
        """Let the shadow thread end; return False if it still runs after `timeout` seconds."""
        return self._thread.close(timeout)

    def _run(self, prompt: TokenArray, sequence: TokenArray, extra: bytes, ending: Ending) -> None:
        flops = self._context.profile.flops
        try:
            saved = [flops(0, shadow.request(prompt, sequence, extra, ending)) for shadow in self._shadows]
        except Exception:  # noqa: BLE001  a failed shadow must not end this thread
            _log.exception("a shadow cache failed; this request is left out of the comparison of policies")
            saved = [0.0] * len(self._portfolio.members)
        self._context.events.post(partial(self._land, saved))

    def _land(self, saved: list[float]) -> None:
        self._waiting -= 1
        if not self._portfolio.settled:
            self._portfolio.served(saved)
