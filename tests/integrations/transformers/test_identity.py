"""Another computation has another identity, and a model that changes under its worker is noticed."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.examples import slow_after
from tests.integrations.transformers.adapters import add_adapter, disable_adapters, layers_of, set_adapter
from tests.integrations.transformers.models import PAGE, build, loaded, prompt
from tests.integrations.transformers.serving import AMPLE, store
from tests.integrity import check_controller
from tiercache.errors import ConfigError, UnsupportedModelError
from tiercache.integrations.transformers import ModelRunner
from tiercache.integrations.transformers import worker as worker_module
from tiercache.integrations.transformers.fingerprint import UNREAD
from tiercache.integrations.transformers.requests.request import Generation
from tiercache.integrations.transformers.watch import Watch, identity_of
from tiercache.integrations.transformers.worker import Worker
from tiercache.keys import Identity
from tiercache_lab.demo.audit import Audit

TOKENS = prompt(6 * PAGE + 1, seed=1)
GIVEN = Identity("a model", "its weights", "float32", "float32", "", PAGE)

Change = Callable[[PreTrainedModel], object]


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_math_sdp(True)


def open_worker(model: PreTrainedModel, path: Path, **options: Any) -> Worker:
    return Worker(model, device_bytes=AMPLE, host_bytes=AMPLE, storage=store(path), page_size=PAGE, **options)


def served(worker: Worker) -> Generation:
    """A request whose answer equals its recompute, wherever its prefix came from."""
    generation = worker.serve(TOKENS, 2, audit=True)
    if not generation.restored:
        verdict = Audit(worker.runner, page_slots=64, state_slots=16).check(generation)
        assert verdict.max_logit_diff == 0.0
        assert verdict.same_text
    return generation


def served_by_another(model: PreTrainedModel, path: Path, **options: Any) -> int:
    """How many tokens a new worker over `model` restores out of what is in the store."""
    with open_worker(model, path, **options) as worker:
        generation = served(worker)
        worker.controller.flush()
        return generation.restored


def with_adapters() -> PreTrainedModel:
    model = build("llama")
    add_adapter(model, "one", seed=1)
    add_adapter(model, "two", seed=2)
    return model


def scale(model: PreTrainedModel) -> None:
    layers_of(model)[1].scaling["two"] = 0.5


def write_adapter(model: PreTrainedModel) -> None:
    with torch.no_grad():
        layers_of(model)[0].lora_B["two"].weight[3, 1] += 1e-3


def write_frequencies(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def write_data(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def replace_data(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def replace_weight(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def hook(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda module, arguments, output: output * 2)


def patch_forward(model: PreTrainedModel) -> None:
    act = model.model.layers[0].mlp.act_fn
    act.forward = torch.nn.functional.gelu


def patch_rope_constant(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.25


def replace_layer(model: PreTrainedModel) -> None:
    model.model.layers[2] = build("llama", seed=5).model.layers[2]


def swap_layers(model: PreTrainedModel) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


CHANGES: dict[str, Change] = {
    "adapters disabled": disable_adapters, "another adapter": lambda model: set_adapter(model, "one"),
    "both adapters": lambda model: [layer._active_adapter.append("one") for layer in layers_of(model)],
    "adapter scaled": scale, "adapter written": write_adapter,
    "adapter added": lambda model: add_adapter(model, "three", seed=3),
    "eager attention": lambda model: model.set_attn_implementation("eager"),
    "frequencies": write_frequencies, "rope constant": patch_rope_constant,
    "weights through .data": write_data, "other .data": replace_data, "other parameter": replace_weight,
    "hook": hook, "other forward": patch_forward, "layer replaced": replace_layer,
    "layers swapped": swap_layers,
    "norm's constant": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-2),
    "configuration": lambda model: setattr(model.config, "attention_dropout", 0.5),
    "precision of products": lambda model: torch.set_float32_matmul_precision("medium"),
    "deterministic algorithms": lambda model: torch.use_deterministic_algorithms(True),
    "kernels of attention": lambda model: torch.backends.cuda.enable_math_sdp(False),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_computation_changes_the_identity_and_is_noticed(change, tmp_path, monkeypatch):
    """A new worker restores nothing of before; the one that lives refuses, and commits nothing."""
    # Nothing here is about the verdict of the probe, which takes longer than all the rest.
    report = loaded("llama")[1]
    monkeypatch.setattr(worker_module, "load", lambda model, size: (ModelRunner(model, size), report))
    model = with_adapters()
    with open_worker(model, tmp_path) as worker:
        assert served(worker).restored == 0
        assert served(worker).restored == 6 * PAGE
        worker.controller.flush()
        change(model)
        with pytest.raises(ConfigError, match="when this worker was made") as refused:
            worker.serve(TOKENS, 2)
        assert "\n" not in str(refused.value)
        check_controller(worker.controller)
    assert served_by_another(model, tmp_path) == 0
    assert served_by_another(model, tmp_path) == 6 * PAGE


@pytest.mark.slow
def test_nothing_of_another_adapter_comes_back_though_weights_are_vouched_for(tmp_path: Path) -> None:
    model = with_adapters()
    assert served_by_another(model, tmp_path, identity=GIVEN) == 0
    assert served_by_another(model, tmp_path, identity=GIVEN) == 6 * PAGE
    disable_adapters(model)
    assert served_by_another(model, tmp_path, identity=GIVEN) == 0
    model.set_attn_implementation("eager")
    assert served_by_another(model, tmp_path, identity=GIVEN) == 0


def test_what_is_set_back_is_the_model_that_it_was(tmp_path: Path) -> None:
    model = with_adapters()
    with open_worker(model, tmp_path) as worker:
        first = served(worker)
        disable_adapters(model)
        with pytest.raises(ConfigError, match="_disable_adapters"):
            worker.serve(TOKENS, 2)
        disable_adapters(model, False)
        model.train(True)
        with pytest.raises(ConfigError, match="training"):
            worker.serve(TOKENS, 2)
        model.train(False)
        again = served(worker)
        assert (again.restored, again.answer.tolist()) == (6 * PAGE, first.answer.tolist())


def test_a_change_in_the_middle_of_a_request_is_not_committed(tmp_path: Path) -> None:
    model = with_adapters()

    switch = threading.Event()
    original = model.forward

    @functools.wraps(original)
    def forward(**arguments: Any) -> Any:
        if switch.is_set():
            disable_adapters(model)
        return original(**arguments)

    model.forward = forward
    with open_worker(model, tmp_path) as worker:
        switch.set()
        with pytest.raises(ConfigError, match="_disable_adapters"):
            worker.serve(TOKENS, 2)
        worker.controller.flush()
        check_controller(worker.controller)
    with store(tmp_path) as storage:
        assert list(storage.scan_all()) == []


def test_large_weights_that_are_vouched_for_are_watched_as_well() -> None:
    model = build("llama", vocab_size=5000)
    weight = model.model.embed_tokens.weight
    assert weight.nbytes > UNREAD
    for change in (lambda: weight.data.mul_(2.0), lambda: torch.nn.init.zeros_(weight)):
        watch = Watch(model, contents=False)
        watch.check()
        change()
        with pytest.raises(ConfigError):
            watch.check()


def test_writing_the_same_values_changes_nothing(tmp_path: Path) -> None:
    model = with_adapters()
    with open_worker(model, tmp_path) as worker:
        assert served(worker).restored == 0
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.config.attention_dropout = float("0.0")
        set_adapter(model, "two")
        assert served(worker).restored == 6 * PAGE


def test_weights_that_cannot_be_read_are_refused() -> None:
    model = build("llama")
    model.model.norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"))
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.norm\.weight is a Parameter on meta whose content cannot be read",
    ):
        Watch(model)


def revision(model: PreTrainedModel) -> str:
    return identity_of(model, ModelRunner(model, PAGE), PAGE).revision


def test_an_attention_that_was_registered_anew_is_another() -> None:
    model = build("llama")
    before = revision(model)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def softer(module: Any, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return sdpa(module, query * 0.5, *arguments, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = softer
    try:
        assert revision(model) != before
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert revision(model) == before


FACTOR = 2.0
"""A global that a hook reads."""


def with_default(factor: float) -> Callable[..., torch.Tensor]:
    def scaled(_module: Any, _arguments: Any, output: torch.Tensor, factor: float = factor) -> torch.Tensor:
        return output * factor

    return scaled


def with_keyword(factor: float) -> Callable[..., torch.Tensor]:
    def scaled(_module: Any, _arguments: Any, output: torch.Tensor, *, by: float = factor) -> torch.Tensor:
        return output * by

    return scaled


def with_global(factor: float) -> Callable[..., torch.Tensor]:
    """Return a hook that reads `FACTOR` in an inner function."""

    def scaled(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return next(part * FACTOR for part in [output])

    return types.FunctionType(scaled.__code__, {**globals(), "FACTOR": factor})


@pytest.mark.parametrize("make", [with_default, with_keyword, with_global])
def test_hooks_that_differ_in_a_number_only_make_different_models(make):
    models = [build("llama") for _ in range(3)]
    for model, factor in zip(models, (2.0, 3.0, 3.0), strict=True):
        model.model.norm.register_forward_hook(make(factor))
    two, three, again = map(revision, models)
    assert two != three == again


def test_a_patched_forward_whose_default_differs_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    kind, found = type(model.model.norm), set()
    for epsilon in (1e-6, 1e-3, 1e-6):

        def forward(self: Any, states: torch.Tensor, epsilon: float = epsilon) -> torch.Tensor:
            return torch.nn.functional.rms_norm(states, self.weight.shape, self.weight, epsilon)

        monkeypatch.setattr(kind, "forward", forward)
        found.add(revision(model))
    assert len(found) == 2


def test_a_global_that_a_hook_reads_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.model.norm.register_forward_hook(lambda _module, _arguments, output: output * FACTOR)
    watch = Watch(model)
    watch.check()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    with pytest.raises(ConfigError, match="FACTOR"):
        watch.check()
    monkeypatch.undo()
    watch.check()


def test_tied_weights_in_bfloat16_keep_their_identity(tmp_path: Path) -> None:
    # A cast rounds the frequencies of rotary embeddings as well, loading does not: the model to start from
    # was loaded.
    build("llama", tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert served_by_another(model, tmp_path) == 0
    model.save_pretrained(tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    assert served_by_another(model, tmp_path) == 6 * PAGE


@pytest.mark.parametrize("name", slow_after(1, ["qwen3_next", "jamba", "falcon_h1", "zaya", "deepseek_v3"]))
def test_an_identity_is_the_same_after_requests_and_after_saving_and_loading(name, tmp_path):
    model = build(name)
    before = revision(model)
    with Worker(model, device_bytes=AMPLE, host_bytes=AMPLE, page_size=PAGE) as worker:
        worker.serve(TOKENS, 2)
    assert revision(model) == before == revision(build(name))
    model.save_pretrained(tmp_path / "model")
    assert revision(AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)) == before
