"""Names that programs of the pages take for granted: a model, a worker, a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def a_model_on_disk(home: Path) -> dict[str, Any]:
    """A small model in HERE/model, and the tokens of a prompt."""
    _model().save_pretrained(home / "model")
    return {"prompt_token_ids": list(range(100))}


def a_worker(home: Path) -> dict[str, Any]:
    """A worker with a store, and prompts."""
    from tiercache.integrations.transformers import Request, Worker

    worker = Worker(_model(), device_bytes="4MiB", host_bytes="4MiB", storage="memory://?capacity=16MiB")
    prompts = {"prompt": list(range(100)), "other": list(range(50, 200)), "system_prompt": list(range(70))}
    worker.serve(prompts["system_prompt"], 1)
    return {"worker": worker, "Request": Request, **prompts}


def _model() -> Any:
    from tests.integrations.transformers.models import build

    return build("llama")
