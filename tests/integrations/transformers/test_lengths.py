"""Models that compute otherwise beyond some length restore what a recompute gives, or are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.examples import slow_after
from tests.integrations.transformers.models import DENSE, PAGE, build, loaded, prompt
from tests.integrations.transformers.serving import AMPLE, joined, store
from tests.integrity import check_controller
from tiercache.core import Reason
from tiercache.errors import InputError, UnsupportedModelError
from tiercache.integrations.transformers import ModelRunner, ProbeReport, TailMode, load
from tiercache.integrations.transformers.probe import named_lengths
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.runner import positions_of
from tiercache.integrations.transformers.worker import Worker
from tiercache_lab.demo.audit import Audit
from tiercache_lab.demo.small import strengthen

pytestmark = pytest.mark.usefixtures("one_thread")
probe_module = sys.modules[
    "tiercache.integrations.transformers.probe"
]  # the package has a function of this name

DIM = DENSE["hidden_size"] // DENSE["num_attention_heads"]
SWITCH = 10 * PAGE
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (DIM // 2),
    "long_factor": [4.0] * (DIM // 2),
    "factor": 8.0,
}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0}, "dynamic": {"factor": 4.0}, "yarn": {"factor": 12.8}, "longrope": LONGROPE,
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def roped(kind: str, switch: int = SWITCH, **options: Any) -> PreTrainedModel:
    """A small Llama whose rotary embeddings are of a type, stretched beyond `switch` tokens."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": switch} | SCALED[
        kind
    ]
    return build("llama", rope_parameters=parameters, **options)


def open_worker(model: PreTrainedModel, path: Path, **options: Any) -> Worker:
    return Worker(model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(path), page_size=PAGE, **options)


def right(worker: Worker, generation: Generation) -> None:
    """Every token is that of a greedy recompute, and the first logits are near those of an uncut prefill."""
    runner, tokens = worker.runner, generation.tokens
    for end in range(generation.prompt_tokens, len(tokens)):
        logits = runner.forward(runner.new_cache(), tokens[:end], 0)
        assert int(logits.argmax()) == tokens[end], end
        if end == generation.prompt_tokens:
            assert float((generation.first_logits - logits).abs().max()) <= worker.probe.tolerance


def test_every_type_of_rotary_embedding_is_tried_here() -> None:
    assert set(SCALED) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("kind", slow_after(1, ["longrope", *sorted(set(SCALED) - {"dynamic", "longrope"})]))
def test_a_conversation_across_the_switch_of_a_rotary_embedding(kind: str, tmp_path: Path) -> None:
    """From below it, over it while decoding, and above it; then again, by a worker with the store alone."""
    limit = SWITCH if kind == "longrope" else None
    for again in (False, True):
        with open_worker(roped(kind), tmp_path) as worker:
            assert worker.limit == limit
            history = prompt(SWITCH - 40, seed=1).tolist()
            for turn in range(4):
                generation = worker.serve(history, 20, audit=True)
                right(worker, generation)
                below = limit is None or len(history) <= limit
                assert (
                    generation.restored >= ((len(history) - 1) // PAGE * PAGE if again else turn * 2 * PAGE)
                    or not below
                )
                assert below or (generation.restored, generation.reason) == (0, Reason.DISABLED)
                history = joined(generation.tokens, prompt(3, seed=turn))
            worker.controller.flush()
            check_controller(worker.controller)


def test_what_was_computed_above_the_switch_is_not_found_below_it(tmp_path: Path) -> None:
    """The long prompt comes first, then its beginning, which has another cache."""
    tokens = prompt(SWITCH + 60, seed=2)
    with open_worker(roped("longrope"), tmp_path) as worker:
        for length in (len(tokens), SWITCH - 8, SWITCH + 1, SWITCH, SWITCH - 8, len(tokens)):
            right(worker, worker.serve(tokens[:length], 2))


def test_an_answer_that_crosses_the_switch_can_be_audited(tmp_path: Path) -> None:
    with open_worker(roped("longrope"), tmp_path) as worker:
        audit = Audit(worker.runner, page_slots=64, state_slots=8)
        for tokens in (prompt(SWITCH - 20, seed=3), prompt(SWITCH - 20, seed=3)):
            generation = worker.serve(tokens, 60, audit=True)
            verdict = audit.check(generation)
            assert generation.anew == SWITCH + 1
            assert (verdict.max_logit_diff, verdict.same_text, verdict.same_bytes) == (0.0, True, True)
        assert generation.restored == (SWITCH - 20) // PAGE * PAGE


def test_a_prompt_beyond_the_limit_of_the_model_is_one_chunk(tmp_path: Path) -> None:
    """A cut below the length at which the rotary embedding changes would mix two of them in one cache."""
    tokens = prompt(SWITCH + 60, seed=2)
    with open_worker(roped("longrope"), tmp_path, chunk_limit=2 * PAGE) as worker:
        assert worker.serve(tokens, 1).bounds == (len(tokens),)
        assert len(worker.serve(tokens[:SWITCH], 1).bounds) == SWITCH // (2 * PAGE)


@pytest.mark.parametrize(("switch", "limit"), slow_after(1, [(141, 141), (300, 300), (1000, 1000)]))
def test_the_switch_is_found_wherever_it_is(switch: int, limit: int) -> None:
    _, report = load(roped("longrope", switch), PAGE)
    assert (report.limit, report.tail_mode) == (limit, TailMode.CHUNK)
    assert f"original_max_position_embeddings {switch}" in report.why


def test_a_switch_within_the_first_page_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a page of 16 tokens is longer than the"):
        load(roped("longrope", PAGE // 2), PAGE)


def test_a_switch_beyond_what_there_is_time_for_is_crossed_by_positions() -> None:
    """These lengths would take hours."""
    _, report = load(roped("yarn", 1 << 22, max_position_embeddings=1 << 23), PAGE, seconds=0.5)
    assert report.limit is None
    _, report = load(roped("longrope", 1 << 22, max_position_embeddings=1 << 23), PAGE, seconds=0.5)
    assert report.limit is not None
    assert report.limit < 1 << 22


def test_frequencies_that_follow_the_longest_sequence_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="type dynamic, whose frequencies follow the longest sequence"
    ):
        load(roped("dynamic"), PAGE)


class Scripted:
    """A trial that is as good as a script says."""

    fault = 0  # the length that a cut sequence must not cross
    seen: ClassVar[list[tuple[int, tuple[int, ...]]]] = []

    def __init__(self, runner: ModelRunner, tokens: int, *, first_position: int = 0) -> None:
        self.tokens = tokens

    def report(self) -> ProbeReport:
        return replace(loaded("llama")[1], limit=None, tokens=self.tokens)

    def crossing(self, mode: TailMode, cuts: tuple[int, ...]) -> str:
        self.seen.append((self.tokens, cuts))
        return "off" if cuts[0] < self.fault < self.tokens else ""


def test_every_named_length_is_crossed_and_prompts_are_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded("llama")[0]  # probed by real trials
    monkeypatch.setattr(probe_module, "Trial", Scripted)
    monkeypatch.setattr(probe_module, "named_lengths", lambda config: {"a": 30, "b": 200, "c": 1000})
    Scripted.seen.clear()
    assert probe_module.probe(runner).limit is None
    for length in (30, 200, 1000):
        assert any(cuts[0] < length < tokens for tokens, cuts in Scripted.seen)
    assert {tokens for tokens, _ in Scripted.seen} >= {2 * 141, 4 * 141}
    for fault in (201, 1001, 1200):
        monkeypatch.setattr(Scripted, "fault", fault)
        limit = probe_module.probe(runner).limit
        assert limit is not None
        assert limit <= fault


@pytest.mark.parametrize("window", slow_after(1, [200, 300]))
def test_keys_that_are_chosen_anew_for_every_length_bound_the_cache(window: int, tmp_path: Path) -> None:
    """Doge keeps as many keys as its window, of the whole sequence."""
    config = CONFIG_MAPPING["doge"](**(DENSE | {"keep_window_size": window}))
    model = strengthen(AutoModelForCausalLM.from_config(config).eval(), 0)
    tokens = prompt(300, seed=4)
    with open_worker(model, tmp_path) as worker:
        assert worker.limit is not None
        assert worker.limit <= window
        for length in (20, 60, 190, 300, 210, 190, 60, 20, 300):
            generation = worker.serve(tokens[:length], 2)
            assert generation.restored <= worker.limit
            right(worker, generation)


@pytest.mark.parametrize("attention", ["block_sparse", "original_full"])
def test_a_model_that_changes_its_attention_for_good_is_refused(attention: str, tmp_path: Path) -> None:
    """BigBird becomes dense at its first short prompt, and was sparse for long ones before."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 256, "block_size": 8,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["big_bird"](is_decoder=True, attention_type=attention, **sizes)
    ).eval()
    if attention == "original_full":
        open_worker(strengthen(model, 0), tmp_path).close()
    else:
        with pytest.raises(UnsupportedModelError, match="changed while it computed"):
            open_worker(strengthen(model, 0), tmp_path)


# -- positions


@pytest.mark.parametrize("name", slow_after(1, ["llama", "falcon_h1"]))
def test_a_probe_is_not_longer_than_the_models_positions(name: str, tmp_path: Path) -> None:
    with open_worker(build(name, max_position_embeddings=100), tmp_path) as worker:
        assert worker.probe.tokens == 100
        for _ in range(2):
            generation = worker.serve(prompt(90, seed=5), 11)
            assert len(generation.tokens) == 101, "the last one is not fed"
            right(worker, generation)
        assert generation.restored == 80


@pytest.mark.parametrize("positions", [8, 15, 16, 30, 39])
def test_too_few_positions_are_refused(positions: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"has {positions} positions"):
        load(build("llama", max_position_embeddings=positions), PAGE)


@pytest.mark.parametrize(("tokens", "new"), [(101, 1), (100, 2), (1, 101), (1000, 1)])
def test_a_request_past_the_positions_is_refused(tokens: int, new: int, tmp_path: Path) -> None:
    with open_worker(build("llama", max_position_embeddings=100), tmp_path) as worker:
        with pytest.raises(
            InputError, match=r"positions, and the model has 100; shorten the prompt"
        ) as refused:
            worker.serve(prompt(tokens, seed=5), new)
        assert "\n" not in str(refused.value)
        check_controller(worker.controller)
        right(worker, worker.serve(prompt(100, seed=5), 1))


def test_linear_scaling_stretches_the_positions() -> None:
    assert positions_of(roped("linear", max_position_embeddings=100).config) == 400
    assert positions_of(roped("yarn", max_position_embeddings=4096).config) == 4096


def test_lengths_are_read_from_where_configurations_have_them() -> None:
    config = build(
        "llama",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 99,
        },
    )  # fmt: skip
    assert named_lengths(config.config) == {"rope_parameters.original_max_position_embeddings": 99}
    config = build(
        "llama", sliding_window=33, attention_block_size=4, window_layers=[3, 50], vocab_window=9,
        num_windows=5,
    ).config  # fmt: skip
    assert named_lengths(config) == {"sliding_window": 33, "attention_block_size": 64}


def test_a_forward_that_fails_says_so_in_one_sentence() -> None:
    model = build("llama")

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        raise IndexError("index out of range in self\nand more of it")

    runner = ModelRunner(model, PAGE)
    model.model.layers[0].mlp.forward = forward
    with pytest.raises(UnsupportedModelError) as refused:
        runner.forward(runner.new_cache(), [1, 2], 0)
    assert str(refused.value).endswith(
        "cannot run over a DynamicCache, fed 2 tokens: IndexError: index out of range in self"
    )
