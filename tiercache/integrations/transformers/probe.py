"""Checks at load that a model follows the rules that make its cache reusable.

The checks run prompts of some 150 tokens a few dozen times.

0. The model gives the same logits with a cache and explicit positions as without a cache and positions.
1. A prefill that is cut gives the logits of an uncut prefill, within a tolerance that `trial` measures.
2. The model reads every tensor of the cache: the logits change if a tensor is replaced by the same tensor of
   another prompt. (If a forward ignored a state, every hit would give a wrong answer without an error.)
3. A cache that was copied to the pools and back equals the original bit by bit, and the next forwards give
   the same logits with both caches. For a model with windows, this is checked before and behind the end of
   each window.

Some models, such as Jamba, break rule 1 or 2 only when they are fed several tokens at once. They are served
token by token (`TailMode.TOKEN`).

Then a search tries rule 1 with growing prompts. Some models compute differently beyond some length: rotary
embeddings switch, windows begin to forget, attention becomes sparse. A cache that was computed below such a
length is wrong for a sequence that grows beyond the length. Therefore prefills are cut near each length that
the configuration names, and continued past the length. Between the named lengths, the search tries prompts of
2, 4, 8, ... times the usual length. The first failure ends the search, and the longest prompt that passed
until then is the limit of the cache: sequences up to the limit are restored and kept, longer sequences are
computed without the cache.

The search takes about `seconds` at most. A named length that is too long to try in this time ends the search
like a failure. There is one exception: a length that is a number of positions, such as the original length of
a stretched rotary embedding, needs no long prompt. A short prompt is run instead, whose positions begin a
little before this length. The short prompt shows everything that depends on positions.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from itertools import count, takewhile
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.runner import POSITIONS, ModelRunner, is_length, mappings, ropes_of
from tiercache.integrations.transformers.trial import SHORT, ProbeReport, Trial

_log = logging.getLogger(__name__)

MAX_CHUNK: Final = 512
"""Number of tokens up to which a chunk of a recurrent scan, or a window, counts for the usual prompts.

The usual prompts are longer than two such chunks or windows. Longer ones are tried by the search, like the
other lengths in the configuration.
"""
SECONDS: Final = 20.0
"""Seconds that longer prompts may take by default."""
BEFORE: Final = 5
"""Distance in tokens from a cut to the named length after the cut."""
BEYOND: Final = 7
"""Number of tokens by which a prefill goes beyond a named length."""
MIN_TOKENS: Final = 24
"""Minimum number of tokens of a prompt; a check of fewer tokens would mean little."""
_BLOCKS: Final = 16
"""Number of blocks up to which block-sparse attention may still be dense.

In a sequence of more blocks, every known model with such attention skips some of them.
"""
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


def load(model: PreTrainedModel, page_size: int, seconds: float = SECONDS) -> tuple[ModelRunner, ProbeReport]:
    """Probe a model and return a runner in the tail mode that it needs, with the report of the probe.

    `seconds` bounds the time for longer prompts. Raises UnsupportedModelError if the model cannot be served.
    """
    runner = ModelRunner(model, page_size)
    report = probe(runner, seconds)
    return runner.like(report.tail_mode), report


def probe(runner: ModelRunner, seconds: float = SECONDS) -> ProbeReport:
    """Check the model of `runner` in both tail modes, whichever mode the runner has.

    `seconds` bounds the time for longer prompts. Raises UnsupportedModelError, with a message of one
    sentence, if the model cannot be served.
    """
    name = type(runner.model).__name__
    for rope in ropes_of(runner.model.config):
        if "dynamic" in str(rope["rope_type"]):
            raise UnsupportedModelError(
                f"{name} has rotary embeddings of type {rope['rope_type']}, whose frequencies follow the"
                " longest sequence that the model has seen, so cached keys would depend on other requests;"
                " use yarn or linear scaling"
            )
    report = Trial(runner, _usual_tokens(runner)).report()
    report = replace(report, **_Search(runner, report, seconds).limit())
    if report.limit is not None and report.limit < runner.page_size:
        raise UnsupportedModelError(
            f"{name} computes differently for longer sequences ({report.why}), and a page of"
            f" {runner.page_size} tokens is longer than the {report.limit} tokens that are safe"
        )
    return report


def _usual_tokens(runner: ModelRunner) -> int:
    """Return the usual length of prompts in tokens.

    The length is more than two pages, two windows and two chunks of the model's own recurrent scan, and twice
    as many tokens as an indexer selects, but at most the model's number of positions. Configurations use
    different names for the chunk. Gated delta nets have chunks of 64 tokens, which their configurations do
    not name. Raises UnsupportedModelError for a model with too few positions.
    """
    config = runner.model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size", "block_size"))
    chunks = [n for n in (*named, *runner.layout.windows) if isinstance(n, int) and n <= MAX_CHUNK]
    if any(t.name == "indexer" for t in runner.layout.kv_tensors()):
        # As long as all tokens are selected, the model does not read the indexer's keys.
        chunks.append(getattr(config, "index_topk", MAX_CHUNK))
    # | chunk | chunk | 13 |    `Trial` computes the chunk from this length: (tokens - 13) // 2
    tokens = 2 * max(64, runner.page_size, *chunks) + 13
    usual = min(tokens, runner.positions) if runner.positions else tokens
    # With 40 tokens, the four cuts of `Trial._cut_checks` still ascend. `Trial._round_trip` needs one whole
    # page and more than 2 * SHORT tokens after it.
    least = max(40, runner.page_size + 2 * SHORT + 1)
    if usual < least:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has {runner.positions} positions, and a page of"
            f" {runner.page_size} tokens is checked with prompts of {least}; use smaller pages"
        )
    return usual


def named_lengths(config: Any) -> dict[str, int]:
    """Return the lengths in tokens beyond which the model may compute differently.

    The result maps names of settings in the configuration to lengths: windows, chunks, `_BLOCKS` blocks of
    sparse attention, or the original number of positions of a stretched rotary embedding. The number of
    positions itself is left out, because a sequence with more tokens is never served.
    """
    text = config.get_text_config(decoder=True)
    found: dict[str, int] = {}
    for path, mapping in mappings("", text.to_dict()):
        for key, value in mapping.items():
            name = str(key)
            if name in POSITIONS or not _LENGTH.search(name) or _NO_LENGTH.search(name):
                continue
            for length in value if isinstance(value, list | tuple) else (value,):
                if is_length(length):
                    many = length * (_BLOCKS if "block_size" in name else 1)
                    found[f"{path}{name}"] = max(many, found.get(f"{path}{name}", 0))
    return found


class _Search:
    """One search for the limit of a model whose `report` is that of the usual prompts; see the module."""

    def __init__(self, runner: ModelRunner, report: ProbeReport, seconds: float) -> None:
        self._runner, self._mode, self._seconds = runner, report.tail_mode, seconds
        self._usual = report.tokens
        self._passed = 0  # tokens of the longest prompt that passed
        self._end = runner.positions or 1 << 62
        named = named_lengths(runner.model.config)
        windows = {f"window of {n}": n for n in runner.layout.windows if n not in named.values()}
        self._lengths = {name: n for name, n in (named | windows).items() if n < self._end}
        self._began = time.monotonic()
        self._last = (self._usual, 0.0)  # the longest prompt so far: its tokens, and the seconds that it took

    def limit(self) -> dict[str, Any]:
        """Return the `limit` of the report, and `why`: the first failure on the way up."""
        named = set(self._lengths.values())
        doublings = (self._usual << n for n in count(1))
        below = takewhile(lambda n: n < min(max(named, default=0), self._end), doublings)
        for length in sorted({*named, self._usual, *below}):
            why = self._cross(length) if length in named else self._double(length)
            if why:
                most = self._passed
                _log.warning("sequences of more than %d tokens are computed without the cache: %s", most, why)
                return {"limit": most, "why": why}
        return {}

    def _cross(self, length: int) -> str:
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
        once, twice = length + BEYOND, 2 * length + BEYOND
        for tokens, cuts in ((once, (below,)), (twice, (below, above)), (twice, (above,))):
            if fault == "":
                fed = min(max(tokens, MIN_TOKENS), self._end)
                fault = self._try(fed, tuple(cut for cut in cuts if cut < fed) or (below,))
        if fault is None:  # not enough time or memory: run a short prompt at the positions around the length
            half = self._usual // 2
            if self._runner.takes_positions:
                fault = self._run(self._usual, (half,), max(0, length - half))
            if fault == "" and all("position" in name for name in names):
                return ""
            fault = fault or f"not reached within {self._seconds:g} seconds, or the memory"
        if not fault:
            return ""
        # The length itself may still be the limit: try a sequence of exactly this length.
        middle = min(self._passed or length // 2, length - BEFORE - 1)
        if length >= MIN_TOKENS and self._try(length, (middle, length - BEFORE)) == "":
            self._passed = length
        return f"{', '.join(names)}: {fault}"

    def _double(self, tokens: int) -> str:
        """Return why a prompt of this length, which is no named length, cannot be continued; empty if it can.

        The result is empty too if the length cannot be reached in time. Then the next named length, which is
        longer, runs out of time too, and ends the search with a reason.
        """
        # The usual prompts have passed already.
        fault = "" if tokens == self._usual else self._try(tokens, (tokens // 2, tokens - BEYOND))
        if fault == "":
            self._passed = max(self._passed, tokens)
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
            return Trial(self._runner, tokens, first_position=first_position).crossing(self._mode, cuts)
        except UnsupportedModelError as error:
            return str(error)
