"""A real server of vLLM above a real server of LMCache, whose L2 adapter is tiercache's."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tests.processes import free_port
from tests.servers.lmcache import plugin
from tests.servers.server import Server, Storage
from tests.servers.vllm.server import VllmServer
from tests.waiting import until

CHUNK = 64


class Lmcache(Server):
    """One server of LMCache's multiprocess mode, on a CPU."""

    def __init__(self, environment: Path, log: Path, adapter: dict[str, Any]) -> None:
        self.port = free_port()
        http = free_port()
        super().__init__(
            [
                str(environment / "bin" / "lmcache"), "server", "--host", "127.0.0.1",
                "--port", str(self.port),
                "--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", str(CHUNK),
                "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
                "--disable-metrics", "--l2-adapter", json.dumps(adapter),
            ],
            http,
            log,
            {
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "LMCACHE_DISABLE_BANNER": "1",
                "LMCACHE_TRACK_USAGE": "false",
            },
        )  # fmt: skip

    ask = flush = None  # type: ignore[assignment]  # it is asked by vLLM

    def _is_healthy(self) -> bool:
        return bool(self.status())

    def status(self) -> dict[str, Any]:
        """Return what it says of its parts; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/status", timeout=30) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            return {}


class LmcacheServer(VllmServer):
    """One server of vLLM with a server of LMCache of its own."""

    MARK = ".caches"
    PAGE = CHUNK
    KINDS = ("attention",)  # it refuses models with several groups

    def __init__(
        self, environment: Path, model: Path, port: int, log: Path, storage: Storage | None, *more: object
    ) -> None:
        self.cache = None if storage is None else Lmcache(environment, log, self.adapter(storage))
        super().__init__(environment, model, port, log, storage, *more)

    def adapter(self, storage: Storage) -> dict[str, Any]:
        """Return the configuration of LMCache's L2."""
        return plugin(storage, chunk_size=CHUNK)

    def transfer(self, storage: Storage) -> dict[str, Any]:
        assert self.cache is not None
        place = {"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": self.cache.port}
        return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": place}

    def ready(self) -> None:
        if self.cache is not None:
            self.cache.ready()
        super().ready()

    def flush(self) -> None:
        assert self.cache is not None
        before = [0]

        def is_stored() -> bool:
            state = self.cache.status()["storage_manager"]
            stores, count = state["store_controller"], state["l1_manager"]["total_object_count"]
            same, before[0] = count == before[0], count
            return same and not stores["pending_keys_count"] + stores["in_flight_task_count"]

        until(is_stored, 300, every=0.5)
        super().flush()

    def stop(self) -> None:
        super().stop()
        if self.cache is not None:
            self.cache.stop()

    def kill(self) -> list[Path]:
        left = super().kill()
        return left if self.cache is None else [*left, *self.cache.kill()]
