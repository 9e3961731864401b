"""Engines, models, and the answers of servers without a cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.processes import free_port
from tests.servers.daemon import Daemon
from tests.servers.lmcache.server import LmcacheServer
from tests.servers.models import make_model
from tests.servers.server import Server
from tests.servers.sglang.server import SglangServer, SglangTreeServer
from tests.servers.vllm.server import VllmConnectorServer, VllmServer
from tiercache.testing.hosts import Answer, Hosts

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


def environment_of(engine: type[Server]) -> Path:
    """Return the environment of an engine, in which it can serve."""
    environment = Path(os.environ.get("ENGINES_FOLDER", ".venv-engines")).absolute() / engine.ENVIRONMENT
    assert (environment / engine.MARK).exists(), f"{environment} cannot serve; run `make test-servers`"
    return environment


class EngineHosts(Hosts):
    """Servers of one class, of the suite's kinds of models and of any model by name."""

    MODELS: ClassVar = {"attention": "llama", "hybrid": "qwen3next"}

    def __init__(self, engine: type[Server], models: Path) -> None:
        super().__init__()
        self.page, self.kinds = engine.PAGE, engine.KINDS
        self._engine, self._models = engine, models
        self.log = models / "server.log"
        """Log of the servers that are started next."""

    def start(self, kind: str, storage: str | None, tenant: str = "") -> Server:
        model = make_model(self.MODELS.get(kind, kind), self._models)
        told = None if storage is None else {"storage": storage, "tenant": tenant}
        return self._engine(environment_of(self._engine), model, free_port(), self.log, told)

    def node(self, directory: Path) -> Daemon:
        return Daemon(directory)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def all_hosts(engine: type[Server], models: Path) -> EngineHosts:
    return EngineHosts(engine, models)


@pytest.fixture
def hosts(all_hosts: EngineHosts, tmp_path: Path) -> EngineHosts:
    """Servers of an engine; all that a test starts write one log."""
    all_hosts.log = tmp_path / "server.log"
    return all_hosts


@pytest.fixture
def start(hosts: EngineHosts) -> Start:
    """A function that starts a server of a model over a store."""
    return hosts.start


@pytest.fixture
def expected(hosts: EngineHosts) -> Expected:
    """A function that returns the answers of a server without a cache to all prompts."""
    return hosts.right
