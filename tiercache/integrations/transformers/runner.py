"""Runner of a Hugging Face model, chunk by chunk, with copies of its cache to and from device pools.

This module does not depend on the controller.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tiercache.core import TokenArray, as_tokens
from tiercache.errors import InputError, TierCacheError, TokenError, UnsupportedModelError
from tiercache.integrations.transformers import device
from tiercache.integrations.transformers.device import PoolTensors, Slots
from tiercache.integrations.transformers.layout import CacheLayout, StateCache, StateSlots, inspect_cache
from tiercache.integrations.transformers.stream import to_device

TINY: Final = 16
"""Tokens of the forward pass after which the layout of the cache is read.

These are more tokens than any convolution keeps, so all tensors have their usual size after the pass.
"""


POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Names under which configurations give the number of positions, in order of precedence."""
ARGUMENTS: Final = ("past_key_values", "cache_params")
"""Names under which models take their cache, in order of precedence; the output has the same name."""


class TailMode(StrEnum):
    """The way in which tokens are fed once the cache is not empty."""

    CHUNK = "chunk"
    """Any number of tokens per forward."""
    TOKEN = "token"  # noqa: S105  (a mode of feeding)
    """One token per forward, for models that drop their recurrent state when they are given more."""


def no_wait(layer: int) -> None:
    """Do nothing: a `wait_layer` for pools that are filled already."""


class ModelRunner:
    """Runner of one model at batch size 1, from token ids to logits; the caller chooses the next token.

    Two runs that make the same calls on equal caches return equal bits, on one device and with one number of
    threads (on CUDA: with deterministic kernels, see `stream.compute_repeatably`). In CHUNK mode, the bits
    depend on the depths of all cuts. In TOKEN mode, they depend only on the depth at which the first chunk
    ends. A cache belongs to one sequence.

    Construction reads the layout of the cache, and raises UnsupportedModelError if a cache with this layout
    could not be saved and restored exactly. `probe.load` also checks this by running the model.
    """

    def __init__(self, model: PreTrainedModel, page_size: int) -> None:
        if page_size < 1:
            raise InputError(
                f"page size {page_size} is not possible; use a positive number of tokens, such as 64"
            )
        self.model: Any = model
        self.model.train(False)  # dropout would make every run return different bits
        self.page_size = page_size
        self.tail_mode = TailMode.CHUNK
        self.first_position = 0
        """Position of a sequence's first token; only the probe sets another number than 0."""
        self.positions = positions_of(model.config)
        """Maximum number of tokens of a sequence; None for a model without a limit."""
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.vocab_size = _vocabulary(model)
        """Number of token ids; the ids are 0 to `vocab_size` - 1."""
        self._counts = False
        """Whether the cache must count its tokens, because no layer does."""
        self._argument = next((name for name in ARGUMENTS if name in self._takes), "")
        self.layout = self._inspect()
        """The layout of the model's cache."""

    @property
    def takes_positions(self) -> bool:
        """Whether the model is given positions; if not, it counts them from the length of its cache."""
        return "position_ids" in self._takes

    def like(self, tail_mode: TailMode, first_position: int = 0) -> ModelRunner:
        """Return a copy of this runner with another tail mode and another position of the first token."""
        other = copy.copy(self)
        other.tail_mode, other.first_position = tail_mode, first_position
        return other

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for one sequence."""
        return (StateCache if self._counts else DynamicCache)(config=self.model.config)

    def forward(self, cache: DynamicCache, tokens: Any, start: int) -> torch.Tensor:
        """Feed the sequence's tokens from position `start` on; return the logits after the last one.

        `start` is the number of tokens that `cache` holds. The logits are `[vocab]` float32 on the model's
        device. Raises as `logits` does.
        """
        return self.logits(cache, tokens, start, keep=1)[0]

    def logits(self, cache: DynamicCache, tokens: Any, start: int, *, keep: int) -> torch.Tensor:
        """Feed `tokens` and return the logits after each of the last `keep` of them, `[keep, vocab]` float32.

        `tokens` is a one-dimensional array, tensor or list of one id or more. Raises TokenError, and changes
        nothing, for ids outside the vocabulary and for a `start` that is not the cache's length.
        """
        ids = self._ids(tokens)
        if not 1 <= keep <= len(ids):
            raise TokenError(
                f"{keep} rows of logits were asked for, of {len(ids)} tokens; feed at least one token"
            )
        if start != (held := self.layout.length(cache)):
            raise TokenError(
                f"the cache holds {held} tokens, so the next position is {held}, not {start}; pass"
                f" start={held}"
            )
        if self.tail_mode is TailMode.CHUNK or start == 0 or len(ids) == 1:
            return self._step(cache, ids, start, keep)
        rows = [self._step(cache, ids[n : n + 1], start + n, 1) for n in range(len(ids))]
        return torch.cat(rows[-keep:])

    def prefill(
        self, cache: DynamicCache, tokens: Any, start: int = 0, cuts: Sequence[int] = ()
    ) -> torch.Tensor:
        """Feed `tokens[start:]` in chunks that end at `cuts` and at the last token; return the last logits.

        `tokens` is the *whole* sequence. `cuts` are depths in tokens, ascending. In TOKEN mode, the first
        chunk of an empty cache is fed at once and all later tokens one by one, so only the first cut affects
        the result. The logits are those of the last position, `[vocab]` float32. Raises TokenError for cuts
        outside `(start, len(tokens)]` or out of order, and if `start` leaves no token to feed.
        """
        # The ids stay on the host; each chunk is copied to the device, and no id is ever copied back.
        ids = self.checked(tokens)
        if not start < len(ids):
            raise TokenError(
                f"{len(ids)} tokens leave nothing to compute from position {start}; restore less, so that at"
                " least the last token is computed"
            )
        # bounds: start < cuts[0] < ... < len(ids); each neighbouring pair is one chunk.
        bounds = [start, *cuts]
        if any(a >= b for a, b in itertools.pairwise(bounds)) or bounds[-1] > len(ids):
            raise TokenError(
                f"cuts {list(cuts)} must ascend within ({start}, {len(ids)}]; leave out what is already"
                " cached"
            )
        logits = torch.empty(0)
        if bounds[-1] < len(ids):
            bounds.append(len(ids))
        for begin, end in itertools.pairwise(bounds):
            logits = self.forward(cache, ids[begin:end], begin)
        return logits

    def allocate_pools(self, page_slots: int, state_slots: int) -> PoolTensors:
        """Return zeroed device pools for this model; see `PoolTensors`."""
        return device.allocate_pools(self.layout, page_slots, state_slots)

    def export_pages(self, cache: DynamicCache, pool: PoolTensors, first_page: int, slots: Slots) -> None:
        """Copy `len(slots)` pages of the cache, from page `first_page` on; see `device.export_pages`."""
        device.export_pages(cache, pool, first_page, slots)

    def export_state(self, cache: DynamicCache, pool: PoolTensors, slots: StateSlots) -> None:
        """Copy the state into `slots`; it stands for exactly the tokens in the cache now."""
        device.export_state(cache, pool, slots)

    def restore(
        self,
        pool: PoolTensors,
        page_slots: Slots,
        state_slots: StateSlots | None,
        *,
        wait_layer: Callable[[int], None] = no_wait,
        tokens: int | None = None,
    ) -> DynamicCache:
        """Return a new cache filled from slots; see `device.fill`.

        The next forward gives the same bits with this cache as with the exported one.
        """
        return device.fill(self.new_cache(), pool, page_slots, state_slots, wait_layer, tokens)

    def checked(self, tokens: Any) -> TokenArray:
        """Return token ids (array, tensor or list) as an array.

        Raises TokenError if one of them is outside the vocabulary.
        """
        ids = as_tokens(tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise TokenError(
                f"token id {int(ids.max())} is outside the model's vocabulary of {self.vocab_size}; use its"
                " own tokenizer"
            )
        return ids

    def _ids(self, tokens: Any) -> torch.Tensor:
        return to_device(torch.from_numpy(self.checked(tokens).astype(np.int64)), self.model.device)

    def _step(self, cache: DynamicCache, ids: torch.Tensor, start: int, keep: int) -> torch.Tensor:
        end = start + len(ids)
        if self.positions is not None and end > self.positions:
            raise TokenError(
                f"{end} tokens are more than the {self.positions} positions of {self._name}; use a shorter"
                " sequence"
            )
        arguments: dict[str, Any] = {"use_cache": True, self._argument: cache}
        # Without explicit positions, some models number the tokens of every chunk from 0.
        if self.takes_positions:
            positions = torch.arange(start, end, device=ids.device)[None]
            arguments["position_ids"] = positions + self.first_position
        out = self._run(ids, keep, arguments)
        if getattr(out, self._argument, None) is not cache:
            raise UnsupportedModelError(
                f"{self._name} does not return the cache that it was given, so it keeps its past elsewhere"
            )
        if isinstance(cache, StateCache):
            cache.tokens = end
        return self._logits(out, keep)

    def _logits(self, out: Any, keep: int) -> torch.Tensor:
        logits: Any = getattr(out, "logits", None)
        shape = logits.shape if isinstance(logits, torch.Tensor) else ()
        if len(shape) != 3 or shape[0] != 1 or shape[1] < keep:
            raise UnsupportedModelError(
                f"{self._name} returns no logits [1, tokens, vocabulary]; load the causal language model"
            )
        kept: torch.Tensor = logits[0, -keep:].float()
        return kept

    def without_cache(self, tokens: Any, keep: int) -> torch.Tensor:
        """Run the model without a cache or positions; return the logits after each of the last `keep` tokens.

        The logits have shape `[keep, vocab]` and are float32.
        """
        arguments: dict[str, Any] = {"use_cache": False} if "use_cache" in self._takes else {}
        return self._logits(self._run(self._ids(tokens), keep, arguments), keep)

    def _run(self, ids: torch.Tensor, keep: int, arguments: dict[str, Any]) -> Any:
        """Call the model and return its output.

        Every exception of the model becomes UnsupportedModelError, except torch.OutOfMemoryError and errors
        of tiercache, which are passed on.
        """
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = keep
        if "return_dict" in self._takes:
            arguments["return_dict"] = True
        with torch.inference_mode():
            try:
                return self.model(input_ids=ids[None], **arguments)
            except (torch.OutOfMemoryError, TierCacheError):
                raise
            except Exception as error:
                over = "over a DynamicCache" if arguments.get("use_cache") else "without a cache"
                raise UnsupportedModelError(
                    f"{self._name} cannot run {over}, fed {len(ids)} tokens: {first_line(error)}"
                ) from error

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _inspect(self) -> CacheLayout:
        """Return the layout of the model's cache, and set what `new_cache` needs."""
        if "input_ids" not in self._takes:
            raise UnsupportedModelError(f"{self._name}.forward takes no input_ids; load a language model")
        if not self._argument:
            raise UnsupportedModelError(
                f"{self._name}.forward takes no {' or '.join(ARGUMENTS)}, so its cache cannot be handed to it"
            )
        if self.positions is not None and self.positions < TINY:
            raise UnsupportedModelError(
                f"{self._name} has {self.positions} positions; at least {TINY} are needed to inspect its"
                " cache"
            )
        ids = torch.arange(TINY, device=self.model.device) % self.vocab_size
        try:
            cache = self.new_cache()
        # DynamicCache reads attributes that another kind of configuration may lack.
        except Exception as error:
            why = first_line(error)
            raise UnsupportedModelError(f"{self._name} cannot have a DynamicCache: {why}") from error
        self._step(cache, ids, 0, 1)
        layout = self.layout_of(cache, TINY)
        self._counts = not layout.counts_tokens
        return layout

    def layout_of(self, cache: DynamicCache, tokens: int) -> CacheLayout:
        """Return the layout of a cache of this model that holds `tokens` tokens; see `inspect_cache`."""
        return inspect_cache(cache, self.page_size, tokens, positions=self.positions)


def first_line(error: Exception) -> str:
    """Return the type and the first line of the message of an error that another library raised."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(" :")


def _vocabulary(model: PreTrainedModel) -> int:
    try:
        embedding: Any = model.get_input_embeddings()
        return int(embedding.weight.shape[0])
    except (AttributeError, NotImplementedError, IndexError, TypeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no embedding of tokens; load a causal language model"
        ) from error


def positions_of(config: Any) -> int | None:
    """Return how many positions a model has; None if its configuration does not say.

    If its rotary embeddings are scaled linearly, the number in the configuration is multiplied by the factor
    of that scaling.
    """
    text = config.get_text_config(decoder=True)
    named = (getattr(text, name, None) for name in POSITIONS)
    positions = next(filter(is_length, named), None)
    if positions is None:
        return None
    factors = [rope.get("factor") or 1.0 for rope in ropes_of(config) if rope.get("rope_type") == "linear"]
    return int(positions * max([1.0, *factors]))


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of every rotary embedding that the configuration describes."""
    return [mapping for _, mapping in mappings("", config.to_dict()) if "rope_type" in mapping]


def mappings(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a mapping and the mappings inside it, each with its path.

    The configurations of other models (`..._config`) are left out.
    """
    if isinstance(value, Mapping):
        yield path, value
        for name, item in value.items():
            if not str(name).endswith("_config") or str(name) == "text_config":
                yield from mappings(f"{path}{name}.", item)


def is_length(value: object) -> bool:
    """Return whether a value of a configuration may be a length in tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
