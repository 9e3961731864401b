"""The verbs by name. Each verb's module is imported when the verb is called: this module holds all that `tiercache --help` needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tiercache.cli import exits


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: where it is implemented (`where`: a function or a typer.Typer, as MODULE:NAME), and its first line of help."""

    where: str
    summary: str
    command: str = ""
    """Class of the verb's typer command, as MODULE:NAME; empty for typer's own."""

    def load(self, name: str) -> Any:
        """Import the verb and return its command, whose help ends with the exit codes."""
        logging.getLogger("tiercache_backends.grpc").addHandler(logging.NullHandler())  # the verbs report these failures themselves
        found = _named(self.where)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name, cls=_named(self.command) if self.command else None)(found)
            found = alone
        made = typer.main.get_command(found)
        made.name = name
        for command in (made, *getattr(made, "commands", {}).values()):
            command.epilog = exits.line()
        return made


_STORE: Final = "tiercache.cli.store"
VERBS: Final = {
    "demo": Verb(
        "tiercache.cli.demo:demo",
        "Serve conversations through device, host and disk, kill the process, go on in a second one, and check every answer.",
    ),
    "replay": Verb(
        "tiercache.cli.replay.command:replay",
        "Replay traffic without a model: which policy saves how much, at which capacity?",
        "tiercache.cli.replay.listing:ReplayCommand",
    ),
    "serve": Verb("tiercache.cli.serve:serve", "Serve one store to many workers: on unix sockets for this host, on TCP for others."),
    "prove": Verb(
        "tiercache.cli.prove.command:prove", "Ask a running engine whether a prompt comes back from storage, and with the same text."
    ),
    "status": Verb(f"{_STORE}.status:status", "Say what a store is and what it holds. Exit code 3 if a daemon does not answer."),
    "ping": Verb(f"{_STORE}.status:ping", "Measure round trips to a daemon. Exit code 3 if it does not answer."),
    "ls": Verb(f"{_STORE}.ls:ls", "List the stored objects."),
    "inspect": Verb(
        f"{_STORE}.inspect:inspect",
        "Show one page with all that belongs to it, the tree of a namespace, or how much of a prompt could be restored.",
    ),
    "verify": Verb(
        f"{_STORE}.verify:verify", "Read every object and check it. Exit code 4 if one was corrupt, 1 if one could not be read."
    ),
    "flush": Verb(f"{_STORE}.flush:flush", "Delete objects: those that meet all of the options given."),
    "doctor": Verb(
        f"{_STORE}.doctor:doctor", "Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything fails."
    ),
    "bench": Verb("tiercache.cli.bench.command:bench", "Measure this machine, each figure beside the raw limit of the same run."),
    "config": Verb("tiercache.cli.config:config", "Check, show and describe the configuration of the daemon."),
}
"""Verbs in the order in which the help lists them."""


class Verbs(TyperGroup):
    """Group of all verbs; lists each by name and summary, and imports only the one that is called or completed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the verb that the arguments name, imported, with its name and the remaining arguments."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, VERBS[name].load(name) if name in VERBS else found, rest


def _named(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
