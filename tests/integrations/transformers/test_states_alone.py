"""Models that keep states alone, through device, host and a real `file` store."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache

from tests.examples import slow_after
from tests.integrations.transformers.alone import ALONE, build, loaded, serving, wrong_state
from tests.integrations.transformers.models import PAGE, prompt
from tests.integrations.transformers.serving import EVICTED, evict, joined, right, settle, store, tiers_of
from tests.integrations.transformers.sweep import small
from tiercache.core import PoolName, Tier
from tiercache.errors import ConfigError, SlotError, TokenError, UnsupportedModelError
from tiercache.integrations.transformers import Generation, ModelRunner, Request
from tiercache.integrations.transformers.arguments import split_device_bytes
from tiercache.integrations.transformers.caches import form_of
from tiercache.integrations.transformers.layout import StateCache
from tiercache_lab.demo.audit import Audit

EACH = slow_after(3, ["mamba2", "rwkv", "mistral", "mamba", "xlstm", "falcon_mamba"])
CASES = slow_after(
    2,
    [
        (model, page, dtype)
        for page, dtype in (
            (64, torch.bfloat16),
            (16, torch.float32),
            (1, torch.float32),
            (256, torch.bfloat16),
        )
        for model in ALONE
        if (model, dtype) != ("xlstm", torch.bfloat16)
    ],
)


@pytest.mark.parametrize("name", EACH)
def test_the_layout_has_states_and_no_pages(name: str) -> None:
    runner, report = loaded(name)
    has_windows = name == "mistral"
    assert set(runner.layout.geometries) == {PoolName.SWA if has_windows else PoolName.MAMBA}
    assert not runner.layout.has_pages
    assert isinstance(runner.new_cache(), StateCache) != has_windows, "windows count their tokens"
    assert "kv" not in report.reactions
    cache = runner.new_cache()
    runner.forward(cache, prompt(7, 1), 0)
    assert runner.layout.length(cache) == 7
    with pytest.raises(TokenError, match="the cache holds 7 tokens"):
        runner.forward(cache, [1], 8)


@pytest.mark.parametrize(("name", "page", "dtype"), slow_after(1, CASES))
def test_a_restored_conversation_equals_its_recompute(
    name: str, page: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """From a file store, with device and host emptied: every state, logit and token, to the last bit."""
    with serving(name, store(tmp_path), page=page, dtype=dtype) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=40)
        first = worker.serve(prompt(2 * page + 21, 1), page + 4 if page < 100 else 4, audit=True)
        right(audit, worker, first)
        for seed, tier in enumerate((Tier.DEVICE, Tier.HOST, Tier.STORAGE), 2):
            again = joined(first.tokens, prompt(5, seed))
            evict(worker, *EVICTED[tier])
            second = worker.serve(again, 2, audit=True)
            # With pages of one token, the prompt before this one has left a state where it left the first.
            assert second.restored - first.states[-1] in ((0, 1) if page == 1 else (0,))
            assert tiers_of(second) == {tier}
            right(audit, worker, second)
        worker.synchronize()
        settle(worker)
        worker.controller.check_integrity()


@pytest.mark.parametrize("name", slow_after(1, EACH))
def test_a_branch_restores_where_the_prompts_part(name: str, tmp_path: Path) -> None:
    with serving(name, store(tmp_path)) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=40)
        system = prompt(2 * PAGE + 5, 1)
        for seed, restored in ((2, 0), (3, 0), (4, 2 * PAGE)):
            generation = worker.serve(joined(system, prompt(20, seed)), 1, audit=True)
            assert generation.restored == restored
            right(audit, worker, generation)
            evict(worker, Tier.DEVICE, Tier.HOST)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", slow_after(1, [torch.float32, torch.bfloat16]))
def test_a_wrong_state_changes_the_logits(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("xlstm", torch.bfloat16):  # its own code multiplies float32 by bfloat16
        with pytest.raises(UnsupportedModelError, match="cannot run"):
            loaded(name, PAGE, dtype)
        return
    runner, report = loaded(name, PAGE, dtype)
    nothing, foreign = wrong_state(runner, 4 * PAGE)
    assert min(nothing, foreign) > report.tolerance


def test_a_damaged_state_on_the_device_is_noticed_by_the_audit() -> None:
    """Negative control of the tests above: they would see one wrong bit."""
    with serving("mamba2") as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=40)
        first = worker.serve(prompt(2 * PAGE + 3, 1), 2, audit=True)
        right(audit, worker, first)
        worker.synchronize()
        settle(worker)
        for tensor in worker.tensors.states.values():
            tensor.view(torch.uint8)[..., 0] ^= 1
        verdict = audit.check(worker.serve(first.tokens, 2, audit=True))
        assert not verdict.same_bytes


def test_another_process_restores_what_this_one_left(tmp_path: Path) -> None:
    with serving("mamba2", store(tmp_path)) as worker:
        first = worker.serve(prompt(3 * PAGE + 3, 1), 2)
        worker.synchronize()
        assert worker.controller.flush()
    with serving("mamba2", store(tmp_path)) as worker:
        assert worker.serve(first.tokens, 2).restored == 3 * PAGE
    with serving("mamba", store(tmp_path)) as worker:
        assert worker.serve(first.tokens, 2).restored == 0


def test_bytes_that_hold_no_request() -> None:
    layout = loaded("mamba2")[0].layout
    state = layout.state_geometries[PoolName.MAMBA].nbytes
    assert split_device_bytes(20 * state + 1, layout) == (0, 20)
    with pytest.raises(ConfigError, match="7 states and 0 pages of this model take"):
        split_device_bytes(7 * state - 1, layout)


def test_a_restore_needs_a_state_and_its_depth() -> None:
    runner = loaded("mamba2")[0]
    pool = runner.allocate_pools(5, 2)
    assert (pool.page_slots, pool.state_slots) == (0, 2)
    for slots, state, tokens in (((), 0, None), ((), 0, 0), ((0,), 0, PAGE)):
        with pytest.raises(SlotError):
            runner.restore(pool, slots, state, tokens=tokens)
    assert runner.layout.length(runner.restore(pool, (), 0, tokens=3 * PAGE)) == 3 * PAGE
    assert runner.layout.length(runner.restore(pool, (), None)) == 0


# -- caches of a model's own
# ------------------------------------------------------------------------------------------------------------


class Config(PretrainedConfig):
    model_type = "counting"
    hidden_size = 8


@dataclass
class Output:
    logits: torch.Tensor
    state: Any


class Counting(nn.Module):
    """A model whose cache is what `make` makes of the tokens that it has seen."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.config, self._make = Config(), make
        self.embedding = nn.Embedding(64, 8)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, state: Any = None, use_cache: bool = True) -> Output:
        seen = int(input_ids.shape[1])
        return Output(self.embedding(input_ids) @ self.embedding.weight.T, self._make(state, seen))


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Slotted:
    __slots__ = ("hidden",)


class HalfSlotted(Slotted):
    def __init__(self) -> None:
        self.seen, self.hidden = torch.zeros(1, 2), torch.zeros(1, 2)


class Listed(list[Any]):
    def __init__(self) -> None:
        super().__init__([torch.zeros(1, 2)])
        self.hidden = torch.zeros(1, 2)


class Named(NamedTuple):
    seen: torch.Tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda state, seen: None, "returns no state, so it keeps its past elsewhere"),
        (lambda state, seen: [1, "x"], "a list, which has no tensors"),
        (lambda state, seen: [torch.zeros(1, 2), Slotted()], r"whose \[1\] is a Slotted, which may hold"),
        (lambda state, seen: HalfSlotted(), "whose content is a HalfSlotted, which may hold"),
        (lambda state, seen: Listed(), "whose content is a Listed, which may hold"),
        (lambda state, seen: [Named(torch.zeros(1, 2))], r"whose \[0\] is a Named, which may hold"),
        (lambda state, seen: Holder(t=torch.zeros(1, 2), f=len), r"whose \.f is a builtin_function"),
        (lambda state, seen: [(t := torch.zeros(1, 2)), t[:, :1]], "share memory"),
        (lambda state, seen: [torch.zeros(1, 2), seen], r"a list, of which \[1\] is not the same"),
        (lambda state, seen: [torch.zeros(1, seen, 2)], r"a list, of which \[0\] is not the same"),
        (
            lambda state, seen: Holder(t=torch.zeros(1, 2), **({} if seen > 1 else {"more": 1})),
            "a Holder, of which the list of parts is not the same",
        ),
        (lambda state, seen: {"t": torch.zeros(1, 2)} if seen > 1 else [torch.zeros(1, 2)], "the type"),
    ],
)  # fmt: skip
def test_a_cache_that_is_not_its_tensors_alone_is_refused(make: Any, message: str) -> None:
    def use(model: Any) -> None:
        runner = ModelRunner(model, PAGE)
        runner.forward(runner.new_cache(), [1], 0)

    with pytest.raises(UnsupportedModelError, match=message):
        use(Counting(make))


def test_a_cache_of_its_own_is_rebuilt_part_by_part() -> None:
    """Also in containers of containers, and without sharing memory with what was kept."""

    def make(state: Any, seen: int) -> Holder:
        before = state.parts["a"][1] if state is not None else torch.zeros(1, 2)
        assert state is None or (state.name, state.parts["b"]) == ("kept", None)
        return Holder(name="kept", parts={"a": (torch.ones(3, dtype=torch.int64), before + seen), "b": None})

    model = Counting(make)
    form = form_of(
        model, frozenset({"input_ids", "state"}), lambda given: model(torch.zeros(1, 4, dtype=int), **given)
    )
    assert (form.argument, form.is_own) == ("state", True)
    cache = form.new(model.config, counts=True)
    assert form.given(cache) is None
    form.take_back(cache, None, model(torch.zeros(1, 4, dtype=int)).state, "it")
    for seen in (5, 7):
        given = form.given(cache)
        assert isinstance(given, Holder)
        assert given.parts["a"][1].tolist() == [[seen - 1 if seen == 5 else 9.0] * 2]
        form.take_back(cache, given, model(torch.zeros(1, seen, dtype=int), given).state, "it")


def test_a_model_that_returns_another_cache_than_it_was_given() -> None:
    model = build("mamba2")
    forward = model.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.cache_params = DynamicCache(config=model.config)
        return out

    other.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = other
    with pytest.raises(UnsupportedModelError, match="does not return the cache that it was given"):
        ModelRunner(model, PAGE)


def test_recurrent_gemma_keeps_its_states_in_its_layers() -> None:
    with pytest.raises(UnsupportedModelError, match="does not return the cache that it was given"):
        ModelRunner(small("recurrent_gemma"), PAGE)


def test_prompts_may_be_shorter_than_a_page() -> None:
    with serving("rwkv", page=64) as worker:
        audit = Audit(worker.runner, page_slots=1, state_slots=8)
        for n in range(1, 4):
            generation = worker.serve(np.arange(n), 2, audit=True)
            assert (generation.restored, generation.states) == (0, ())
            right(audit, worker, generation)
        worker.controller.check_integrity()


@pytest.mark.parametrize("name", slow_after(1, ["mistral", "mamba2", "mamba"]))
def test_requests_in_turns_give_what_each_gives_alone(name: str, tmp_path: Path) -> None:
    with serving(name, store(tmp_path)) as worker:
        turns = worker.serve_all([Request(prompt(3 * PAGE + 3, seed), PAGE + 9) for seed in (2, 3)])
        for seed, answer in zip((2, 3), turns, strict=True):
            assert isinstance(answer, Generation)
            alone = worker.serve(prompt(3 * PAGE + 3, seed), PAGE + 9)
            assert np.array_equal(alone.tokens, answer.tokens)
            assert (alone.restored, answer.states) == (3 * PAGE, (3 * PAGE, 4 * PAGE))
        worker.controller.check_integrity()
