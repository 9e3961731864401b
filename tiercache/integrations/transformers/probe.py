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

After these checks, `reach` checks rule 1 again with prompts that are longer than the lengths in the model's
configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from transformers import PreTrainedModel

from tiercache.errors import UnsupportedModelError
from tiercache.integrations.transformers.reach import (
    SECONDS,
    Explorer,
    TailMode,
    named_lengths,
    refuse_dynamic_rope,
)
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.trial import SHORT, ProbeReport, Trial

MAX_CHUNK: Final = 512
"""Number of tokens up to which a chunk of a recurrent scan, or a window, counts for the usual prompts.

The usual prompts are longer than two such chunks or windows. Longer ones are checked by `reach`, like the
other lengths in the configuration.
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

    `seconds` bounds the time for prompts longer than usual; see `reach`. Raises UnsupportedModelError, with a
    message of one sentence, if the model cannot be served.
    """
    refuse_dynamic_rope(runner.model)
    report = _base(runner)
    named = named_lengths(runner.model.config)
    windows = {f"window of {n}": n for n in runner.layout.windows if n not in named.values()}
    lengths = {
        name: n for name, n in (named | windows).items() if runner.positions is None or n < runner.positions
    }
    explorer = Explorer(
        lambda tokens, first: Trial(runner, tokens, first_position=first),
        report.tail_mode,
        report.tokens,
        _usual_tokens(runner),
        lengths,
        seconds,
        shifts=runner.takes_positions,
    )
    reach = explorer.explore(runner.positions)
    if reach.limit is not None and reach.limit < runner.page_size:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} computes differently for longer sequences ({reach.why}), and a"
            f" page of {runner.page_size} tokens is longer than the {reach.limit} tokens that are safe"
        )
    return replace(report, reach=reach, seconds=report.seconds + reach.seconds)


def _base(runner: ModelRunner) -> ProbeReport:
    """Run the checks with prompts of the usual length and then of shorter lengths, until CHUNK mode passes.

    The shorter lengths are those that the configuration names, the longest first. Returns the first report
    that is in CHUNK mode. If no length gives such a report, returns the first report in TOKEN mode. If no
    length gives a report at all, raises the first UnsupportedModelError.
    """
    usual = _usual_tokens(runner)
    # With 40 tokens, the four cuts of `Trial._cut_checks` still ascend. `Trial._round_trip` needs one whole
    # page and more than 2 * SHORT tokens after it.
    least = max(40, runner.page_size + 2 * SHORT + 1)
    if usual < least:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has {runner.positions} positions, and a page of"
            f" {runner.page_size} tokens is checked with prompts of {least}; use smaller pages"
        )
    shorter = sorted(
        {n for n in named_lengths(runner.model.config).values() if least <= n < usual}, reverse=True
    )
    found: ProbeReport | UnsupportedModelError | None = None
    for tokens in (usual, *shorter):
        try:
            report = Trial(runner, tokens).report()
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


def _usual_tokens(runner: ModelRunner) -> int:
    """Return the usual length of prompts in tokens.

    The length is more than two pages, two windows and two chunks of the model's own recurrent scan, and twice
    as many tokens as an indexer selects, but at most the model's number of positions. Configurations use
    different names for the chunk. Gated delta nets have chunks of 64 tokens, which their configurations do
    not name.
    """
    config = runner.model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size", "block_size"))
    chunks = [n for n in (*named, *runner.layout.windows) if isinstance(n, int) and n <= MAX_CHUNK]
    if any(layer.indexer for layer in runner.layout.layers):
        # As long as all tokens are selected, the model does not read the indexer's keys.
        chunks.append(getattr(config, "index_topk", MAX_CHUNK))
    # | chunk | chunk | 13 |    `Trial` computes the chunk from this length: (tokens - 13) // 2
    tokens = 2 * max(64, runner.page_size, *chunks) + 13
    return min(tokens, runner.positions) if runner.positions else tokens
