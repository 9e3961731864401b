"""Differences between SGLang (0.5.23) and vLLM (0.33.0): how to recognise each, empty its own caches, and find the cause of a miss."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Any, Final

from tiercache.cli.exits import CannotTellError
from tiercache.cli.prove.server import Server
from tiercache.errors import ConfigError

_RESTART: Final = "or prove it over a restart: --save FILE, restart the server, --after FILE"
_AGAIN_S: Final = 0.5
_SAFE_CONNECTOR: Final = "OffloadingConnector"
"""Only vLLM connector known to keep its storage when it is reset. Mooncake's deletes everything, of all servers."""


class Engine(enum.StrEnum):
    """Engines that can be asked; the values are the owners that they give for their models in /v1/models."""

    SGLANG = "sglang"
    VLLM = "vllm"


class EngineChoice(enum.StrEnum):
    """Values of the option `--engine`."""

    AUTO = "auto"
    SGLANG = "sglang"
    VLLM = "vllm"


REPORT_FLAGS: Final = {Engine.SGLANG: "--enable-cache-report", Engine.VLLM: "--enable-prompt-tokens-details"}
"""Options that a server needs to report the number of cached tokens."""

_FIRST: Final = "docs/engines.md: the settings that attach the store, and what the log says when it worked"
LOOK_AT: Final = {
    Engine.SGLANG: (
        _FIRST,
        "the server's log: `tiercache: pool kv, ...` at the start, or why the attach failed; `is not kept` names a pool that came too late",
        "--tokens: SGLang asks storage for no less than a page, and no less than prefetch_threshold (256 tokens)",
        "--hicache-write-policy: write_through_selective stores what is used a second time, write_back only what is evicted",
        "--hicache-storage-prefetch-policy: best_effort does not wait for a slow store, wait_complete does",
        "--settle: a slow store may not have written everything yet",
    ),
    Engine.VLLM: (
        _FIRST,
        "the server's log: `Created secondary tier` at the start, and lines of tiercache's after it",
        "--tokens: a prompt shorter than one chunk of the offloading is not kept",
        "kv_connector OffloadingConnector with spec_name TieringOffloadingSpec: without it nothing is below the GPU",
        "--settle: what is being written while the caches are emptied is lost, and vLLM asks no tier until that is over",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a server offers; `longest` is its limit in tokens, or 0 if the server does not say."""

    name: str
    owner: str = ""
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine and the model that answer the requests."""

    engine: Engine
    model: Model


def find(server: Server, choice: EngineChoice, name: str) -> Subject:
    """Return the engine and the model to ask; raises CannotTellError, or ConfigError if --engine has to name the engine."""
    offered = _models(server)
    model = next((model for model in offered if model.name == name), None) if name else offered[0]
    if model is None:
        model = Model(name, offered[0].owner)  # may be a route or an adapter that the list omits; the server refuses a wrong name later
    owner = model.owner if choice is EngineChoice.AUTO else choice.value
    if owner not in list(Engine):
        raise ConfigError(f"{server.url} does not say which engine it is; give --engine sglang or --engine vllm")
    return Subject(Engine(owner), model)


def empty(server: Server, engine: Engine) -> str:
    """Empty the engine's own caches and leave the storage alone.

    Returns a note about what stays uncertain, or an empty string; raises CannotTellError if the caches cannot be emptied.
    """
    return _empty_sglang(server) if engine is Engine.SGLANG else _empty_vllm(server)


def _empty_sglang(server: Server) -> str:
    """Empty SGLang's caches on device and host; a storage backend keeps its contents.

    With a timeout SGLang waits for requests, write-through and backup to finish; without one it refuses while they run.
    """
    reply = server.post(f"/flush_cache?timeout={server.timeout_s / 2:g}")
    if reply.status == 400:
        raise CannotTellError(f"{reply.url}: SGLang does not empty its caches while it works; try when nothing else runs, {_RESTART}")
    if reply.status == 404:
        raise CannotTellError(f"{reply.url} is not there, so the caches cannot be emptied; give the URL of SGLang itself, {_RESTART}")
    if reply.status != 200:
        raise server.refusal(reply)
    return ""


def _empty_vllm(server: Server) -> str:
    """Empty vLLM's device blocks, and its host memory where the connector allows it; retry while the server is busy.

    With `reset_external` the primary tier of the offloading, in host memory, is emptied too; its secondary tiers stay.
    """
    connector = _connector(server)
    external = connector == _SAFE_CONNECTOR
    deadline = time.monotonic() + server.timeout_s / 2
    while True:
        reply = server.post(f"/reset_prefix_cache{'?reset_external=true' if external else ''}")
        if reply.status == 404:
            raise CannotTellError(f"{reply.url} is not there; start vLLM with VLLM_SERVER_DEV_MODE=1, {_RESTART}")
        if reply.status != 200:
            raise server.refusal(reply)
        if not _refused(reply.body and reply.document()):  # the body is {"success": bool}; earlier releases send none
            break
        if time.monotonic() > deadline:
            raise CannotTellError(f"{reply.url}: vLLM does not empty its cache while it works; try when nothing else runs, {_RESTART}")
        time.sleep(_AGAIN_S)
    if external:
        return ""
    found = f"connector {connector} may not keep its storage" if connector else "no connector is named in /server_info"
    return (
        f"only the GPU's cache was emptied ({found}): what came back may come from host memory; to be sure, {_RESTART.removeprefix('or ')}"
    )


def _refused(said: Any) -> bool:
    return isinstance(said, dict) and said.get("success") is False


def _models(server: Server) -> list[Model]:
    reply = server.get("/v1/models")
    if reply.status != 200:
        raise server.refusal(reply)
    found = reply.document()
    data = found.get("data") if isinstance(found, dict) else None
    models = [_model(entry) for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    if not models or not all(model.name for model in models):
        raise CannotTellError(f"{reply.url} offers no model; is that the URL of SGLang or vLLM?")
    return models


def _model(entry: dict[str, Any]) -> Model:
    name, owner, longest = (entry.get(key) for key in ("id", "owned_by", "max_model_len"))
    return Model(name if isinstance(name, str) else "", owner if isinstance(owner, str) else "", longest if type(longest) is int else 0)


def _connector(server: Server) -> str:
    """Return the name of the KV connector of a vLLM server in development mode; empty if the server does not tell."""
    reply = server.get("/server_info?config_format=json")
    if reply.status != 200:
        return ""
    found: Any = reply.document()
    for name in ("vllm_config", "kv_transfer_config", "kv_connector"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""
