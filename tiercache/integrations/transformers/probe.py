"""Checks at load that a model follows the rules that make its cache reusable: it runs prompts of some 150 tokens a few dozen times.

0. Given a cache and explicit positions, the model gives the same logits as without either.
1. A prefill that is cut gives the logits of an uncut one, within a tolerance.
2. Every tensor of the cache is read: replaced by another prompt's, it changes the logits. (A forward that ignores a state would make
   every hit a wrong answer, without an error.)
3. A cache that went through the pools is bitwise the one that was exported, and both continue with equal bits.

A model that breaks rule 1 or 2 only when it is fed several tokens at once is served token by token (`TailMode.TOKEN`); Jamba is one.

After these checks rule 1 is checked again with longer prompts, past every length that the configuration names; see `reach`.

**The tolerance.** A cut changes the order of sums, so cached values differ by rounding. The probe measures what rounding does to this
model: all cached values get a relative noise of at most half an eps of their dtype, and the logits move by the jitter. The tolerance is
a multiple of the median jitter of three draws: 16 in float32, where every sum of every operation rounds by as much as a stored value
does; 4 in narrower types, whose sums are float32 and round once, when stored (16 where cuBLAS may round the parts of a sum). Both are
empirical: over the 19 served families of `tests/models.py`, on CPUs, cuts err by 0.96 to 3.25 jitters in float32 and by 0 to 1.25 in
bfloat16, so the tolerance exceeds the largest error by a factor of 4.9 and of 3.2.
The tolerance is useful only if a wrong cache exceeds it: a model is refused if another prompt's states, or its KV where there are no
states, move the logits by no more than the tolerance.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.device import differences
from tiercache.integrations.transformers.layout import TensorLayout, inspect_cache
from tiercache.integrations.transformers.lengths import named_lengths, refuse_dynamic_rope
from tiercache.integrations.transformers.reach import SECONDS, UNBOUNDED, Explorer, Reach
from tiercache.integrations.transformers.runner import ModelRunner, TailMode
from tiercache.integrations.transformers.stream import rounds_parts

JITTERS: Final = 16
"""The tolerance in jitters, for float32 and wherever the parts of a sum may be rounded."""
JITTERS_NARROW: Final = 4
"""The tolerance in jitters, for narrower dtypes."""
SHORT: Final = 3
"""Tokens of a short tail. The logits after each of them are compared, because the shortest convolutions reach only the first."""
SEED: Final = 20457
"""Seed of the random prompts and of the noise."""
MOST_CHUNK: Final = 512
"""Tokens of the longest scan chunk that the usual prompts cross; longer chunks are checked by `reach`, like other lengths."""


class CutCheck(NamedTuple):
    """A prefill cut at `cuts`, compared with an uncut one.

    `error` is the largest absolute difference of the last position's logits.
    """

    mode: TailMode
    cuts: tuple[int, ...]
    error: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The findings of the probe.

    Errors, reactions, the jitter and the tolerance are absolute differences of logits; `scale` is the largest magnitude of a logit.
    `tokens` is the length of the prompts, `seconds` the time that the probe took.
    `reactions` maps `kv` and `state` to how far the logits move when all tensors of that kind are another prompt's. `chunk_fault` says
    why chunks are not used (empty in CHUNK mode). `reach` is what longer prompts showed.
    """

    tail_mode: TailMode
    tokens: int
    scale: float
    jitter: float
    tolerance: float
    checks: tuple[CutCheck, ...]
    reactions: Mapping[str, float]
    chunk_fault: str
    seconds: float
    reach: Reach = UNBOUNDED

    @property
    def max_error(self) -> float:
        """The largest difference between a cut and an uncut prefill in the tail mode that is used."""
        return max(check.error for check in self.checks if self.tail_mode is TailMode.CHUNK or check.mode is TailMode.TOKEN)


def load(model: PreTrainedModel, page_size: int, seconds: float = SECONDS) -> tuple[ModelRunner, ProbeReport]:
    """Probe a model and return a runner in the tail mode that it needs, with the report of the probe.

    `seconds` bounds the time for longer prompts. Raises UnsupportedModelError if the model cannot be served.
    """
    runner = ModelRunner(model, page_size)
    report = probe(runner, seconds)
    return runner.like(report.tail_mode), report


def probe(runner: ModelRunner, seconds: float = SECONDS) -> ProbeReport:
    """Check the model of `runner` in both tail modes, whichever the runner's own is.

    `seconds` bounds the time for prompts longer than usual; see `reach`. Raises UnsupportedModelError, with a message of one sentence, if
    the model cannot be served.
    """
    refuse_dynamic_rope(runner.model)
    report = _base(runner)
    lengths = {name: n for name, n in named_lengths(runner.model.config).items() if runner.positions is None or n < runner.positions}
    explorer = Explorer(
        lambda tokens, first: _Trial(runner, tokens, first_position=first),
        report.tail_mode,
        report.tokens,
        _usual_tokens(runner),
        lengths,
        seconds,
    )
    reach = explorer.explore(runner.positions)
    if reach.limit is not None and reach.limit < runner.page_size:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} computes otherwise for longer sequences ({reach.why}), and a page of {runner.page_size} tokens "
            f"is more than the {reach.limit} that are safe"
        )
    return replace(report, reach=reach, seconds=report.seconds + reach.seconds)


def _base(runner: ModelRunner) -> ProbeReport:
    """Run the checks with prompts of the usual length or, where they fail, of shorter lengths that the configuration names.

    Returns the first report in CHUNK mode, else the first report; raises the first UnsupportedModelError if there is no report.
    """
    usual = _usual_tokens(runner)
    least = max(40, runner.page_size + 2 * SHORT + 1)
    if usual < least:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has {runner.positions} positions, and a page of {runner.page_size} tokens is checked with "
            f"prompts of {least}; use smaller pages"
        )
    shorter = sorted({n for n in named_lengths(runner.model.config).values() if least <= n < usual}, reverse=True)
    found: ProbeReport | UnsupportedModelError | None = None
    for tokens in (usual, *shorter):
        try:
            report = _Trial(runner, tokens).report()
        except UnsupportedModelError as error:
            found = found or error
            continue
        if report.tail_mode is TailMode.CHUNK:
            return report
        found = report if not isinstance(found, ProbeReport) else found
    if isinstance(found, ProbeReport):
        return found
    assert found is not None
    raise found


class _Trial:
    """One run of the checks over two random prompts of `tokens` tokens; `first_position` is the position of their first token."""

    def __init__(self, runner: ModelRunner, tokens: int, *, first_position: int = 0) -> None:
        self.started = time.monotonic()
        self.model, self.page_size, self.layout = runner.model, runner.page_size, runner.layout
        self.runners = {mode: runner.like(mode, first_position) for mode in TailMode}
        self.chunk = (tokens - 13) // 2
        self.name = type(self.model).__name__
        rng = np.random.default_rng(SEED)
        self.prompt, self.other = rng.integers(0, runner.vocab_size, (2, tokens))
        self.n = tokens

    def report(self) -> ProbeReport:
        """Run all checks; raise UnsupportedModelError if the model fails them even when it is fed token by token."""
        tolerance, jitter = self.tolerance()
        self.compare_without_cache(tolerance)
        token_checks = self.cut_checks(TailMode.TOKEN)
        if fault := self.fault(TailMode.TOKEN, token_checks, tolerance):
            raise UnsupportedModelError(f"{self.name} cannot continue from a cache: {fault}")
        reactions = self.reactions(tolerance)
        self.round_trip()
        chunk_checks = self.cut_checks(TailMode.CHUNK)
        fault = self.fault(TailMode.CHUNK, chunk_checks, tolerance)
        mode = TailMode.TOKEN if fault else TailMode.CHUNK
        return ProbeReport(
            mode, self.n, self.scale, jitter, tolerance, (*token_checks, *chunk_checks), reactions, fault, time.monotonic() - self.started
        )

    @cached_property
    def uncut(self) -> torch.Tensor:
        """The last position's logits `[vocab]` of one forward over the whole prompt.

        The forward runs twice: raises UnsupportedModelError if the two differ, or if logits are not finite.
        """
        first, second = (self.run(self.new(), self.prompt, 0) for _ in range(2))
        if not torch.isfinite(first).all():
            raise UnsupportedModelError(f"{self.name} gives logits that are not finite, so nothing can be checked; look at its weights")
        if not torch.equal(first, second):
            raise UnsupportedModelError(
                f"{self.name} gives other logits for a repeated prompt (by {_gap(first, second):.3g}); use deterministic algorithms"
            )
        return first[-1]

    @cached_property
    def scale(self) -> float:
        return float(self.uncut.abs().max())

    @cached_property
    def cache(self) -> DynamicCache:
        """The prompt's cache after all but the last `SHORT` tokens; copy it before continuing it."""
        return self.cache_of(self.prompt)

    @cached_property
    def other_cache(self) -> DynamicCache:
        return self.cache_of(self.other)

    def cache_of(self, prompt: npt.NDArray[np.int64]) -> DynamicCache:
        cache = self.new()
        self.run(cache, prompt[: self.n - SHORT], 0)
        if inspect_cache(cache, self.page_size, self.n - SHORT) != self.layout:
            raise UnsupportedModelError(
                f"{self.name} changes the shape of its cache between {self.n - SHORT} tokens and few; its states cannot be kept in slots"
            )
        return cache

    def new(self) -> DynamicCache:
        return self.runners[TailMode.CHUNK].new_cache()

    def run(self, cache: DynamicCache, tokens: npt.NDArray[np.int64], start: int, mode: TailMode = TailMode.CHUNK) -> torch.Tensor:
        return self.runners[mode].logits(cache, tokens, start, keep=min(SHORT, len(tokens)))

    def tail(self, cache: DynamicCache, mode: TailMode) -> torch.Tensor:
        """Return the logits of the last `SHORT` tokens, continued from `cache`."""
        return self.run(cache, self.prompt[-SHORT:], self.n - SHORT, mode)

    def tolerance(self) -> tuple[float, float]:
        """Measure and return the tolerance and the jitter (see the module); the tolerance is at least 2 eps of the largest logit."""
        base = self.tail(copy.deepcopy(self.cache), TailMode.TOKEN)
        rng = torch.Generator().manual_seed(SEED)
        jitters = [_gap(self.tail(self.noisy(rng), TailMode.TOKEN), base) for _ in range(3)]
        jitter, eps = median(jitters), torch.finfo(self.model.dtype).eps
        exact = eps > torch.finfo(torch.float32).eps and not rounds_parts(self.model.device)
        return max((JITTERS_NARROW if exact else JITTERS) * jitter, 2 * eps * self.scale), jitter

    def compare_without_cache(self, tolerance: float) -> None:
        """Raise UnsupportedModelError if passing a cache and positions changes the logits by more than the tolerance."""
        off = _gap(self.runners[TailMode.CHUNK].without_cache(self.prompt, SHORT)[-1], self.uncut)
        if not off <= tolerance:
            raise UnsupportedModelError(
                f"{self.name} gives other logits over a DynamicCache with positions from 0 than by itself, off by {off:.3g}, more than the "
                f"{tolerance:.3g} that rounding explains"
            )

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        """Return why a prefill cut at `cuts` cannot be continued in this mode; empty if it can."""
        tolerance, _ = self.tolerance()
        error = self.cut_error(mode, cuts)
        if error <= tolerance:
            return ""
        return f"cut at {', '.join(map(str, cuts))} of {self.n} tokens, logits are off by {error:.3g}, rounding explains {tolerance:.3g}"

    def cut_checks(self, mode: TailMode) -> tuple[CutCheck, ...]:
        """Check cuts on and off the model's own chunk boundaries, with tails longer than a chunk, short tails, and tails of one token."""
        n, c, middle = self.n, self.chunk, self.chunk // 2 + 5
        # Single steps are slow on a large model; a dozen steps reach past any convolution kernel.
        several = [(c,), (middle,), (n - 7,), (middle, c, n - 7, n - 1)] if mode is TailMode.CHUNK else [(n - 1,), (n - 12,)]
        return tuple(CutCheck(mode, cuts, self.cut_error(mode, cuts)) for cuts in several)

    def cut_error(self, mode: TailMode, cuts: tuple[int, ...]) -> float:
        return _gap(self.runners[mode].prefill(self.new(), self.prompt, 0, cuts), self.uncut)

    def fault(self, mode: TailMode, checks: tuple[CutCheck, ...], tolerance: float) -> str:
        """Return why this tail mode cannot be used; empty if it can."""
        feeding = "one token at a time" if mode is TailMode.TOKEN else "several tokens at a time"
        if (ignored := self.ignored(mode)) is not None:
            return f"fed {feeding}, it ignores {ignored.name} of layer {ignored.layer} ({type(self.cache.layers[ignored.layer]).__name__})"
        off = [check for check in checks if not check.error <= tolerance]
        if off:
            return (
                f"fed {feeding} after a cut at {', '.join(map(str, off[0].cuts))} of {self.n} tokens, its logits are off by "
                f"{off[0].error:.3g}, more than the {tolerance:.3g} that rounding explains"
            )
        return ""

    def ignored(self, mode: TailMode) -> TensorLayout | None:
        """Return the first tensor whose content does not change a single bit of the next logits; None if all do."""

        def following(cache: DynamicCache) -> torch.Tensor:
            # Token by token, one token is enough: it reads everything that the model reads at all.
            return self.run(cache, self.prompt[-SHORT:][: 1 if mode is TailMode.TOKEN else SHORT], self.n - SHORT, mode)

        base = following(copy.deepcopy(self.cache))
        for t in (*self.layout.kv_tensors(), *self.layout.state_tensors()):
            if torch.equal(following(self.replaced([t])), base):
                return t
        return None

    def reactions(self, tolerance: float) -> dict[str, float]:
        """Return by how much the logits move when all tensors of a kind (`kv`, `state`) are another prompt's.

        Raises UnsupportedModelError if the states (or the KV, where there are none) move them by no more than the tolerance.
        """
        base = self.tail(copy.deepcopy(self.cache), TailMode.TOKEN)
        kinds = {"kv": [*self.layout.kv_tensors()], "state": [*self.layout.state_tensors()]}
        found = {kind: _gap(self.tail(self.replaced(ts), TailMode.TOKEN), base) for kind, ts in kinds.items() if ts}
        kind = "state" if "state" in found else "kv"
        if not found[kind] > tolerance:
            raise UnsupportedModelError(
                f"{self.name} hardly reads its {kind}: another prompt's moves the logits by {found[kind]:.3g}, within the {tolerance:.3g} "
                "that rounding explains, so wrong answers could not be told from right ones"
            )
        return found

    def replaced(self, tensors: list[TensorLayout]) -> DynamicCache:
        """Return a copy of the prompt's cache with some tensors taken from the other prompt's."""
        cache = copy.deepcopy(self.cache)
        with torch.inference_mode():
            for t in tensors:
                mine, theirs = (self.layout.tensor_of(c, t.layer, t.name) for c in (cache, self.other_cache))
                # A tensor that depends on the position alone is the same in both caches, so change it by 1.
                mine.copy_(theirs if not torch.equal(mine, theirs) else theirs + 1)
        return cache

    def noisy(self, rng: torch.Generator) -> DynamicCache:
        """Return a copy of the prompt's cache as if every value had been rounded once more: relative noise of at most half an eps."""
        cache = copy.deepcopy(self.cache)
        with torch.inference_mode():
            for t in (*self.layout.kv_tensors(), *self.layout.state_tensors()):
                tensor = self.layout.tensor_of(cache, t.layer, t.name)
                if tensor.is_floating_point():
                    noise = (torch.rand(tensor.shape, generator=rng) - 0.5) * torch.finfo(tensor.dtype).eps
                    tensor.copy_(tensor.float() * (1 + noise.to(tensor.device)))
        return cache

    def round_trip(self) -> None:
        """Export at the deepest page boundary before the last 2 * `SHORT` tokens, restore twice, continue the original and both copies.

        Raises UnsupportedModelError unless caches and logits stay equal bit by bit.
        """
        runner = self.runners[TailMode.CHUNK]
        pages = (self.n - 2 * SHORT) // self.page_size
        depth, slots = pages * self.page_size, np.arange(pages)[::-1] + 1
        cache, pool = self.new(), runner.allocate_pools(pages + 1, 2)
        runner.forward(cache, self.prompt[:depth], 0)
        runner.export_pages(cache, pool, 0, slots)
        state = 1 if pool.states else None
        if state is not None:
            runner.export_state(cache, pool, state)
        # Restore twice: the first continuation must not have written into the pool.
        for attempt in ("restored", "restored again"):
            original, restored = copy.deepcopy(cache), runner.restore(pool, slots, state)
            steps: list[Callable[[DynamicCache], torch.Tensor]] = [
                lambda c: runner.forward(c, self.prompt[depth:-1], depth),
                lambda c: runner.forward(c, self.prompt[-1:], self.n - 1),
            ]
            logits = [(step(original), step(restored)) for step in steps]
            different = differences(self.layout, original, restored)
            if different or not all(torch.equal(a, b) for a, b in logits):
                where = different[0] if different else "its logits"
                raise UnsupportedModelError(
                    f"{self.name}, {attempt} at {depth} tokens, does not continue as before: {where} differs; "
                    "it keeps something outside its cache"
                )


def _usual_tokens(runner: ModelRunner) -> int:
    """Return the length of the prompts in tokens.

    It is more than twice the chunk of the model's own scan and more than two pages, but no more than the model has positions.
    Configurations use different names for the chunk; gated delta nets use 64 without naming it.
    """
    config = runner.model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size", "block_size"))
    tokens = 2 * max(64, runner.page_size, *(n for n in named if isinstance(n, int) and n <= MOST_CHUNK)) + 13
    return min(tokens, runner.positions) if runner.positions else tokens


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    return float((a - b).abs().max())
