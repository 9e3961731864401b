"""One prompt and its streamed answer: the text, the time to the first token, and the cached tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from tiercache.cli.terminal import CannotTellError
from tiercache_lab.prove.engines import Engine
from tiercache_lab.prove.server import Server

PATH: Final = "/v1/completions"
_DONE: Final = "[DONE]"
_FIELDS: Final = frozenset(("", "data", "event", "id", "retry"))


@dataclass(frozen=True, slots=True)
class Sources:
    """Cached tokens by the tier in which they were when the prompt came; only SGLang reports these."""

    device: int
    host: int
    storage: int


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


def ask(server: Server, engine: Engine, model: str, prompt: str, max_tokens: int) -> Answer:
    """Send a prompt and wait for its complete answer.

    Raises CannotTellError for an answer without a text or in a wrong form, and the errors of `Server.lines`.
    """
    # Without ignore_eos, a model may end its answer at once, and two empty texts would prove nothing.
    request: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    if engine is Engine.SGLANG:
        request["return_cached_tokens_details"] = True
    url = server.url + PATH
    reading = _Reading(server, time.perf_counter())
    with server.lines(PATH, request) as lines:
        for event in _events(lines, url):
            reading.take(event)
    return reading.answer()


class _Reading:
    """Collector for the events of one streamed answer.

    Thread safety: one thread.
    """

    def __init__(self, server: Server, began: float) -> None:
        self._server = server
        self._url = server.url + PATH
        self._began = began
        self._first: float | None = None
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._details: dict[str, Any] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of the stream.

        Raises CannotTellError for a malformed event, and for an event that reports an error.
        """
        if error := event.get("error"):
            said = self._server.without_keys(_words(error))
            raise CannotTellError(f"{self._url} ends its answer with an error: {said}; see the server's log")
        for choice in _of(event, "choices", list, self._url) or []:
            text = choice.get("text") if isinstance(choice, dict) else 0
            if not isinstance(text, str | None):
                raise _malformed(self._url)
            self._first = self._first or time.perf_counter()
            self._text.append(text or "")
        self._usage = _of(event, "usage", dict, self._url) or self._usage
        extension = _of(event, "sglext", dict, self._url) or {}
        self._details = _of(extension, "cached_tokens_details", dict, self._url) or self._details

    def answer(self) -> Answer:
        """Return the complete answer; raises CannotTellError if it contains no text."""
        text = "".join(self._text)
        if self._first is None or not text:
            raise CannotTellError(
                f"{self._url} answers without a text, so the answers cannot be compared; give a higher"
                " --max-tokens"
            )
        sources = Sources(
            *(_count(self._details, name, self._url) or 0 for name in ("device", "host", "storage"))
        )
        found = sources if self._details else None
        reported = _count(
            _of(self._usage, "prompt_tokens_details", dict, self._url) or {}, "cached_tokens", self._url
        )
        if reported is None and found is not None:  # SGLang without --enable-cache-report
            reported = found.device + found.host + found.storage
        return Answer(
            text, self._first - self._began, _count(self._usage, "prompt_tokens", self._url), reported, found
        )


def _events(lines: Iterator[str], url: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON data of server-sent events up to the [DONE] mark.

    Comments, which servers send to keep connections open, and other fields are skipped. Raises
    CannotTellError for a malformed or truncated stream.
    """
    for line in lines:
        name, _, value = line.partition(":")
        if name not in _FIELDS:
            raise _malformed(url)
        if name != "data":
            continue
        if value.strip() == _DONE:
            return
        try:
            event = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _malformed(url) from error
        if not isinstance(event, dict):
            raise _malformed(url)
        yield event
    raise CannotTellError(f"{url} stopped in the middle of its answer; see the server's log")


def _malformed(url: str) -> CannotTellError:
    return CannotTellError(f"{url} answers with a malformed stream; is that the URL of SGLang or vLLM?")


def _of(event: dict[str, Any], name: str, kind: type, url: str) -> Any:
    """Return the part `name` of an event, or None if it is missing.

    Raises CannotTellError if the part is not of type `kind`.
    """
    found = event.get(name)
    if found is not None and not isinstance(found, kind):
        raise _malformed(url)
    return found


def _count(record: dict[str, Any], name: str, url: str) -> int | None:
    found = record.get(name)
    if found is not None and (type(found) is not int or found < 0):
        raise _malformed(url)
    return found


def _words(error: object) -> str:
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300]
