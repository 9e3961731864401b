"""The engine's environment, models, and the answers of servers without a cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.servers.models import make_model
from tests.servers.prompts import PROMPTS
from tests.servers.server import Answer
from tests.servers.sglang.server import SglangServer

Start = Callable[..., SglangServer]
Expected = Callable[[str], list[Answer]]


@pytest.fixture(scope="session")
def engine() -> Path:
    """The environment of SGLang that `make test-servers` has made."""
    path = Path(os.environ.get("ENGINES_FOLDER", ".venv-engines")).absolute() / "sglang"
    assert (path / ".serves").exists(), f"{path} has no SGLang that can serve; run `make test-servers`"
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(engine: Path, models: Path, tmp_path: Path) -> Start:
    """A function that starts a server of a model; all servers of a test write one log."""

    def begin(model: str, *arguments: object) -> SglangServer:
        sizes = ["--max-total-tokens", "8192"]
        if model != "llama":
            sizes += ["--max-mamba-cache-size", "24"]
        log = tmp_path / "server.log"
        return SglangServer(engine, make_model(model, models), free_port(), log, *sizes, *arguments)

    return begin


@pytest.fixture(scope="session")
def expected(engine: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A function that returns the answers of a server without a cache to all prompts."""
    known: dict[str, list[Answer]] = {}

    def of(model: str) -> list[Answer]:
        if model not in known:
            log = tmp_path_factory.mktemp("without") / "server.log"
            with SglangServer(
                engine, make_model(model, models), free_port(), log, "--disable-radix-cache"
            ) as server:
                known[model] = [server.ask(asked) for asked in PROMPTS]
            assert not any(answer.cached for answer in known[model])
        return known[model]

    return of
