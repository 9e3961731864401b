"""Shadow caches for a portfolio, which find out on a background thread which of its policies would have saved most."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from tiercache.controller.state import ControllerState
from tiercache.core import TokenArray
from tiercache.index import Shadow
from tiercache.policy import WINDOW, Portfolio, policy_named
from tiercache.policy.costs import Costs

_log = logging.getLogger(__name__)
_MOST_WAITING: Final = 64
"""Most requests that may wait for the shadow thread; further requests are not shown to the shadows, so that no caller is delayed."""


class Shadows:
    """Set of shadow caches, one of the host's size per member of `portfolio`, each with a policy object of its own.

    Thread safety: the owner's thread; `_run` runs on the shadow thread.
    """

    def __init__(self, state: ControllerState, portfolio: Portfolio) -> None:
        self._state = state
        self._portfolio = portfolio
        self._waiting = 0
        self._served = 0
        cost = {name: pool.blocks_per_object * state.arena.block_bytes for name, pool in state.host.items()}
        self._shadows = [
            Shadow(
                policy_named(name, Costs(state.profile)), page_size=state.page_size, page_pools=state.index.page_pools,
                state_pools=state.index.state_pools, cost=cost, capacity=state.arena.nbytes, checkpoints=state.options.checkpoints,
                seed=state.options.seed,
            )
            for name in portfolio.members
        ]  # fmt: skip
        self._saved = [0.0] * len(self._shadows)
        self._thread = state.threads("shadow", 1)

    def served(self, prompt: TokenArray, sequence: TokenArray, extra: bytes) -> None:
        """Show the shadows a request that began with the tokens `prompt` and ended with `sequence`."""
        if self._waiting < _MOST_WAITING:
            self._waiting += 1
            self._thread.submit(partial(self._run, prompt, sequence, extra))

    def close(self, timeout: float) -> bool:
        """Let the thread end; return False if it still runs after `timeout` seconds."""
        return self._thread.close(timeout)

    def _run(self, prompt: TokenArray, sequence: TokenArray, extra: bytes) -> None:
        flops = self._state.profile.flops
        try:
            saved = [flops(0, shadow.request(prompt, sequence, extra)) for shadow in self._shadows]
        except Exception:  # noqa: BLE001  a shadow that fails costs its advice, never the thread
            _log.exception("a shadow cache failed; its advice is left out")
            saved = [0.0] * len(self._shadows)
        self._state.post(partial(self._land, saved))

    def _land(self, saved: list[float]) -> None:
        self._waiting -= 1
        self._served += 1
        self._saved = [before + now for before, now in zip(self._saved, saved, strict=True)]
        if self._served % WINDOW == 0:
            self._portfolio.saved(self._saved)
            self._saved = [0.0] * len(self._shadows)
