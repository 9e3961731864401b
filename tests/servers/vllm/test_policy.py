"""A real server of vLLM whose own CPU tier evicts by `hvd`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.servers.conftest import Expected, Start
from tests.servers.server import Storage, settings
from tests.servers.vllm.server import VllmServer
from tiercache.testing.hosts import ask_all, cached, check, whole_pages

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


class Small(VllmServer):
    PAGE = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, "--max-model-len", 2048, "--num-gpu-blocks-override", 34)

    def transfer(self, storage: Storage) -> dict[str, Any]:
        told = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [], "cpu_bytes_to_use": 8 << 20}
        told |= {"eviction_policy": settings(storage)["storage"]}
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": told}


@pytest.mark.parametrize("engine", [Small], indirect=True)
def test_answers_stay_what_they_are_while_the_tier_evicts(start: Start, expected: Expected) -> None:
    """The tier has room for 4,096 tokens of a Llama, and the device for 2,176; others have 6,000."""
    right, draw = expected("llama"), random.Random(3)
    others = [[draw.randrange(3, 250) for _ in range(1000)] for _ in range(6)]
    with start("llama", "hvd") as server:
        for when in ("first", "after others"):
            check(found := ask_all(server), right, when=when)
            assert sum(cached(found)) < sum(whole_pages(Small.PAGE)), f"nothing was evicted: {when}"
            check(again := ask_all(server), right, when=f"again, {when}")
            assert cached(again) == whole_pages(Small.PAGE)
            for other in others:
                server.ask(other)
