"""Table of the verbs, and the search for those that other packages add.

A verb's module is imported only when the verb is called. `tiercache --help` needs only the summaries.

Another package adds a verb by an entry point of the group `tiercache.verbs`, whose value is a `Verb`:

    [project.entry-points."tiercache.verbs"]
    hello = "my_package.verbs:HELLO"

The module with the `Verb` is imported for `tiercache --help`, so it should import little else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tiercache.cli.terminal import complain, exit_sentence
from tiercache.entries import entries, load
from tiercache.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "tiercache.verbs"
"""Group of the entry points of verbs; the name of an entry point is the verb's name."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Entry of one verb."""

    where: str
    """The function or typer.Typer that implements the verb, as MODULE:NAME."""
    summary: str
    """The first sentences of the verb's help."""
    extra: str = "all"
    """Name of the extra of tiercache that installs what the verb needs; empty if none does."""

    def load(self, name: str) -> Any:
        """Import the verb and return its command, whose help ends with the exit codes."""
        # The verbs report failures of the grpc backend themselves. Without a handler, Python would also print
        # the warnings of that backend.
        logging.getLogger("tiercache_backends.grpc").addHandler(logging.NullHandler())
        try:
            module, _, attribute = self.where.partition(":")
            found = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if self.extra:
                raise MissingExtraError(f"tiercache {name}", self.extra, error) from error
            raise ConfigError(
                f"tiercache {name} needs a package that is not installed ({error}); install it"
            ) from error
        except (ImportError, AttributeError) as error:
            if name in VERBS:
                raise  # a defect of this package; the others may be of another version
            raise ConfigError(
                f"tiercache {name} cannot be imported: {error}; install its package in the version of this"
                " tiercache"
            ) from error
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name)(found)
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
    "serve": Verb(
        "tiercache.cli.serve:serve",
        "Serve one store to many workers: on unix sockets for this host, on TCP for others.",
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
    "ls": Verb(f"{_STORE}.objects:ls", "List the stored objects."),
    "inspect": Verb(
        f"{_STORE}.objects:inspect", "Show one page, its objects, and what is above and below it."
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
    "config": Verb(
        "tiercache.cli.config:config", "Check, show, describe and apply the configuration of the daemon."
    ),
}
"""Verbs of this package, in the order in which the help lists them; others follow by their names."""


def other_verbs() -> dict[str, EntryPoint]:
    """Return the entry points of other packages' verbs, sorted by name; none replaces a verb of this one."""
    return {name: entry for name, entry in entries(GROUP).items() if name not in VERBS}


def verb_of(entry: EntryPoint) -> Verb:
    """Return the verb of an entry point; raises ConfigError if there is none."""
    found = load(entry, f"the verb {entry.name!r}")
    if not isinstance(found, Verb):
        raise ConfigError(
            f"the verb {entry.name!r} is {entry.value}, which is not a Verb; fix its entry point"
        )
    return found


LAB: Final = ("bench", "demo", "prove", "replay")
"""Verbs of the package tiercache-lab, for the sentence where it is not installed."""


class Verbs(TyperGroup):
    """Group of all verbs, which imports only the verb that is called or completed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._verbs: dict[str, Verb] = {}
        for name, verb in VERBS.items():
            self._add(name, verb)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs; complain of those that cannot be imported, but not at a Tab key."""
        for name, entry in other_verbs().items():
            try:
                self._add(name, verb_of(entry))
            except ConfigError as error:
                if not ctx.resilient_parsing:
                    complain(str(error))
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the verb that the arguments name; return its name, its command and the other arguments.

        While a shell completes a line, a verb that cannot be imported is no command.
        """
        try:
            return self._resolve(ctx, args)
        except ConfigError:
            if ctx.resilient_parsing:
                return None, None, args
            raise

    def _resolve(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] not in self._verbs:
            if entry := other_verbs().get(args[0]):
                self._add(args[0], verb_of(entry))
            elif args[0] in LAB:
                raise ConfigError(
                    f"tiercache {args[0]} is in the package tiercache-lab, which is not installed: pip"
                    " install path/to/checkout/lab"
                )
            else:
                self.list_commands(ctx)  # the error suggests similar names
        name, found, rest = super().resolve_command(ctx, args)
        return name, self._verbs[name].load(name) if name in self._verbs else found, rest

    def _add(self, name: str, verb: Verb) -> None:
        self._verbs[name] = verb
        self.add_command(TyperCommand(name, short_help=verb.summary))
