"""The serving half of `tiercache demo`: what it refuses, and a run that is killed and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.transformers.models import build
from tests.lab.demo.saved_models import save
from tiercache.errors import ConfigError, UnsupportedModelError
from tiercache_lab.demo import serving as demo
from tiercache_lab.demo.serving import Conversations, DemoPlan, Session, load_model, zigzag

SALT = "00" * 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama")


def test_every_conversation_is_visited_once_a_turn_and_the_last_one_twice_in_a_row() -> None:
    assert list(zigzag(3, 2)) == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


def test_conversations_share_their_beginning_and_nothing_else() -> None:
    talk = Conversations(lambda text: list(text.encode()), 2)
    one, two = talk.ask(0), talk.ask(1)
    assert (one[: demo.SYSTEM_TOKENS] == two[: demo.SYSTEM_TOKENS]).all()
    assert not (one[demo.SYSTEM_TOKENS :] == two[demo.SYSTEM_TOKENS :]).all()
    assert len(talk.long_prompt(300_000)) == 300_000, "longer than the text there is"


def test_a_saved_model_is_loaded_with_its_tokenizer(llama: str) -> None:
    model, encode = load_model(llama)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(encode("three")) == 5


def test_a_directory_without_a_model_or_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        load_model(str(tmp_path))
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer that transformers can load: .*[a-z]$"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="has no causal language model that transformers can load: "):
        load_model(str(tmp_path))


def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="keeps its past elsewhere"):
        Session(DemoPlan("serve", str(tmp_path), SALT, save(tmp_path / "model", "recurrent_gemma")))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"context": 2048}, "--context makes sequences of 2049 tokens, and the model supports 2048"),
        ({"turns": 10}, "--turns makes sequences of 3008 tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused(change, sentence, llama, tmp_path):
    plan = DemoPlan("serve", str(tmp_path), SALT, llama, context=1024)
    with pytest.raises(ConfigError, match=sentence):
        Session(replace(plan, **change))  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"pip install 'tiercache-hybrid\[cuda\]'|there is no device cuda:99"
    ):
        Session(DemoPlan("serve", str(tmp_path), SALT, str(tmp_path / "no model"), device="cuda:99"))


@pytest.mark.slow
def test_one_conversation_of_one_turn_needs_every_tier(llama: str, tmp_path: Path) -> None:
    """The hardest plan, where an earlier demonstration left what must not be taken for its own."""
    plan = DemoPlan("serve", str(tmp_path / "run"), "01" * 8, llama, turns=1, conversations=1, context=256)
    Path(plan.directory).mkdir()
    assert [event["tier"] for event in events(plan) if event["event"] == "row"] == ["none"]
    first = list(events(replace(plan, salt=SALT)))
    runs = [{**event} for event in first if event["event"] == "run"]
    second = events(replace(plan, salt=SALT, phase="restart", runs=runs))
    rows = [event for event in (*first, *second) if event["event"] == "row"]
    assert [row["tier"] for row in rows] == ["none", "disk", "device", "host", "disk", "disk"]
    assert all(row["same_text"] and row["same_bytes"] and row["max_logit_diff"] == 0.0 for row in rows)


def events(plan: DemoPlan) -> Iterator[dict[str, Any]]:
    """Run a server process and yield its reports; kill it once it reports that all is stored."""
    with subprocess.Popen(
        [sys.executable, "-m", demo.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(asdict(plan)))
        server.stdin.close()
        for line in server.stdout:
            yield json.loads(line)
            if '"settled"' in line:
                server.send_signal(signal.SIGKILL)
        assert server.wait() in (0, -signal.SIGKILL)
