"""Real servers of vLLM with tiercache's connector: kinds of groups, and starts that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.processes import free_port
from tests.servers.conftest import Expected, Start, environment_of
from tests.servers.models import make_model
from tests.servers.prompts import ask_all, cached, check, come_back, damage, whole_pages
from tests.servers.server import Server
from tests.servers.vllm.server import VllmConnectorServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


class Fine(VllmConnectorServer):
    PAGE = 64


MODELS = [
    *((Fine, model) for model in ("gemma2", "gemma3", "gptoss", "mistral")),
    *((VllmConnectorServer, model) for model in ("falconh1", "granite4")),
]


@pytest.mark.parametrize(("engine", "model"), MODELS, indirect=["engine"], ids=[model for _, model in MODELS])
def test_windows_and_states_of_other_kinds_come_back(
    model: str, engine: type[Server], start: Start, expected: Expected, tmp_path: Path
) -> None:
    right, store = expected(model), tmp_path / "store"
    url = f"file://{store}?capacity=256MiB"
    come_back(lambda: start(model, url), right, engine.PAGE)
    with start(model, url) as server:
        damage(store, 1 << 14)
        damaged = ask_all(server)
        check(damaged, right, when="damaged")
        assert sum(cached(damaged)) < sum(whole_pages(engine.PAGE))
        check(ask_all(server), right, when="again")


class Apart(VllmConnectorServer):
    """A server whose scheduler and worker are two processes."""

    SETTINGS: ClassVar = {}


class Failing(VllmConnectorServer):
    def transfer(self, storage: str) -> dict[str, Any]:
        return super().transfer(storage) | {"kv_load_failure_policy": "fail"}


class Unsized(VllmConnectorServer):
    SIZED = False


@pytest.mark.parametrize(
    ("kind", "model", "why"),
    [
        (Apart, "llama", "--distributed-executor-backend mp, but uni"),
        (Failing, "llama", "a kv_load_failure_policy other than"),
        (Unsized, "falconh1", "states on a CPU without --block-size; start vLLM with --block-size 256"),
    ],
)
def test_a_server_that_is_not_served_does_not_start(
    kind: type[VllmConnectorServer], model: str, why: str, models: Path, tmp_path: Path
) -> None:
    path = make_model(model, models)
    server = kind(environment_of(kind), path, free_port(), tmp_path / "log", "memory://?capacity=64MiB")
    with pytest.raises(AssertionError, match="the server ended"):
        server.ready()
    server.kill()
    assert f"TierCacheConnector does not serve {why}" in server.said()
