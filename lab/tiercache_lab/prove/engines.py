"""Differences between SGLang (0.5.23) and vLLM (0.33.0).

For each engine: how to recognise it, how to empty its own caches, and possible causes of a miss.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiercache.cli.terminal import CannotTellError
from tiercache.errors import ConfigError
from tiercache_lab.prove.server import Server

_RESTART: Final = "or test over a restart: --save FILE, restart the server, --after FILE"
_RETRY_S: Final = 0.5
_SAFE_CONNECTOR: Final = "OffloadingConnector"
"""The only vLLM connector known to leave its storage alone when vLLM resets it. Mooncake's connector deletes
the objects of all servers."""


class Engine(enum.StrEnum):
    """Supported engines; the values are the owners that they report for their models in /v1/models."""

    SGLANG = "sglang"
    VLLM = "vllm"


REPORT_FLAGS: Final = {Engine.SGLANG: "--enable-cache-report", Engine.VLLM: "--enable-prompt-tokens-details"}
"""Options that a server needs to report the number of cached tokens."""

_FIRST: Final = "docs/engines.md: the settings that attach the store, and the log lines after a success"
_STATES: Final = (
    "a KV hit without a state: of a model with recurrent states, pages restore nothing unless a state is"
    " stored for the depth where they end; `tiercache ls --pool mamba` shows whether states are stored"
)
LOOK_AT: Final = {
    Engine.SGLANG: (
        _FIRST,
        "the server's log: `tiercache: pool kv, ...` at the start, or the reason why the attach failed; `is "
        "not kept` names a pool that came too late",
        "--tokens: SGLang reads from storage only if a whole page, and at least prefetch_threshold (256) "
        "tokens, are missing on device and host",
        "--hicache-write-policy: write_through_selective stores only what is used twice, write_back"
        " only what is evicted",
        "--hicache-storage-prefetch-policy: best_effort does not wait for a slow store, wait_complete does",
        _STATES,
        "--settle: a slow store may not have written everything yet",
    ),
    Engine.VLLM: (
        _FIRST,
        "the server's log: `Created secondary tier` at the start, and lines of tiercache after it",
        "--tokens: a prompt that is shorter than one offloading chunk is not stored",
        "kv_connector OffloadingConnector with spec_name TieringOffloadingSpec: without it there is no tier "
        "below the GPU",
        "--block-size, for a model with recurrent states: without it vLLM may cut a prefill where no block"
        " ends, and then has no state to store; 256 works",
        _STATES,
        "--settle: tokens that are being written while the caches are emptied are lost, and vLLM reads"
        " from no tier until these writes have ended",
    ),
}  # fmt: skip


class _Listed(BaseModel):
    id: Annotated[str, Field(min_length=1)]
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    """Answer of /v1/models, as far as it is read here."""

    model_config = ConfigDict(strict=True)
    data: Annotated[list[_Listed], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class EngineSubject:
    """Engine and model that answer the requests."""

    engine: Engine
    model: str
    longest: int = 0
    """Limit of prompt and answer in tokens; 0 if the server does not report one."""


def find(server: Server, engine: Engine | None, name: str) -> EngineSubject:
    """Return the engine of a server (default: the one that it reports) and the model (default: the first).

    Raises ConfigError if the server does not report its engine, and CannotTellError or RefusedError if the
    server does not list its models.
    """
    reply = server.get("/v1/models")
    if reply.status != 200:
        raise server.refusal(reply)
    try:
        offered = _Models.model_validate_json(reply.body).data
    except ValidationError as error:
        raise CannotTellError(f"{reply.url} offers no model; is that the URL of SGLang or vLLM?") from error
    owner = engine or offered[0].owned_by
    if owner not in list(Engine):
        raise ConfigError(f"{server.url} does not report its engine; give --engine sglang or --engine vllm")
    # The name may be an alias or an adapter that the list omits. The server will refuse a wrong name.
    wanted = name or offered[0].id
    longest = next((model.max_model_len for model in offered if model.id == wanted), None)
    return EngineSubject(Engine(owner), wanted, longest or 0)


def empty(server: Server, engine: Engine) -> str:
    """Empty the engine's own caches, but not the storage; return a note on what is uncertain, or "".

    Raises CannotTellError if the caches cannot be emptied.
    """
    return _empty_sglang(server) if engine is Engine.SGLANG else _empty_vllm(server)


def _empty_sglang(server: Server) -> str:
    """Empty SGLang's caches on device and host; a storage backend keeps its contents.

    With a timeout, SGLang waits until requests, write-through and backup (its writes to storage) have ended.
    Without a timeout, it refuses to empty its caches while any of them runs.
    """
    reply = server.post(f"/flush_cache?timeout={server.timeout_s / 2:g}")
    if reply.status == 400:
        raise CannotTellError(
            f"{reply.url}: SGLang does not empty its caches while it is busy; try without other requests,"
            f" {_RESTART}"
        )
    if reply.status == 404:
        raise CannotTellError(
            f"{reply.url} does not exist, so the caches cannot be emptied; give the URL of SGLang itself,"
            f" {_RESTART}"
        )
    if reply.status != 200:
        raise server.refusal(reply)
    return ""


def _empty_vllm(server: Server) -> str:
    """Empty vLLM's device blocks and, if the connector allows it, its host memory.

    The request is repeated while the server is busy. With `reset_external`, vLLM also empties the primary
    tier of its offloading, which is in host memory; the secondary tiers keep their contents.
    """
    connector = _connector(server)
    external = connector == _SAFE_CONNECTOR
    deadline = time.monotonic() + server.timeout_s / 2
    while True:
        reply = server.post(f"/reset_prefix_cache{'?reset_external=true' if external else ''}")
        if reply.status == 404:
            raise CannotTellError(
                f"{reply.url} does not exist; start vLLM with VLLM_SERVER_DEV_MODE=1, {_RESTART}"
            )
        if reply.status != 200:
            raise server.refusal(reply)
        # The body is {"success": bool}; earlier releases send an empty body.
        said: Any = reply.body and reply.document()
        if not (isinstance(said, dict) and said.get("success") is False):
            break
        if time.monotonic() > deadline:
            raise CannotTellError(
                f"{reply.url}: vLLM does not empty its cache while it is busy; try without other requests,"
                f" {_RESTART}"
            )
        time.sleep(_RETRY_S)
    if external:
        return ""
    found = (
        f"connector {connector} may not keep its storage"
        if connector
        else "no connector is named in /server_info"
    )
    return (
        f"only the GPU's cache was emptied ({found}), so restored tokens may come from host memory; to"
        f" be sure, {_RESTART.removeprefix('or ')}"
    )


def _connector(server: Server) -> str:
    """Return the name of the KV connector of a vLLM server in development mode; "" if it is not reported."""
    reply = server.get("/server_info?config_format=json")
    if reply.status != 200:
        return ""
    found: Any = reply.document()
    for name in ("vllm_config", "kv_transfer_config", "kv_connector"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""
