"""Prefills in chunks of limited length: where they are cut, and that a cut changes nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import slow_after
from tests.integrations.transformers.models import FAMILIES, PAGE, loaded, prompt
from tests.integrations.transformers.serving import EVICTED, SYSTEM, evict, joined, right, serving, store
from tests.integrity import check_controller
from tiercache.core import Tier
from tiercache_lab.demo.audit import Audit

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 2 * PAGE
BEGINNING = prompt(5 * PAGE + 3, seed=1)
LONGER = joined(BEGINNING, prompt(4 * PAGE, seed=2))


@pytest.mark.parametrize("name", slow_after(2, ["qwen3_next", "llama", "bamba", "falcon_h1", "jamba"]))
def test_a_prefill_in_chunks_equals_its_recompute(name: str, tmp_path: Path) -> None:
    """From nothing, and then what a longer prompt has beyond the part that each of the tiers restores."""
    has_states = FAMILIES[name].states
    audit = Audit(loaded(name)[0], page_slots=256, state_slots=64)
    with serving(name, store(tmp_path), chunk_limit=LIMIT) as worker:
        for tier in (None, *Tier):
            extra = str(tier).encode()
            if tier is not None:
                worker.serve(BEGINNING, 1, extra=extra)
                evict(worker, *EVICTED[tier])
            tokens, depth = (LONGER, 5 * PAGE) if tier is not None else (BEGINNING, 0)
            generation = worker.serve(tokens, 2, extra=extra, audit=True)
            assert (generation.tier, generation.restored) == (tier, depth)
            ends = (
                (7 * PAGE, 9 * PAGE, len(LONGER)) if depth else
                (LIMIT, 2 * LIMIT, 5 * PAGE, len(BEGINNING)) if has_states else
                (LIMIT, 2 * LIMIT, len(BEGINNING))
            )  # fmt: skip
            assert generation.bounds[: len(ends)] == ends
            assert generation.states == (ends[-2:-1] if has_states else ())
            right(audit, worker, generation)
        check_controller(worker.controller)


def test_the_branch_and_the_limit_cut_the_same_prefill() -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=64, state_slots=16)
    with serving("qwen3_next", chunk_limit=3 * PAGE) as worker:
        for seed in (2, 3):
            generation = worker.serve(joined(SYSTEM, prompt(5 * PAGE, seed)), 1)
            right(audit, worker, generation)
    assert generation.bounds == (2 * PAGE, 5 * PAGE, 7 * PAGE, generation.prompt_tokens)
    assert generation.states == (2 * PAGE, 7 * PAGE)


def test_bytes_that_were_computed_in_other_chunks_are_restored_exactly(tmp_path: Path) -> None:
    audit = Audit(loaded("qwen3_next")[0], page_slots=128, state_slots=32)
    history = BEGINNING.tolist()
    for restored, limit in ((0, None), (5 * PAGE, PAGE), (10 * PAGE, 3 * PAGE)):
        with serving("qwen3_next", store(tmp_path), chunk_limit=limit) as worker:
            generation = worker.serve(history, 2, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            history = joined(history, prompt(5 * PAGE, seed=restored + 7))
            assert worker.controller.flush()
