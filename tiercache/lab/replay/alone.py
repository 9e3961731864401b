"""One run of a replay through the index alone: one pool of bytes, without a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tiercache.core import PoolName, TokenArray
from tiercache.errors import ConfigError
from tiercache.index import Shadow, checkpoints_named
from tiercache.lab.replay.base import Source
from tiercache.lab.replay.cache import Setup, tokens_of
from tiercache.lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache.lab.replay.needs import Need
from tiercache.lab.replay.plane import geometries
from tiercache.lab.replay.results import Kept, TierUse
from tiercache.lab.replay.tally import Tally
from tiercache.policy import Costs, Ending, Policy, Portfolio, policy_named

_UNKNOWN: Final = float("nan")


class IndexRun:
    """A replay of one source through the real index and policy, with one budget of bytes.

    It takes a third to a fifth of the time of `Run`. Requests are served one after the other; copies, tiers,
    times and cuts are not simulated, and evictions come after the insert for which they make room. Raises
    ConfigError for tiers other than one host, and for a source whose requests run at once.

    Thread safety: one thread.
    """

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        if setup.tiers.storage or setup.tiers.device_bytes is not None:
            raise ConfigError("--index-only replays one pool of bytes; leave out the other tiers")
        if source.concurrency > 1:
            raise ConfigError(
                f"{source.name} runs {source.concurrency} requests at once, and --index-only one after the"
                " other; leave it out"
            )
        self._source = source
        self._setup = setup
        self._page_size = source.page_size
        self._policy = (
            setup.policy
            if isinstance(setup.policy, Policy)
            else policy_named(setup.policy, Costs(setup.profile))
        )
        self._cache = self._shadow(self._policy)
        members = self._policy.members if isinstance(self._policy, Portfolio) else {}
        self._members = [self._shadow(policy_named(name, Costs(setup.profile))) for name in members]
        self.peak_bytes = 0
        """Highest number of bytes in use, after evictions."""
        self.working_bytes = 0
        """0: requests that run hold nothing outside of the cache here."""
        self.tally = Tally(setup.profile, need.requests, lambda: self._cache.used)

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve all requests; `step` is called after each."""
        for request in self._source:
            if isinstance(self._policy, Recorder | Clairvoyant):
                self._policy.requested()
            sequence = tokens_of(request)
            depth = self._cache.request(request.prompt, sequence, ending=request.ending)
            self._compare(request.prompt, sequence, request.ending)
            self.peak_bytes = max(self.peak_bytes, self._cache.used)
            self.tally.add(request, depth, _UNKNOWN)
            step()

    def uses(self) -> Mapping[str, TierUse]:
        """Return nothing: reads and writes are not counted."""
        return {}

    def kept(self) -> tuple[Kept, ...]:
        """Return nothing: the contents are not counted."""
        return ()

    def _compare(self, prompt: TokenArray, sequence: TokenArray, ending: Ending) -> None:
        """Let the members of a portfolio serve the request as well, until it has settled on one."""
        if not isinstance(self._policy, Portfolio) or self._policy.settled:
            return
        flops = self._setup.profile.flops
        self._policy.served([flops(0, one.request(prompt, sequence, ending=ending)) for one in self._members])

    def _shadow(self, policy: Policy) -> Shadow:
        setup, geometry = self._setup, geometries(self._setup.profile, self._page_size)
        return Shadow(
            policy, page_size=self._page_size,
            page_pools=[name for name in geometry if name == PoolName.KV],
            state_pools=[name for name in geometry if name != PoolName.KV],
            cost={name: one.nbytes for name, one in geometry.items()},
            capacity=setup.tiers.host_bytes,
            checkpoints=checkpoints_named(setup.checkpoints, Costs(setup.profile)),
            seed=setup.seed,
        )  # fmt: skip
