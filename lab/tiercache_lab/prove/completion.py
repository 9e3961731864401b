"""One prompt and its streamed answer: the text, the time to the first token, and the cached tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from tiercache.cli.terminal import CannotTellError
from tiercache_lab.prove.engines import Engine
from tiercache_lab.prove.server import Server

PATH: Final = "/v1/completions"
_DONE: Final = b"[DONE]"
_FIELDS: Final = frozenset((b"", b"data", b"event", b"id", b"retry"))


@dataclass(frozen=True, slots=True)
class Sources:
    """Cached tokens by the tier in which they were when the prompt came; only SGLang reports these."""

    device: NonNegativeInt = 0
    host: NonNegativeInt = 0
    storage: NonNegativeInt = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one prompt; a figure that the server did not report is None."""

    text: str
    first_token_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    sources: Sources | None = None

    def record(self) -> dict[str, Any]:
        """Return the answer as a dictionary for JSON."""
        return asdict(self)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Choice(_Strict):
    text: str | None = None


class _Details(_Strict):
    cached_tokens: NonNegativeInt | None = None


class _Usage(_Strict):
    prompt_tokens: NonNegativeInt | None = None
    prompt_tokens_details: _Details | None = None


class _Extension(_Strict):
    cached_tokens_details: Sources | None = None


class _Event(_Strict):
    """Event of a streamed completion; fields that are not named here are ignored."""

    error: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    sglext: _Extension | None = None


def ask(server: Server, engine: Engine, model: str, prompt: str, max_tokens: int) -> Answer:
    """Send a prompt and wait for its complete answer.

    Raises CannotTellError for an answer without a text or in a wrong form, and the errors of `Server.lines`.
    """
    # Without ignore_eos, a model may end its answer at once, and two empty texts would prove nothing.
    request: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if engine is Engine.SGLANG:
        request["return_cached_tokens_details"] = True
    url, began = server.url + PATH, time.perf_counter()
    first: float | None = None
    text, usage, sources = "", _Usage(), None
    with server.lines(PATH, request) as lines:
        for event in _events(lines, url):
            if event.error:
                told = (
                    event.error.get("message", event.error) if isinstance(event.error, dict) else event.error
                )
                raise CannotTellError(
                    f"{url} ends its answer with an error: {server.quote(str(told))}; see the server's log"
                )
            for choice in event.choices or ():
                first = first or time.perf_counter()
                text += choice.text or ""
            usage = event.usage or usage
            sources = (event.sglext and event.sglext.cached_tokens_details) or sources
    if first is None or not text:
        raise CannotTellError(
            f"{url} answers without a text, so the answers cannot be compared; give a higher --max-tokens"
        )
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if cached is None and sources is not None:  # SGLang without --enable-cache-report
        cached = sources.device + sources.host + sources.storage
    return Answer(text, first - began, usage.prompt_tokens, cached, sources)


def _events(lines: Iterator[bytes], url: str) -> Iterator[_Event]:
    """Yield the data of server-sent events up to the [DONE] mark.

    Comments, which servers send to keep connections open, and other fields are skipped. Raises
    CannotTellError for a malformed or truncated stream.
    """
    for line in lines:
        name, _, value = line.partition(b":")
        if name == b"data" and value.strip() == _DONE:
            return
        try:
            if name not in _FIELDS:
                raise ValueError(line)
            if name == b"data":
                yield _Event.model_validate_json(value)
        except (ValidationError, ValueError) as error:
            raise CannotTellError(
                f"{url} answers with a malformed stream; is that the URL of SGLang or vLLM?"
            ) from error
    raise CannotTellError(f"{url} stopped in the middle of its answer; see the server's log")
