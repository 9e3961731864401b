"""A real server of SGLang on a CPU, with stand-ins for the kernels that SGLang has for CUDA only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from tests.servers.server import Server, Storage, settings
from tiercache.testing.hosts import Answer

STAND_INS = Path(__file__).parent / "stand_ins"
ALWAYS = (
    "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
    "--mem-fraction-static", "0.2", "--random-seed", "1",
    "--watchdog-timeout", "1200", "--page-size", "64", "--enable-cache-report",
    "--max-running-requests", "4",
)  # fmt: skip


class SglangServer(Server):
    """One server of SGLang with a model; SGLang's states of a prefill are 64 tokens apart."""

    ENVIRONMENT = "sglang"
    PAGE = 64
    LEAVES = "sgl*shm*"
    DTYPES: ClassVar = {"llama": "float32", "qwen3next": "float32"}
    TREE: tuple[str, ...] = ()
    """Arguments that choose the tree."""
    SETTINGS: ClassVar[dict[str, object]] = {
        "backend_name": "tiercache", "module_path": "tiercache.integrations.sglang",
        "class_name": "TierCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": True,
    }  # fmt: skip
    """Settings of the store beside its URL and the revision."""

    def __init__(
        self,
        environment: Path,
        model: Path,
        port: int,
        log: Path,
        storage: Storage | None,
        *arguments: object,
        overlap: bool = False,
    ) -> None:
        """Start it; `arguments` may replace a host cache over `storage`; `overlap` prepares a batch ahead."""
        cache = [*self.TREE, *map(str, arguments)]
        if storage is None and not arguments:
            cache = ["--disable-radix-cache"]
        if storage is not None:
            cache += _hicache(log.with_name(f"settings-{port}.json"), storage, **self.SETTINGS)
        if storage is not None or arguments:
            sizes = ["--max-total-tokens", "8192", "--max-mamba-cache-size", "24"]
            cache = [*sizes[: 2 if model.name == "llama" else None], *cache]
        if not overlap:
            cache.append("--disable-overlap-schedule")
        super().__init__(
            [
                str(environment / "bin" / "python"), "-W", "ignore", "-m", "sglang.launch_server",
                "--model-path", str(model), "--port", str(port), *ALWAYS, *cache,
            ],
            port,
            log,
            {
                "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join((str(STAND_INS), os.environ.get("PYTHONPATH", ""))).rstrip(":"),
                "SGLANG_USE_CPU_ENGINE": "1",
                "SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS": "1",
                "SGLANG_MAMBA_CONV_DTYPE": "float32",
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
                **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "--tp" in arguments else {}),
            },
        )  # fmt: skip

    def ask(self, prompt: Iterable[int], new: int = 8) -> Answer:
        found = self.post(
            "/generate",
            {
                "input_ids": list(prompt),
                "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        meta = found["meta_info"]
        chosen = meta["output_token_logprobs"]
        return Answer(
            [token for _, token, _ in chosen], [value for value, _, _ in chosen], meta["cached_tokens"]
        )

    def flush(self) -> None:
        answer = self.post("/flush_cache")
        assert "flushed" in str(answer).lower(), answer


class SglangTreeServer(SglangServer):
    """The same with tiercache in the place of SGLang's tree, down to the store."""

    TREE = ("--radix-cache-backend", "tiercache")
    SETTINGS: ClassVar = {"policy": "hvd", "load_or_recompute": False}


def _hicache(file: Path, storage: Storage, **more: object) -> list[str]:
    """Arguments of a server whose host cache stores in tiercache; writes the settings to `file`."""
    file.write_text(json.dumps(settings(storage, **more)))
    return [
        "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "dynamic",
        "--hicache-storage-backend-extra-config", f"@{file}",
        "--hicache-storage-prefetch-policy", "wait_complete",
    ]  # fmt: skip
