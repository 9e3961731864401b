"""Hits and answers of real servers of SGLang and vLLM that store in tiercache."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.servers.conftest import Start
from tests.servers.daemon import Daemon
from tests.servers.models import MODELS, make_model
from tests.servers.prompts import PROMPTS, ask_all, cached, check, come_back, damage, prompt, whole_pages
from tests.servers.server import Answer, Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


ROUNDING = {"float32": 1e-3, "bfloat16": 0.6}
"""How far a log probability may lie from that of transformers in float32."""


def check_computed(model: Path, dtype: str, answers: list[Answer]) -> None:
    """Compare answers with transformers, by odds; else they could be equal because all are wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).float().eval()
    for asked, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([asked + answer.tokens])).logits
        odds = logits[0, len(asked) - 1 : -1].log_softmax(-1)
        chosen = odds.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (odds.max(-1).values - chosen).max() < ROUNDING[dtype]
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() < ROUNDING[dtype]


@pytest.mark.parametrize("model", MODELS)
def test_servers_compute_what_transformers_computes(model, engine, models, expected):
    check_computed(make_model(model, models), engine.DTYPES[model], expected(model))


def test_a_short_life(engine: type[Server], start: Start, models: Path, tmp_path: Path) -> None:
    """One server: the answers of transformers, what comes back after a flush, and `tiercache prove`."""
    whole = whole_pages(engine.PAGE)
    with Daemon(tmp_path / "node") as daemon, start(engine.HARD, daemon.url) as server:
        first = ask_all(server)
        check_computed(make_model(engine.HARD, models), engine.DTYPES[engine.HARD], first)
        assert cached(first) == [0] * len(PROMPTS)
        server.flush()
        flushed = ask_all(server)
        check(flushed, first, when="flushed")
        assert cached(flushed) == whole
        command = [
            str(Path(sys.executable).parent / "tiercache"), "prove", server.url,
            "--tokens", "1500", "--max-tokens", "8", "--timeout", "600", "-o", "json",
        ]  # fmt: skip
        proved = subprocess.run(command, check=False, capture_output=True, text=True)
        assert proved.returncode == 0, proved.stdout + proved.stderr
        assert json.loads(proved.stdout)["restored_tokens"] >= engine.PAGE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["file", "grpc"])
def test_every_way_back(model, kind, engine, start, expected, tmp_path):
    with ExitStack() as stack:
        url = f"file://{tmp_path}/store?capacity=256MiB"
        if kind == "grpc":
            url = stack.enter_context(Daemon(tmp_path / "node")).url
        come_back(lambda: start(model, url), expected(model), engine.PAGE)


def test_a_daemon_that_hangs_or_is_killed_costs_hits_and_no_answer(engine, start, expected, tmp_path):
    right = expected(engine.HARD)
    with Daemon(tmp_path / "node") as daemon, start(engine.HARD, daemon.url) as server:
        check(ask_all(server), right, when="first")
        daemon.hang()
        server.flush()
        hung = ask_all(server)
        check(hung, right, when="the daemon hangs")
        assert cached(hung) == [0] * len(PROMPTS)
        daemon.go_on()
        daemon.kill()
        server.flush()
        check(ask_all(server), right, when="the daemon is gone")
        daemon.start()
        server.flush()
        check(ask_all(server), right, when="the daemon is back")


def test_a_store_that_lies_costs_hits_and_no_answer(engine, start, expected, tmp_path):
    right, store = expected(engine.HARD), tmp_path / "store"
    with start(engine.HARD, f"file://{store}?capacity=256MiB") as server:
        check(ask_all(server), right, when="first")
        server.flush()
        damage(store, 1 << 16)
        damaged = ask_all(server)
        check(damaged, right, when="damaged")
        assert sum(cached(damaged)) < sum(whole_pages(engine.PAGE))
        check(ask_all(server), right, when="again")


@pytest.mark.parametrize("model", MODELS)
def test_two_servers_on_one_daemon(model, engine, start, expected, tmp_path):
    """Each has computed a half of the prompts, and hits all."""
    right, whole = expected(model), whole_pages(engine.PAGE)
    with (
        Daemon(tmp_path / "node") as daemon,
        start(model, daemon.url) as one,
        start(model, daemon.url) as two,
    ):
        check([one.ask(asked) for asked in PROMPTS[:2]], right[:2], when="one")
        check([two.ask(asked) for asked in PROMPTS[2:]], right[2:], when="two")
        for server in (one, two):
            server.flush()
        for server in (one, two):
            found = ask_all(server)
            check(found, right, when="both")
            assert cached(found) == whole


def test_a_full_store(engine: type[Server], start: Start, tmp_path: Path) -> None:
    """The store holds a part of the prompts: nothing grows beyond it, and what comes back is right."""
    store, capacity = tmp_path / "store", 4 << 20
    prompts = [prompt(1000) for _ in range(14)]
    whole = 999 // engine.PAGE * engine.PAGE * len(prompts)
    with start(engine.HARD, f"file://{store}?capacity={capacity}") as server:
        first = [server.ask(asked) for asked in prompts]
        assert cached(first) == [0] * len(prompts)
        server.flush()
        restored = 0
        for asked, answer in zip(prompts[::-1], first[::-1], strict=True):
            again = server.ask(asked)
            assert again.tokens == answer.tokens
            restored += again.cached
        assert 0 < restored < whole
    assert sum(file.stat().st_blocks * 512 for file in store.rglob("*") if file.is_file()) <= capacity
