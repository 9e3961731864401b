"""Parts of a worker that its requests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.index import Chunk, plan_prefill

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
