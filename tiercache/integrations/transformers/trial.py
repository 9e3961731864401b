"""Trial: one run of the checks of a model with prompts of one length, and its report.

**The tolerance.** A cut changes the order of sums, so cached values differ by rounding. A trial measures what
rounding does to this model. It adds noise to all cached values: relative to the value, at most half an eps of
its dtype (eps: the distance from 1.0 to the next number). The change of the logits is called the jitter; the
median of three draws counts. The tolerance is

- 16 jitters in float32, where every sum of every operation rounds by as much as a stored value does;
- 4 jitters in narrower types, whose sums are float32 and round once, when they are stored;
- 16 jitters in narrower types if cuBLAS may round the parts of a sum.

These factors are empirical. On CPUs, over the 19 served families of
`tests/integrations/transformers/models.py`, a cut changes the logits by 0.96 to 3.25 jitters in float32 and
by 0 to 1.25 jitters in bfloat16. The tolerance is 4.9 times the largest change in float32, and 3.2 times in
bfloat16.

The tolerance is useful only if a wrong cache exceeds it. Therefore the states are replaced by those of
another prompt, and so are the windows; if the logits change by no more than the tolerance, the model is
refused. (For a model without states and windows, the KV is replaced.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from tiercache.core import PoolName
from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.device import differences
from tiercache.integrations.transformers.layout import TensorLayout
from tiercache.integrations.transformers.runner import ModelRunner, TailMode
from tiercache.integrations.transformers.stream import rounds_parts

JITTERS: Final = 16
"""The tolerance in jitters, for float32 and for narrower dtypes whose partial sums may be rounded."""
JITTERS_NARROW: Final = 4
"""The tolerance in jitters, for narrower dtypes whose sums are rounded once."""
SHORT: Final = 3
"""Tokens of a short tail (the tokens that are fed after a cut).

The logits after each of these tokens are compared, because the state of a very short convolution affects
only the first token.
"""
SEED: Final = 20457
"""Seed of the random prompts and of the noise."""


class CutCheck(NamedTuple):
    """A prefill cut at `cuts`, compared with an uncut prefill."""

    mode: TailMode
    cuts: tuple[int, ...]
    error: float
    """Largest absolute difference of the last position's logits."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The findings of the probe.

    The tolerance, the errors of the checks and the reactions are absolute differences of logits.
    """

    tail_mode: TailMode
    tokens: int
    """Length of the prompts."""
    scale: float
    """Largest magnitude of a logit."""
    tolerance: float
    checks: tuple[CutCheck, ...]
    reactions: Mapping[str, float]
    """Change of the logits when all tensors of a kind are those of another prompt.

    The kinds are `kv`, `state` (recurrent tensors) and `window`.
    """
    chunk_fault: str
    """The reason why chunks are not used; empty in CHUNK mode."""
    limit: int | None = None
    """Tokens of the longest sequence that is restored and kept; None for no limit."""
    why: str = ""
    """The reason for the limit."""


class Trial:
    """One run of the checks over two random prompts of `tokens` tokens.

    `first_position` is the position of the prompts' first token.
    """

    def __init__(self, runner: ModelRunner, tokens: int, *, first_position: int = 0) -> None:
        self._runner, self._model, self._layout = runner, runner.model, runner.layout
        self._page_size = runner.page_size
        self._runners = {mode: runner.like(mode, first_position) for mode in TailMode}
        self._chunk = (tokens - 13) // 2  # the model's chunk, if `probe` chose the length
        self._name = type(self._model).__name__
        rng = np.random.default_rng(SEED)
        self._prompt, self._other = rng.integers(0, runner.vocab_size, (2, tokens))
        self._n = tokens

    def report(self) -> ProbeReport:
        """Run all checks.

        Raises UnsupportedModelError if the model fails them even when it is fed token by token.
        """
        tolerance = self._tolerance()
        off = _gap(self._runners[TailMode.CHUNK].without_cache(self._prompt, SHORT)[-1], self._uncut)
        if not off <= tolerance:
            raise UnsupportedModelError(
                f"{self._name} gives other logits over a DynamicCache with positions from 0 than by itself,"
                f" off by {off:.3g}, more than the {tolerance:.3g} that rounding explains"
            )
        token_checks = self._cut_checks(TailMode.TOKEN)
        if fault := self._fault(TailMode.TOKEN, token_checks, tolerance):
            raise UnsupportedModelError(f"{self._name} cannot continue from a cache: {fault}")
        reactions = self._reactions(tolerance)
        for depth in self._depths():
            self._round_trip(depth)
        chunk_checks = self._cut_checks(TailMode.CHUNK)
        fault = self._fault(TailMode.CHUNK, chunk_checks, tolerance)
        mode, checks = TailMode.TOKEN if fault else TailMode.CHUNK, (*token_checks, *chunk_checks)
        return ProbeReport(mode, self._n, self._scale, tolerance, checks, reactions, fault)

    @cached_property
    def _uncut(self) -> torch.Tensor:
        """The last position's logits `[vocab]` of one forward over the whole prompt.

        The forward runs twice. Raises UnsupportedModelError if the two results differ, or if logits are not
        finite.
        """
        first, second = (self._run(self._new(), self._prompt, 0) for _ in range(2))
        if not torch.isfinite(first).all():
            raise UnsupportedModelError(
                f"{self._name} gives logits that are not finite, so nothing can be checked; look at its"
                " weights"
            )
        if not torch.equal(first, second):
            raise UnsupportedModelError(
                f"{self._name} gives other logits for a repeated prompt (by {_gap(first, second):.3g}); use"
                " deterministic algorithms"
            )
        return first[-1]

    @cached_property
    def _scale(self) -> float:
        return float(self._uncut.abs().max())

    @cached_property
    def _cache(self) -> DynamicCache:
        """The cache of the prompt without its last `SHORT` tokens; callers copy it before they change it."""
        return self._cache_of(self._prompt)

    @cached_property
    def _other_cache(self) -> DynamicCache:
        return self._cache_of(self._other)

    def _cache_of(self, prompt: npt.NDArray[np.int64]) -> DynamicCache:
        cache = self._new()
        self._run(cache, prompt[: self._n - SHORT], 0)
        if self._runner.layout_of(cache, self._n - SHORT) != self._layout:
            raise UnsupportedModelError(
                f"{self._name} changes the shape of its cache between {self._n - SHORT} tokens and few; its"
                " states cannot be kept in slots"
            )
        return cache

    def _new(self) -> DynamicCache:
        return self._runners[TailMode.CHUNK].new_cache()

    def _run(
        self, cache: DynamicCache, tokens: npt.NDArray[np.int64], start: int, mode: TailMode = TailMode.CHUNK
    ) -> torch.Tensor:
        return self._runners[mode].logits(cache, tokens, start, keep=min(SHORT, len(tokens)))

    def _tail(self, cache: DynamicCache, mode: TailMode) -> torch.Tensor:
        """Feed the last `SHORT` tokens after `cache`, and return their logits."""
        return self._run(cache, self._prompt[-SHORT:], self._n - SHORT, mode)

    def _tolerance(self) -> float:
        """Measure and return the tolerance (see the docstring of the module).

        The tolerance is at least 2 eps of the largest logit.
        """
        base = self._tail(copy.deepcopy(self._cache), TailMode.TOKEN)
        rng = torch.Generator().manual_seed(SEED)
        jitter = median(_gap(self._tail(self._noisy(rng), TailMode.TOKEN), base) for _ in range(3))
        eps = torch.finfo(self._model.dtype).eps
        rounds_once = eps > torch.finfo(torch.float32).eps and not rounds_parts(self._model.device)
        return max((JITTERS_NARROW if rounds_once else JITTERS) * jitter, 2 * eps * self._scale)

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        """Return why a prefill cut at `cuts` cannot be continued in this mode; empty if it can.

        If the prompt is one to three windows long, the model is also restored around the end of the window.
        Raises UnsupportedModelError unless it then continues as before, bit by bit.
        """
        if any(window <= self._n < 3 * window for window in self._layout.windows):
            for depth in self._depths():
                self._round_trip(depth)
        tolerance = self._tolerance()
        error = self._cut_error(mode, cuts)
        if error <= tolerance:
            return ""
        return (
            f"cut at {', '.join(map(str, cuts))} of {self._n} tokens, logits are off by {error:.3g}, rounding"
            f" explains {tolerance:.3g}"
        )

    def _cut_checks(self, mode: TailMode) -> tuple[CutCheck, ...]:
        """Check cuts on and off the model's own chunk boundaries.

        Some tails after a cut are longer than a chunk, some are short, and some have a single token.
        """
        n, c, middle = self._n, self._chunk, self._chunk // 2 + 5
        # Feeding one token at a time is slow on a large model. 12 tokens are enough: no known convolution
        # kernel is longer.
        several: list[tuple[int, ...]] = [(n - 1,), (n - 12,)]
        if mode is TailMode.CHUNK:
            several = [(c,), (middle,), (n - 7,), (middle, c, n - 7, n - 1)]
        return tuple(CutCheck(mode, cuts, self._cut_error(mode, cuts)) for cuts in several)

    def _cut_error(self, mode: TailMode, cuts: tuple[int, ...]) -> float:
        return _gap(self._runners[mode].prefill(self._new(), self._prompt, 0, cuts), self._uncut)

    def _fault(self, mode: TailMode, checks: tuple[CutCheck, ...], tolerance: float) -> str:
        """Return why this tail mode cannot be used; empty if it can."""
        feeding = "one token at a time" if mode is TailMode.TOKEN else "several tokens at a time"
        if (ignored := self._ignored(mode)) is not None:
            return (
                f"fed {feeding}, it ignores {ignored.name} of layer {ignored.layer}"
                f" ({type(self._cache.layers[ignored.layer]).__name__})"
            )
        off = [check for check in checks if not check.error <= tolerance]
        if off:
            return (
                f"fed {feeding} after a cut at {', '.join(map(str, off[0].cuts))} of {self._n} tokens, its"
                f" logits are off by {off[0].error:.3g}, more than the {tolerance:.3g} that rounding explains"
            )
        return ""

    def _ignored(self, mode: TailMode) -> TensorLayout | None:
        """Return the first tensor whose replacement changes no bit of the next logits; None if there is none.

        Each tensor in turn is replaced by that of another prompt.
        """

        def following(cache: DynamicCache) -> torch.Tensor:
            # In TOKEN mode one token is enough: it reads every tensor that later tokens would read.
            fed = self._prompt[-SHORT:][: 1 if mode is TailMode.TOKEN else SHORT]
            return self._run(cache, fed, self._n - SHORT, mode)

        base = following(copy.deepcopy(self._cache))
        for t in self._layout.tensors():
            # An integer counts tokens; nothing may depend on it, and it is restored like the others.
            if t.dtype.is_floating_point and torch.equal(following(self._replaced([t])), base):
                return t
        return None

    def _reactions(self, tolerance: float) -> dict[str, float]:
        """Return the change of the logits when all tensors of a kind are replaced by those of another prompt.

        The kinds are `kv`, `state` and `window`. Raises UnsupportedModelError if the change by `state` or by
        `window` is within the tolerance. For a model without both, the change by `kv` counts instead.
        """
        base = self._tail(copy.deepcopy(self._cache), TailMode.TOKEN)
        states = [*self._layout.state_tensors()]
        kinds = {
            "kv": [*self._layout.kv_tensors()],
            "state": [t for t in states if t.pool is PoolName.MAMBA],
            "window": [t for t in states if t.pool is PoolName.SWA],
        }
        kinds = {k: ts for k, ts in kinds.items() if ts}
        found = {k: _gap(self._tail(self._replaced(ts), TailMode.TOKEN), base) for k, ts in kinds.items()}
        for kind in [kind for kind in found if kind != "kv"] or ["kv"]:
            if not found[kind] > tolerance:
                raise UnsupportedModelError(
                    f"{self._name} hardly reads its {kind}: the {kind} of another prompt changes the logits"
                    f" by {found[kind]:.3g}, within the {tolerance:.3g} that rounding explains, so wrong"
                    " answers could not be told from right ones"
                )
        return found

    def _replaced(self, tensors: list[TensorLayout]) -> DynamicCache:
        """Return a copy of the prompt's cache in which some tensors are those of the other prompt."""
        cache = copy.deepcopy(self._cache)
        with torch.inference_mode():
            for t in tensors:
                both = (cache, self._other_cache)
                mine, theirs = (self._layout.tensor_of(c, t.layer, t.name) for c in both)
                # A tensor that depends only on the position is equal in both caches, so add 1 to it instead.
                mine.copy_(theirs if not torch.equal(mine, theirs) else theirs + 1)
        return cache

    def _noisy(self, rng: torch.Generator) -> DynamicCache:
        """Return a copy of the prompt's cache as if every value had been rounded once more.

        The relative noise is at most half an eps of the tensor's dtype.
        """
        cache = copy.deepcopy(self._cache)
        with torch.inference_mode():
            for t in self._layout.tensors():
                tensor = self._layout.tensor_of(cache, t.layer, t.name)
                if tensor.is_floating_point():
                    noise = (torch.rand(tensor.shape, generator=rng) - 0.5) * torch.finfo(tensor.dtype).eps
                    tensor.copy_(tensor.float() * (1 + noise.to(tensor.device)))
        return cache

    def _depths(self) -> tuple[int, ...]:
        """Return page boundaries for `_round_trip`: the deepest, and those around the end of each window.

        The deepest is the last one before the last 2 * `SHORT` tokens. A window of W tokens is full at
        depth W - 1, and forgets from depth W on.
        """
        #   tokens       0 ........... p ........... 2 p ........... 3 p
        #   window       |<------- W - 1 ------->|
        #   boundaries                 x              x                     before it is full, and full
        last = (self._n - 2 * SHORT) // self._page_size
        found = {last} - {0}
        for window in self._layout.windows:
            filling = (window - 2) // self._page_size
            full, forgetting = (-(-depth // self._page_size) for depth in (window - 1, window))
            found |= {n for n in (filling, full, forgetting) if 0 < n * self._page_size < self._n}
        return tuple(n * self._page_size for n in sorted(found))

    def _round_trip(self, depth: int) -> None:
        """Export at `depth`, a page boundary, restore twice, and continue the original and both copies.

        Raises UnsupportedModelError unless all caches and logits are equal bit by bit.
        """
        # Slots descend from `pages` to 1, so a copy that confuses slots with pages gives another cache.
        runner = self._runners[TailMode.CHUNK]
        pages = depth // self._page_size if self._layout.has_pages else 0
        slots = np.arange(pages)[::-1] + 1
        cache, pool = self._new(), runner.allocate_pools(pages + 1, 2)
        # Zeros of the allocation would hide a part of a state that is not written.
        for tensor in pool.states.values():
            tensor.fill_(1)
        runner.forward(cache, self._prompt[:depth], 0)
        runner.export_pages(cache, pool, 0, slots)
        state = 1 if pool.states else None
        if state is not None:
            runner.export_state(cache, pool, state)
        # Restore twice, because the first continuation could have written into the pool.
        for attempt in ("restored", "restored again"):
            original, restored = copy.deepcopy(cache), runner.restore(pool, slots, state, tokens=depth)
            logits = [
                tuple(runner.forward(c, self._prompt[start:end], start) for c in (original, restored))
                for start, end in ((depth, self._n - 1), (self._n - 1, self._n))
                if start < end
            ]
            different = differences(self._layout, original, restored)
            if different or not all(torch.equal(a, b) for a, b in logits):
                where = different[0] if different else "its logits"
                raise UnsupportedModelError(
                    f"{self._name}, {attempt} at {depth} tokens, does not continue as before: {where}"
                    " differs; it keeps something outside its cache"
                )


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a - b).abs().max())
