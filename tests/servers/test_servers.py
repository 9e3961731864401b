"""Hits and answers of real servers of SGLang and vLLM that store in tiercache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.conftest import EngineHosts
from tests.servers.daemon import Daemon
from tests.servers.models import make_model
from tests.servers.server import Server
from tiercache.testing.hosts import PROMPTS, Answer, HostConformance, ask_all, cached, check

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


def test_servers_compute_what_transformers_computes(engine, models, expected):
    for kind in engine.KINDS:
        model = EngineHosts.MODELS[kind]
        check_computed(make_model(model, models), engine.DTYPES[model], expected(kind))


def test_a_short_life(engine: type[Server], hosts: EngineHosts, models: Path, tmp_path: Path) -> None:
    """One server: the answers of transformers, what comes back after a flush, and `tiercache prove`."""
    model = EngineHosts.MODELS[engine.KINDS[-1]]
    with Daemon(tmp_path / "node") as daemon, hosts.start(model, daemon.url) as server:
        first = ask_all(server)
        check_computed(make_model(model, models), engine.DTYPES[model], first)
        assert cached(first) == [0] * len(PROMPTS)
        server.flush()
        flushed = ask_all(server)
        check(flushed, first, when="flushed")
        assert cached(flushed) == hosts.whole
        command = [
            str(Path(sys.executable).parent / "tiercache"), "prove", server.url,
            "--tokens", "1500", "--max-tokens", "8", "--timeout", "600", "-o", "json",
        ]  # fmt: skip
        proved = subprocess.run(command, check=False, capture_output=True, text=True)
        assert proved.returncode == 0, proved.stdout + proved.stderr
        assert json.loads(proved.stdout)["restored_tokens"] >= engine.PAGE


class TestPromises(HostConformance):
    """The suite for integrations with every engine."""
