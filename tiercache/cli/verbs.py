"""Table of the verbs, with the summary and the module of each verb.

A verb's module is imported only when the verb is called. `tiercache --help` needs only this table.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tiercache.cli.terminal import exit_sentence
from tiercache.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Verb:
    """Entry of one verb."""

    where: str
    """The function or typer.Typer that implements the verb, as MODULE:NAME."""
    summary: str
    """The first sentences of the verb's help."""
    command: str = ""
    """Class of the verb's typer command, as MODULE:NAME; empty for typer's own class."""
    extra: str = "all"
    """Name of the extra of the distribution that installs what the verb needs."""

    def load(self, name: str) -> Any:
        """Import the verb and return its command, whose help ends with the exit codes."""
        # The verbs report failures of the grpc backend themselves. Without a handler, Python would also print
        # the warnings of that backend.
        logging.getLogger("tiercache_backends.grpc").addHandler(logging.NullHandler())
        try:
            found = _named(self.where)
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"tiercache {name}", self.extra, error) from error
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name, cls=_named(self.command) if self.command else None)(found)
            found = alone
        made = typer.main.get_command(found)
        made.name = name
        for command in (made, *getattr(made, "commands", {}).values()):
            command.epilog = exit_sentence()
            command.rich_markup_mode = None
            # Without a short help, the help of a group would cut each command's sentence after 60 characters.
            command.short_help = (command.help or "").partition("\n\n")[0]
        return made


_STORE: Final = "tiercache.cli.store"
VERBS: Final = {
    "demo": Verb(
        "tiercache.lab.demo.command:demo",
        "Serve conversations, kill the process, continue them in a second process, and check every answer.",
    ),
    "replay": Verb(
        "tiercache.lab.replay.verb.command:replay",
        "Replay traffic without a model, to see how much each policy saves at each capacity.",
        "tiercache.lab.replay.verb.listing:ReplayCommand",
    ),
    "serve": Verb(
        "tiercache.cli.serve:serve",
        "Serve one store to many workers: on unix sockets for this host, on TCP for others.",
    ),
    "prove": Verb(
        "tiercache.lab.prove.command:prove",
        "Check whether a running engine restores a prompt from storage, and answers with the same text.",
    ),
    "status": Verb(
        f"{_STORE}.status:status",
        "Show what a store is, holds and does, once or live. Exit code 3 if a daemon does not answer.",
    ),
    "ping": Verb(
        f"{_STORE}.status:ping", "Measure round trips to a daemon. Exit code 3 if it does not answer."
    ),
    "report": Verb(
        f"{_STORE}.report:report", "Show what each tenant of a daemon stored, read and saved, by day or hour."
    ),
    "ls": Verb(f"{_STORE}.ls:ls", "List the stored objects."),
    "inspect": Verb(
        f"{_STORE}.inspect:inspect", "Show one page and its objects, or the tree of a namespace."
    ),
    "explain": Verb(
        f"{_STORE}.explain:explain",
        "Explain how deep a prompt can be restored, and why not deeper. Exit code 6 if nothing of it can be.",
    ),
    "verify": Verb(
        f"{_STORE}.verify:verify",
        "Read and check every object. Exit code 4 if an object was corrupt, 1 if one could not be read.",
    ),
    "flush": Verb(f"{_STORE}.flush:flush", "Delete the objects that match all of the given options."),
    "tier": Verb(
        f"{_STORE}.tier:tier", "Show the tiers of a daemon's store, and change them while it serves."
    ),
    "quota": Verb(
        f"{_STORE}.quota:quota",
        "Show how much the tenants of a daemon have, and change their quotas and guarantees.",
    ),
    "events": Verb(
        "tiercache.cli.events:events",
        "Print what the tiers of a daemon or of a worker hold, and what changes.",
        extra="events",
    ),
    "doctor": Verb(
        f"{_STORE}.doctor:doctor",
        "Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything"
        " fails.",
    ),
    "bench": Verb(
        "tiercache.lab.bench.command:bench",
        "Measure this machine, and compare most figures with its speed without tiercache.",
    ),
    "config": Verb(
        "tiercache.cli.config:config", "Check, show and describe the configuration of the daemon."
    ),
}
"""Verbs in the order in which the help lists them."""


class Verbs(TyperGroup):
    """Group of all verbs, which imports only the verb that is called or completed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, short_help=verb.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the verb that the arguments name; return its name, its command and the other arguments."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, VERBS[name].load(name) if name in VERBS else found, rest


def _named(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
