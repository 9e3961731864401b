"""Draft model of a worker, which proposes tokens for the worker's model to verify, and its live cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from tiercache.core import PoolName
from tiercache.errors import InputError, UnsupportedModelError
from tiercache.geometry import Geometry
from tiercache.integrations.transformers.arguments import count_of, model_of
from tiercache.integrations.transformers.device import PoolTensors
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.watch import Watch, identity_of
from tiercache.keys import namespace_of

if TYPE_CHECKING:
    from tiercache.controller import Admission
    from tiercache.integrations.transformers.trial import ProbeReport


class Draft:
    """A draft model that proposes up to `proposes` tokens at a time to the model of `target`.

    Its KV is kept in the page pool DRAFT. The geometry of that pool names the draft's identity, so the
    objects of another draft have other keys, while the objects of the model's own pools keep theirs.

    Raises UnsupportedModelError if either model keeps states or windows, from which no token can be cut off,
    for another vocabulary or fewer positions than the model's, and as the probe does; InputError for a draft
    on another device.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | os.PathLike[str],
        proposes: Any,
        target: ModelRunner,
        load: Callable[[PreTrainedModel, int], tuple[ModelRunner, ProbeReport]],
    ) -> None:
        """Load the draft and probe it by `load`, which is given the model and the page size."""
        self.proposes = count_of("draft_tokens", proposes)
        """Maximum number of tokens that are proposed at a time."""
        if target.layout.state_geometries:
            raise UnsupportedModelError(
                "the model keeps states or windows, from which rejected tokens cannot be cut off; leave out"
                " the draft"
            )
        model = model_of(model)
        self.watch = Watch(model)
        """Record of the draft, with which it is compared like the worker's model."""
        self.runner, report = load(model, target.page_size)
        self.watch.settle()
        layout = self.runner.layout
        if layout.state_geometries:
            raise UnsupportedModelError(
                "the draft keeps states or windows, from which rejected tokens cannot be cut off; use a draft"
                " whose layers all have full attention"
            )
        if self.runner.vocab_size != target.vocab_size:
            raise UnsupportedModelError(
                f"the draft has a vocabulary of {self.runner.vocab_size} ids and the model one of"
                f" {target.vocab_size}; use a draft with the model's tokenizer"
            )
        own, wanted = self.runner.positions, target.positions
        if own is not None and (wanted is None or own < wanted):
            raise UnsupportedModelError(
                f"the draft has {own} positions and the model {wanted or 'no limit'}; use a draft with at"
                " least as many"
            )
        devices = {t.device for t in layout.tensors()} | {t.device for t in target.layout.tensors()}
        if len(devices) > 1:
            raise InputError(
                f"the draft and the model are on {', '.join(sorted(map(str, devices)))}; move them to one"
                " device"
            )
        self.limit = report.reach.limit
        """Tokens of the longest sequence that is restored and kept; None for no limit."""
        identity = namespace_of(identity_of(model, self.runner, target.page_size, self.watch)).hex()
        page = layout.kv_geometry
        self.geometry = Geometry(
            PoolName.DRAFT, page.page_size, page.segments, layout=f"{page.layout} of draft {identity}"
        )
        """Geometry of a page of the draft's KV."""
        self.tensors: PoolTensors = self.runner.allocate_pools(0, 0)
        """Tensors of the pool DRAFT; without slots before `allocate`."""

    def allocate(self, page_slots: int) -> None:
        """Allocate the pool. Raises ConfigError if the device has no room for it."""
        self.tensors = self.runner.allocate_pools(page_slots, 0)


class Drafting:
    """The draft's live cache of one sequence, which never holds more tokens than the model was given."""

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
