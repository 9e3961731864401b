"""Parts of a worker that its requests share, their sizes, and the plan of one request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from transformers import PreTrainedModel

from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.geometry import Geometry
from tiercache.index import Chunk, plan_prefill
from tiercache.integrations.transformers.requests.commits import CHECKPOINTS, DECODE_SNAPSHOTS
from tiercache.policy import ModelProfile, profile_of
from tiercache.text import readable_size

if TYPE_CHECKING:
    from tiercache.controller import HybridCacheController
    from tiercache.integrations.transformers.device import PoolTensors
    from tiercache.integrations.transformers.draft import Draft
    from tiercache.integrations.transformers.runner import ModelRunner
    from tiercache.integrations.transformers.stream import TorchStream
    from tiercache.integrations.transformers.watch import Watch


@dataclass(frozen=True, slots=True)
class Parts:
    """Model, pools, stream and controller of one worker."""

    controller: HybridCacheController
    runner: ModelRunner
    tensors: PoolTensors
    stream: TorchStream
    watch: Watch
    draft: Draft | None
    limit: int | None
    """Tokens of the longest sequence that is restored and kept; None for no limit."""
    chunk_limit: int | None
    """Maximum number of tokens of one forward pass of a prefill; None for no limit."""

    def check_models(self) -> None:
        """Raise ConfigError, naming the change, if the model, its draft or a numeric setting has changed."""
        self.watch.check()
        if self.draft is not None:
            self.draft.watch.check()

    def chunks(
        self, prompt_tokens: int, restored: int = 0, checkpoints: Sequence[int] = ()
    ) -> tuple[Chunk, ...]:
        """Return the chunks of a prefill, which is cut at `checkpoints` and after `chunk_limit` tokens each.

        A prompt longer than `limit` is one chunk, because the model might compute something else with cuts.
        """
        most = prompt_tokens if self.exceeds_limit(prompt_tokens) else self.chunk_limit or prompt_tokens
        return plan_prefill(prompt_tokens, restored, most, self.runner.page_size, checkpoints)

    def exceeds_limit(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens is longer than the cache may keep (see `limit`)."""
        return self.kept(tokens) < tokens

    def kept(self, tokens: int) -> int:
        """Return how many of a sequence's tokens the cache may keep (see `limit`)."""
        return tokens if self.limit is None else min(tokens, self.limit)


_log = logging.getLogger(__name__)


PAGES: Final = (PoolName.KV, PoolName.DRAFT)
"""Pools of pages: those of the model, and those of its draft. A page of each has one number of tokens."""


def known_profile(model: PreTrainedModel) -> ModelProfile | None:
    """Return the model profile, from which the eviction policy estimates the cost of a recomputation.

    Returns None if the architecture is unknown; the policy then uses the default profile.
    """
    try:
        return profile_of(model.config.to_dict())
    except ConfigError as error:
        _log.info("using the default model profile: %s", error)
        return None


def split_device_bytes(device_bytes: int, geometries: Mapping[PoolName, Geometry]) -> tuple[int, int]:
    """Return the numbers of page slots and state slots for `device_bytes`.

    Half of the bytes go to states, because without a state no page can be restored; all of them, if there are
    no pages. Raises ConfigError if the bytes are too few to hold a single request.
    """
    page = sum(g.nbytes for name, g in geometries.items() if name in PAGES)
    state = sum(g.nbytes for name, g in geometries.items() if name not in PAGES)
    # A request needs state slots for the states that it leaves, one slot for the state that it restores, and
    # one that its admission reserves for loading that state from the host.
    least = CHECKPOINTS + DECODE_SNAPSHOTS + 2 if state else 0
    states = max(least, min(device_bytes // (2 if page else 1) // state, 1 << 16)) if state else 0
    pages = (device_bytes - states * state) // page if page else 0
    fewest = 2 if page else 0
    if pages < fewest or states * state > device_bytes:
        raise ConfigError(
            f"{device_bytes} device bytes are too few; {least} states and {fewest} pages of this model take"
            f" {least * state + fewest * page}"
        )
    return pages, states


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """How a request would be served now, as far as the index knows; depths are in tokens."""

    prompt_tokens: int
    chunks: tuple[Chunk, ...]
    """The forward passes of the prefill. They begin at the restored depth and end at the prompt's end."""
    pages: int
    """Page slots for the prompt and the answer; some of these pages may be on the device already."""
    states: int
    """State slots: for the restored state, for those of the prefill, and for those of the decoding."""
    page_bytes: int
    """Payload bytes of the page slots."""
    state_bytes: int
    """Payload bytes of the state slots."""

    @property
    def restored(self) -> int:
        """Depth up to which the prompt would be restored."""
        return self.chunks[0].start

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Depths at which the prefill would leave states."""
        return tuple(chunk.end for chunk in self.chunks if chunk.checkpoint)

    def __str__(self) -> str:
        cuts = ", ".join(f"{chunk.end}{' (state)' * chunk.checkpoint}" for chunk in self.chunks)
        states = f", states {self.states} ({readable_size(self.state_bytes)})" if self.states else ""
        return (
            f"{self.restored} of {self.prompt_tokens} tokens restored, the rest computed up to {cuts};"
            f" on the device: pages {self.pages} ({readable_size(self.page_bytes)}){states}"
        )
