"""The tokens of a prompt, from a file of integers or from a text and a tokenizer."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from tiercache.cli.terminal import clean
from tiercache.core import TokenArray, as_tokens
from tiercache.errors import ConfigError, TokenError

TokensOption = Annotated[
    str,
    typer.Option(
        "--tokens", metavar="FILE", help="File with a prompt's token ids: JSON or text; - for stdin."
    ),
]
TextOption = Annotated[
    str | None, typer.Option("--text", help="Prompt, for --tokenizer.", show_default=False)
]
TextFileOption = Annotated[
    str, typer.Option("--text-file", metavar="FILE", help="File with a prompt, for --tokenizer; - for stdin.")
]
TokenizerOption = Annotated[
    str,
    typer.Option(
        "--tokenizer",
        metavar="DIR",
        help="Model's directory with tokenizer.json; adds its special tokens to the prompt.",
    ),
]
ExtraOption = Annotated[
    str,
    typer.Option(
        "--extra",
        metavar="HEX",
        help="Result of tiercache.keys.sequence_extra for the prompt's adapter or images.",
    ),
]

_MAX_BYTES: Final = 256 << 20
"""Maximum bytes of a file with a prompt."""


def extra_of(text: str) -> bytes:
    """Return the bytes that page keys include for adapters and images; raises ConfigError."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(
            f"--extra {clean(text)!r} is not hex; give sequence_extra(adapter, images).hex()"
        ) from error


def tokens_of(tokens: str, text: str | None, text_file: str, tokenizer: str) -> TokenArray:
    """Return the tokens of the prompt that the options give; raises ConfigError unless exactly one does."""
    options = {"--tokens": bool(tokens), "--text": text is not None, "--text-file": bool(text_file)}
    given = [option for option, is_given in options.items() if is_given]
    if not given:
        raise ConfigError("explain needs a prompt: give --tokens, or --text or --text-file with --tokenizer")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are {len(given)} prompts; give only one of them")
    if tokens:
        if tokenizer:
            raise ConfigError(
                "--tokenizer is for --text and --text-file; omit it, because --tokens are numbers already"
            )
        return _read_tokens(tokens)
    if not tokenizer:
        raise ConfigError(
            "--text needs --tokenizer, the directory of the model's tokenizer.json; or give token ids with"
            " --tokens"
        )
    if text is None:
        try:
            text = _read("--text-file", text_file).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--text-file {clean(text_file)} is not UTF-8 text; convert it, or give token ids with"
                " --tokens"
            ) from error
    return _encode(text, tokenizer)


def _read_tokens(name: str) -> TokenArray:
    raw = _read("--tokens", name)
    try:
        return as_tokens(_parse_text(raw.decode()))
    except TokenError as error:
        raise ConfigError(f"--tokens {clean(name)}: {clean(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--tokens {clean(name)} is neither a JSON list of integers nor integers separated by blanks or"
            f" commas ({clean(str(error))[:80]}); convert it"
        ) from error


def _parse_text(text: str) -> Any:
    if text.lstrip().startswith(("[", "{")):
        found = json.loads(text)
        if not isinstance(found, list):
            raise ValueError("a JSON object")
        return found
    numbers = [int(word) for word in text.replace(",", " ").split()]
    return numbers if numbers else np.empty(0, np.uint64)


def _read(option: str, name: str) -> bytes:
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{option} {clean(name)} cannot be read: {error.strerror}; name a file") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(
            f"{option} {clean(name)} has more than 256 MiB, which is too large for a prompt; name"
            " another file"
        )
    return raw


def _encode(text: str, directory: str) -> TokenArray:
    path = Path(directory)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--tokenizer {clean(directory)} has no tokenizer.json; name the directory of a model, or the"
            " file"
        )
    try:
        library = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            "--text needs the tokenizers library; install it with: pip install tokenizers, or give --tokens"
        ) from error
    try:
        made = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"--tokenizer {clean(str(file))} cannot be read: {clean(str(error))[:80]}; is it a"
            " tokenizer.json?"
        ) from error
    return as_tokens([int(token) for token in made.encode(text).ids])
