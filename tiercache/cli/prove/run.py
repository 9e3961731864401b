"""The requests of `tiercache prove` to one server, in their order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercache.cli.output import clean
from tiercache.cli.prove.completion import Answer, ask
from tiercache.cli.prove.engines import Subject, empty
from tiercache.cli.prove.prompt import draw
from tiercache.cli.prove.saved import Saved
from tiercache.cli.prove.server import Server
from tiercache.cli.prove.show import Report
from tiercache.cli.prove.verdict import Round
from tiercache.errors import ConfigError

_RESTARTED: Final = "whether the server was restarted cannot be seen from here: without it, what came back may come from memory"


@dataclass(frozen=True, slots=True)
class Run:
    """Requests to one server, with the options that they share.

    Thread safety: one thread.
    """

    server: Server
    subject: Subject
    tokens: int
    max_tokens: int
    say: Callable[[str], None]

    def check_length(self) -> None:
        """Raise ConfigError if prompt and answer exceed the model's limit; no check if the server does not report one."""
        longest = self.subject.model.longest
        if longest and self.tokens + self.max_tokens > longest:
            raise ConfigError(
                f"--tokens {self.tokens} and --max-tokens {self.max_tokens} do not fit into the {longest} tokens of this model; give fewer"
            )

    def rounds(self, seeds: range, settle: float) -> Report:
        """Run one complete round for each seed; `settle` is the time in seconds to wait for the engine to write through."""
        found, notes = [], dict[str, None]()
        for seed in seeds:
            prompt = draw(str(seed), self.tokens)
            first = self._ask("a prompt that nobody has sent", prompt)
            self.say(f"waiting {settle:g} s for it to be stored")
            time.sleep(settle)
            self.say("emptying the engine's own caches")
            notes |= dict.fromkeys(filter(None, [empty(self.server, self.subject.engine)]))
            found.append(self._judge(seed, prompt, first))
        return Report(self.server.url, self.subject, found, list(notes))

    def save(self, seed: int, path: Path) -> Saved:
        """Send the first request and write the prompt and its answer to a file, for `after` to use once the server has restarted."""
        prompt, model = draw(str(seed), self.tokens), self.subject.model.name
        first = self._ask("a prompt that nobody has sent", prompt)
        saved = Saved(self.server.url, model, self.subject.engine.value, seed, self.tokens, self.max_tokens, prompt, first)
        saved.save(path)
        return saved

    def after(self, before: Saved) -> Report:
        """Send the second request and the control for a saved prompt; raises ConfigError for a file about another model."""
        if before.model != self.subject.model.name:
            raise ConfigError(
                f"--after is about model {clean(before.model)}, not {clean(self.subject.model.name)}; give --model, or save anew"
            )
        found = self._judge(before.seed, before.prompt, before.first)
        return Report(self.server.url, self.subject, [found], [] if found.again.sources else [_RESTARTED])

    def _judge(self, seed: int, prompt: str, first: Answer) -> Round:
        again = self._ask("the same prompt again", prompt)
        # Drawn at random, not from the seed: with a seed that was used before, the control would have been sent before too.
        control = self._ask("a prompt that was never sent", draw(secrets.token_hex(16), self.tokens))
        return Round(seed, first, again, control)

    def _ask(self, what: str, prompt: str) -> Answer:
        self.say(what)
        return ask(self.server, self.subject.engine, self.subject.model.name, prompt, self.max_tokens)
