"""Starts of real servers of vLLM that tiercache's connector refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.processes import free_port
from tests.servers.conftest import environment_of
from tests.servers.models import make_model
from tests.servers.vllm.server import VllmConnectorServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


class Apart(VllmConnectorServer):
    """A server whose scheduler and worker are two processes."""

    SETTINGS: ClassVar = {}


class Failing(VllmConnectorServer):
    def transfer(self, storage: str) -> dict[str, Any]:
        return super().transfer(storage) | {"kv_load_failure_policy": "fail"}


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Apart, "--distributed-executor-backend mp, but uni"), (Failing, "a kv_load_failure_policy other than")],
)
def test_a_server_that_is_not_served_does_not_start(
    kind: type[VllmConnectorServer], why: str, models: Path, tmp_path: Path
) -> None:
    path = make_model("llama", models)
    server = kind(environment_of(kind), path, free_port(), tmp_path / "log", "memory://?capacity=64MiB")
    with pytest.raises(AssertionError, match="the server ended"):
        server.ready()
    server.kill()
    assert f"TierCacheConnector does not serve {why}" in server.said()
