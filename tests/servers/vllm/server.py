"""A real server of vLLM's build for CPUs, with stand-ins for the copies that vLLM has for CUDA only."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.server import ANSWER_S, Server, Storage, settings
from tests.waiting import until
from tiercache.testing.hosts import Answer

STAND_INS = Path(__file__).parent / "stand_ins"
ALWAYS = (
    "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "8192", "--max-num-seqs", "4",
    "--enable-prompt-tokens-details", "--seed", "1", "--shutdown-timeout", "60",
)  # fmt: skip


class VllmServer(Server):
    """One server of vLLM with a model; a state of the Qwen3-Next is as large as the KV of 512 tokens."""

    ENVIRONMENT = "vllm-cpu"
    PAGE = 512
    SIZED: ClassVar = True
    """Whether vLLM is told the size of a block."""
    BLOCK: ClassVar[int | None] = None
    """Tokens of a block, where a page has several."""
    DTYPES: ClassVar = {"llama": "float32", "qwen3next": "bfloat16"}
    """Number formats; float32 for other models, and bfloat16 where the build for CPUs takes nothing else."""
    SETTINGS: ClassVar[dict[str, str]] = {}
    """Environment of this kind of server."""

    def __init__(
        self, environment: Path, model: Path, port: int, log: Path, storage: Storage | None, *more: object
    ) -> None:
        cache = ["--no-enable-prefix-caching"]
        if storage is not None:
            cache = [
                "--enable-prefix-caching",
                *(("--block-size", str(self.BLOCK or self.PAGE)) if self.SIZED else ()),
                "--kv-transfer-config",
                json.dumps({"kv_role": "kv_both", **self.transfer(storage)}),
            ]
        self._model = model.name
        super().__init__(
            [
                str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(model), "--served-model-name", model.name, "--port", str(port),
                "--dtype", self.DTYPES.get(model.name, "float32"), *ALWAYS, *cache, *map(str, more),
            ],
            port,
            log,
            {
                "PYTHONPATH": os.pathsep.join((str(STAND_INS), os.environ.get("PYTHONPATH", ""))).rstrip(":"),
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",
                **(self.SETTINGS if storage else {}),
            },
        )  # fmt: skip

    def ask(self, prompt: Iterable[int], new: int = 8) -> Answer:
        [answer] = self.answers(prompt, new)
        return answer

    def answers(
        self, prompt: Iterable[int], new: int, *, timeout: float = ANSWER_S, **more: object
    ) -> list[Answer]:
        """Return greedy answers; `more` are fields of the request."""
        found = self.post(
            "/v1/completions",
            {
                "model": self._model, "prompt": list(prompt), "max_tokens": new, "temperature": 0,
                "logprobs": 1, "ignore_eos": True, "return_token_ids": True, **more,
            },
            timeout,
        )  # fmt: skip
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return [
            Answer(one["token_ids"], one["logprobs"]["token_logprobs"], cached) for one in found["choices"]
        ]

    def metrics(self, name: str) -> dict[str, float]:
        """Return the samples of a metric in `/metrics`, by their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
        return {labels.removeprefix(name): float(value) for labels, _, value in found}

    def flush(self) -> None:
        def emptied() -> bool:
            return bool(self.post("/reset_prefix_cache?reset_external=true")["success"])

        until(emptied, 300, every=0.5)

    def transfer(self, storage: Storage) -> dict[str, Any]:
        """Return the settings of vLLM's tiers with a store of tiercache below."""
        tier = {"type": "TierCacheTier", "module_path": "tiercache.integrations.vllm", **settings(storage)}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 64 << 20,
                "secondary_tiers": [tier],
            },
        }


class VllmConnectorServer(VllmServer):
    """One server of vLLM with tiercache's own connector, whose scheduler and worker are one process."""

    SETTINGS: ClassVar = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # on a CPU nothing else leaves them together

    def transfer(self, storage: Storage) -> dict[str, Any]:
        return {
            "kv_connector": "TierCacheConnector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings(storage, host_bytes="64MiB", load_or_recompute=False),
        }


class VllmApartServer(VllmConnectorServer):
    """A server whose scheduler and worker are two processes."""

    SETTINGS: ClassVar = {}


class VllmRanksServer(VllmApartServer):
    """A server with two workers, each of which has a half of each block."""

    LEAVES = "*-cpushm_?"  # also without a cache: vLLM's workers end too late to remove it

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, "--tensor-parallel-size", 2)
