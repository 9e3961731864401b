"""Draft's side of one sequence: its live cache, its proposals, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tiercache.core import PoolName

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.draft import Draft


class Drafting:
    """The draft's live cache of one sequence, which never holds more tokens than the model was given.

    Thread safety: one owner thread.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._runner = draft.runner
        self.cache = draft.runner.new_cache()
        """The live cache of the draft."""

    def restore(self, admission: Admission, depth: int, wait_layer: Callable[[int], None]) -> None:
        """Begin with the first `depth` tokens, from slots. Raises what `wait_layer` raises."""
        slots = admission.pages[PoolName.DRAFT][: depth // self._runner.page_size]
        self.cache = self._runner.restore(
            self._draft.tensors, slots, None, wait_layer=wait_layer, tokens=depth
        )

    def follow(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Feed what the cache lacks of `tokens`, which begin with those that it holds.

        Returns the logits `[vocab]` after the last token; None if the cache lacks none.
        """
        held = self._runner.layout.length(self.cache)
        return self._runner.forward(self.cache, tokens[held:], held) if held < len(tokens) else None

    def propose(self, tokens: Sequence[int], most: int, stop: frozenset[int]) -> list[int]:
        """Return up to `most` tokens that the draft expects behind `tokens`, the last of which is new to it.

        The proposal ends before a token of `stop`, because the model is not fed one.
        """
        proposed: list[int] = []
        while len(proposed) < min(most, self._draft.proposes):
            logits = self.follow([*tokens, *proposed])
            assert logits is not None
            token = int(logits.argmax())
            if token in stop:
                break
            proposed.append(token)
        return proposed

    def keep(self, tokens: int) -> None:
        """Cut the cache to its first `tokens` tokens, because the model has rejected the others."""
        if self._runner.layout.length(self.cache) > tokens:
            self._runner.layout.cut(self.cache, tokens)

    def export(self, tokens: Sequence[int], first: int, admission: Admission) -> None:
        """Copy the pages of `tokens` from page `first` on into the slots of `admission`; feed what lacks."""
        last = len(tokens) // self._runner.page_size
        self.follow(tokens[: last * self._runner.page_size])
        self._runner.export_pages(
            self.cache, self._draft.tensors, first, admission.pages[PoolName.DRAFT][first:last]
        )
