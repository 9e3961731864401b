"""The requests that `tiercache prove` sends to a server, and the file that keeps the first over a restart."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from tiercache.cli.terminal import clean
from tiercache.errors import ConfigError
from tiercache_lab.prove.completion import Answer, ask
from tiercache_lab.prove.engines import EngineSubject, empty
from tiercache_lab.prove.server import MAX_BYTES, Server
from tiercache_lab.prove.verdict import Report

MIN_TOKENS: Final = 64
MAX_TOKENS: Final = 1_000_000
MAX_ANSWER: Final = 1024


@dataclass(frozen=True, slots=True)
class Saved:
    """Prompt that was sent, the options of the request, and the answer."""

    format: Literal[1]
    url: str
    model: str
    engine: str
    seed: int
    tokens: Annotated[int, Field(ge=MIN_TOKENS, le=MAX_TOKENS)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_ANSWER)]
    prompt: str
    first: Answer


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
        return TypeAdapter(Saved).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read: {error.strerror}; name the file that --save wrote"
        ) from error
    except ValidationError as error:
        raise ConfigError(
            f"{shown} is not a file of --save of this version; name another file, or save again"
        ) from error


@dataclass(frozen=True, slots=True)
class ProveRun:
    """Requests to one server, with the options that they share. Thread safety: one thread."""

    server: Server
    subject: EngineSubject
    tokens: int
    max_tokens: int
    say: Callable[[str], None]

    def check_length(self) -> None:
        """Raise ConfigError if prompt and answer exceed the limit that the server reports for its model."""
        longest = self.subject.longest
        if longest and self.tokens + self.max_tokens > longest:
            raise ConfigError(
                f"--tokens {self.tokens} and --max-tokens {self.max_tokens} do not fit into the {longest}"
                " tokens of this model; give fewer"
            )

    def prove(self, seed: int, settle: float) -> Report:
        """Send a new prompt, the same prompt again with empty caches, and another new prompt.

        `settle` is the time to wait, in seconds, until the engine has written the prompt to storage.
        """
        prompt, first = self._first(seed)
        self.say(f"waiting {settle:g} s for the prompt to be stored")
        time.sleep(settle)
        self.say("emptying the engine's own caches")
        note = empty(self.server, self.subject.engine)
        return self._judge(seed, prompt, first, note)

    def save(self, seed: int, path: Path) -> Saved:
        """Send the first request, and save the prompt and its answer for `after`.

        Raises ConfigError if the file cannot be written.
        """
        (prompt, first), subject = self._first(seed), self.subject
        saved = Saved(
            1, self.server.url, subject.model, subject.engine.value, seed, self.tokens, self.max_tokens,
            prompt, first,
        )  # fmt: skip
        try:
            path.write_text(json.dumps(asdict(saved), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--save {path} cannot be written: {error.strerror}; name a file in a directory of your own"
            ) from error
        return saved

    def after(self, before: Saved) -> Report:
        """Send a saved prompt again, and then another new prompt.

        Raises ConfigError if the file is about another model.
        """
        if before.model != self.subject.model:
            raise ConfigError(
                f"--after is about model {clean(before.model)}, not {clean(self.subject.model)}; give"
                " --model, or use --save again"
            )
        found = self._judge(before.seed, before.prompt, before.first)
        if found.again.sources:
            return found
        note = "whether the server was restarted is not known; without a restart, tokens may come from memory"
        return replace(found, notes=[note])

    def _first(self, seed: int) -> tuple[str, Answer]:
        """Send the first prompt, or a shorter one while it may be whole pages; return it and its answer.

        An engine computes the last token of every prompt. If that token ends a page, the prompt's only state
        is after it, and the same prompt restores nothing of a model with recurrent states.
        """
        words = self._fitting_words()
        for tried in range(5):
            prompt = draw(f"{seed}{'+' * tried}", words - tried)
            first = self._ask("a new prompt", prompt)
            if first.prompt_tokens is None or first.prompt_tokens % _SMALLEST_PAGE:
                break
        return prompt, first

    def _judge(self, seed: int, prompt: str, first: Answer, note: str = "") -> Report:
        again = self._ask("the same prompt again", prompt)
        # The control must be a new prompt, so it is drawn at random. With a seed that was used before, a
        # prompt drawn from the seed would not be new.
        control = self._ask("another new prompt", draw(secrets.token_hex(16), len(prompt.split()) - _FRAME))
        notes = [note] if note else []
        return Report(self.server.url, self.subject, seed, first, again, control, notes)

    def _fitting_words(self) -> int:
        """Return the number of words for which the server counts about `tokens` tokens in a prompt.

        Sends a prompt of its own. A server that does not report its count gets one word for each token.
        """
        sent = min(self.tokens, _TRIAL)
        counted = self._ask(
            "the length of a prompt", draw(secrets.token_hex(16), sent - _FRAME)
        ).prompt_tokens
        # No server has fewer tokens than words, whatever it counts.
        return max(_SHOWN, self.tokens * sent // max(counted or 0, sent) - _FRAME)

    def _ask(self, what: str, prompt: str) -> Answer:
        self.say(what)
        return ask(self.server, self.subject.engine, self.subject.model, prompt, self.max_tokens)


_COMMON: Final = """
air arm art baby bag ball bank bar base bear bed bird blood blue board boat body book box boy brain bread
bridge brother brown car card cat chair child church circle city class clock cloud coat coffee cold color
copper corner cotton country cup dance dark day desk doctor dog door dream dress east egg engine eye face
farm father field finger fire fish floor flower food foot forest friend fruit garden gas girl glass gold
grass green ground group hair hand hat head heart hill home horse hospital hotel hour house ice iron island
king kitchen lake lamp land letter light lion market milk mirror moon mother mountain mouth music night
north ocean office paper park phone picture
"""
WORDS: Final = tuple(_COMMON.split())
"""Common words; most of them are one token in any tokenizer. There are about 10^33 sequences of 16 words, so
two prompts never share a page by chance."""
_SHOWN: Final = 6
"""Number of words that the prompt repeats, enough for a model to find the place in the list."""
_FRAME: Final = 10 + _SHOWN
"""Words of the prompt outside the list of words."""
_SMALLEST_PAGE: Final = 16
"""Tokens of the smallest page of an engine; all others are multiples."""
_TRIAL: Final = 128
"""Maximum number of words of the prompt that is sent only to learn how the server counts."""


def draw(seed: str, count: int) -> str:
    """Return a prompt with a list of `count` words; the same seed gives the same prompt.

    The prompt ends shortly after it has begun to repeat its own words. A model continues the repetition, so
    its answer depends on the restored beginning, and one next word is always far more likely than all others.
    After random words, many next words are about equally likely, and rounding would choose one of them.
    """
    # The generator need not be secure, because prompts are not secret.
    words = random.Random(seed).choices(WORDS, k=count)  # noqa: S311
    return (
        f"{' '.join(words)}\n\nThe same words once more, from the first one on:\n\n{' '.join(words[:_SHOWN])}"
    )
