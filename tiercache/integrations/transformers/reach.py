"""Search for the length up to which a model's cache equals a recomputation, with growing prompts.

Some models compute differently beyond some length: rotary embeddings switch, windows begin to forget,
attention becomes sparse. A cache that was computed below such a length is wrong for a sequence that grows
beyond the length. Therefore prefills are cut near each length that the configuration names, and continued
past the length. Between the named lengths, the search tries prompts of 2, 4, 8, ... times the usual length.

The first failure ends the search. The longest prompt that passed until then is the limit of the cache:
sequences up to the limit are restored and kept, longer sequences are computed without the cache.

The search at load takes about `seconds` at most. A named length that is too long to try in this time ends the
search like a failure. There is one exception: a length that is a number of positions, such as the original
length of a stretched rotary embedding, needs no long prompt. A short prompt is run instead, whose positions
begin a little before this length. The short prompt shows everything that depends on positions.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import torch

from tiercache.errors import UnsupportedModelError

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Names under which configurations give the number of positions, in order of precedence."""


_LENGTH: Final = re.compile(
    r"position|window|length|context|keep|span|distance|stride|seq_len|chunk|block_size|local|bucket|"
    r"floor_scale|switch|threshold|n_ctx"
)
"""Pattern of the names of settings whose values may be lengths beyond which a model computes differently."""


_NO_LENGTH: Final = re.compile(
    r"^_|feed_forward|max_length|min_length|vocab|image|vision|audio|video|speech|vq_|patch|encoder|mamba|"
    r"kernel|dim|num_|layers|pattern|"
    r"source|mask_|blocks"
)
"""Pattern of the names of settings to leave out, although `_LENGTH` matches them.

Their values are numbers of layers, for example, or belong to other modalities.
"""


_BLOCKS: Final = 16
"""Number of blocks up to which block-sparse attention may still be dense.

In a sequence of more blocks, every known model with such attention skips some of them.
"""


class TailMode(StrEnum):
    """The way in which tokens are fed once the cache is not empty."""

    CHUNK = "chunk"
    """Any number of tokens per forward."""
    TOKEN = "token"  # noqa: S105  (a mode of feeding)
    """One token per forward, for models that drop their recurrent state when they are given more."""


def positions_of(config: Any) -> int | None:
    """Return how many positions a model has; None if its configuration does not say.

    If its rotary embeddings are scaled linearly, the number in the configuration is multiplied by the factor
    of that scaling.
    """
    text = config.get_text_config(decoder=True)
    named = (getattr(text, name, None) for name in _POSITIONS)
    positions = next(filter(_is_length, named), None)
    if positions is None:
        return None
    factors = [rope.get("factor") or 1.0 for rope in ropes_of(config) if rope.get("rope_type") == "linear"]
    return int(positions * max([1.0, *factors]))


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of every rotary embedding that the configuration describes."""
    return [mapping for _, mapping in _mappings("", config.to_dict()) if "rope_type" in mapping]


def refuse_dynamic_rope(model: Any) -> None:
    """Raise UnsupportedModelError for rotary embeddings that depend on the longest sequence seen so far."""
    for rope in ropes_of(model.config):
        if "dynamic" in str(rope["rope_type"]):
            raise UnsupportedModelError(
                f"{type(model).__name__} has rotary embeddings of type {rope['rope_type']}, whose frequencies"
                " follow the longest sequence that the model has seen, so cached keys would depend on other"
                " requests; use yarn or linear scaling"
            )


def named_lengths(config: Any) -> dict[str, int]:
    """Return the lengths in tokens beyond which the model may compute differently.

    The result maps names of settings in the configuration to lengths: windows, chunks, `_BLOCKS` blocks of
    sparse attention, or the original number of positions of a stretched rotary embedding. The number of
    positions itself is left out, because a sequence with more tokens is never served.
    """
    text = config.get_text_config(decoder=True)
    found: dict[str, int] = {}
    for path, mapping in _mappings("", text.to_dict()):
        for key, value in mapping.items():
            name = str(key)
            if name in _POSITIONS or not _LENGTH.search(name) or _NO_LENGTH.search(name):
                continue
            for length in value if isinstance(value, list | tuple) else (value,):
                if _is_length(length):
                    many = length * (_BLOCKS if "block_size" in name else 1)
                    found[f"{path}{name}"] = max(many, found.get(f"{path}{name}", 0))
    return found


def _mappings(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a mapping and the mappings inside it, each with its path.

    The configurations of other models (`..._config`) are left out.
    """
    if isinstance(value, Mapping):
        yield path, value
        for name, item in value.items():
            if not str(name).endswith("_config") or str(name) == "text_config":
                yield from _mappings(f"{path}{name}.", item)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


SECONDS: Final = 20.0
"""Seconds that longer prompts may take by default."""


BEFORE: Final = 5
"""Distance in tokens from a cut to the named length after the cut."""


BEYOND: Final = 7
"""Number of tokens by which a prefill goes beyond a named length."""


MIN_TOKENS: Final = 24
"""Minimum number of tokens of a prompt; a check of fewer tokens would mean little."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reach:
    """The result of a search with prompts that are longer than usual."""

    limit: int | None = None
    """Tokens of the longest sequence that is restored and kept; None for no limit."""
    why: str = ""
    """The reason for the limit."""
    tokens: int = 0
    """Length of the longest prompt that was run."""
    lengths: Mapping[str, str] = field(default_factory=dict)
    """The finding at each length that the configuration names.

    A key is the name and the length, such as `sliding_window 4096`; its value is the finding, such as
    `crossed`.
    """
    seconds: float = 0.0
    """Time of all prompts."""


UNBOUNDED: Final = Reach()
"""The reach of a model whose cache is good for any length."""


class Prompt(Protocol):
    """A prompt of one length, on which a cut can be tried."""

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        """Return why a prefill cut at `cuts` differs from an uncut one; empty if it does not."""


class Explorer:
    """One search for the reach of a model.

    All lengths are in tokens. `make(tokens, first_position)` returns a prompt. `usual` is the length with
    which a `Trial` begins. `checked` is the length at which a `Trial` passed; it is smaller than `usual` if
    only shorter prompts passed. `lengths` are the named lengths. The search takes about `seconds` at most.
    With `shifts`, `make` takes other first positions than 0.
    """

    def __init__(
        self,
        make: Callable[[int, int], Prompt],
        mode: TailMode,
        checked: int,
        usual: int,
        lengths: Mapping[str, int],
        seconds: float = SECONDS,
        *,
        shifts: bool = True,
    ) -> None:
        self._shifts = shifts
        self._make, self._mode, self._checked, self._usual, self._lengths = (
            make,
            mode,
            checked,
            usual,
            lengths,
        )
        self._seconds = seconds
        self._done: dict[str, str] = {}
        self._began = time.monotonic()
        self._last = (usual, 0.0)  # the longest prompt so far: its tokens, and the seconds that it took
        self._passed = 0  # tokens of the longest prompt that passed

    def explore(self, positions: int | None) -> Reach:
        """Try the named lengths and the doubled lengths between them, ascending, up to the first failure.

        A named length that cannot be tried in the time that is left counts as a failure.

        `positions` is the number of positions of the model; None for a model without a limit.
        """
        end = positions or 1 << 62
        named = set(self._lengths.values())
        steps = sorted(
            {*named, self._checked, self._usual, *self._doublings(min(max(named, default=0), end))}
        )
        why = ""
        for length in steps:
            why = self._cross(length, end) if length in named else self._double(length)
            if why:
                _log.warning(
                    "sequences of more than %d tokens are computed without the cache: %s", self._passed, why
                )
                break
        for name, length in self._lengths.items():
            self._done.setdefault(f"{name} {length}", "not tried, because the search ended below it")
        return Reach(
            self._passed if why else None, why, self._last[0], self._done, time.monotonic() - self._began
        )

    def _doublings(self, top: int) -> Iterator[int]:
        """Yield the usual length doubled, and doubled again, while it is below `top`."""
        length = 2 * self._usual
        while length < top:
            yield length
            length *= 2

    def _cross(self, length: int, end: int) -> str:
        """Return why sequences that grow past a named length cannot be continued; empty if they can.

        The sequences grow to a little more than the length, and to twice the length.
        """
        names = [f"{name} {at}" for name, at in self._lengths.items() if at == length]
        fault: str | None = ""
        below, above = max(1, length - BEFORE), length + max(1, length // 2)
        # 0 ........... length ....... 1.5 * length ........ 2 * length
        # |------- cut ----|-> BEYOND
        # |------- cut --------------------- cut ---------------|-> BEYOND
        # |--------------------------------- cut ---------------|-> BEYOND
        # The cut beyond the length reveals sparse attention: a prefix that is fed alone keeps the KV of more
        # tokens than the same prefix keeps at the beginning of a longer prompt.
        for tokens, cuts in (
            (length + BEYOND, (below,)),
            (2 * length + BEYOND, (below, above)),
            (2 * length + BEYOND, (above,)),
        ):
            if fault == "":
                fed = min(max(tokens, MIN_TOKENS), end)
                fault = self._try(fed, tuple(cut for cut in cuts if cut < fed) or (below,))
        if fault is None:  # not enough time or memory: run a short prompt at the positions around the length
            if self._shifts:
                fault = self._run(self._checked, (self._checked // 2,), max(0, length - self._checked // 2))
            if fault == "" and all("position" in name for name in names):
                self._done |= dict.fromkeys(names, "crossed by positions alone")
                return ""
            fault = fault or f"not reached within {self._seconds:g} seconds, or the memory"
        if not fault:
            self._done |= dict.fromkeys(names, "crossed")
            return ""
        # The length itself may still be the limit: try a sequence of exactly this length.
        middle = min(self._passed or length // 2, length - BEFORE - 1)
        if length >= MIN_TOKENS and self._try(length, (middle, length - BEFORE)) == "":
            self._passed = length
        self._done |= dict.fromkeys(names, fault)
        return f"{', '.join(names)}: {fault}"

    def _double(self, tokens: int) -> str:
        """Return why a prompt of this length, which is no named length, cannot be continued; empty if it can.

        The result is empty too if the length cannot be reached in time.
        """
        fault = "" if tokens == self._checked else self._try(tokens, (tokens // 2, tokens - BEYOND))
        if fault == "":
            self._passed = max(self._passed, tokens)
        # If time ran out (None), the next named length, which is longer, will run out of time too. The search
        # ends there with a reason, so this prompt need not give one.
        return fault or ""

    def _try(self, tokens: int, cuts: tuple[int, ...]) -> str | None:
        """Return why a cut makes a difference; empty if it makes none.

        Returns None if there is not enough time or memory to find out.
        """
        begun, (last, seconds) = time.monotonic(), self._last
        # At worst, time grows with the square of the length.
        if begun - self._began + seconds * max(1.0, tokens / last) ** 2 > self._seconds:
            return None
        try:
            fault = self._run(tokens, cuts)
        except torch.OutOfMemoryError:
            return None
        if tokens >= last:
            self._last = (tokens, time.monotonic() - begun)
        return fault

    def _run(self, tokens: int, cuts: tuple[int, ...], first_position: int = 0) -> str:
        try:
            return self._make(tokens, first_position).crossing(self._mode, cuts)
        except UnsupportedModelError as error:
            return str(error)
