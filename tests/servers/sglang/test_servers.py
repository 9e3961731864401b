"""Hits and answers of a real server of SGLang that stores in tiercache."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.servers.daemon import Daemon
from tests.servers.models import MODELS, make_model
from tests.servers.prompts import PROMPTS, check, prompt, whole_pages
from tests.servers.server import Answer
from tests.servers.sglang.conftest import Expected, Start
from tests.servers.sglang.server import PAGE, SglangServer, hicache

pytestmark = pytest.mark.integration
WHOLE = whole_pages(PAGE)
LIMIT_S = 1800


def ask_all(server: SglangServer) -> list[Answer]:
    return [server.ask(asked) for asked in PROMPTS]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("model", MODELS)
def test_stand_ins_compute_what_transformers_computes(model: str, models: Path, expected: Expected) -> None:
    """Else answers could be equal because all are wrong in the same way."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(make_model(model, models), dtype=torch.float32).eval()
    for asked, answer in zip(PROMPTS, expected(model), strict=True):
        tokens = torch.tensor([asked + answer.tokens])
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, len(asked) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == answer.tokens
        chosen = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() < 1e-3


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["file", "grpc"])
def test_every_way_back(model: str, kind: str, start: Start, expected: Expected, tmp_path: Path) -> None:
    """First, again from memory, after a flush from the store, after a restart, and after a kill."""
    right = expected(model)
    with ExitStack() as stack:
        url = f"file://{tmp_path}/store?capacity=256MiB"
        if kind == "grpc":
            url = stack.enter_context(Daemon(tmp_path / "node")).url
        arguments = hicache(tmp_path / "settings.json", url)
        with start(model, *arguments) as server:
            first = ask_all(server)
            check(first, right, when="first")
            assert [answer.cached for answer in first] == [0] * len(PROMPTS)
            again = ask_all(server)
            check(again, right, when="again")
            assert [answer.cached for answer in again] == WHOLE
            server.flush()
            flushed = ask_all(server)
            check(flushed, right, when="flushed")
            assert [answer.cached for answer in flushed] == WHOLE
        with start(model, *arguments) as server:
            restarted = ask_all(server)
            check(restarted, right, when="restarted")
            assert [answer.cached for answer in restarted] == WHOLE
            server.kill()
        with start(model, *arguments) as server:
            killed = ask_all(server)
            check(killed, right, when="killed")
            assert [answer.cached for answer in killed] == WHOLE
        assert "memory leak" not in server.said().lower()


@pytest.mark.timeout(LIMIT_S)
def test_a_daemon_that_hangs_or_stops_costs_hits_and_no_answer(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    right = expected("qwen3next")
    with Daemon(tmp_path / "node") as daemon:
        arguments = hicache(tmp_path / "settings.json", daemon.url)
        with start("qwen3next", *arguments) as server:
            check(ask_all(server), right, when="first")
            daemon.hang()
            server.flush()
            hung = ask_all(server)
            check(hung, right, when="the daemon hangs")
            assert [answer.cached for answer in hung] == [0] * len(PROMPTS)
            daemon.go_on()
            daemon.stop()
            server.flush()
            check(ask_all(server), right, when="the daemon is gone")
            daemon.start()
            server.flush()
            check(ask_all(server), right, when="the daemon is back")


@pytest.mark.timeout(LIMIT_S)
def test_two_servers_on_one_daemon(start: Start, expected: Expected, tmp_path: Path) -> None:
    right = expected("qwen3next")
    with Daemon(tmp_path / "node") as daemon:
        arguments = hicache(tmp_path / "settings.json", daemon.url)
        with start("qwen3next", *arguments) as one, start("qwen3next", *arguments) as two:
            check(ask_all(one), right, when="one")
            one.flush()
            assert [answer.cached for answer in ask_all(one)] == WHOLE, "everything is stored"
            found = ask_all(two)
            check(found, right, when="two")
            assert [answer.cached for answer in found] == WHOLE


@pytest.mark.timeout(LIMIT_S)
def test_a_full_store(start: Start, tmp_path: Path) -> None:
    """The store holds a part of the prompts: nothing grows beyond it, and what comes back is right."""
    store, capacity = tmp_path / "store", 4 << 20
    arguments = hicache(tmp_path / "settings.json", f"file://{store}?capacity={capacity}")
    prompts = [prompt(1000) for _ in range(14)]
    with start("qwen3next", *arguments) as server:
        computed = [server.ask(asked) for asked in prompts]
        assert not any(answer.cached for answer in computed)
        server.flush()
        restored = 0
        for asked, answer in zip(prompts[::-1], computed[::-1], strict=True):
            again = server.ask(asked)
            assert again.tokens == answer.tokens
            restored += again.cached
        assert 0 < restored < 1000 * len(prompts)
    assert sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file()) <= capacity
