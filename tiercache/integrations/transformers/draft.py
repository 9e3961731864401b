"""Draft model of a worker: a smaller model that proposes tokens, which the worker's model then verifies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    from tiercache.integrations.transformers.trial import ProbeReport


class Draft:
    """A draft model that proposes up to `proposes` tokens at a time to the model of `target`.

    Its KV is kept in the page pool DRAFT. The geometry of that pool names the draft's identity, so the
    objects of another draft have other keys, while the objects of the model's own pools keep theirs.

    Raises UnsupportedModelError if either model keeps states or windows, from which no token can be cut off,
    for another vocabulary or fewer positions than the model's, and as the probe does; InputError for a draft
    on another device.

    Thread safety: one owner thread.
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
