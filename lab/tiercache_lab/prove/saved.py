"""The file of `--save` and `--after`, which keeps the first request and its answer over a restart."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tiercache.cli.terminal import clean
from tiercache.errors import ConfigError
from tiercache_lab.prove.completion import Answer, Sources
from tiercache_lab.prove.server import MAX_BYTES

FORMAT: Final = 1
MIN_TOKENS: Final = 64
"""Minimum length of a prompt in tokens."""
MAX_TOKENS: Final = 1_000_000
"""Maximum length of a prompt in tokens."""
MAX_ANSWER: Final = 1024
"""Maximum length of an answer in tokens."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Prompt that was sent, the options of the request, and the answer."""

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
            raise ConfigError(
                f"--save {path} cannot be written: {error.strerror}; name a file in a directory of your own"
            ) from error


def check_place(path: Path) -> None:
    """Raise ConfigError if no file can be created at `path`. Call this before anything is sent."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--save {clean(str(path))} is a directory, or its directory does not exist; name another file"
        )


def load(path: Path) -> Saved:
    """Return the request that `save` wrote to a file; raises ConfigError for any other file."""
    shown = f"--after {clean(str(path))}"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{shown} is too large for a file of --save; name the file that --save wrote")
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read: {error.strerror}; name the file that --save wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown} is not a file of --save; name the file that --save wrote") from error
    try:
        return _saved(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{shown} is not a file of --save of this version; name another file, or save again"
        ) from error


def _saved(record: dict[str, Any]) -> Saved:
    if record.pop("format") != FORMAT:
        raise ValueError
    first = record.pop("first")
    sources = first.pop("sources")
    saved = Saved(**record, first=Answer(**first, sources=sources and Sources(**sources)))
    texts = (saved.url, saved.model, saved.engine, saved.prompt, saved.first.text)
    numbers = (
        saved.seed,
        saved.tokens,
        saved.max_tokens,
        saved.first.prompt_tokens or 0,
        saved.first.cached_tokens or 0,
    )
    times = isinstance(saved.first.first_token_s, float)
    if not (
        all(type(text) is str for text in texts) and all(type(number) is int for number in numbers) and times
    ):
        raise TypeError
    if not (MIN_TOKENS <= saved.tokens <= MAX_TOKENS and 1 <= saved.max_tokens <= MAX_ANSWER):
        raise ValueError
    return saved
