"""The file between `--save` and `--after`: the first request and its answer, kept over a restart of the server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tiercache.cli.output import clean
from tiercache.cli.prove.completion import Answer, Sources
from tiercache.cli.prove.server import MOST_BYTES
from tiercache.errors import ConfigError

FORMAT: Final = 1
LEAST_TOKENS: Final = 64
MOST_TOKENS: Final = 1_000_000
MOST_ANSWER: Final = 1024
"""Largest length of an answer in tokens; this and the limits of the prompt above are those of the command's options."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A prompt that was sent, the options it was sent with, and the answer."""

    url: str
    model: str
    engine: str
    seed: int
    tokens: int
    max_tokens: int
    prompt: str
    first: Answer

    def save(self, path: Path) -> None:
        """Write the request to a file as JSON; raises ConfigError if it cannot be written."""
        try:
            path.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {path} cannot be written: {error.strerror}; name a file in a directory of yours") from error


def check_place(path: Path) -> None:
    """Raise ConfigError if no file can be created at `path`; called before anything is sent."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--save {clean(str(path))} is no file that can be made; name one in a directory that exists")


def load(path: Path) -> Saved:
    """Return the request that `save` wrote to a file; raises ConfigError for any other file."""
    shown = f"--after {clean(str(path))}"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{shown} is too large to be a file of --save; name the one that it wrote")
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}; name the file that --save wrote") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown} is not a file of --save; name the one that it wrote") from error
    try:
        return _saved(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{shown} is not a file of --save of this version; name another, or save anew") from error


def _saved(record: dict[str, Any]) -> Saved:
    if record.pop("format") != FORMAT:
        raise ValueError
    first = record.pop("first")
    sources = first.pop("sources")
    saved = Saved(**record, first=Answer(**first, sources=sources and Sources(**sources)))
    texts = (saved.url, saved.model, saved.engine, saved.prompt, saved.first.text)
    numbers = (saved.seed, saved.tokens, saved.max_tokens, saved.first.prompt_tokens or 0, saved.first.cached_tokens or 0)
    times = isinstance(saved.first.first_token_s, float)
    if not (all(type(text) is str for text in texts) and all(type(number) is int for number in numbers) and times):
        raise TypeError
    if not (LEAST_TOKENS <= saved.tokens <= MOST_TOKENS and 1 <= saved.max_tokens <= MOST_ANSWER):
        raise ValueError
    return saved
