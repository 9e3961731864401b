"""Engines, models, and the answers of servers without a cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import free_port
from tests.servers.lmcache.server import LmcacheServer
from tests.servers.models import make_model
from tests.servers.prompts import PROMPTS
from tests.servers.server import Answer, Server
from tests.servers.sglang.server import SglangServer, SglangTreeServer
from tests.servers.vllm.server import VllmConnectorServer, VllmServer

Start = Callable[[str, str | None], Server]
Expected = Callable[[str], list[Answer]]


@pytest.fixture(
    scope="session",
    params=[SglangServer, SglangTreeServer, VllmServer, VllmConnectorServer, LmcacheServer],
    ids=["sglang", "tree", "vllm", "connector", "lmcache"],
)
def engine(request: pytest.FixtureRequest) -> type[Server]:
    """The class of an engine's servers."""
    found: type[Server] = request.param
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave models out that an engine refuses."""
    params = {item: (getattr(item, "callspec", None) and item.callspec.params) or {} for item in items}
    items[:] = [
        item
        for item, given in params.items()
        if given.get("engine") is not LmcacheServer or given.get("model") in (None, LmcacheServer.HARD)
    ]


def environment_of(engine: type[Server]) -> Path:
    """Return the environment of an engine, in which it can serve."""
    environment = Path(os.environ.get("ENGINES_FOLDER", ".venv-engines")).absolute() / engine.ENVIRONMENT
    assert (environment / engine.MARK).exists(), f"{environment} cannot serve; run `make test-servers`"
    return environment


@pytest.fixture(scope="session")
def begin(engine: type[Server], models: Path) -> Callable[[str, Path, str | None], Server]:
    """A function that starts a server of a model."""
    environment = environment_of(engine)
    return lambda model, log, storage: engine(
        environment, make_model(model, models), free_port(), log, storage
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(begin: Callable[[str, Path, str | None], Server], tmp_path: Path) -> Start:
    """A function that starts a server of a model over a store; all servers of a test write one log."""
    return lambda model, storage: begin(model, tmp_path / "server.log", storage)


@pytest.fixture(scope="session")
def expected(
    begin: Callable[[str, Path, str | None], Server], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    """A function that returns the answers of a server without a cache to all prompts."""
    known: dict[str, list[Answer]] = {}

    def of(model: str) -> list[Answer]:
        if model not in known:
            with begin(model, tmp_path_factory.mktemp("without") / "server.log", None) as server:
                known[model] = [server.ask(asked) for asked in PROMPTS]
            assert not any(answer.cached for answer in known[model])
        return known[model]

    return of
